//! Calls written with tags, in the manner of XML.

use super::json_text::{Bracketed, bracketed, is_space, json_string, json_value};
use super::literal::literal_value;
use super::tools::{Arguments, Untyped};
use super::{BlockError, ToolCall, Tools};

/// A format with a tag for each call and each argument.
#[derive(Debug)]
pub(super) struct TagStyle {
    /// The beginning of a call's tag, up to its name or attributes.
    call: &'static str,
    call_end: &'static str,
    argument: &'static str,
    argument_end: &'static str,
    /// The name is an attribute, rather than the rest of the tag.
    attributes: bool,
    /// Of a value's text the white space around it is none; else one line break before and one behind.
    trim: bool,
    untyped: Untyped,
    /// The last call may have no end.
    open_end: bool,
}

pub(super) const QWEN: TagStyle = TagStyle {
    call: "<function=",
    call_end: "</function>",
    argument: "<parameter=",
    argument_end: "</parameter>",
    attributes: false,
    trim: false,
    untyped: Untyped::Text,
    open_end: false,
};

pub(super) const MINIMAX: TagStyle = TagStyle {
    call: "<invoke ",
    call_end: "</invoke>",
    argument: "<parameter ",
    attributes: true,
    trim: true,
    ..QWEN
};

pub(super) const MINICPM: TagStyle = TagStyle {
    call: "<function ",
    call_end: "</function>",
    argument: "<param ",
    argument_end: "</param>",
    ..MINIMAX
};

pub(super) const MUSE: TagStyle = TagStyle {
    call: "<atem:invoke ",
    call_end: "</atem:invoke>",
    argument: "<atem:parameter ",
    argument_end: "</atem:parameter>",
    untyped: Untyped::Json,
    open_end: true,
    ..MINIMAX
};

pub(super) const DSML: TagStyle = TagStyle {
    call: "<｜DSML｜invoke ",
    call_end: "</｜DSML｜invoke>",
    argument: "<｜DSML｜parameter ",
    argument_end: "</｜DSML｜parameter>",
    trim: false,
    untyped: Untyped::Json,
    ..MINIMAX
};

impl TagStyle {
    pub(super) fn parse(&self, text: &str, tools: &Tools) -> Result<Vec<ToolCall>, BlockError> {
        let mut rest = text.trim();
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let inner = strip(rest, self.call)?;
            let (tag, after) = split(inner, ">")?;
            let name = self.name(tag)?;
            let (arguments, after) = self.arguments(&name, after, tools)?;
            calls.push(ToolCall::new(&name, arguments.json()));
            rest = after.trim_start();
        }
        if calls.is_empty() { Err(BlockError::NoCall) } else { Ok(calls) }
    }

    /// The arguments up to the end of the call, and what is behind it.
    fn arguments<'a>(
        &self,
        call: &str,
        mut rest: &'a str,
        tools: &Tools,
    ) -> Result<(Arguments, &'a str), BlockError> {
        let mut arguments = Arguments::default();
        loop {
            rest = rest.trim_start();
            if let Some(after) = rest.strip_prefix(self.call_end) {
                return Ok((arguments, after));
            }
            if rest.is_empty() && self.open_end {
                return Ok((arguments, rest));
            }
            let (tag, after) = split(strip(rest, self.argument)?, ">")?;
            let key = self.name(tag)?;
            let typed = attribute(tag, "string");
            let may_be_json = typed
                .map_or_else(|| tools.may_be_json(call, &key, self.untyped), |is_string| is_string != "true");
            let (value, after) = self.value(after, may_be_json)?;
            let json = match typed {
                Some("true") => json_string(value),
                Some(_) => json_value(value).unwrap_or_else(|| json_string(value)),
                None => tools.argument(call, &key, value, self.untyped),
            };
            arguments.set(&key, json);
            rest = after;
        }
    }

    /// The text of a value, and what is behind its end.
    fn value<'a>(&self, text: &'a str, may_be_json: bool) -> Result<(&'a str, &'a str), BlockError> {
        if let Some(inner) = text.trim_start().strip_prefix("<![CDATA[") {
            let (value, after) = inner.split_once("]]>").ok_or_else(|| unfinished(inner))?;
            return Ok((value, strip(after.trim_start(), self.argument_end)?));
        }
        let (value, after) = up_to(text, self.argument_end, may_be_json)?;
        if self.trim {
            return Ok((value.trim(), after));
        }
        let value = value.strip_prefix('\n').unwrap_or(value);
        Ok((value.strip_suffix('\n').unwrap_or(value), after))
    }

    fn name(&self, tag: &str) -> Result<String, BlockError> {
        let name = if self.attributes { attribute(tag, "name").unwrap_or_default() } else { unquoted(tag) };
        if name.is_empty() { Err(expected("a name", tag)) } else { Ok(name.to_owned()) }
    }
}

/// A format with a tag for each key and each value, behind the function's name.
#[derive(Debug)]
pub(super) struct PairStyle {
    key: [&'static str; 2],
    value: [&'static str; 2],
}

pub(super) const GLM: PairStyle =
    PairStyle { key: ["<arg_key>", "</arg_key>"], value: ["<arg_value>", "</arg_value>"] };

pub(super) const LONGCAT: PairStyle = PairStyle {
    key: ["<longcat_arg_key>", "</longcat_arg_key>"],
    value: ["<longcat_arg_value>", "</longcat_arg_value>"],
};

impl PairStyle {
    /// One call; JSON calls and `NAME {…}` too.
    pub(super) fn parse(&self, text: &str, tools: &Tools) -> Result<Vec<ToolCall>, BlockError> {
        let text = text.trim();
        if bracketed(text) == Bracketed::Open {
            return Err(unfinished(text));
        }
        if text.starts_with(['{', '[']) {
            return super::ToolFormat::JsonTools.parse_body(text, tools);
        }
        let end = text.find(|c: char| c.is_whitespace() || matches!(c, '<' | '{')).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        if name.is_empty() {
            return Err(expected("a function's name", text));
        }
        let rest = rest.trim_start();
        if bracketed(rest) == Bracketed::Open {
            return Err(unfinished(rest));
        }
        if rest.starts_with('{') {
            let object = json_value(rest).or_else(|| literal_value(rest));
            let object = object.filter(|json| json.starts_with('{'));
            return Ok(vec![ToolCall::new(name, object.ok_or_else(|| expected("a JSON object", rest))?)]);
        }
        let arguments = if rest.is_empty() || rest.starts_with(self.key[0]) {
            self.pairs(name, rest, tools)?
        } else {
            words(name, rest, tools)?
        };
        Ok(vec![ToolCall::new(name, arguments.json())])
    }

    fn pairs(&self, call: &str, mut rest: &str, tools: &Tools) -> Result<Arguments, BlockError> {
        let mut arguments = Arguments::default();
        while !rest.is_empty() {
            let (key, after) = split(strip(rest, self.key[0])?, self.key[1])?;
            // Some models write the line break between the two as an escape.
            let after = after.trim_start_matches(is_space).trim_start_matches("\\n").trim_start();
            let key = key.trim();
            let may_be_json = tools.may_be_json(call, key, Untyped::Json);
            let (value, after) = up_to(strip(after, self.value[0])?, self.value[1], may_be_json)?;
            let trimmed = value.trim();
            let json = if tools.is_string(call, key) {
                json_string(trimmed)
            } else {
                tools.argument(call, key, trimmed, Untyped::Json)
            };
            arguments.set(key, json);
            rest = after.trim_start().trim_start_matches("\\n").trim_start();
        }
        Ok(arguments)
    }
}

/// `key=value key='a value'`, quoted as in a shell.
fn words(call: &str, text: &str, tools: &Tools) -> Result<Arguments, BlockError> {
    let mut arguments = Arguments::default();
    let mut rest = text;
    while !rest.is_empty() {
        let (key, after) = rest.split_once('=').ok_or_else(|| expected("key=value", rest))?;
        if key.is_empty() || key.contains(|c: char| c.is_whitespace() || matches!(c, '"' | '\'')) {
            return Err(expected("key=value", rest));
        }
        let (value, after) = match after.chars().next().filter(|c| matches!(c, '"' | '\'')) {
            Some(quote) => split(&after[1..], if quote == '"' { "\"" } else { "'" })?,
            None => after.split_at(after.find(char::is_whitespace).unwrap_or(after.len())),
        };
        if !after.is_empty() && !after.starts_with(char::is_whitespace) {
            return Err(expected("white space", after));
        }
        arguments.set(key, tools.argument(call, key, value, Untyped::Json));
        rest = after.trim_start();
    }
    Ok(arguments)
}

/// The text of a value up to `end`, and what is behind that. Within a list or an object, which a value that
/// `may_be_json` may be, `end` is text.
fn up_to<'a>(text: &'a str, end: &'static str, may_be_json: bool) -> Result<(&'a str, &'a str), BlockError> {
    match if may_be_json { bracketed(text) } else { Bracketed::None } {
        Bracketed::Open => return Err(unfinished(text)),
        Bracketed::Ends(at) => {
            let (value, rest) = text.split_at(at);
            if let Some(after) = rest.trim_start().strip_prefix(end) {
                return Ok((value, after));
            }
        }
        Bracketed::None => {}
    }
    text.split_once(end).ok_or_else(|| unfinished(text))
}

fn unfinished(value: &str) -> BlockError {
    BlockError::Unfinished { value: value.chars().take(20).collect() }
}

pub(super) fn expected(expected: &'static str, found: &str) -> BlockError {
    BlockError::Expected { expected, found: found.chars().take(20).collect() }
}

/// `text` behind `prefix`.
pub(super) fn strip<'a>(text: &'a str, prefix: &'static str) -> Result<&'a str, BlockError> {
    text.strip_prefix(prefix).ok_or_else(|| expected(prefix, text))
}

/// `text` before and behind `at`.
pub(super) fn split<'a>(text: &'a str, at: &'static str) -> Result<(&'a str, &'a str), BlockError> {
    text.split_once(at).ok_or_else(|| expected(at, text))
}

/// The value of an attribute `key="value"` of a tag's text; quotes of either kind, or none.
pub(super) fn attribute<'a>(tag: &'a str, key: &str) -> Option<&'a str> {
    let mut rest = tag.trim_start();
    while let Some((name, after)) = rest.split_once('=') {
        let after = after.trim_start();
        let (value, next) = match after.chars().next() {
            Some(quote @ ('"' | '\'')) => after[1..].split_once(quote)?,
            _ => after.split_at(after.find(char::is_whitespace).unwrap_or(after.len())),
        };
        if name.trim().rsplit(char::is_whitespace).next() == Some(key) {
            return Some(value);
        }
        rest = next.trim_start();
    }
    None
}

fn unquoted(text: &str) -> &str {
    let text = text.trim();
    let inner = |quote| text.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).unwrap_or(text)
}
