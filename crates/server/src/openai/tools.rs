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

/// `tool_choice` in full: `allowed_tools` also leaves only those of `tools` that it lists.
pub(crate) fn choose(value: Option<&Value>, tools: &mut Vec<Value>) -> ApiResult<Choice> {
    let Some(allowed) = value.filter(|value| value["type"] == "allowed_tools") else {
        return choice(value, tools);
    };
    let allowed = allowed.get("allowed_tools").unwrap_or(allowed);
    let refused = |why: &str| Err(ApiError::field("tool_choice", format!("tool_choice {why}")));
    let Some(list) = allowed["tools"].as_array() else { return refused("needs a list of allowed tools") };
    let name = |tool: &Value| tool.get("function").unwrap_or(tool)["name"].as_str().map(str::to_owned);
    let Some(names) = list.iter().map(name).collect::<Option<Vec<_>>>() else {
        return refused("may only list functions, by name");
    };
    let known = |name: &String| tools.iter().any(|tool| tool["function"]["name"] == name.as_str());
    if let Some(unknown) = names.iter().find(|name| !known(name)) {
        return refused(&format!("allows {unknown:?}, which is none of the tools"));
    }
    tools.retain(|tool| names.iter().any(|name| tool["function"]["name"] == name.as_str()));
    match allowed["mode"].as_str() {
        Some("auto" | "required") => choice(allowed.get("mode"), tools),
        _ => refused("has a mode that is neither auto nor required"),
    }
}

/// `tools`, in which null counts as absent, checked.
pub(crate) fn normalize(mut tools: Vec<Value>) -> ApiResult<Vec<Value>> {
    let drop_nulls = |object: &mut Value| {
        if let Value::Object(map) = object {
            map.retain(|_, value| !value.is_null());
        }
    };
    for tool in &mut tools {
        drop_nulls(tool);
        if let Some(function) = tool.get_mut("function") {
            drop_nulls(function);
        }
    }
    check(&tools)?;
    Ok(tools)
}

/// Whether `strict` is what it can be.
pub(crate) fn is_flag(value: Option<&Value>) -> bool {
    value.is_none_or(|value| value.is_null() || value.is_boolean())
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
        if !is_flag(tool.pointer("/function/strict")) {
            let field = format!("tools[{index}].function.strict");
            return Err(ApiError::field(&field, format!("{field} must be true or false")));
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

/// The form that `format`, the value of `field`, asks for. A schema is always enforced, strict or not. In a `flat` format
/// it stands beside the type, else within `json_schema`.
pub(crate) fn form(
    field: &'static str,
    format: Option<&Value>,
    flat: bool,
) -> ApiResult<Option<(&'static str, Form)>> {
    let Some(format) = format else { return Ok(None) };
    let kind = format.get("type").and_then(Value::as_str).unwrap_or_default();
    let form = match kind {
        "text" => return Ok(None),
        "json_object" => Form::JsonSchema(json!({"type": "object"})),
        "json_schema" => {
            let mut named = if flat { format.clone() } else { format["json_schema"].clone() };
            let at = if flat { field.to_owned() } else { format!("{field}.json_schema") };
            if let (true, Some(map)) = (flat, named.as_object_mut()) {
                map.shift_remove("type");
            }
            let named: NamedSchema = serde_json::from_value(named)
                .map_err(|error| ApiError::field(&at, format!("{at}: {error}")))?;
            match named.schema {
                Some(schema) => Form::JsonSchema(schema),
                None => {
                    let field = format!("{at}.schema");
                    return Err(ApiError::field(&field, format!("{field} is required")));
                }
            }
        }
        "regex" | "grammar" => match format.get(kind).or_else(|| format.get("value")).and_then(Value::as_str)
        {
            Some(text) if kind == "regex" => Form::Regex(text.to_owned()),
            Some(text) => Form::Lark(text.to_owned()),
            None => {
                let field = format!("{field}.{kind}");
                return Err(ApiError::field(&field, format!("{field} must be a text")));
            }
        },
        _ => {
            let field = format!("{field}.type");
            let message = format!("{field} must be text, json_object, json_schema, regex or grammar");
            return Err(ApiError::field(field, message));
        }
    };
    Ok(Some((field, form)))
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
    fn allowed_tools_are_those_that_are_left() {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let of = |value: Value| {
            let mut tools = vec![tool("f"), tool("g")];
            choose(Some(&value), &mut tools)
                .map(|choice| (choice, tools))
                .map_err(|error| error.param.unwrap())
        };
        let flat = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]});
        assert_eq!(of(flat), Ok((Choice::Required, vec![tool("g")])));
        let nested =
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("f")]}});
        assert_eq!(of(nested), Ok((Choice::Auto, vec![tool("f")])));
        for wrong in [
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "h"}]}),
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}),
            json!({"type": "allowed_tools", "mode": "none", "tools": []}),
            json!({"type": "allowed_tools", "mode": "required", "tools": []}),
            json!({"type": "allowed_tools", "mode": "auto"}),
        ] {
            assert_eq!(of(wrong), Err("tool_choice".into()));
        }
    }

    #[test]
    fn formats_become_forms() {
        let at = "response_format";
        let of = |value: Value| {
            form(at, Some(&value), false)
                .map(|form| form.map(|(_, form)| form))
                .map_err(|error| error.param.unwrap())
        };
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
        let flat =
            |value: Value| form("text.format", Some(&value), true).map_err(|error| error.param.unwrap());
        let schema = json!({"type": "json_schema", "name": "x", "schema": {"type": "null"}, "strict": true});
        assert_eq!(flat(schema), Ok(Some(("text.format", Form::JsonSchema(json!({"type": "null"}))))));
        assert_eq!(flat(json!({"type": "json_schema"})), Err("text.format.schema".into()));
    }

    #[test]
    fn tools_are_functions() {
        let param = |tool: Value| check(&[tool]).unwrap_err().param.unwrap();
        assert!(check(&[json!({"type": "function", "function": {"name": "f", "parameters": {}}})]).is_ok());
        let nulls = json!([{"type": null, "function": {"name": "f", "parameters": null, "strict": null}}]);
        let Value::Array(nulls) = nulls else { panic!("a list") };
        assert_eq!(normalize(nulls).unwrap(), [json!({"function": {"name": "f"}})]);
        assert_eq!(param(json!({"type": "web_search"})), "tools[0].type");
        assert_eq!(param(json!({"type": "function"})), "tools[0].function.name");
        assert_eq!(
            param(json!({"function": {"name": "f", "parameters": 1}})),
            "tools[0].function.parameters"
        );
    }
}
