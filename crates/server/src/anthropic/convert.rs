//! From Anthropic's messages and tools to those of chat templates.

use crate::error::{ApiError, ApiResult};
use crate::openai::messages::arguments;
use crate::openai::tools::{Choice, is_flag};
use serde_json::{Value, json};

fn refused<T>(field: String, why: &str) -> ApiResult<T> {
    let message = format!("{field} {why}");
    Err(ApiError::field(field, message))
}

/// The text of `system` or of a tool's result: a text, or blocks of type text.
fn texts(at: &str, value: &Value) -> ApiResult<String> {
    match value {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let mut joined = Vec::new();
            for (index, block) in blocks.iter().enumerate() {
                match (block["type"].as_str(), block["text"].as_str()) {
                    (Some("text"), Some(text)) => joined.push(text),
                    _ => return refused(format!("{at}[{index}]"), "must be a block of type text"),
                }
            }
            Ok(joined.join("\n"))
        }
        _ => refused(at.to_owned(), "must be a text or a list of blocks"),
    }
}

/// `system` and `messages`, as OpenAI's protocol has them.
pub(crate) fn messages(system: Option<&Value>, messages: &[Value]) -> ApiResult<Vec<Value>> {
    let mut out = Vec::new();
    if let Some(system) = system {
        let text = texts("system", system)?;
        if !text.is_empty() {
            out.push(json!({"role": "system", "content": text}));
        }
    }
    for (index, message) in messages.iter().enumerate() {
        let at = format!("messages[{index}]");
        match message["role"].as_str() {
            Some("user") => user(&at, &message["content"], &mut out)?,
            Some("assistant") => assistant(&at, &message["content"], &mut out)?,
            Some("system") => out.push(
                json!({"role": "system", "content": texts(&format!("{at}.content"), &message["content"])?}),
            ),
            _ => return refused(format!("{at}.role"), "must be user or assistant"),
        }
    }
    Ok(out)
}

/// A user's message: its tools' results come first, each a message of its own.
fn user(at: &str, content: &Value, out: &mut Vec<Value>) -> ApiResult<()> {
    if content.is_null() || content.as_array().is_some_and(Vec::is_empty) {
        return refused(format!("{at}.content"), "is required: a text, or at least one block");
    }
    let Value::Array(blocks) = content else {
        out.push(json!({"role": "user", "content": texts(&format!("{at}.content"), content)?}));
        return Ok(());
    };
    let mut said = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{index}]");
        match block["type"].as_str() {
            Some("text") => match block["text"].as_str() {
                Some(text) => said.push(text),
                None => return refused(format!("{at}.text"), "must be a text"),
            },
            Some("tool_result") => {
                let Some(id) = block["tool_use_id"].as_str() else {
                    return refused(format!("{at}.tool_use_id"), "is required");
                };
                let mut text = texts(&format!("{at}.content"), &block["content"])?;
                if block["is_error"] == true {
                    text.insert_str(0, "Error: ");
                }
                out.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            kind => {
                let why =
                    format!("is {:?}: only text and tool_result are supported", kind.unwrap_or_default());
                return refused(format!("{at}.type"), &why);
            }
        }
    }
    if !said.is_empty() {
        out.push(json!({"role": "user", "content": said.join("\n")}));
    }
    Ok(())
}

fn assistant(at: &str, content: &Value, out: &mut Vec<Value>) -> ApiResult<()> {
    let Value::Array(blocks) = content else {
        out.push(json!({"role": "assistant", "content": texts(&format!("{at}.content"), content)?}));
        return Ok(());
    };
    let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{index}]");
        match block["type"].as_str() {
            Some("text") => said.push_str(block["text"].as_str().unwrap_or_default()),
            Some("thinking") => thought.push_str(block["thinking"].as_str().unwrap_or_default()),
            // Thoughts that only their author can read.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let (Some(id), Some(name)) = (block["id"].as_str(), block["name"].as_str()) else {
                    return refused(at, "needs id and name");
                };
                let arguments = arguments(&format!("{at}.input"), block.get("input"))?;
                let function = json!({"name": name, "arguments": arguments});
                calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            kind => {
                let why = format!(
                    "is {:?}: only text, thinking and tool_use are supported",
                    kind.unwrap_or_default()
                );
                return refused(format!("{at}.type"), &why);
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": said});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    out.push(message);
    Ok(())
}

/// `tools`, as OpenAI's protocol has them.
pub(crate) fn tools(tools: &[Value]) -> ApiResult<Vec<Value>> {
    let mut out = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        if tool["type"].as_str().is_some_and(|kind| kind != "custom") {
            return refused(
                format!("tools[{index}].type"),
                "must be custom: the server has no tools of its own",
            );
        }
        let Some(name) = tool["name"].as_str().filter(|name| !name.is_empty()) else {
            return refused(format!("tools[{index}].name"), "is required");
        };
        if !tool["input_schema"].is_object() {
            return refused(format!("tools[{index}].input_schema"), "is required, and is a JSON schema");
        }
        let mut function = json!({"name": name, "parameters": tool["input_schema"]});
        if !is_flag(tool.get("strict")) {
            return refused(format!("tools[{index}].strict"), "must be true or false");
        }
        for key in ["description", "strict"] {
            if !tool[key].is_null() {
                function[key] = tool[key].clone();
            }
        }
        out.push(json!({"type": "function", "function": function}));
    }
    Ok(out)
}

/// `tool_choice`, and whether there may be several calls.
pub(crate) fn choice(choice: Option<&Value>, tools: &[Value]) -> ApiResult<(Choice, bool)> {
    let Some(choice) = choice else { return Ok((Choice::Auto, true)) };
    let parallel = choice["disable_parallel_tool_use"] != true;
    let openai = match choice["type"].as_str() {
        Some("auto") => json!("auto"),
        Some("none") => json!("none"),
        Some("any") => json!("required"),
        Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => return refused("tool_choice.type".to_owned(), "must be auto, any, tool or none"),
    };
    Ok((crate::openai::tools::choice(Some(&openai), tools)?, parallel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_loop_is_taken_over() {
        let list = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}]},
                {"type": "text", "text": "go on"},
            ]},
        ]);
        let done =
            messages(Some(&json!([{"type": "text", "text": "be"}])), list.as_array().unwrap()).unwrap();
        assert_eq!(
            Value::Array(done),
            json!([
                {"role": "system", "content": "be"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "so", "reasoning_content": "hm",
                 "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "tool_call_id": "t1", "content": "5"},
                {"role": "user", "content": "go on"},
            ])
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let param = |message: Value| messages(None, &[message]).unwrap_err().param.unwrap();
        assert_eq!(param(json!({"role": "tool", "content": "x"})), "messages[0].role");
        for content in [json!(1), json!(null), json!([])] {
            assert_eq!(param(json!({"role": "user", "content": content})), "messages[0].content");
        }
        let call = json!({"type": "tool_use", "id": "t", "name": "f", "input": [1]});
        assert_eq!(param(json!({"role": "assistant", "content": [call]})), "messages[0].content[0].input");
        let image = json!({"role": "user", "content": [{"type": "image"}]});
        assert_eq!(param(image), "messages[0].content[0].type");
        assert_eq!(
            tools(&[json!({"type": "web_search_20250305", "name": "x"})]).unwrap_err().param.unwrap(),
            "tools[0].type"
        );
        for (tool, field) in [
            (json!({"input_schema": {}}), "name"),
            (json!({"name": "", "input_schema": {}}), "name"),
            (json!({"name": "f"}), "input_schema"),
            (json!({"name": "f", "input_schema": 5}), "input_schema"),
        ] {
            assert_eq!(tools(&[tool]).unwrap_err().param.unwrap(), format!("tools[0].{field}"));
        }
        assert!(choice(Some(&json!({"type": "any"})), &[]).is_err());
        let tools = tools(&[json!({"name": "f", "input_schema": {}})]).unwrap();
        let named = json!({"type": "tool", "name": "f", "disable_parallel_tool_use": true});
        assert_eq!(choice(Some(&named), &tools).unwrap(), (Choice::Named("f".into()), false));
    }
}
