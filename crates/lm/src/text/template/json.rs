//! JSON and numbers spelled as Python spells them: templates print them, and models are trained on that.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write as _;

/// What Python's `json.dumps` takes.
#[derive(Default)]
pub(super) struct JsonStyle {
    pub(super) ensure_ascii: bool,
    /// The indentation of one level; without it everything stands on one line.
    pub(super) indent: Option<String>,
    /// Between items, and between key and value.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

/// Values may be this deeply nested.
const DEPTH_MAX: usize = 128;

impl JsonStyle {
    pub(super) fn write(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.value(value, 0, &mut out)?;
        Ok(out)
    }

    fn item_separator(&self) -> &str {
        match &self.separators {
            Some((item, _)) => item,
            // With indentation Python leaves out the space that would end the line.
            None if self.indent.is_some() => ",",
            None => ", ",
        }
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX || out.len() > super::engine::OUTPUT_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                "the value is too deep or too large for JSON",
            ));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq => self.list(value, depth, out)?,
            ValueKind::Map => self.map(value, depth, out)?,
            kind => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("{kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn list(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        out.push('[');
        let mut empty = true;
        for item in value.try_iter()?.checked() {
            if !std::mem::take(&mut empty) {
                out.push_str(self.item_separator());
            }
            self.line(depth + 1, out);
            self.value(&item?, depth + 1, out)?;
        }
        if !empty {
            self.line(depth, out);
        }
        out.push(']');
        Ok(())
    }

    fn map(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let mut keys = value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        let key_separator = self.separators.as_ref().map_or(": ", |(_, key)| key);
        for (i, key) in keys.iter().enumerate() {
            if i > 0 {
                out.push_str(self.item_separator());
            }
            self.line(depth + 1, out);
            let name = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::Bool => key.is_true().to_string(),
                ValueKind::None => "null".to_owned(),
                ValueKind::Number => number(key),
                kind => {
                    let why = format!("{kind} is not a JSON key");
                    return Err(Error::new(ErrorKind::BadSerialization, why));
                }
            };
            self.string(&name, out);
            out.push_str(key_separator);
            self.value(&value.get_item(key)?, depth + 1, out)?;
        }
        if !keys.is_empty() {
            self.line(depth, out);
        }
        out.push('}');
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{C}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String does not fail.
                        _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A number as JSON: integers in full, floats as Python prints them.
fn number(value: &Value) -> String {
    match float(value) {
        Some(x) if x.is_nan() => "NaN".to_owned(),
        Some(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Some(x) => python_float(x),
        None => value.to_string(),
    }
}

/// What Python's `str` makes of a value.
pub(super) fn python_text(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => {
            let mut out = String::new();
            represent(value, 0, &mut out);
            out
        }
    }
}

fn represent(value: &Value, depth: usize, out: &mut String) {
    let container = matches!(value.kind(), ValueKind::Seq | ValueKind::Map);
    let items = value.try_iter().ok().filter(|_| container && depth <= DEPTH_MAX);
    let Some(items) = items else {
        return match (value.as_str(), float(value)) {
            (Some(text), _) => represent_text(text, out),
            (None, Some(x)) => out.push_str(&python_float(x)),
            _ => out.push_str(&value.to_string()),
        };
    };
    let is_map = value.kind() == ValueKind::Map;
    let (open, close) = match (is_map, value.is_tuple()) {
        (true, _) => ('{', "}"),
        (_, true) => ('(', if value.len() == Some(1) { ",)" } else { ")" }),
        _ => ('[', "]"),
    };
    out.push(open);
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        represent(&item, depth + 1, out);
        if is_map {
            out.push_str(": ");
            represent(&value.get_item(&item).unwrap_or_default(), depth + 1, out);
        }
    }
    out.push_str(close);
}

fn represent_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            // Writing to a String does not fail.
            c => {
                _ = match u32::from(c) {
                    code @ ..=0xFF => write!(out, "\\x{code:02x}"),
                    code @ ..=0xFFFF => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                }
            }
        }
    }
    out.push(quote);
}

/// Whether Python prints a character as it is. Beyond control characters and spaces Python also escapes
/// format characters, private and unassigned ones; of those the ones in use are listed.
fn is_printable(c: char) -> bool {
    let format = matches!(c, '\u{AD}' | '\u{600}'..='\u{605}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{FEFF}' | '\u{E000}'..='\u{F8FF}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || format)
}

/// The value of a float; `None` for integers.
pub(super) fn float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        f64::try_from(value.clone()).ok()
    } else {
        None
    }
}

/// The shortest text that reads back as `x`, with the exponent where Python has one.
pub(super) fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = x.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_prints_them() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (9999999999999998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
            (f64::INFINITY, "inf"),
        ];
        for (x, text) in cases {
            assert_eq!(python_float(x), text);
        }
    }
}
