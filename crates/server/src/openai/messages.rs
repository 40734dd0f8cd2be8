//! The messages of a conversation, as chat templates want them.

use crate::error::{ApiError, ApiResult};
use serde_json::{Map, Value};

/// Roles that the protocol knows.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Checks messages and brings them into the one form that templates expect: a text for content, and the arguments of
/// tool calls as objects.
///
/// # Errors
/// Names the message and the field.
pub(crate) fn normalize(messages: Vec<Value>, most: usize) -> ApiResult<Vec<Value>> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages is empty: at least one message is needed"));
    }
    if messages.len() > most {
        let message = format!("there are {} messages: at most {most} are allowed", messages.len());
        return Err(ApiError::field("messages", message));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| one(&format!("messages[{index}]"), message))
        .collect()
}

fn one(at: &str, message: Value) -> ApiResult<Value> {
    let Value::Object(mut message) = message else {
        return Err(ApiError::field(at, format!("{at} must be an object")));
    };
    message.retain(|_, value| !value.is_null());
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !ROLES.contains(&role.as_str()) {
        let field = format!("{at}.role");
        let message = format!("{field} must be one of {}", ROLES.join(", "));
        return Err(ApiError::field(field, message));
    }
    if role == "developer" {
        // The newer name of the same role, which templates do not know.
        message.insert("role".to_owned(), "system".into());
    }
    let content =
        message.remove("content").map(|content| text(&format!("{at}.content"), content)).transpose()?;
    let calls = message.get_mut("tool_calls").map(|calls| decode_calls(&format!("{at}.tool_calls"), calls));
    let calls = calls.transpose()?.is_some();
    if content.is_none() && !(role == "assistant" && calls) {
        let field = format!("{at}.content");
        return Err(ApiError::field(&field, format!("{field} is required")));
    }
    message.insert("content".to_owned(), content.unwrap_or_default().into());
    Ok(Value::Object(message))
}

/// The text of a message's content: a text, or parts of which all are texts.
pub(crate) fn text(at: &str, content: Value) -> ApiResult<String> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(ApiError::field(at, format!("{at} must be a text or a list of parts"))),
    };
    let mut joined = String::new();
    for (index, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let field = match kind {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            _ => {
                let field = format!("{at}[{index}].type");
                let message = format!("{field} is {kind:?}: only parts of type text are supported");
                return Err(ApiError::field(field, message));
            }
        };
        let Some(text) = part.get(field).and_then(Value::as_str) else {
            let field = format!("{at}[{index}].{field}");
            return Err(ApiError::field(&field, format!("{field} must be a text")));
        };
        joined.push_str(text);
    }
    Ok(joined)
}

/// Makes objects of arguments, which may be texts of objects.
fn decode_calls(at: &str, calls: &mut Value) -> ApiResult<()> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::field(at, format!("{at} must be a list")));
    };
    for (index, call) in calls.iter_mut().enumerate() {
        let field = format!("{at}[{index}].function");
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let function =
            function.ok_or_else(|| ApiError::field(&field, format!("{field} must be an object")))?;
        if !function.get("name").is_some_and(Value::is_string) {
            let field = format!("{field}.name");
            return Err(ApiError::field(&field, format!("{field} must be a text")));
        }
        let decoded = arguments(&format!("{field}.arguments"), function.get("arguments"))?;
        function.insert("arguments".to_owned(), decoded);
    }
    Ok(())
}

/// The arguments of a call, which are an object or the text of one; nothing is an object without any.
pub(crate) fn arguments(at: &str, given: Option<&Value>) -> ApiResult<Value> {
    let decoded = match given {
        None | Some(Value::Null) => Some(Map::new().into()),
        Some(Value::String(text)) if text.trim().is_empty() => Some(Map::new().into()),
        Some(Value::String(text)) => serde_json::from_str::<Value>(text).ok(),
        Some(other) => Some(other.clone()),
    };
    decoded
        .filter(Value::is_object)
        .ok_or_else(|| ApiError::field(at, format!("{at} must be a JSON object, or the text of one")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn templates_get_one_form() {
        let messages = json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "name": null},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
            ]},
            {"role": "tool", "tool_call_id": "1", "content": "d"},
        ]);
        let Value::Array(messages) = messages else { panic!("a list") };
        let done = normalize(messages, 10).unwrap();
        assert_eq!(done[0], json!({"role": "system", "content": "ab"}));
        assert_eq!(done[1], json!({"role": "user", "content": "c"}));
        assert_eq!(done[2]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(done[2]["tool_calls"][1]["function"]["arguments"], json!({}));
        assert_eq!(done[2]["content"], "");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let param = |message: Value| normalize(vec![message], 10).unwrap_err().param.unwrap();
        assert_eq!(normalize(vec![], 10).unwrap_err().param.unwrap(), "messages");
        assert_eq!(normalize(vec![json!({}); 11], 10).unwrap_err().param.unwrap(), "messages");
        assert_eq!(param(json!("x")), "messages[0]");
        assert_eq!(param(json!({"content": "x"})), "messages[0].role");
        assert_eq!(param(json!({"role": "wizard", "content": "x"})), "messages[0].role");
        assert_eq!(param(json!({"role": "user"})), "messages[0].content");
        assert_eq!(param(json!({"role": "user", "content": 5})), "messages[0].content");
        let image =
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]});
        assert_eq!(param(image), "messages[0].content[0].type");
        let call = json!({"role": "assistant", "tool_calls": [{"function": {}}]});
        assert_eq!(param(call), "messages[0].tool_calls[0].function.name");
        for arguments in [json!("{\"x\": "), json!("x"), json!("[1]"), json!(5), json!([])] {
            let call = json!({"function": {"name": "f", "arguments": arguments}});
            let message = json!({"role": "assistant", "tool_calls": [call]});
            assert_eq!(param(message), "messages[0].tool_calls[0].function.arguments");
        }
    }
}
