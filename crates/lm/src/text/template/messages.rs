//! What transformers does to messages before and after a template sees them.

use super::TemplateError;
use super::python;
use serde_json::{Map, Value};

/// The names under which reasoning is passed; templates read the first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Stands at the end of the message that is to be continued. The space tells whether the template trims.
const MARK: &str = "CONTINUE-THE-FINAL-MESSAGE-HERE ";

/// Drops fields that are null (templates handle a missing field, but print `None`), and gives reasoning
/// the names that templates read.
pub(super) fn normalize(messages: &[Value]) -> Result<Vec<Value>, TemplateError> {
    if messages.is_empty() {
        return Err(TemplateError::NoMessages);
    }
    let normal = |(index, message): (usize, &Value)| {
        let fields = message.as_object().ok_or(TemplateError::NotAMessage { index })?;
        let fields = fields.iter().filter(|(_, value)| !value.is_null());
        let fields: Map<String, Value> = fields.map(|(k, v)| (k.clone(), v.clone())).collect();
        Ok(Value::Object(with_reasoning_names(fields)))
    };
    messages.iter().enumerate().map(normal).collect()
}

fn with_reasoning_names(fields: Map<String, Value>) -> Map<String, Value> {
    let Some(reasoning) = REASONING.iter().find_map(|name| fields.get(*name)).cloned() else {
        return fields;
    };
    let mut named = Map::new();
    named.insert("thinking".to_owned(), reasoning.clone());
    named.extend(fields);
    named.insert("reasoning_content".to_owned(), reasoning);
    named
}

/// Puts the mark after the last message's text and returns that text.
pub(super) fn mark_end(
    messages: &mut [Value],
    add_generation_prompt: bool,
    template: &str,
) -> Result<String, TemplateError> {
    let refuse = |why: &str| TemplateError::Continue { why: why.to_owned() };
    if add_generation_prompt {
        return Err(refuse("it cannot be combined with add_generation_prompt"));
    }
    if !template.contains("content") {
        return Err(refuse("the template does not read content"));
    }
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = match content.ok_or_else(|| refuse("it has no content"))? {
        Value::String(text) => Some(text),
        Value::Array(parts) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    let text = text.ok_or_else(|| refuse("it has no text"))?;
    let before = text.clone();
    text.push_str(MARK);
    Ok(before)
}

/// Cuts the rendered text where the mark stands.
pub(super) fn cut_at_mark(rendered: String, final_text: &str) -> Result<String, TemplateError> {
    let at = rendered.rfind(MARK.trim_end());
    let at = at.filter(|_| rendered.contains(python::trim(final_text)));
    let (before, mark) = at
        .and_then(|at| rendered.split_at_checked(at))
        .ok_or_else(|| TemplateError::Continue { why: "the template leaves out parts of it".to_owned() })?;
    let keeps_space = mark.starts_with(MARK);
    Ok(if keeps_space { before } else { before.trim_end_matches(python::is_space) }.to_owned())
}

/// The texts of a message's content that are not blank.
pub(super) fn texts(message: &Value) -> Vec<&str> {
    let content = message.get("content");
    let parts = content.and_then(Value::as_array).into_iter().flatten();
    let parts = parts.filter_map(|part| part.get("text").and_then(Value::as_str));
    let texts = content.and_then(Value::as_str).into_iter().chain(parts);
    texts.filter(|text| !text.trim().is_empty()).collect()
}

/// The message with another text in the same form.
pub(super) fn with_text(message: &Value, text: &str) -> Value {
    let mut message = message.clone();
    match message.get_mut("content") {
        Some(Value::Array(parts)) => {
            for part in parts.iter_mut().filter_map(|part| part.get_mut("text")) {
                *part = text.into();
            }
        }
        Some(content) => *content = text.into(),
        None => {}
    }
    message
}
