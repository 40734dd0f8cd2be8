//! Normalizers and pre-tokenizers: those of the `tokenizers` crate, behind a check.
//!
//! The crate trusts its files: some values make it panic or loop later. Only kinds and values that are
//! known to be safe pass, everything else is an error that names it.

use super::error::TokenizerError;
use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

const NORMALIZERS: &[&str] = &[
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Prepend",
    "Replace",
    "Sequence",
    "Strip",
    "StripAccents",
];
const PRE_TOKENIZERS: &[&str] = &[
    "BertPreTokenizer",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Sequence",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
];

/// The normalizer of a tokenizer.json.
pub(crate) fn normalizer(file: &str, value: &Value) -> Result<Option<NormalizerWrapper>, TokenizerError> {
    part(file, "normalizer", "normalizers", NORMALIZERS, value)
}

/// The pre-tokenizer of a tokenizer.json.
pub(crate) fn pre_tokenizer(
    file: &str,
    value: &Value,
) -> Result<Option<PreTokenizerWrapper>, TokenizerError> {
    part(file, "pre_tokenizer", "pretokenizers", PRE_TOKENIZERS, value)
}

fn part<T: serde::de::DeserializeOwned>(
    file: &str,
    field: &str,
    list: &str,
    known: &[&str],
    value: &Value,
) -> Result<Option<T>, TokenizerError> {
    if value.is_null() {
        return Ok(None);
    }
    check(file, field, list, known, value)?;
    let part = serde_json::from_value(value.clone());
    part.map(Some).map_err(|error| TokenizerError::invalid(file, field, value, error))
}

fn check(file: &str, field: &str, list: &str, known: &[&str], value: &Value) -> Result<(), TokenizerError> {
    let kind = value.get("type").and_then(Value::as_str).unwrap_or("without type");
    if !known.contains(&kind) {
        return Err(TokenizerError::unknown(file, &format!("{field}.type"), kind, known.join(", ")));
    }
    if kind == "Sequence" {
        let parts = value.get(list).and_then(Value::as_array);
        let Some(parts) = parts else {
            return Err(TokenizerError::invalid(file, field, "Sequence", format!("{list} is not a list")));
        };
        return parts.iter().try_for_each(|part| check(file, field, list, known, part));
    }
    // The crate cuts a text at an empty pattern by counting characters where it means bytes.
    let empty =
        |kind: &str| value.get("pattern").and_then(|p| p.get(kind)).and_then(Value::as_str) == Some("");
    if empty("String") || empty("Regex") {
        return Err(TokenizerError::invalid(file, &format!("{field}.pattern"), "\"\"", "must not be empty"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_kinds_and_empty_patterns_are_refused_by_name() {
        let split = |pattern: Value| {
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false}]})
        };
        assert!(matches!(pre_tokenizer("f", &split(json!({"Regex": "\\d+"}))), Ok(Some(_))));
        for bad in [
            split(json!({"String": ""})),
            split(json!({"Regex": ""})),
            split(json!({"Regex": "("})),
            split(json!(3)),
            json!({"type": "FixedLength", "length": 0}),
            json!({"type": "Sequence"}),
            json!([]),
        ] {
            assert!(pre_tokenizer("f", &bad).is_err(), "{bad}");
        }
        let charsmap =
            normalizer("tokenizer.json", &json!({"type": "Precompiled", "precompiled_charsmap": "AA=="}));
        let text = charsmap.map(|_| ()).map_err(|e| e.to_string());
        assert!(text.is_err_and(|t| t.starts_with("tokenizer.json: normalizer.type \"Precompiled\"")));
        assert!(matches!(normalizer("f", &Value::Null), Ok(None)));
    }
}
