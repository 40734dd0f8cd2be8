//! Gemma's calls: `call:NAME{key:value}`, whose strings stand between two equal marks.

use super::json_text::{json_string, json_value};
use super::tags::{expected, split, strip};
use super::tools::Arguments;
use super::{BlockError, ToolCall};

/// Brackets within brackets at most.
const DEPTH_MAX: usize = 64;

/// The calls of a block whose strings stand between `quote`s.
pub(super) fn parse(text: &str, quote: &'static str) -> Result<Vec<ToolCall>, BlockError> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, after) = split(strip(rest, "call:")?, "{")?;
        let name = name.trim();
        if name.is_empty() || name.contains(|c: char| c.is_whitespace() || matches!(c, ':' | '<')) {
            return Err(expected("a function's name", rest));
        }
        let mut reader = Reader { rest: after, quote };
        let arguments = reader.object(DEPTH_MAX)?;
        calls.push(ToolCall::new(name, arguments));
        rest = reader.rest.trim_start().trim_start_matches(',').trim_start();
    }
    if calls.is_empty() { Err(BlockError::NoCall) } else { Ok(calls) }
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'static str,
}

impl<'a> Reader<'a> {
    fn takes(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let Some(rest) = self.rest.strip_prefix(token) else { return false };
        self.rest = rest;
        true
    }

    fn string(&mut self) -> Result<&'a str, BlockError> {
        let (text, rest) = split(self.rest, self.quote)?;
        self.rest = rest;
        Ok(text)
    }

    /// The members up to the closing brace, as a JSON object.
    fn object(&mut self, depth: usize) -> Result<String, BlockError> {
        let mut members = Arguments::default();
        while !self.takes("}") {
            let key = if self.takes(self.quote) {
                let key = self.string()?;
                if !self.takes(":") {
                    return Err(expected(":", self.rest));
                }
                key
            } else {
                let (key, rest) = split(self.rest, ":")?;
                self.rest = rest;
                key.trim().trim_matches('"')
            };
            if key.is_empty() || key.contains(['{', '}', '[', ']', ',', '<']) {
                return Err(expected("a key", key));
            }
            let value = self.value(depth)?;
            members.set(key, value);
            if !self.takes(",") && !self.rest.starts_with('}') {
                return Err(expected("`,` or `}`", self.rest));
            }
        }
        Ok(members.json())
    }

    fn value(&mut self, depth: usize) -> Result<String, BlockError> {
        let depth = depth.checked_sub(1).ok_or_else(|| expected("fewer brackets", self.rest))?;
        if self.takes(self.quote) {
            return Ok(json_string(self.string()?));
        }
        if self.takes("{") {
            return self.object(depth);
        }
        if self.takes("[") {
            return self.array(depth);
        }
        self.bare()
    }

    fn array(&mut self, depth: usize) -> Result<String, BlockError> {
        let mut items = Vec::new();
        while !self.takes("]") {
            items.push(self.value(depth)?);
            if !self.takes(",") && !self.rest.starts_with(']') {
                return Err(expected("`,` or `]`", self.rest));
            }
        }
        Ok(format!("[{}]", items.join(", ")))
    }

    /// A number, a word, a JSON string, or text without quotes.
    fn bare(&mut self) -> Result<String, BlockError> {
        let mut in_string = self.rest.starts_with('"');
        let mut escaped = false;
        let end = self.rest.char_indices().skip(1).find(|&(_, c)| {
            if in_string {
                in_string = c != '"' || escaped;
                escaped = c == '\\' && !escaped;
                return false;
            }
            matches!(c, ',' | '}' | ']' | '{' | '[')
        });
        let (text, rest) = self.rest.split_at(end.map_or(self.rest.len(), |(i, _)| i));
        let text = text.trim();
        if text.is_empty() || text.starts_with([',', '}', ']']) || text.contains(self.quote) {
            return Err(expected("a value", self.rest));
        }
        self.rest = rest;
        Ok(json_value(text).unwrap_or_else(|| json_string(text)))
    }
}
