//! `tools`, `tool_choice` and `response_format`.

use crate::error::{ApiError, ApiResult};
use lmx::grammar::Form;
use serde::Deserialize;
use serde_json::{Value, json};

/// Tools of one request at most.
const TOOLS_MAX: usize = 512;

/// What a request says of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The model decides.
    Auto,
    /// No call.
    Off,
    /// A call, of any tool.
    Required,
    /// A call of this tool.
    Named(String),
}

/// `tool_choice`
pub(crate) fn choice(value: Option<&Value>, tools: &[Value]) -> ApiResult<Choice> {
    let refused = |why: &str| Err(ApiError::field("tool_choice", format!("tool_choice {why}")));
    let choice = match value {
        None => return Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Choice::Auto,
            "none" => Choice::Off,
            "required" => Choice::Required,
            _ => return refused("must be auto, none, required, or an object that names a function"),
        },
        Some(object) => {
            let function = object.get("function").unwrap_or(object);
            let typed = object.get("type").and_then(Value::as_str) == Some("function");
            match function.get("name").and_then(Value::as_str).filter(|_| typed) {
                Some(name) => Choice::Named(name.to_owned()),
                None => {
                    return refused(
                        "must be auto, none, required, or {\"type\": \"function\", \"function\": {\"name\": …}}",
                    );
                }
            }
        }
    };
    let known = |name: &str| tools.iter().any(|tool| tool["function"]["name"] == name);
    match &choice {
        Choice::Required | Choice::Named(_) if tools.is_empty() => {
            refused("asks for a call, but there are no tools")
        }
        Choice::Named(name) if !known(name) => {
            refused(&format!("names {name:?}, which is none of the tools"))
        }
        _ => Ok(choice),
    }
}

/// Checks `tools`: functions with names.
pub(crate) fn check(tools: &[Value]) -> ApiResult<()> {
    if tools.len() > TOOLS_MAX {
        let message = format!("there are {} tools: at most {TOOLS_MAX} are allowed", tools.len());
        return Err(ApiError::field("tools", message));
    }
    for (index, tool) in tools.iter().enumerate() {
        if tool.get("type").is_some_and(|kind| kind != "function") {
            let field = format!("tools[{index}].type");
            return Err(ApiError::field(&field, format!("{field} must be function")));
        }
        if tool.pointer("/function/name").and_then(Value::as_str).is_none_or(str::is_empty) {
            let field = format!("tools[{index}].function.name");
            return Err(ApiError::field(&field, format!("{field} is required")));
        }
        if tool.pointer("/function/parameters").is_some_and(|schema| !schema.is_object()) {
            let field = format!("tools[{index}].function.parameters");
            return Err(ApiError::field(&field, format!("{field} must be a JSON schema")));
        }
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedSchema {
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    schema: Option<Value>,
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

/// The form that `response_format` asks for. A schema is always enforced, strict or not.
pub(crate) fn form(format: Option<&Value>) -> ApiResult<Option<Form>> {
    const FIELD: &str = "response_format";
    let Some(format) = format else { return Ok(None) };
    let kind = format.get("type").and_then(Value::as_str).unwrap_or_default();
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(Form::JsonSchema(json!({"type": "object"})))),
        "json_schema" => {
            let named = format.get("json_schema").cloned().unwrap_or_default();
            let named: NamedSchema = serde_json::from_value(named).map_err(|error| {
                let field = format!("{FIELD}.json_schema");
                ApiError::field(&field, format!("{field}: {error}"))
            })?;
            match named.schema {
                Some(schema) => Ok(Some(Form::JsonSchema(schema))),
                None => {
                    let field = format!("{FIELD}.json_schema.schema");
                    Err(ApiError::field(&field, format!("{field} is required")))
                }
            }
        }
        "regex" | "grammar" => match format.get(kind).or_else(|| format.get("value")).and_then(Value::as_str)
        {
            Some(text) if kind == "regex" => Ok(Some(Form::Regex(text.to_owned()))),
            Some(text) => Ok(Some(Form::Lark(text.to_owned()))),
            None => {
                let field = format!("{FIELD}.{kind}");
                Err(ApiError::field(&field, format!("{field} must be a text")))
            }
        },
        _ => {
            let field = format!("{FIELD}.type");
            let message = format!("{field} must be text, json_object, json_schema, regex or grammar");
            Err(ApiError::field(field, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_checked_against_the_tools() {
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let of = |value: Value| choice(Some(&value), &tools).map_err(|error| error.param.unwrap());
        assert_eq!(choice(None, &[]).unwrap(), Choice::Auto);
        assert_eq!(of(json!("none")), Ok(Choice::Off));
        assert_eq!(of(json!("required")), Ok(Choice::Required));
        assert_eq!(of(json!({"type": "function", "function": {"name": "f"}})), Ok(Choice::Named("f".into())));
        for wrong in
            [json!("maybe"), json!(5), json!({"type": "function", "function": {"name": "g"}}), json!({})]
        {
            assert_eq!(of(wrong), Err("tool_choice".into()));
        }
        assert!(choice(Some(&json!("required")), &[]).is_err());
    }

    #[test]
    fn formats_become_forms() {
        let of = |value: Value| form(Some(&value)).map_err(|error| error.param.unwrap());
        assert_eq!(of(json!({"type": "text"})), Ok(None));
        assert!(matches!(of(json!({"type": "json_object"})), Ok(Some(Form::JsonSchema(_)))));
        let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}, "strict": true}});
        assert_eq!(of(schema), Ok(Some(Form::JsonSchema(json!({"type": "null"})))));
        assert_eq!(of(json!({"type": "json_schema"})), Err("response_format.json_schema".into()));
        assert_eq!(
            of(json!({"type": "json_schema", "json_schema": {"name": "x"}})),
            Err("response_format.json_schema.schema".into())
        );
        assert_eq!(of(json!({"type": "yaml"})), Err("response_format.type".into()));
        assert_eq!(of(json!("text")), Err("response_format.type".into()));
    }

    #[test]
    fn tools_are_functions() {
        let param = |tool: Value| check(&[tool]).unwrap_err().param.unwrap();
        assert!(check(&[json!({"type": "function", "function": {"name": "f", "parameters": {}}})]).is_ok());
        assert_eq!(param(json!({"type": "web_search"})), "tools[0].type");
        assert_eq!(param(json!({"type": "function"})), "tools[0].function.name");
        assert_eq!(
            param(json!({"function": {"name": "f", "parameters": 1}})),
            "tools[0].function.parameters"
        );
    }
}
