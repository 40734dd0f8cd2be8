//! What a prompt-cache file says beside the keys and values.

use super::Identity;
use super::PromptCacheError;
use super::file::Entries;
use serde_json::Value;
use std::collections::BTreeMap;

const MODEL: &str = "model";
const TOKENIZER_CONFIG: &str = "tokenizer_config";
const MESSAGES: &str = "lmx_messages";
const TOKEN_IDS: &str = "lmx_token_ids";
const LONG_CONTEXT: &str = "lmx_long_context";
const QUANTIZED_START: &str = "lmx_quantized_kv_start";

/// The text entries of a prompt-cache file: mlx-lm's two, and lmx's own, which mlx-lm ignores. Their keys have no
/// dots, since mlx-lm nests at dots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// The model's name, as it was typed.
    pub model: String,
    /// An end-of-sequence token that was asked for.
    pub eos_token: Option<String>,
    /// The messages that the tokens were rendered from; the last one may go on. `None` if the file does not say.
    pub messages: Option<Vec<Value>>,
    /// What the cache belongs to; `None` if the file does not say.
    pub identity: Option<Identity>,
}

/// All that the text entries say.
pub(super) struct Said {
    pub(super) notes: Notes,
    /// The tokens, if they are known.
    pub(super) tokens: Option<Vec<u32>>,
    /// Whether they are those of a long context.
    pub(super) long_context: bool,
    /// The first position whose query reads quantized keys and values.
    pub(super) quantized_start: Option<usize>,
}

impl Notes {
    /// The entries, with those that depend on the tokens; `quantized_start` if they are quantized.
    pub(super) fn entries(
        &self,
        tokens: Option<&[u32]>,
        long_context: bool,
        quantized_start: Option<usize>,
    ) -> BTreeMap<String, String> {
        let config = match &self.eos_token {
            Some(token) => serde_json::json!({"eos_token": token}),
            None => serde_json::json!({}),
        };
        let mut entries = BTreeMap::from([
            (MODEL.to_owned(), self.model.clone()),
            (TOKENIZER_CONFIG.to_owned(), config.to_string()),
        ]);
        if let Some(messages) = &self.messages {
            entries.insert(MESSAGES.to_owned(), Value::from(messages.clone()).to_string());
        }
        if let Some(tokens) = tokens {
            let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
            entries.insert(TOKEN_IDS.to_owned(), ids.join(" "));
        }
        if long_context {
            entries.insert(LONG_CONTEXT.to_owned(), "true".to_owned());
        }
        if let Some(start) = quantized_start {
            entries.insert(QUANTIZED_START.to_owned(), start.to_string());
        }
        entries.extend(self.identity.iter().flat_map(Identity::entries));
        entries
    }
}

/// An entry's name in an error.
fn field(key: &str) -> String {
    format!("entry \"0.{key}\"")
}

impl Said {
    pub(super) fn field_of_start() -> String {
        field(QUANTIZED_START)
    }

    /// Reads the entries of a file of `len` tokens.
    pub(super) fn read(
        file: &Entries,
        entries: &BTreeMap<String, String>,
        len: usize,
    ) -> Result<Self, PromptCacheError> {
        let config = entries.get(TOKENIZER_CONFIG).map_or("{}", String::as_str);
        let config: Value = serde_json::from_str(config)
            .map_err(|error| file.wrong(&field(TOKENIZER_CONFIG), error, "a JSON object"))?;
        let eos_token = match config.get("eos_token") {
            None | Some(Value::Null) => None,
            Some(Value::String(token)) => Some(token.clone()),
            Some(other) => {
                return Err(file.wrong(&field(TOKENIZER_CONFIG), other, "an eos_token that is a text"));
            }
        };
        let messages = entries.get(MESSAGES).map(|text| match serde_json::from_str(text) {
            Ok(Value::Array(messages)) if messages.last().is_some_and(is_user_text) => Ok(messages),
            Ok(_) => Err(file.wrong(
                &field(MESSAGES),
                "other JSON",
                "a list of messages that ends with the user's",
            )),
            Err(error) => Err(file.wrong(&field(MESSAGES), error, "a JSON list of messages")),
        });
        let tokens = entries.get(TOKEN_IDS).map(|text| token_ids(file, &field(TOKEN_IDS), text, len));
        let long_context = match entries.get(LONG_CONTEXT).map(String::as_str) {
            None => false,
            Some("true") => true,
            Some(other) => return Err(file.wrong(&field(LONG_CONTEXT), format!("{other:?}"), "true")),
        };
        let start = |text: &String| {
            let start = text.parse().ok().filter(|&start: &usize| start <= len);
            let allowed = || format!("a position of at most {len}, the number of tokens");
            start.ok_or_else(|| file.wrong(&field(QUANTIZED_START), format!("{text:?}"), allowed()))
        };
        let quantized_start = entries.get(QUANTIZED_START).map(start).transpose()?;
        let notes = Notes {
            model: entries.get(MODEL).cloned().unwrap_or_default(),
            eos_token,
            messages: messages.transpose()?,
            identity: Identity::read(file, entries)?,
        };
        Ok(Self { notes, tokens: tokens.transpose()?, long_context, quantized_start })
    }
}

fn is_user_text(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("user")
        && message.get("content").is_some_and(Value::is_string)
}

fn token_ids(file: &Entries, field: &str, text: &str, len: usize) -> Result<Vec<u32>, PromptCacheError> {
    let ids = text.split_ascii_whitespace().map(str::parse::<u32>).collect::<Result<Vec<_>, _>>();
    let ids = ids.map_err(|error| file.wrong(field, error, "token ids with blanks between them"))?;
    if ids.len() != len {
        return Err(file.wrong(
            field,
            format!("{} ids", ids.len()),
            format!("the {len} ids of the tokens held"),
        ));
    }
    Ok(ids)
}
