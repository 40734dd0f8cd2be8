//! Python's literals and calls with keyword arguments, as JSON: `f(a=1, b='x', c={'k': None})`.

use super::json_text::{json_string, json_value};
use super::tools::Arguments;
use super::{BlockError, ToolCall};

/// Brackets within brackets at most.
const DEPTH_MAX: usize = 64;

/// The JSON of the literal that `text` is as a whole.
pub(super) fn literal_value(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text.trim() };
    reader.value(DEPTH_MAX).filter(|_| reader.rest.is_empty())
}

/// The calls of a list `[f(a=1), g(b=2)]`.
pub(super) fn call_list(text: &str) -> Result<Vec<ToolCall>, BlockError> {
    let mut reader = Reader { rest: text.trim() };
    reader.expect("[")?;
    let mut calls = Vec::new();
    loop {
        calls.push(reader.call()?);
        if reader.takes(",") && !reader.begins("]") {
            continue;
        }
        reader.expect("]")?;
        return if reader.rest.is_empty() { Ok(calls) } else { Err(reader.unexpected("the end")) };
    }
}

/// Whether a text of literals ends within a string.
pub(super) fn is_within_string(text: &str) -> bool {
    let (mut quote, mut escaped) = (None, false);
    for c in text.chars() {
        match quote {
            None if matches!(c, '"' | '\'') => quote = Some(c),
            Some(open) if open == c && !escaped => quote = None,
            _ => {}
        }
        escaped = c == '\\' && !escaped;
    }
    quote.is_some()
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn begins(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        self.rest.starts_with(token)
    }

    /// Skips white space, then `token` if it comes.
    fn takes(&mut self, token: &str) -> bool {
        let comes = self.begins(token);
        if comes {
            self.rest = &self.rest[token.len()..];
        }
        comes
    }

    fn expect(&mut self, token: &'static str) -> Result<(), BlockError> {
        if self.takes(token) { Ok(()) } else { Err(self.unexpected(token)) }
    }

    fn unexpected(&self, expected: &'static str) -> BlockError {
        BlockError::Expected { expected, found: self.rest.chars().take(20).collect() }
    }

    /// Letters, digits, underscores and what `more` allows.
    fn name(&mut self, more: &[char]) -> &'a str {
        self.rest = self.rest.trim_start();
        let end = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_' && !more.contains(&c));
        let (name, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        name
    }

    fn call(&mut self) -> Result<ToolCall, BlockError> {
        let name = self.name(&['.', '-']);
        if name.is_empty() {
            return Err(self.unexpected("a function's name"));
        }
        self.expect("(")?;
        let mut arguments = Arguments::default();
        while !self.takes(")") {
            let before = self.rest;
            let key = self.name(&[]);
            if key.is_empty() || !self.takes("=") || self.begins("=") {
                self.rest = before;
                return Err(BlockError::Positional { name: name.to_owned() });
            }
            let value = self.argument()?;
            arguments.set(key, value);
            if !self.takes(",") && !self.begins(")") {
                return Err(self.unexpected("`,` or `)`"));
            }
        }
        Ok(ToolCall::new(name, arguments.json()))
    }

    /// A literal, or the bare text up to the next comma or bracket.
    fn argument(&mut self) -> Result<String, BlockError> {
        let before = self.rest;
        if let Some(value) = self.value(DEPTH_MAX)
            && (self.begins(",") || self.begins(")"))
        {
            return Ok(value);
        }
        self.rest = before.trim_start();
        let end =
            self.rest.find([',', '(', ')', '[', ']', '{', '}', '"', '\'', '=']).unwrap_or(self.rest.len());
        let bare = self.rest[..end].trim();
        if bare.is_empty() {
            return Err(self.unexpected("a value"));
        }
        self.rest = &self.rest[end..];
        Ok(json_string(bare))
    }

    fn value(&mut self, depth: usize) -> Option<String> {
        let depth = depth.checked_sub(1)?;
        if self.takes("[") {
            return self.list(depth, "]");
        }
        if self.takes("(") {
            return self.tuple(depth);
        }
        if self.takes("{") {
            return self.dictionary(depth);
        }
        let first = self.rest.chars().next()?;
        if matches!(first, '"' | '\'') {
            return self.strings();
        }
        if first.is_ascii_digit() || matches!(first, '-' | '+' | '.') {
            return self.number();
        }
        match self.name(&[]) {
            "True" | "true" => Some("true".to_owned()),
            "False" | "false" => Some("false".to_owned()),
            "None" | "null" => Some("null".to_owned()),
            _ => None,
        }
    }

    fn list(&mut self, depth: usize, close: &str) -> Option<String> {
        let mut items = Vec::new();
        while !self.takes(close) {
            items.push(self.value(depth)?);
            if !self.takes(",") && !self.begins(close) {
                return None;
            }
        }
        Some(format!("[{}]", items.join(", ")))
    }

    /// A tuple, or a value in brackets.
    fn tuple(&mut self, depth: usize) -> Option<String> {
        if self.takes(")") {
            return Some("[]".to_owned());
        }
        let first = self.value(depth)?;
        if self.takes(")") {
            return Some(first);
        }
        if !self.takes(",") {
            return None;
        }
        let rest = self.list(depth, ")")?;
        Some(if rest == "[]" { format!("[{first}]") } else { format!("[{first}, {}", &rest[1..]) })
    }

    fn dictionary(&mut self, depth: usize) -> Option<String> {
        let mut members = Arguments::default();
        while !self.takes("}") {
            let key = self.value(depth)?;
            // JSON has no other keys than strings.
            let key = super::json_text::json_string_text(&key).unwrap_or(key);
            if !self.takes(":") {
                return None;
            }
            let value = self.value(depth)?;
            members.set(&key, value);
            if !self.takes(",") && !self.begins("}") {
                return None;
            }
        }
        Some(members.json())
    }

    /// A string; several one after the other are one.
    fn strings(&mut self) -> Option<String> {
        let mut text = String::new();
        while self.begins("\"") || self.begins("'") {
            self.string(&mut text)?;
        }
        Some(json_string(&text))
    }

    fn string(&mut self, text: &mut String) -> Option<()> {
        let quote = ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| self.takes(quote))?;
        loop {
            if let Some(rest) = self.rest.strip_prefix(quote) {
                self.rest = rest;
                return Some(());
            }
            let mut chars = self.rest.chars();
            let c = chars.next()?;
            self.rest = chars.as_str();
            if c == '\\' { self.escape(text)? } else { text.push(c) }
        }
    }

    /// What follows a backslash.
    fn escape(&mut self, text: &mut String) -> Option<()> {
        let mut chars = self.rest.chars();
        let c = chars.next()?;
        self.rest = chars.as_str();
        let digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        if digits > 0 {
            let code = self.rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok())?;
            self.rest = &self.rest[digits..];
            text.push(char::from_u32(code).unwrap_or('\u{fffd}'));
            return Some(());
        }
        match c {
            '\n' => {}
            'n' => text.push('\n'),
            't' => text.push('\t'),
            'r' => text.push('\r'),
            'b' => text.push('\u{8}'),
            'f' => text.push('\u{c}'),
            '0' => text.push('\0'),
            '\\' | '\'' | '"' => text.push(c),
            _ => text.extend(['\\', c]),
        }
        Some(())
    }

    fn number(&mut self) -> Option<String> {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '-' | '+' | '_'));
        let (number, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        let number = number.strip_prefix('+').unwrap_or(number).replace('_', "");
        // Python also writes `.5` and `5.`.
        let number = match number.strip_prefix('.') {
            Some(fraction) => format!("0.{fraction}"),
            None if number.ends_with('.') => format!("{number}0"),
            None => number,
        };
        let number = json_value(&number)?;
        self.rest = rest;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    #[test]
    fn literals_become_json() {
        let cases = [
            ("[1, 2.5, -3, 1_000, .5, 5., 1e3,]", "[1, 2.5, -3, 1000, 0.5, 5.0, 1e3]"),
            ("(1,)", "[1]"),
            ("(1, 'x')", "[1, \"x\"]"),
            ("()", "[]"),
            ("(1)", "1"),
            ("{'a': True, \"b\": null, 1: None}", "{\"a\": true, \"b\": null, \"1\": null}"),
            (r#"'it\'s' " \x41\u00e9\n\d""#, r#""it's Aé\n\\d""#),
            ("'''a\n'b'''", "\"a\\n'b\""),
            ("12345678901234567890123", "12345678901234567890123"),
        ];
        for (text, json) in cases {
            let expected: Value = serde_json::from_str(json).unwrap();
            let read = literal_value(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(serde_json::from_str::<Value>(&read).unwrap(), expected, "{text}");
        }
        for text in
            ["", "x", "[1", "'a", "1 2", "{1}", "007", "f()", "__import__('os')", "1+1", "'\\x4'", "'\\xé"]
        {
            assert_eq!(literal_value(text), None, "{text}");
        }
        assert_eq!(literal_value(&"[".repeat(1_000_000)), None);
        assert_eq!(literal_value(&("[".repeat(65) + &"]".repeat(65))), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_text_panics_and_what_is_read_is_json(text in r#"[\[\](){}'"a-zTN0-9.,:=\\ é_+-]{0,30}"#) {
            if let Some(json) = literal_value(&text) {
                prop_assert!(serde_json::from_str::<Value>(&json).is_ok() || json.contains('e'), "{}", json);
            }
            let _ = call_list(&text);
            let _ = call_list(&format!("[f(a={text})]"));
        }
    }
}
