//! The arguments of a call, as a schema and a format want them.

use super::lark::{Lark, json_rule};
use super::style::Written;
use super::{CallGrammarError, schema_error};
use crate::grammar::MAX_SOURCE;
use crate::text::reply::json_text::json_string;
use crate::text::reply::tools::{Types, resolve};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Keywords that allow and forbid nothing.
const ANNOTATIONS: [&str; 7] =
    ["title", "description", "default", "examples", "$schema", "$defs", "definitions"];
/// A name of any argument.
const KEY: &str = "/[A-Za-z0-9_.-]{1,64}/";
/// The words for a value that is no plain text.
const OTHER_TYPES: &str = r#"("integer" | "number" | "boolean" | "array" | "object" | "null" | "json")"#;
/// Schemas within schemas, and references, at most.
const DEPTH_MAX: usize = 100;
/// The types that JSON has.
const TYPES: usize = 7;
const IDENTIFIER: &str = "/[A-Za-z_][A-Za-z0-9_]{0,63}/";

impl Lark<'_> {
    /// The arguments of the call of `tool` whose schema is `root`; new rules have names that begin with `rule`.
    pub(super) fn arguments(
        &mut self,
        written: Written,
        tool: &str,
        root: &Value,
        rule: &str,
    ) -> Result<String, CallGrammarError> {
        check_name(tool)?;
        let mut arguments =
            Arguments { lark: self, root, rule, rules: 0, depth: 0, bytes: 0, named: HashMap::new() };
        match written {
            Written::Json => Ok(json_rule(&object_schema(root))),
            Written::Tags(tags) => arguments.tags(tags, tool),
            Written::TypedTags { key, text, json, close } => {
                arguments.typed_tags(&Typed { key, text, json, close }, tool)
            }
            Written::Braces(quote) => {
                let object = Object::of(root, tool, false)?;
                arguments.members(quote, &object, tool)
            }
            Written::Keywords => arguments.keywords(tool),
        }
    }
}

/// How a value in a tag of its type is written.
struct Typed {
    key: &'static str,
    text: &'static str,
    json: &'static str,
    close: &'static str,
}

/// What an object may have in it.
struct Object<'s> {
    /// Key, schema, and whether it must be there.
    fixed: Vec<(&'s str, &'s Value, bool)>,
    /// The schema of values of any key; not if there are fixed ones.
    free: Option<Value>,
}

impl<'s> Object<'s> {
    /// `open` says that a schema that says nothing allows anything.
    fn of(schema: &'s Value, place: &str, open: bool) -> Result<Self, CallGrammarError> {
        check_keywords(schema, &["type", "properties", "required", "additionalProperties"], place)?;
        let properties = schema.get("properties").and_then(Value::as_object);
        let properties = properties.into_iter().flatten();
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        let required: Vec<&str> = required.filter_map(Value::as_str).collect();
        let fixed: Vec<_> = properties
            .map(|(key, schema)| (key.as_str(), schema, required.contains(&key.as_str())))
            .collect();
        if let Some(key) = required.iter().find(|key| !fixed.iter().any(|(known, ..)| known == *key)) {
            return Err(schema_error(place, format!("required {key:?} is no property")));
        }
        for (key, ..) in &fixed {
            check_name(key)?;
        }
        let free = match schema.get("additionalProperties") {
            _ if !fixed.is_empty() => None,
            Some(Value::Bool(true)) => Some(json!({})),
            Some(schema @ Value::Object(_)) => Some(schema.clone()),
            None if open && schema.get("properties").is_none() => Some(json!({})),
            _ => None,
        };
        Ok(Self { fixed, free })
    }
}

struct Arguments<'l, 'a, 's> {
    lark: &'l mut Lark<'a>,
    root: &'s Value,
    rule: &'s str,
    /// Names of rules that are taken.
    rules: usize,
    /// Schemas that the one that is being written is within.
    depth: usize,
    /// Bytes of the schemas that were written.
    bytes: usize,
    /// The rules of schemas, by their texts.
    named: HashMap<String, String>,
}

impl<'s> Arguments<'_, '_, 's> {
    fn new_rule(&mut self) -> String {
        self.rules += 1;
        format!("{}_v{}", self.rule, self.rules)
    }

    /// What `schema` refers to, if it says nothing else.
    fn resolve(&self, schema: &'s Value) -> &'s Value {
        let refers = check_keywords(schema, &["$ref"], "").is_ok();
        if refers { resolve(self.root, schema) } else { schema }
    }

    /// Any text up to `close`. White space around that is no part of what ends the text.
    fn text_until(&mut self, close: &str) -> String {
        let rule = self.new_rule();
        let end = self.lark.text_until(&rule, close.trim(), &[]);
        format!("{end} {}", json_string(&close[close.trim_end().len()..]))
    }

    /// Any JSON that `schema` allows.
    fn json(&mut self, schema: &Value, place: &str) -> Result<String, CallGrammarError> {
        let text = json_rule(&with_definitions(schema, self.root));
        self.bytes += text.len();
        // With its definitions a schema may be written often. The whole would be refused in the end.
        if self.bytes > MAX_SOURCE {
            return Err(schema_error(place, format!("its text, of more than {MAX_SOURCE} bytes")));
        }
        Ok(text)
    }

    /// Arguments in tags, in the order of the schema.
    fn tags(
        &mut self,
        [key_open, value_open, close]: [&str; 3],
        tool: &str,
    ) -> Result<String, CallGrammarError> {
        let object = Object::of(self.root, tool, false)?;
        let mut members = Vec::new();
        for &(key, schema, required) in &object.fixed {
            let value = self.tagged_value(self.resolve(schema), close, &format!("{tool}.{key}"))?;
            let open = self.lark.text(&format!("{key_open}{key}{value_open}"));
            members.push((format!("{open} {value}"), required));
        }
        let free = object.free.as_ref().map(|schema| {
            check_keywords(schema, &[], tool)?;
            let value = self.text_until(close);
            let [key_open, value_open] = [key_open, value_open].map(|text| self.lark.text(text));
            Ok::<_, CallGrammarError>(format!("({key_open} {KEY} {value_open} {value})*"))
        });
        Ok(sequence(&members) + &free.transpose()?.unwrap_or_default())
    }

    /// The text of a value, and `close`.
    fn tagged_value(&mut self, schema: &Value, close: &str, place: &str) -> Result<String, CallGrammarError> {
        let types = Types::of(schema);
        if types != Types::default() && !types.string {
            return Ok(format!("{} {}", self.json(schema, place)?, self.lark.text(close)));
        }
        if let Some(choices) = choices(schema) {
            let mut texts = Vec::new();
            for choice in &choices {
                let text = choice.as_str().map_or_else(|| choice.to_string(), str::to_owned);
                let read = types.read(&text).and_then(|json| serde_json::from_str(&json).ok());
                let read: Value = read.unwrap_or_else(|| text.as_str().into());
                if text.trim() != text || text.contains(close.trim()) || !choices.contains(&read) {
                    return Err(schema_error(place, format!("the choice {choice}")));
                }
                texts.push(json_string(&text));
            }
            return Ok(format!("({}) {}", texts.join(" | "), self.lark.text(close)));
        }
        for branch in branches(schema) {
            check_keywords(&branch, &["type"], place)?;
        }
        Ok(self.text_until(close))
    }

    /// Arguments in tags that tell text from JSON, in the order of the schema.
    fn typed_tags(&mut self, typed: &Typed, tool: &str) -> Result<String, CallGrammarError> {
        let object = Object::of(self.root, tool, false)?;
        let mut members = Vec::new();
        for &(key, schema, required) in &object.fixed {
            let place = format!("{tool}.{key}");
            let key = self.lark.text(&format!("{}{key}", typed.key));
            let values = self.typed_values(typed, self.resolve(schema), &place)?;
            members.push((format!("{key} ({values})"), required));
        }
        let free = object.free.as_ref().map(|schema| {
            let key = self.lark.text(typed.key);
            let values = self.typed_values(typed, schema, tool)?;
            Ok::<_, CallGrammarError>(format!("({key} {KEY} ({values}))*"))
        });
        Ok(sequence(&members) + &free.transpose()?.unwrap_or_default())
    }

    /// The ways to write a value, behind its key.
    fn typed_values(
        &mut self,
        typed: &Typed,
        schema: &Value,
        place: &str,
    ) -> Result<String, CallGrammarError> {
        let mut all = Vec::new();
        for schema in branches(schema) {
            let is_string = schema["type"] == "string";
            let texts = choices(&schema).filter(|_| is_string || schema.get("type").is_none());
            let texts: Option<Vec<String>> = texts.and_then(|choices| {
                let plain = |choice: &Value| {
                    let text = choice.as_str()?;
                    (text.trim() == text && !text.contains(typed.close.trim())).then(|| json_string(text))
                };
                choices.iter().map(plain).collect()
            });
            let [open, close] = [typed.text, typed.close].map(|text| self.lark.text(text));
            if let Some(texts) = texts {
                all.push(format!("{open} ({}) {close}", texts.join(" | ")));
                continue;
            }
            if check_keywords(&schema, &["type"], "").is_ok() && (is_string || schema.get("type").is_none()) {
                all.push(format!("{open} {}", self.text_until(typed.close)));
                if is_string {
                    continue;
                }
            }
            let kind = schema["type"].as_str().filter(|&kind| kind != "string");
            let kind = kind.map_or_else(|| OTHER_TYPES.to_owned(), json_string);
            let open = match typed.json.split_once("{type}") {
                Some((first, last)) => format!("{} {kind} {}", self.lark.text(first), self.lark.text(last)),
                None => self.lark.text(typed.json),
            };
            all.push(format!("{open} {} {close}", self.json(&schema, place)?));
        }
        Ok(all.join(" | "))
    }

    /// `key=value, …`, with values that both JSON and Python read, but for their words.
    fn keywords(&mut self, tool: &str) -> Result<String, CallGrammarError> {
        let object = Object::of(self.root, tool, false)?;
        let mut members = Vec::new();
        for &(key, schema, required) in &object.fixed {
            if key.contains(['-', '.']) || key.starts_with(|c: char| c.is_ascii_digit()) {
                return Err(CallGrammarError::Name { name: key.to_owned() });
            }
            let schema = self.resolve(schema);
            let is_plain = check_keywords(schema, &["type"], "").is_ok();
            let value = match schema["type"].as_str().filter(|_| is_plain) {
                Some("boolean") => "(\"True\" | \"False\")".to_owned(),
                Some("null") => "\"None\"".to_owned(),
                _ => self.json(schema, &format!("{tool}.{key}"))?,
            };
            members.push((format!("{} {value}", json_string(&format!("{key}="))), required));
        }
        let free = object.free.as_ref().map(|schema| {
            Ok::<_, CallGrammarError>(format!("{IDENTIFIER} \"=\" {}", self.json(schema, tool)?))
        });
        Ok(self.list(&members, free.transpose()?, ", "))
    }

    /// The members of an object in braces whose strings stand between two `quote`s.
    fn members(&mut self, quote: &str, object: &Object<'_>, place: &str) -> Result<String, CallGrammarError> {
        let mut members = Vec::new();
        for &(key, schema, required) in &object.fixed {
            let value = self.braced(quote, schema, &format!("{place}.{key}"))?;
            members.push((format!("{} {value}", json_string(&format!("{key}:"))), required));
        }
        let free = object.free.as_ref().map(|schema| {
            let value = self.braced(quote, schema, place)?;
            Ok::<_, CallGrammarError>(format!("{KEY} \":\" {value}"))
        });
        Ok(self.list(&members, free.transpose()?, ","))
    }

    /// A value in braces, as a rule.
    fn braced(&mut self, quote: &str, schema: &Value, place: &str) -> Result<String, CallGrammarError> {
        let key = schema.to_string();
        if let Some(rule) = self.named.get(&key) {
            return Ok(rule.clone());
        }
        if self.depth == DEPTH_MAX {
            return Err(schema_error(place, format!("more than {DEPTH_MAX} schemas within each other")));
        }
        let rule = self.new_rule();
        self.named.insert(key, rule.clone());
        self.depth += 1;
        let value = self.braced_value(quote, schema, place)?;
        self.depth -= 1;
        self.lark.rules.push(format!("{rule}: {value}"));
        Ok(rule)
    }

    fn braced_value(&mut self, quote: &str, schema: &Value, place: &str) -> Result<String, CallGrammarError> {
        if let Some(reference) = schema.get("$ref") {
            check_keywords(schema, &["$ref"], place)?;
            let root = self.root;
            let pointer = reference.as_str().and_then(|to| to.strip_prefix('#'));
            let target = pointer.and_then(|pointer| root.pointer(pointer));
            let target = target.ok_or_else(|| schema_error(place, format!("$ref {reference}")))?;
            return self.braced(quote, target, place);
        }
        if let Some(choices) = choices(schema) {
            let literals = choices.iter().map(|choice| {
                let literal = literal(choice, quote);
                literal
                    .map(|text| self.lark.text(&text))
                    .ok_or_else(|| schema_error(place, format!("the choice {choice}")))
            });
            return Ok(literals.collect::<Result<Vec<_>, _>>()?.join(" | "));
        }
        let branches = branches(schema);
        if branches.len() > 1 {
            let rules = branches.iter().map(|branch| self.braced(quote, branch, place));
            return Ok(rules.collect::<Result<Vec<_>, _>>()?.join(" | "));
        }
        let kind = schema.get("type").and_then(Value::as_str);
        let implied = ["properties", "items"].into_iter().find(|key| schema.get(key).is_some());
        match kind.or(implied) {
            Some("string") => {
                check_keywords(schema, &["type"], place)?;
                let rule = self.new_rule();
                Ok(format!("{} {}", self.lark.text(quote), self.lark.text_until(&rule, quote, &[])))
            }
            Some("integer" | "number" | "boolean" | "null") => self.json(schema, place),
            Some("array" | "items") => {
                check_keywords(schema, &["type", "items", "minItems", "maxItems"], place)?;
                let any = json!({});
                let item = self.braced(quote, schema.get("items").unwrap_or(&any), place)?;
                Ok(format!("\"[\" {} \"]\"", items(schema, &item)))
            }
            Some("object" | "properties") => {
                let members = self.members(quote, &Object::of(schema, place, true)?, place)?;
                Ok(format!("\"{{\" {members} \"}}\""))
            }
            Some(kind) => Err(schema_error(place, format!("type {kind}"))),
            None => {
                check_keywords(schema, &[], place)?;
                let kinds = ["string", "number", "boolean", "null", "array", "object"];
                let rules = kinds.map(|kind| self.braced(quote, &json!({"type": kind}), place));
                Ok(rules.into_iter().collect::<Result<Vec<_>, _>>()?.join(" | "))
            }
        }
    }

    /// Members with `separator` between them, those that need not be there included.
    fn list(&mut self, members: &[(String, bool)], free: Option<String>, separator: &str) -> String {
        let separator = json_string(separator);
        if let Some(free) = free {
            return format!("({free} ({separator} {free})*)?");
        }
        // What may come where no member was before, and behind one.
        let (mut first, mut more) = (String::new(), String::new());
        for (member, required) in members.iter().rev() {
            let [first_rule, more_rule] = [self.new_rule(), self.new_rule()];
            let none = |rest: &str| match (required, rest) {
                (true, _) => String::new(),
                (false, "") => " | \"\"".to_owned(),
                (false, rest) => format!(" | {rest}"),
            };
            self.lark.rules.push(format!("{first_rule}: {member} {more}{}", none(&first)));
            self.lark.rules.push(format!("{more_rule}: {separator} {member} {more}{}", none(&more)));
            (first, more) = (first_rule, more_rule);
        }
        first
    }
}

/// As many items as the schema of a list allows.
fn items(schema: &Value, item: &str) -> String {
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
    let (least, most) = (bound("minItems").unwrap_or(0), bound("maxItems"));
    let behind = least.saturating_sub(1);
    let more = match most {
        Some(0) => return String::new(),
        Some(1) => String::new(),
        Some(most) => format!("(\",\" {item}){{{behind},{}}}", most - 1),
        None => format!("(\",\" {item}){{{behind},}}"),
    };
    if least == 0 { format!("({item} {more})?") } else { format!("{item} {more}") }
}

/// Members without anything between them.
fn sequence(members: &[(String, bool)]) -> String {
    let members = members.iter().map(|(member, required)| {
        let optional = if *required { "" } else { "?" };
        format!("({member}){optional} ")
    });
    members.collect()
}

/// A value in braces.
fn literal(value: &Value, quote: &str) -> Option<String> {
    Some(match value {
        Value::String(text) if text.contains(quote) => return None,
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(items) => {
            let items: Option<Vec<String>> = items.iter().map(|item| literal(item, quote)).collect();
            format!("[{}]", items?.join(","))
        }
        Value::Object(members) => {
            let members = members.iter().map(|(key, value)| {
                check_name(key).ok()?;
                Some(format!("{key}:{}", literal(value, quote)?))
            });
            format!("{{{}}}", members.collect::<Option<Vec<_>>>()?.join(","))
        }
        scalar => scalar.to_string(),
    })
}

/// The values that a schema lists.
fn choices(schema: &Value) -> Option<Vec<Value>> {
    let choices = schema.get("enum").and_then(Value::as_array).cloned();
    choices.or_else(|| Some(vec![schema.get("const")?.clone()]))
}

/// The schemas of which a value must have one.
fn branches(schema: &Value) -> Vec<Value> {
    if let (Some(any), true) =
        (schema.get("anyOf").and_then(Value::as_array), check_keywords(schema, &["anyOf"], "").is_ok())
    {
        return any.iter().flat_map(branches).collect();
    }
    match schema.get("type").and_then(Value::as_array) {
        Some(types) if choices(schema).is_none() && types.len() <= TYPES => {
            let of = |kind: &Value| {
                let mut schema = schema.clone();
                schema["type"] = kind.clone();
                schema
            };
            types.iter().map(of).collect()
        }
        _ => vec![schema.clone()],
    }
}

fn check_name(name: &str) -> Result<(), CallGrammarError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if !name.is_empty() && name.chars().all(fits) {
        return Ok(());
    }
    Err(CallGrammarError::Name { name: name.to_owned() })
}

/// Checks that a schema has only `known` keywords, and such as say nothing.
fn check_keywords(schema: &Value, known: &[&str], place: &str) -> Result<(), CallGrammarError> {
    let unknown = |key: &&String| !known.contains(&key.as_str()) && !ANNOTATIONS.contains(&key.as_str());
    let unknown = schema.as_object().into_iter().flat_map(Map::keys).find(unknown);
    unknown.map_or(Ok(()), |key| Err(schema_error(place, key.clone())))
}

/// Arguments are an object, whether the schema says so or not.
fn object_schema(schema: &Value) -> Value {
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.entry("type").or_insert_with(|| "object".into());
    schema.into()
}

/// A schema from within `root`, with what its references name.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    if !refers(&schema) {
        return schema;
    }
    for key in ["$defs", "definitions"] {
        if let (Some(object), Some(definitions)) = (schema.as_object_mut(), root.get(key)) {
            object.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

/// Whether there is a reference in a schema.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(refers),
        Value::Array(list) => list.iter().any(refers),
        _ => false,
    }
}
