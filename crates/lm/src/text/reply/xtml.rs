//! Kimi K3's calls: `<|open|>call tool="NAME"<|sep|>…<|close|>call<|sep|>`.

use super::json_text::{json_string, json_value};
use super::tags::{attribute, expected, split, strip};
use super::tools::Arguments;
use super::{BlockError, ToolCall};

const SEP: &str = "<|sep|>";

/// The calls of a block.
pub(super) fn parse(text: &str) -> Result<Vec<ToolCall>, BlockError> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (tag, after) = split(strip(rest, "<|open|>call")?, SEP)?;
        let (body, after) = split(after, "<|close|>call<|sep|>")?;
        let name = attribute(tag, "tool").map(plain).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| expected("a tool", tag))?;
        calls.push(ToolCall::new(&name, arguments(body.trim())?));
        rest = after.trim_start();
    }
    if calls.is_empty() { Err(BlockError::NoCall) } else { Ok(calls) }
}

/// One JSON object, or an argument in each tag.
fn arguments(mut rest: &str) -> Result<String, BlockError> {
    if let Some(after) = rest.strip_prefix("<|open|>json") {
        let (_, after) = split(after, SEP)?;
        let (json, after) = split(after, "<|close|>json<|sep|>")?;
        let object = json_value(json).filter(|json| json.starts_with('{') && after.trim().is_empty());
        return object.ok_or_else(|| expected("a JSON object", json));
    }
    let mut arguments = Arguments::default();
    while !rest.is_empty() {
        let (tag, after) = split(strip(rest, "<|open|>argument")?, SEP)?;
        let (value, after) = split(after, "<|close|>argument<|sep|>")?;
        let key = attribute(tag, "key").map(plain).ok_or_else(|| expected("a key", tag))?;
        let json = match attribute(tag, "type") {
            Some("string") | None => None,
            Some(_) => json_value(value),
        };
        arguments.set(&key, json.unwrap_or_else(|| json_string(value)));
        rest = after.trim_start();
    }
    Ok(arguments.json())
}

/// An attribute's value without its entities.
fn plain(value: &str) -> String {
    value.replace("&quot;", "\"").replace("&amp;", "&")
}
