//! The named special tokens of a tokenizer, and what its configuration says about added tokens.

use super::added::AddedToken;
use super::error::TokenizerError;
use super::tokenizer_json::AddedEntry;
use hashbrown::HashMap;
use serde_json::{Map, Value};

/// The roles every tokenizer may have; a configuration may name more (`image_token`).
const ROLES: &[&str] =
    &["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Names such as `bos_token` with the token's text, in the order of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    list: Vec<(String, String)>,
}

impl SpecialTokens {
    /// The text of the token in a role, such as `"eos_token"`.
    pub fn get(&self, role: &str) -> Option<&str> {
        self.list.iter().find(|(name, _)| name == role).map(|(_, text)| text.as_str())
    }

    /// All roles with their texts.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.list.iter().map(|(role, text)| (role.as_str(), text.as_str()))
    }

    pub(crate) fn set(&mut self, role: &str, text: &str) {
        match self.list.iter_mut().find(|(name, _)| name == role) {
            Some((_, old)) => text.clone_into(old),
            None => self.list.push((role.to_owned(), text.to_owned())),
        }
    }
}

/// What tokenizer_config.json and special_tokens_map.json say about tokens.
#[derive(Default)]
pub(crate) struct TokenConfig {
    pub(crate) special: SpecialTokens,
    /// Entries of `added_tokens_decoder`, by id.
    pub(crate) added: Vec<(u64, AddedToken)>,
    /// Tokens that are special by being named: with the flags given with the name, if any.
    pub(crate) named: Vec<(String, Option<AddedToken>)>,
}

impl TokenConfig {
    /// special_tokens_map.json counts only where the configuration has no `added_tokens_decoder`, as in
    /// transformers.
    pub(crate) fn read(
        config: &Map<String, Value>,
        special_tokens_map: Option<&Map<String, Value>>,
    ) -> Result<Self, TokenizerError> {
        let mut this = Self::default();
        match config.get("added_tokens_decoder") {
            Some(decoder) => {
                this.read_roles(config);
                this.read_added(decoder)?;
            }
            None => {
                let mut merged = config.clone();
                merged.extend(special_tokens_map.into_iter().flatten().map(|(k, v)| (k.clone(), v.clone())));
                this.read_roles(&merged);
            }
        }
        Ok(this)
    }

    fn read_roles(&mut self, config: &Map<String, Value>) {
        for (key, value) in config {
            let Some((text, flags)) = named_token(value) else { continue };
            if ROLES.contains(&key.as_str()) || (key.ends_with("_token") && value.is_string()) {
                self.special.set(key, &text);
                self.named.push((text, flags));
            }
        }
        let extra = config.get("extra_special_tokens").filter(|v| !is_empty(v));
        match extra.or_else(|| config.get("additional_special_tokens")) {
            Some(Value::Array(list)) => self.named.extend(list.iter().filter_map(named_token)),
            // Names of one model's own, which its template may use like the common ones.
            Some(Value::Object(map)) => {
                for (key, value) in map {
                    if let Some((text, flags)) = named_token(value) {
                        self.special.set(key, &text);
                        self.named.push((text, flags));
                    }
                }
            }
            _ => {}
        }
    }

    fn read_added(&mut self, decoder: &Value) -> Result<(), TokenizerError> {
        let file = "tokenizer_config.json";
        let bad = |key: &str, why: &str| {
            TokenizerError::invalid(file, "added_tokens_decoder", format!("{key:?}"), why)
        };
        let map = decoder.as_object().ok_or_else(|| bad("", "must map ids to tokens"))?;
        for (key, value) in map {
            let id = key.parse().map_err(|_| bad(key, "is not a token id"))?;
            let entry = serde_json::from_value::<AddedEntry>(value.clone());
            let token = entry.map_err(|error| bad(key, &error.to_string()))?;
            self.added.push((id, token.into_token()));
        }
        self.added.sort_by_key(|(id, _)| *id);
        Ok(())
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => true,
    }
}

/// A token given as a text or as an object with `content`.
fn named_token(value: &Value) -> Option<(String, Option<AddedToken>)> {
    match value {
        Value::String(text) => Some((text.clone(), None)),
        Value::Object(_) => {
            let mut entry: AddedEntry = serde_json::from_value(value.clone()).ok()?;
            entry.special = true;
            Some((entry.content.clone(), Some(entry.into_token())))
        }
        _ => None,
    }
}

impl AddedEntry {
    pub(crate) fn into_token(self) -> AddedToken {
        AddedToken {
            normalized: self.normalized.unwrap_or(!self.special),
            content: self.content,
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            special: self.special,
        }
    }
}

/// Collects added tokens from all sources and settles their ids and flags.
pub(crate) struct TokenTable<'v> {
    pub(crate) vocab_id: &'v dyn Fn(&str) -> Option<u32>,
    pub(crate) tokens: HashMap<u32, AddedToken>,
    pub(crate) ids: HashMap<String, u32>,
}

impl<'v> TokenTable<'v> {
    pub(crate) fn new(vocab_id: &'v dyn Fn(&str) -> Option<u32>) -> Self {
        Self { vocab_id, tokens: HashMap::new(), ids: HashMap::new() }
    }

    /// Adds a token or changes its flags. A text that the vocabulary has keeps its id there.
    pub(crate) fn add(&mut self, id: u32, token: AddedToken) {
        if token.content.is_empty() {
            return;
        }
        let known = self.ids.get(&token.content).copied();
        let id = known.or_else(|| (self.vocab_id)(&token.content)).unwrap_or(id);
        self.ids.insert(token.content.clone(), id);
        self.tokens.insert(id, token);
    }

    /// Marks a token as special, with the flags it has or else those given.
    pub(crate) fn mark_special(&mut self, text: &str, flags: Option<AddedToken>) {
        let Some(id) = self.ids.get(text).copied().or_else(|| (self.vocab_id)(text)) else {
            // Not in the vocabulary: there is no embedding for it either.
            return;
        };
        let plain = || AddedToken { content: text.to_owned(), ..AddedToken::default() };
        let mut token = self.tokens.get(&id).cloned().or(flags).unwrap_or_else(plain);
        token.special = true;
        self.add(id, token);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test may stop at the first surprise
    use super::*;
    use serde_json::json;

    fn map(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn the_special_tokens_map_counts_only_without_an_added_tokens_decoder() {
        let plain = map(json!({"bos_token": "<a>", "add_bos_token": true, "eos_token": null}));
        let special = map(json!({"bos_token": {"content": "<b>", "lstrip": true}, "eos_token": "<e>"}));
        let read = TokenConfig::read(&plain, Some(&special)).unwrap();
        assert_eq!(
            (read.special.get("bos_token"), read.special.get("eos_token")),
            (Some("<b>"), Some("<e>"))
        );
        let mut with = plain;
        with.insert("added_tokens_decoder".to_owned(), json!({"7": {"content": "<a>", "special": true}}));
        let read = TokenConfig::read(&with, Some(&special)).unwrap();
        assert_eq!((read.special.get("bos_token"), read.special.get("eos_token")), (Some("<a>"), None));
        assert_eq!((read.added[0].0, read.added[0].1.normalized), (7, false));
    }

    #[test]
    fn extra_names_become_variables_and_bad_ids_are_refused() {
        let config = map(json!({"image_token": "<img>", "extra_special_tokens": {"audio_token": "<au>"}}));
        let read = TokenConfig::read(&config, None).unwrap();
        assert_eq!(
            (read.special.get("image_token"), read.special.get("audio_token")),
            (Some("<img>"), Some("<au>"))
        );
        for bad in [json!([]), json!({"x": {"content": "a"}}), json!({"1": {"content": 4}})] {
            let config = map(json!({"added_tokens_decoder": bad}));
            assert!(TokenConfig::read(&config, None).is_err());
        }
    }
}
