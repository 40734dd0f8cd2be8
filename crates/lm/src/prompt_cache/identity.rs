//! What a cache belongs to: fingerprints of all that decides its values and how it goes on.

use super::PromptCacheError;
use super::file::Entries;
use crate::adapter::Adapter;
use crate::checkpoint::Checkpoint;
use crate::text::TokenizerFiles;
use lmx_tensor::files::gguf::{Array, Value as GgufValue};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The form of lmx's entries; another one is refused.
const VERSION: &str = "1";
/// Bytes of a tensor that are looked at, in each of three places.
const SAMPLE: usize = 4096;
const ADAPTER: &str = "lmx_adapter";
/// The entries, with what messages call them.
const FIELDS: [(&str, &str); 6] = [
    ("lmx_version", "lmx's file version"),
    ("lmx_config", "a configuration (config.json) with fingerprint"),
    ("lmx_tensors", "weights with fingerprint"),
    ("lmx_tokenizer", "a tokenizer with fingerprint"),
    ("lmx_template", "a chat template with fingerprint"),
    (ADAPTER, Identity::ADAPTER_FIELD),
];

/// What a cache belongs to. Fingerprints find differences that happen by accident; they do not stop forgers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(BTreeMap<String, String>);

impl Identity {
    /// What messages call the adapter.
    pub(super) const ADAPTER_FIELD: &str = "an adapter with fingerprint";

    /// Of a checkpoint, its tokenizer, and the source of its chat template if it has one.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn of(checkpoint: &Checkpoint, template: Option<&str>) -> Result<Self, PromptCacheError> {
        let template = template.map_or("none".to_owned(), |source| fingerprint([source.as_bytes()]));
        let values = [
            VERSION.to_owned(),
            fingerprint([checkpoint.config().to_json().as_bytes()]),
            tensors(checkpoint)?,
            tokenizer(checkpoint)?,
            template,
            adapter(None),
        ];
        Ok(Self(FIELDS.iter().map(|(key, _)| (*key).to_owned()).zip(values).collect()))
    }

    /// The same, with an adapter, or without.
    #[must_use]
    pub fn with_adapter(mut self, of: Option<&Adapter>) -> Self {
        self.0.insert(ADAPTER.to_owned(), adapter(of));
        self
    }

    /// The entry of the adapter, if it is not `of`.
    pub(super) fn other_adapter(&self, of: Option<&Adapter>) -> Option<(&str, String)> {
        let own = self.0.get(ADAPTER).map_or("", String::as_str);
        let wanted = adapter(of);
        (own != wanted).then_some((own, wanted))
    }

    /// The identity of a file, if it has one.
    pub(super) fn read(
        file: &Entries,
        texts: &BTreeMap<String, String>,
    ) -> Result<Option<Self>, PromptCacheError> {
        let has = |(key, _): &(&str, &str)| texts.contains_key(*key);
        if !FIELDS.iter().any(has) {
            return Ok(None);
        }
        let mut entries = BTreeMap::new();
        for (key, _) in FIELDS {
            let Some(value) = texts.get(key) else {
                return Err(file.wrong(
                    &format!("entry \"0.{key}\""),
                    "missing",
                    "present beside the others",
                ));
            };
            entries.insert(key.to_owned(), value.clone());
        }
        Ok(Some(Self(entries)))
    }

    /// What decides keys and values, given the tokens.
    pub(crate) fn of_values(&self) -> [&str; 3] {
        ["lmx_config", "lmx_tensors", ADAPTER].map(|key| self.0.get(key).map_or("", String::as_str))
    }

    /// Its fingerprints by name: of the configuration, the weights (names, types, shapes and samples of the values), the
    /// tokenizer, the chat template and the adapter.
    pub fn entries(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().map(|(key, value)| (key.clone(), value.clone()))
    }

    /// The first entry in which `other` differs: what it is, its value here, and there.
    pub(super) fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let value = |of: &Self, key: &str| of.0.get(key).cloned().unwrap_or_default();
        let pairs = FIELDS.iter().map(|&(key, name)| (name, value(self, key), value(other, key)));
        let cut = |text: String| text.chars().take(80).collect();
        pairs
            .into_iter()
            .find(|(_, own, other)| own != other)
            .map(|(name, own, other)| (name.to_owned(), cut(own), cut(other)))
    }
}

fn adapter(of: Option<&Adapter>) -> String {
    of.map_or_else(|| "none".to_owned(), |adapter| format!("{:016x}", adapter.fingerprint()))
}

/// Name, type, shape and samples of every tensor.
fn tensors(checkpoint: &Checkpoint) -> Result<String, PromptCacheError> {
    let mut hash = Hash::default();
    checkpoint.visit_tensors(&mut |name, tensor| {
        let mut head = String::new();
        let _ = write!(head, "{name} {} {:?}", tensor.dtype(), tensor.shape());
        hash.add(head.as_bytes());
        let data = tensor.data();
        let last = data.len().saturating_sub(SAMPLE);
        for start in [0, last / 2, last] {
            hash.add(data.get(start..data.len().min(start + SAMPLE)).unwrap_or_default());
        }
    })?;
    Ok(hash.finish())
}

fn tokenizer(checkpoint: &Checkpoint) -> Result<String, PromptCacheError> {
    let mut hash = Hash::default();
    if let Some(folder) = checkpoint.folder() {
        let files = TokenizerFiles::read(folder)?;
        hash.add(&files.tokenizer);
        // The template has an entry of its own.
        let config = files.config.map(|bytes| match serde_json::from_slice(&bytes) {
            Ok(Value::Object(mut config)) => {
                config.remove("chat_template");
                Value::Object(config).to_string().into_bytes()
            }
            _ => bytes,
        });
        hash.add(&config.unwrap_or_default());
        hash.add(&files.special_tokens_map.unwrap_or_default());
    }
    if let Some(gguf) = checkpoint.gguf() {
        let entries = gguf.metadata().iter().filter(|(key, _)| key.starts_with("tokenizer."));
        for (key, value) in entries.filter(|(key, _)| !key.starts_with("tokenizer.chat_template")) {
            hash.add(key.as_bytes());
            add_value(&mut hash, value);
        }
    }
    Ok(hash.finish())
}

fn add_value(hash: &mut Hash, value: &GgufValue) {
    match value {
        GgufValue::Text(text) => hash.add(text.as_bytes()),
        GgufValue::Array(Array::Text(texts)) => texts.iter().for_each(|text| hash.add(text.as_bytes())),
        other => hash.add(format!("{other:?}").as_bytes()),
    }
}

fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Hash::default();
    parts.into_iter().for_each(|part| hash.add(part));
    hash.finish()
}

/// FNV-1a over words of eight bytes and lengths, with the upper half folded in so that every bit counts.
struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn add(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|&word| self.word(u64::from_le_bytes(word)));
        rest.iter().for_each(|&byte| self.word(u64::from(byte)));
    }

    fn word(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(self) -> String {
        format!("{:016x}", self.0)
    }
}
