//! A checkpoint's configuration: `config.json`, or a GGUF file's metadata under the same keys, with the spellings that
//! different writers use brought to one. Families read it through typed getters; what nobody asks for is not in
//! effect, and [`Config::unread`] tells.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value};

/// The largest value of any size in a configuration. Products of two sizes stay far from overflowing `usize`.
const SIZE_MAX: u64 = 1 << 31;
/// The longest piece of a value that an error shows, in characters.
const SHOWN_CHARS_MAX: usize = 80;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The text is not a JSON object.
    #[error("{origin}: {reason}")]
    Syntax {
        /// The file.
        origin: String,
        /// What the parser found.
        reason: String,
    },
    /// A required key is absent or null.
    #[error("{origin}: `{key}` is missing; it must be {allowed}")]
    Missing {
        /// The file.
        origin: String,
        /// The key, dotted when nested.
        key: String,
        /// What belongs there.
        allowed: String,
    },
    /// A key holds a value that it cannot have.
    #[error("{origin}: `{key}` is {value}, but must be {allowed}")]
    Invalid {
        /// The file.
        origin: String,
        /// The key, dotted when nested.
        key: String,
        /// The value found, shortened.
        value: String,
        /// What belongs there.
        allowed: String,
    },
    /// A key would change what the model computes, in a way that its family does not do here.
    #[error("{origin}: `{key}` is {value}, which {model_type} models do not support here")]
    Unsupported {
        /// The file.
        origin: String,
        /// The key, dotted when nested.
        key: String,
        /// The value found, shortened.
        value: String,
        /// The model's type.
        model_type: String,
    },
    /// The model is defined by program code in its folder.
    #[error(
        "{origin}: `{key}` names program code ({value}) that defines this model; lmx never runs code from a model folder"
    )]
    NeedsCode {
        /// The file.
        origin: String,
        /// `model_file` or `auto_map`.
        key: String,
        /// The value found, shortened.
        value: String,
    },
}

/// A checkpoint's configuration.
#[derive(Debug)]
pub struct Config {
    origin: String,
    values: Map<String, Value>,
    log: Mutex<Log>,
}

/// What reading the configuration brought to light.
#[derive(Debug, Default)]
struct Log {
    read: BTreeSet<String>,
    notices: Vec<String>,
}

impl Config {
    /// Reads the text of a `config.json`. `origin` is how errors call the file.
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let syntax = |reason: String| ConfigError::Syntax { origin: origin.to_owned(), reason };
        match serde_json::from_str(text) {
            Ok(Value::Object(values)) => Ok(Self::from_values(values, origin)),
            Ok(_) => Err(syntax("not a JSON object".to_owned())),
            Err(error) => Err(syntax(format!("not valid JSON: {error}"))),
        }
    }

    /// Takes keys and values as they stand in a `config.json`.
    pub fn from_values(values: Map<String, Value>, origin: &str) -> Self {
        let mut values = values;
        for value in values.values_mut() {
            untag_floats(value);
        }
        Self { origin: origin.to_owned(), values: flatten_text_config(values), log: Mutex::default() }
    }

    /// How errors call the file.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// All of it.
    #[must_use]
    pub fn to_json(&self) -> String {
        Value::Object(self.values.clone()).to_string()
    }

    /// The value at `key`; null counts as absent. A dot goes into an object: `rope_scaling.factor`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.locked().read.insert(key.to_owned());
        let mut parts = key.split('.');
        let first = self.values.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part)).filter(|value| !value.is_null())
    }

    /// A size of at least 1.
    pub fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.size_opt(key)?.ok_or_else(|| self.missing(key, "a whole number of at least 1"))
    }

    /// A size of at least 1, or `default` where the key is absent.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.size_opt(key)?.unwrap_or(default))
    }

    /// A size of at least 1, where the key is present. `64.0` counts as 64.
    pub fn size_opt(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.whole_opt(key, 1)
    }

    /// A whole number, or `default` where the key is absent.
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.whole_opt(key, 0)?.unwrap_or(default))
    }

    fn whole_opt(&self, key: &str, least: u64) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let from_float =
            |x: f64| (x.fract() == 0.0 && (0.0..=SIZE_MAX as f64).contains(&x)).then_some(x as u64);
        let whole = value.as_u64().or_else(|| value.as_f64().and_then(from_float));
        match whole.filter(|size| (least..=SIZE_MAX).contains(size)) {
            Some(size) => Ok(Some(size as usize)),
            None => Err(self.invalid(key, &format!("a whole number from {least} to {SIZE_MAX}"))),
        }
    }

    /// Whether `key`, which is not nested, is there and null: some families switch a feature off in this way.
    pub fn is_null(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(Value::is_null)
    }

    /// A finite number, or `default` where the key is absent.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        Ok(self.number_opt(key)?.unwrap_or(default))
    }

    /// A finite number, where the key is present.
    pub fn number_opt(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite() && (*x as f32).is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.invalid(key, "a finite number")),
        }
    }

    /// A number above zero, or `default` where the key is absent.
    pub fn positive_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        Ok(self.positive_opt(key)?.unwrap_or(default))
    }

    /// A number above zero, where the key is present.
    pub fn positive_opt(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let number = self.number_opt(key)?;
        match number {
            Some(number) if number as f32 <= 0.0 => Err(self.invalid(key, "a number above 0")),
            _ => Ok(number),
        }
    }

    /// `true` or `false`, or `default` where the key is absent.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.invalid(key, "true or false")),
        }
    }

    /// A text, where the key is present.
    pub fn text_opt(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(key, "a text")),
        }
    }

    /// A list of `len` items, each read by `item`, where the key is present. `items` names them in errors.
    pub fn list_opt<T>(
        &self,
        key: &str,
        len: usize,
        items: &str,
        item: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().filter(|list| list.len() == len);
        match list.and_then(|list| list.iter().map(item).collect()) {
            Some(list) => Ok(Some(list)),
            None => Err(self.invalid(key, &format!("a list of {len} {items}"))),
        }
    }

    /// The model's type as the file gives it.
    pub fn model_type(&self) -> Result<&str, ConfigError> {
        self.text_opt("model_type")?.ok_or_else(|| self.missing("model_type", "the name of a model family"))
    }

    /// An error that says what `key` must be. The value shown is the one at `key`.
    pub fn invalid(&self, key: &str, allowed: &str) -> ConfigError {
        ConfigError::Invalid {
            origin: self.origin.clone(),
            key: key.to_owned(),
            value: self.shown(key),
            allowed: allowed.to_owned(),
        }
    }

    /// An error that says what belongs at the absent `key`.
    pub fn missing(&self, key: &str, allowed: &str) -> ConfigError {
        ConfigError::Missing { origin: self.origin.clone(), key: key.to_owned(), allowed: allowed.to_owned() }
    }

    /// The value at `key` as an error shows it.
    pub(crate) fn shown(&self, key: &str) -> String {
        let text = self.get(key).map_or_else(|| "absent".to_owned(), Value::to_string);
        match text.char_indices().nth(SHOWN_CHARS_MAX) {
            Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
            None => text,
        }
    }

    /// The keys that nobody has asked for so far, dotted when nested, in the file's order.
    pub fn unread(&self) -> Vec<String> {
        let log = self.locked();
        let mut unread = Vec::new();
        collect_unread("", &self.values, &log.read, &mut unread);
        unread
    }

    /// Adds something that the user should be told.
    pub fn notice(&self, text: String) {
        let mut log = self.locked();
        if !log.notices.contains(&text) {
            log.notices.push(text);
        }
    }

    /// What the user should be told, in the order in which it was found.
    pub fn notices(&self) -> Vec<String> {
        self.locked().notices.clone()
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Log> {
        // The log holds only finished entries, so that it is sound even if a thread died while it held the lock.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// transformers writes non-finite floats as `{"__float__": "Infinity"}`. JSON has no such numbers, so that the plain
/// text is left in their place, which every numeric getter refuses by name.
fn untag_floats(value: &mut Value) {
    match value {
        Value::Object(object) => match object.get_mut("__float__") {
            Some(tag @ Value::String(_)) => *value = tag.take(),
            _ => object.values_mut().for_each(untag_floats),
        },
        Value::Array(list) => list.iter_mut().for_each(untag_floats),
        _ => {}
    }
}

/// Multimodal wrappers keep the language model's keys under `text_config`: brings them to the top, where they win over
/// the wrapper's own. Token ids, dtype and quantization stay outside in some files and are kept.
fn flatten_text_config(mut values: Map<String, Value>) -> Map<String, Value> {
    let Some(Value::Object(mut text)) = values.remove("text_config") else { return values };
    let outer = values.get("model_type").and_then(Value::as_str);
    if let (false, Some(outer @ ("gemma3" | "llama4"))) = (text.contains_key("model_type"), outer) {
        text.insert("model_type".to_owned(), Value::from(format!("{outer}_text")));
    }
    for (key, value) in values {
        if text.get(&key).is_none_or(Value::is_null) {
            text.insert(key, value);
        }
    }
    text
}

/// An object counts as read when one of its keys was asked for; the others in it are then listed one by one.
fn collect_unread(
    prefix: &str,
    values: &Map<String, Value>,
    read: &BTreeSet<String>,
    unread: &mut Vec<String>,
) {
    for (key, value) in values {
        let path = format!("{prefix}{key}");
        let inside = format!("{path}.");
        let entered = read.range(inside.clone()..).next().is_some_and(|next| next.starts_with(&inside));
        match value {
            Value::Object(object) if entered => collect_unread(&inside, object, read, unread),
            Value::Null => {}
            _ if read.contains(&path) => {}
            _ => unread.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn config(text: &str) -> Config {
        Config::from_json(text, "config.json").unwrap()
    }

    #[test]
    fn numbers_are_read_in_every_spelling() {
        let config = config(r#"{"a": 64.0, "b": 64, "c": 1e6, "d": null, "e": {"__float__": "Infinity"}}"#);
        assert_eq!(config.size("a").unwrap(), 64);
        assert_eq!(config.size("b").unwrap(), 64);
        assert_eq!(config.number_or("c", 0.0).unwrap(), 1e6);
        assert_eq!(config.size_or("d", 7).unwrap(), 7);
        assert_eq!(
            config.number_opt("e").unwrap_err().to_string(),
            "config.json: `e` is \"Infinity\", but must be a finite number"
        );
    }

    #[test]
    fn wrong_values_are_named() {
        let config = config(
            r#"{"a": -1, "b": 1.5, "c": "x", "d": true, "e": 1e300, "f": 4294967296, "g": 0, "h": [1]}"#,
        );
        for key in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            let message = config.size(key).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}`")) && message.contains("from 1 to"), "{message}");
        }
        assert!(config.number_opt("e").is_err());
        assert!(config.flag_or("c", false).is_err());
        assert!(config.text_opt("a").is_err());
        assert!(config.positive_opt("g").is_err());
        assert!(config.list_opt("h", 2, "numbers", Value::as_f64).is_err());
        assert!(config.size("absent").unwrap_err().to_string().contains("`absent` is missing"));
    }

    #[test]
    fn long_values_are_shortened_in_errors() {
        let text = format!(r#"{{"a": "{}"}}"#, "é".repeat(500));
        assert!(config(&text).size("a").unwrap_err().to_string().len() < 400);
    }

    #[test]
    fn text_config_wins_over_its_wrapper() {
        let config = config(
            r#"{"model_type": "gemma3", "eos_token_id": 1, "vocab_size": 9, "hidden_size": 1,
                "text_config": {"hidden_size": 8, "vocab_size": null}}"#,
        );
        assert_eq!(config.model_type().unwrap(), "gemma3_text");
        assert_eq!(config.size("hidden_size").unwrap(), 8);
        assert_eq!(config.size("vocab_size").unwrap(), 9);
        assert!(config.get("eos_token_id").is_some());
    }

    #[test]
    fn unread_keys_are_listed() {
        let config = config(r#"{"a": 1, "rope": {"x": 1, "y": 2}, "other": {"z": 1}, "b": 3, "n": null}"#);
        config.get("a");
        config.get("rope.x");
        assert_eq!(config.unread(), ["rope.y", "other", "b"]);
    }

    #[test]
    fn broken_json_is_an_error() {
        assert!(Config::from_json("{", "c").is_err());
        assert!(Config::from_json("[]", "c").is_err());
        assert!(Config::from_json(&"[".repeat(100_000), "c").is_err());
    }
}
