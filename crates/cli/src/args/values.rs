//! Values of flags that are more than a number or a text.

use serde_json::{Map, Value};

/// `true` or `false` in the words that people use for them, in any case.
pub(crate) fn boolean(word: &str) -> Result<bool, String> {
    match word.to_ascii_lowercase().as_str() {
        "true" | "t" | "yes" | "y" | "on" | "1" => Ok(true),
        "false" | "f" | "no" | "n" | "off" | "0" => Ok(false),
        _ => Err("expected true or false (also t, f, yes, no, on, off, 1, 0)".into()),
    }
}

/// A number; whether it is in range is checked where the range is known.
pub(crate) fn number(word: &str) -> Result<f64, String> {
    word.trim().parse().map_err(|_| "expected a number".to_owned())
}

/// A number of things.
pub(crate) fn count(word: &str) -> Result<usize, String> {
    word.trim().parse().map_err(|_| "expected a whole number, 0 or more".to_owned())
}

/// A number of bytes: a number with an optional unit, whose steps are thousands as in mlx-lm.
pub(crate) fn size(word: &str) -> Result<usize, String> {
    let expected = || {
        "expected a size above 0 like 500MB, 2G or 1.5GB (units: B, K, KB, M, MB, G, GB, T, TB)".to_owned()
    };
    let word = word.trim();
    let digits = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
    let (number, unit) = word.split_at(digits);
    let exponent = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" => 3,
        "M" | "MB" => 6,
        "G" | "GB" => 9,
        "T" | "TB" => 12,
        _ => return Err(expected()),
    };
    let bytes = number.parse::<f64>().map_err(|_| expected())? * 10_f64.powi(exponent);
    if bytes >= 1.0 && bytes < usize::MAX as f64 { Ok(bytes as usize) } else { Err(expected()) }
}

/// A seed of random numbers.
pub(crate) fn seed(word: &str) -> Result<u64, String> {
    word.trim().parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

/// A JSON object.
pub(crate) fn json_object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(format!("expected a JSON object like {{\"key\": true}}, found {}", kind(&other))),
        Err(error) => Err(format!("not valid JSON ({error}); expected an object like {{\"key\": true}}")),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// `text` with the two-character escapes `\n` and `\t` expanded, as mlx-lm does for `--prompt`.
pub(crate) fn expand_escapes(text: &str) -> String {
    text.replace("\\n", "\n").replace("\\t", "\t")
}

/// `text` with every line end (`\r\n` or a lone `\r`) as `\n`, as Python reads its standard input.
pub(crate) fn universal_newlines(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn booleans_are_strict() {
        for (word, meaning) in
            [("True", true), ("t", true), ("ON", true), ("0", false), ("No", false), ("F", false)]
        {
            assert_eq!(boolean(word), Ok(meaning), "{word}");
        }
        for word in ["", "2", "maybe", "tru"] {
            assert!(boolean(word).is_err(), "{word}");
        }
    }

    #[test]
    fn a_json_object_or_what_is_wrong() {
        assert_eq!(json_object(r#"{"a": 1}"#).unwrap().len(), 1);
        for (text, says) in [("[1]", "an array"), ("null", "null"), ("{a: 1}", "not valid JSON")] {
            let error = json_object(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (word, bytes) in [
            ("1", 1),
            ("500MB", 500_000_000),
            ("1.5g", 1_500_000_000),
            ("2 KB", 2000),
            ("1t", 1_000_000_000_000),
        ] {
            assert_eq!(size(word), Ok(bytes), "{word}");
        }
        for word in ["", "0", "-1", "MB", "1X", "1.2.3M", "0.1B", "nan", "99999999999T"] {
            assert!(size(word).is_err(), "{word}");
        }
    }

    #[test]
    fn text_is_read_as_python_reads_it() {
        assert_eq!(expand_escapes(r"a\nb\tc\\"), "a\nb\tc\\\\");
        assert_eq!(universal_newlines("a\r\nb\rc\n"), "a\nb\nc\n");
    }
}
