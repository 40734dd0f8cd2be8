//! The tools of a request, and what their schemas say about a value that came as text.

use super::json_text::{json_string, json_value};
use super::literal::literal_value;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The tools that a request offers.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    tools: Vec<Tool>,
    by_name: HashMap<String, usize>,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
    /// Its arguments must keep to that schema wherever it is called.
    pub strict: bool,
}

/// Schemas within a schema of a value that are looked at.
const DEPTH_MAX: usize = 8;

/// What a value may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types {
    pub(super) integer: bool,
    pub(super) number: bool,
    pub(super) boolean: bool,
    pub(super) json: bool,
    pub(super) string: bool,
    pub(super) null: bool,
}

/// What a value is taken for whose type the schema does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Untyped {
    /// Text.
    Text,
    /// JSON or a Python literal if it is one, else text.
    Json,
}

impl Tools {
    /// From the `tools` of a chat request: `{"type": "function", "function": {"name": …, "parameters": …}}`, or the
    /// functions themselves. What has no name is left out: a server refuses it before.
    #[must_use]
    pub fn new(tools: &[Value]) -> Self {
        let tool = |value: &Value| {
            let function = value.get("function").unwrap_or(value);
            let parameters = ["parameters", "input_schema"].into_iter().find_map(|key| function.get(key));
            Some(Tool {
                strict: function.get("strict") == Some(&Value::Bool(true)),
                name: function.get("name")?.as_str()?.to_owned(),
                parameters: parameters
                    .filter(|p| p.is_object())
                    .cloned()
                    .unwrap_or_else(|| Map::new().into()),
            })
        };
        let tools: Vec<Tool> = tools.iter().filter_map(tool).collect();
        let by_name = tools.iter().enumerate().map(|(i, tool)| (tool.name.clone(), i)).collect();
        Self { tools, by_name }
    }

    /// The tools, in the request's order.
    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter()
    }

    /// The tool of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.tools.get(*self.by_name.get(name)?)
    }

    /// What the argument `key` of `tool` may be; `None` if the schema does not tell.
    fn types(&self, tool: &str, key: &str) -> Option<Types> {
        let root = &self.get(tool)?.parameters;
        let types = Types::of(resolve(root, root.get("properties")?.get(key)?));
        (types != Types::default()).then_some(types)
    }

    /// The JSON of an argument that the model wrote as text: the first of integer, number, boolean, object or array,
    /// null and string that the schema allows and that the text is. Text that is none of them stays a string, for the
    /// tool to complain about.
    pub(super) fn argument(&self, tool: &str, key: &str, text: &str, untyped: Untyped) -> String {
        let Some(types) = self.types(tool, key) else {
            let json = match untyped {
                Untyped::Json => json_value(text).or_else(|| literal_value(text)),
                Untyped::Text => None,
            };
            return match json {
                Some(json) => json,
                None if text.trim().eq_ignore_ascii_case("null") => "null".to_owned(),
                None => json_string(text),
            };
        };
        types.read(text.trim()).unwrap_or_else(|| json_string(text))
    }

    /// Whether the argument may be a list or an object.
    pub(super) fn may_be_json(&self, tool: &str, key: &str, untyped: Untyped) -> bool {
        self.types(tool, key).map_or(untyped == Untyped::Json, |types| types.json)
    }

    /// Whether the schema says that the argument is a string and nothing else.
    pub(super) fn is_string(&self, tool: &str, key: &str) -> bool {
        self.types(tool, key) == Some(Types { string: true, ..Types::default() })
    }
}

/// What a schema within `root` refers to, in the end.
pub(super) fn resolve<'s>(root: &'s Value, mut schema: &'s Value) -> &'s Value {
    for _ in 0..DEPTH_MAX {
        let pointer = schema.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
        let Some(target) = pointer.and_then(|pointer| root.pointer(pointer)) else { break };
        schema = target;
    }
    schema
}

impl Types {
    pub(super) fn of(schema: &Value) -> Self {
        let mut types = Self::default();
        types.add(schema, DEPTH_MAX);
        types
    }

    fn add(&mut self, schema: &Value, depth: usize) {
        let named = |name: &str| schema.get(name).into_iter();
        for name in named("type").flat_map(|t| t.as_array().map_or(std::slice::from_ref(t), Vec::as_slice)) {
            self.add_named(name.as_str().unwrap_or_default());
        }
        for value in named("enum").filter_map(Value::as_array).flatten().chain(named("const")) {
            match value {
                Value::Null => self.null = true,
                Value::Bool(_) => self.boolean = true,
                Value::Number(n) if n.is_f64() => self.number = true,
                Value::Number(_) => self.integer = true,
                Value::String(_) => self.string = true,
                Value::Array(_) | Value::Object(_) => self.json = true,
            }
        }
        if depth > 0 {
            let choices = ["anyOf", "oneOf", "allOf"].into_iter().flat_map(named);
            choices.filter_map(Value::as_array).flatten().for_each(|choice| self.add(choice, depth - 1));
        }
    }

    /// The names of JSON Schema, and those of other languages that tools are described in.
    fn add_named(&mut self, name: &str) {
        let name = name.to_ascii_lowercase();
        let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        match name.as_str() {
            "null" | "none" => self.null = true,
            _ if begins(&["int", "uint", "long", "short", "unsigned"]) => self.integer = true,
            _ if begins(&["num", "float", "double"]) => self.number = true,
            _ if begins(&["bool"]) => self.boolean = true,
            _ if begins(&["obj", "arr", "dict", "list"]) => self.json = true,
            _ => self.string = true,
        }
    }

    /// The JSON of a text that is one of these types, but a string.
    pub(super) fn read(self, text: &str) -> Option<String> {
        if self.integer
            && let Some(integer) = integer(text)
        {
            return Some(integer);
        }
        if self.number
            && let Some(number) = json_value(text).filter(|json| is_number(json))
        {
            return Some(number);
        }
        if self.boolean {
            match text.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "on" => return Some("true".to_owned()),
                "false" | "0" | "no" | "off" => return Some("false".to_owned()),
                _ => {}
            }
        }
        if self.json {
            let value = json_value(text).or_else(|| literal_value(text));
            if let Some(value) = value.filter(|json| json.starts_with(['{', '['])) {
                return Some(value);
            }
        }
        let null = ["null", "none", "nil"].iter().any(|word| text.eq_ignore_ascii_case(word));
        // Many schemas do not say that an optional argument may be null.
        if null && (self.null || !self.string && text.eq_ignore_ascii_case("null")) {
            return Some("null".to_owned());
        }
        None
    }
}

fn is_number(json: &str) -> bool {
    json.starts_with(|c: char| c == '-' || c.is_ascii_digit())
}

/// An integer of any length; `3.0` is one.
fn integer(text: &str) -> Option<String> {
    let json = json_value(text.strip_prefix('+').unwrap_or(text)).filter(|json| is_number(json))?;
    let (whole, fraction) = json.split_once('.').unwrap_or((&json, ""));
    let whole_only = fraction.bytes().all(|b| b == b'0') && !whole.contains(['e', 'E']);
    whole_only.then(|| whole.to_owned())
}

/// Arguments in the order in which they came.
#[derive(Clone, Debug, Default)]
pub(super) struct Arguments(Vec<(String, String)>);

impl Arguments {
    /// Sets an argument, given as JSON; the last value of a name counts.
    pub(super) fn set(&mut self, key: &str, json: String) {
        match self.0.iter_mut().find(|(k, _)| k == key) {
            Some((_, value)) => *value = json,
            None => self.0.push((key.to_owned(), json)),
        }
    }

    /// The JSON object.
    pub(super) fn json(&self) -> String {
        let members: Vec<String> = self.0.iter().map(|(k, v)| format!("{}: {v}", json_string(k))).collect();
        format!("{{{}}}", members.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_becomes_what_the_schema_says() {
        let tools = Tools::new(&[
            json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {
                "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "o": {"type": "object"},
                "s": {"type": "string"}, "m": {"type": ["integer", "null"]}, "e": {"enum": [1, "one"]},
                "a": {"anyOf": [{"type": "array"}, {"type": "string"}]}, "x": {}
            }}}}),
        ]);
        let cases = [
            ("i", "1", "1"),
            ("i", " 3.0 ", "3"),
            ("i", "1.5", "\"1.5\""),
            ("i", "abc", "\"abc\""),
            ("i", "123456789012345678901234567890", "123456789012345678901234567890"),
            ("i", "null", "null"),
            ("n", "1.5", "1.5"),
            ("n", "2", "2"),
            ("n", "x", "\"x\""),
            ("b", "True", "true"),
            ("b", "no", "false"),
            ("o", "{'k': None}", "{\"k\": null}"),
            ("o", "{\"k\":1}", "{\"k\": 1}"),
            ("o", "k", "\"k\""),
            ("s", "1", "\"1\""),
            ("s", "null", "\"null\""),
            ("s", " x\n", "\" x\\n\""),
            ("m", "null", "null"),
            ("m", "5", "5"),
            ("e", "1", "1"),
            ("e", "one", "\"one\""),
            ("a", "[1]", "[1]"),
            ("a", "1", "\"1\""),
        ];
        for (key, text, json) in cases {
            assert_eq!(tools.argument("f", key, text, Untyped::Text), json, "{key} {text}");
        }
        for key in ["x", "unknown"] {
            assert_eq!(tools.argument("f", key, "1", Untyped::Text), "\"1\"");
            assert_eq!(tools.argument("f", key, "null", Untyped::Text), "null");
            assert_eq!(tools.argument("f", key, "007", Untyped::Json), "\"007\"");
            assert_eq!(tools.argument("f", key, "(1, 'x')", Untyped::Json), "[1, \"x\"]");
        }
        assert_eq!(tools.argument("g", "i", "1", Untyped::Json), "1");
    }

    #[test]
    fn a_schema_within_itself_ends() {
        let mut schema = json!({"type": "string"});
        for _ in 0..1000 {
            schema = json!({"anyOf": [schema]});
        }
        assert_eq!(Types::of(&schema), Types::default());
    }
}
