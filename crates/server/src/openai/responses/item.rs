//! The items of a conversation: what stands between two responses.

use crate::error::{ApiError, ApiResult};
use crate::openai::messages;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// An item of a request or of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Message { role: Role, text: String },
    Reasoning { text: String },
    Call { id: String, name: String, arguments: String },
    Output { call: String, text: String },
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
}

impl Role {
    const ALL: [Self; 4] = [Self::System, Self::Developer, Self::User, Self::Assistant];

    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// Thoughts as a text that clients hand back as it is: this server has no secret that would hide them.
pub(crate) fn encode_thoughts(text: &str) -> String {
    BASE64_STANDARD.encode(text)
}

impl Item {
    /// Reads an item that stands at `at`.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub(crate) fn read(at: &str, value: &Value) -> ApiResult<Self> {
        let text = |key: &str| {
            let field = format!("{at}.{key}");
            let missing = || ApiError::field(&field, format!("{field} is required, and is a text"));
            value[key].as_str().map(str::to_owned).ok_or_else(missing)
        };
        let content = |key: &str| match &value[key] {
            Value::Null => {
                let field = format!("{at}.{key}");
                Err(ApiError::field(&field, format!("{field} is required")))
            }
            content => messages::text(&format!("{at}.{key}"), content.clone()),
        };
        match value["type"].as_str() {
            None | Some("message") if !value["role"].is_null() || value["type"] == "message" => {
                let role = Role::ALL.into_iter().find(|role| value["role"] == role.name());
                let role = role.ok_or_else(|| {
                    let names = Role::ALL.map(Role::name).join(", ");
                    ApiError::field(format!("{at}.role"), format!("{at}.role must be one of {names}"))
                })?;
                Ok(Self::Message { role, text: content("content")? })
            }
            Some("function_call") => {
                messages::arguments(&format!("{at}.arguments"), value.get("arguments"))?;
                Ok(Self::Call { id: text("call_id")?, name: text("name")?, arguments: text("arguments")? })
            }
            Some("function_call_output") => {
                Ok(Self::Output { call: text("call_id")?, text: content("output")? })
            }
            Some("reasoning") => Ok(Self::Reasoning { text: thoughts(at, value)? }),
            kind => {
                let field = format!("{at}.type");
                let known = "message, function_call, function_call_output, reasoning and item_reference";
                let kind = kind.unwrap_or_default();
                let message = format!("{field} is {kind:?}: only {known} are supported");
                Err(ApiError::field(field, message))
            }
        }
    }

    /// What ids of such items begin with.
    pub(crate) fn prefix(&self) -> &'static str {
        match self {
            Self::Message { .. } => "msg_",
            Self::Reasoning { .. } => "rs_",
            Self::Call { .. } => "fc_",
            Self::Output { .. } => "fco_",
        }
    }

    /// The item as the protocol writes it.
    pub(crate) fn json(&self, id: &str) -> Value {
        match self {
            Self::Message { role: Role::Assistant, text } => json!({
                "id": id, "type": "message", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
            }),
            Self::Message { role, text } => json!({
                "id": id, "type": "message", "status": "completed", "role": role.name(),
                "content": [{"type": "input_text", "text": text}],
            }),
            Self::Reasoning { text } => json!({
                "id": id, "type": "reasoning", "summary": [], "status": "completed",
                "content": [{"type": "reasoning_text", "text": text}],
            }),
            Self::Call { id: call, name, arguments } => json!({
                "id": id, "type": "function_call", "status": "completed",
                "call_id": call, "name": name, "arguments": arguments,
            }),
            Self::Output { call, text } => json!({
                "id": id, "type": "function_call_output", "status": "completed", "call_id": call, "output": text,
            }),
        }
    }
}

/// The text of a reasoning item: its own if it is there, else what only its author can read.
fn thoughts(at: &str, value: &Value) -> ApiResult<String> {
    let texts = |key: &str| {
        let parts = value[key].as_array().map(Vec::as_slice).unwrap_or_default();
        parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
    };
    let own = texts("content");
    if !own.is_empty() {
        return Ok(own);
    }
    let Some(encoded) = value["encrypted_content"].as_str() else { return Ok(texts("summary")) };
    let decoded = BASE64_STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    decoded.ok_or_else(|| {
        let field = format!("{at}.encrypted_content");
        let message = format!("{field} was not written by this server: leave the item out");
        ApiError { code: Some("invalid_encrypted_content"), ..ApiError::field(field, message) }
    })
}

/// Checks that every output belongs to a call before it. The request's own items begin at `first`.
pub(crate) fn check_outputs(items: &[Item], first: usize) -> ApiResult<()> {
    let mut calls = HashSet::new();
    for (index, item) in items.iter().enumerate() {
        match item {
            Item::Call { id, .. } => drop(calls.insert(id)),
            Item::Output { call, .. } if !calls.contains(call) => {
                let field = format!("input[{}].call_id", index.saturating_sub(first));
                let message = format!("{field}: no function call before it has the id {call:?}");
                return Err(ApiError::field(field, message));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The items as messages of a chat. What an assistant thought, said and called up to the next answer is one message,
/// and instructions are one with what the system says first: templates expect that.
pub(crate) fn messages(instructions: Option<&str>, items: &[Item]) -> Vec<Value> {
    let mut out: Vec<Map<String, Value>> = Vec::new();
    if let Some(text) = instructions {
        out.push(message("system", text));
    }
    let mut before: Option<&Item> = None;
    for item in items {
        match item {
            Item::Message { role: Role::System | Role::Developer, text } => match out.as_mut_slice() {
                [first] if first["role"] == "system" => append(first, "content", "\n\n", text),
                _ => out.push(message("system", text)),
            },
            Item::Message { role: Role::User, text } => out.push(message("user", text)),
            Item::Output { call, text } => {
                let mut message = message("tool", text);
                message.insert("tool_call_id".to_owned(), call.as_str().into());
                out.push(message);
            }
            Item::Message { role: Role::Assistant, .. } | Item::Reasoning { .. } | Item::Call { .. } => {
                let twice = |item: &Item| matches!(item, Item::Message { .. });
                let same = out.last().is_some_and(|last| last["role"] == "assistant")
                    && !(twice(item) && before.is_some_and(twice));
                if !same {
                    out.push(message("assistant", ""));
                }
                if let Some(last) = out.last_mut() {
                    add(last, item);
                }
            }
        }
        before = Some(item);
    }
    out.into_iter().map(Value::Object).collect()
}

fn message(role: &str, text: &str) -> Map<String, Value> {
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), text.into());
    message
}

/// Appends to a text of a message.
fn append(message: &mut Map<String, Value>, key: &str, between: &str, more: &str) {
    let before = message.get(key).and_then(Value::as_str).unwrap_or_default();
    let between = if before.is_empty() { "" } else { between };
    let joined = format!("{before}{between}{more}");
    message.insert(key.to_owned(), joined.into());
}

/// Adds what an assistant did.
fn add(message: &mut Map<String, Value>, item: &Item) {
    match item {
        Item::Message { text, .. } => append(message, "content", "", text),
        Item::Reasoning { text } if text.is_empty() => {}
        Item::Reasoning { text } => append(message, "reasoning_content", "\n", text),
        Item::Call { id, name, arguments } => {
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": id, "type": "function", "function": function});
            let calls = message.entry("tool_calls").or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(calls) = calls {
                calls.push(call);
            }
        }
        Item::Output { .. } => {}
    }
}
