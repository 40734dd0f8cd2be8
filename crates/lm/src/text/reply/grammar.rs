//! Grammars of replies that call a tool, for `tool_choice` `required`, a named function, and strict schemas.

use super::format::ToolFormat;
use super::json_text::json_string;
use super::tools::{Tool, Tools, Types};
use crate::text::ThinkingMarkers;
use serde_json::{Map, Value, json};

/// What a reply may be beside the calls themselves.
#[derive(Clone, Debug, Default)]
pub struct CallGrammar {
    /// Only this tool may be called.
    pub only: Option<String>,
    /// Several calls may follow one another.
    pub parallel: bool,
    /// Thoughts may come before.
    pub thinking: Option<ThinkingMarkers>,
    /// The prompt has opened the thoughts, so that they do come before.
    pub in_reasoning: bool,
}

/// Why a call cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallGrammarError {
    /// There is no such format to write.
    #[error("calls in the format {format} cannot be enforced; those in {} can", enforceable())]
    Format {
        /// Its name.
        format: &'static str,
    },
    /// There is nothing to call.
    #[error("there is no tool to call")]
    NoTool,
    /// The tool to call is none of the request's.
    #[error("tool_choice names {name:?}, which is none of the tools")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// A name cannot be written in the format.
    #[error(
        "the name {name:?} of a tool or argument cannot be enforced: it may have letters, digits, `_`, `-` and `.`"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The format writes arguments as text, of which the schema says more than a grammar can.
    #[error("the schema of {place} cannot be enforced in this model's tool calls: {keyword}")]
    Schema {
        /// The tool, or the tool and the argument.
        place: String,
        /// What of it.
        keyword: String,
    },
}

fn enforceable() -> String {
    let names = ToolFormat::ALL.into_iter().filter(|&format| style(format).is_some()).map(ToolFormat::name);
    names.collect::<Vec<_>>().join(", ")
}

/// How the calls of a format are written, with `{name}` for the name and `{arguments}` for the arguments.
struct Style {
    /// Before all calls.
    before: &'static str,
    call: &'static str,
    between: &'static str,
    after: &'static str,
    /// Arguments that are not JSON: what is before a name and before and behind a value.
    tags: Option<[&'static str; 3]>,
}

const fn json_style(call: &'static str) -> Style {
    Style { before: "", call, between: "", after: "", tags: None }
}

fn style(format: ToolFormat) -> Option<Style> {
    use ToolFormat::*;
    let tagged = |call, tags| Style { tags: Some(tags), ..json_style(call) };
    Some(match format {
        JsonTools => Style {
            between: "\n",
            ..json_style("<tool_call>\n{\"name\": \"{name}\", \"arguments\": {arguments}}\n</tool_call>")
        },
        Llama3 => {
            Style { between: "; ", ..json_style("{\"name\": \"{name}\", \"parameters\": {arguments}}") }
        }
        Mistral => json_style("[TOOL_CALLS]{name}[ARGS]{arguments}"),
        KimiK2 => Style {
            before: "<|tool_calls_section_begin|>",
            after: "<|tool_calls_section_end|>",
            ..json_style(
                "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            )
        },
        DeepseekV3 => Style {
            before: "<｜tool▁calls▁begin｜>",
            after: "<｜tool▁calls▁end｜>",
            ..json_style("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
        },
        Harmony => {
            json_style("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")
        }
        Qwen3Coder => Style {
            between: "\n",
            ..tagged(
                "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
                ["<parameter=", ">\n", "\n</parameter>\n"],
            )
        },
        Glm47 | Laguna => tagged(
            "<tool_call>{name}\n{arguments}</tool_call>",
            ["<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"],
        ),
        Longcat => tagged(
            "<longcat_tool_call>{name}\n{arguments}</longcat_tool_call>",
            ["<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"],
        ),
        MinimaxM2 => Style {
            before: "<minimax:tool_call>\n",
            after: "</minimax:tool_call>",
            ..tagged(
                "<invoke name=\"{name}\">\n{arguments}</invoke>\n",
                ["<parameter name=\"", "\">", "</parameter>\n"],
            )
        },
        Minicpm5 => {
            tagged("<function name=\"{name}\">{arguments}</function>", ["<param name=\"", "\">", "</param>"])
        }
        DeepseekV32 | FunctionGemma | Gemma4 | KimiK3 | MuseSpark | Pythonic => return None,
    })
}

/// Texts that are tokens of their own in some vocabularies.
const MARKERS: [&str; 26] = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "</think>",
];

impl CallGrammar {
    /// The grammar, in llguidance's notation, of a reply in which `tools` are called. `control` tells the id of a text
    /// that is a control token of the vocabulary: a grammar reaches those by id only.
    ///
    /// # Errors
    /// [`CallGrammarError`]: nothing is enforced in part.
    pub fn lark(
        &self,
        format: ToolFormat,
        tools: &Tools,
        control: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<String, CallGrammarError> {
        let mut style = style(format).ok_or(CallGrammarError::Format { format: format.name() })?;
        if format == ToolFormat::Mistral && control("[ARGS]").is_none() {
            style = Style {
                before: "[TOOL_CALLS] [",
                between: ", ",
                after: "]",
                ..json_style("{\"name\": \"{name}\", \"arguments\": {arguments}}")
            };
        }
        let wanted = |tool: &&Tool| self.only.as_ref().is_none_or(|name| *name == tool.name);
        let wanted: Vec<&Tool> = tools.iter().filter(wanted).collect();
        if wanted.is_empty() {
            return Err(match &self.only {
                Some(name) => CallGrammarError::Unknown { name: name.clone() },
                None => CallGrammarError::NoTool,
            });
        }
        let mut lark = Lark { rules: Vec::new(), control };
        let names: Vec<String> = (0..wanted.len()).map(|i| format!("call_{i}")).collect();
        for (tool, name) in wanted.into_iter().zip(&names) {
            let call = lark.call(&style, tool, name)?;
            lark.rules.push(format!("{name}: {call}"));
        }
        lark.rules.push(format!("call: {}", names.join(" | ")));
        // A message holds one call.
        let more = match format {
            ToolFormat::Harmony => String::new(),
            _ if self.parallel => format!("({} call)*", lark.text(style.between)),
            _ => String::new(),
        };
        let thoughts = self.thoughts(format, &mut lark);
        let [before, after] = [style.before, style.after].map(|text| lark.text(text));
        let start = format!("start: {thoughts} {before} call {more} {after}\n");
        Ok(start + &lark.rules.join("\n") + "\n")
    }

    /// What may come before the calls.
    fn thoughts(&self, format: ToolFormat, lark: &mut Lark<'_>) -> String {
        if format == ToolFormat::Harmony {
            let end = lark.text_until("thoughts", "<|end|>");
            let open =
                if self.in_reasoning { String::new() } else { lark.text("<|channel|>analysis<|message|>") };
            let thoughts = format!("{open} {end} {} \"assistant\"", lark.mark("<|start|>"));
            return if self.in_reasoning { thoughts } else { format!("({thoughts})?") };
        }
        let Some(thinking) = &self.thinking else { return String::new() };
        let end = lark.text_until("thoughts", &thinking.end);
        if self.in_reasoning {
            return format!("{end} /\\n{{0,2}}/");
        }
        format!("({} {end} /\\n{{0,2}}/)?", lark.mark(&thinking.start))
    }
}

struct Lark<'a> {
    rules: Vec<String>,
    control: &'a dyn Fn(&str) -> Option<u32>,
}

impl Lark<'_> {
    /// One marker.
    fn mark(&self, marker: &str) -> String {
        (self.control)(marker).map_or_else(|| json_string(marker), |id| format!("<[{id}]>"))
    }

    /// A text in which markers are what the vocabulary has for them.
    fn text(&self, mut text: &str) -> String {
        let mut parts = Vec::new();
        while !text.is_empty() {
            let control = |marker: &&&str| (self.control)(marker).is_some();
            let first = MARKERS.iter().filter(control).filter_map(|&m| Some((text.find(m)?, m))).min();
            let (plain, marker) = first.map_or((text.len(), ""), |(at, marker)| (at, marker));
            if plain > 0 {
                parts.push(json_string(&text[..plain]));
            }
            if !marker.is_empty() {
                parts.push(self.mark(marker));
            }
            text = &text[plain + marker.len()..];
        }
        parts.join(" ")
    }

    /// Any text up to `end`, and `end`.
    fn text_until(&mut self, rule: &str, end: &str) -> String {
        let marker = MARKERS.iter().find(|&&m| end.starts_with(m)).copied().unwrap_or(end);
        if (self.control)(marker).is_some() {
            // No text contains a control token.
            self.rules.push(format!(
                "{rule}: /(?s:.*)/ {} {}",
                self.mark(marker),
                self.text(&end[marker.len()..])
            ));
        } else {
            self.rules.push(format!("{rule}[suffix={}]: /(?s:.*)/", json_string(end)));
        }
        rule.to_owned()
    }

    /// A call of `tool`.
    fn call(&mut self, style: &Style, tool: &Tool, rule: &str) -> Result<String, CallGrammarError> {
        check_name(&tool.name)?;
        let arguments = match style.tags {
            None => json_rule(&object_schema(&tool.parameters)),
            Some(tags) => self.tagged(tags, tool, rule)?,
        };
        let written = style.call.replace("{name}", &tool.name);
        let (before, after) = written.split_once("{arguments}").unwrap_or((&written, ""));
        let before = match before.split_once("{number}") {
            Some((first, second)) => format!("{} /[0-9]{{1,3}}/ {}", self.text(first), self.text(second)),
            None => self.text(before),
        };
        Ok(format!("{before} {arguments} {}", self.text(after)))
    }

    /// Arguments in tags, in the order of the schema.
    fn tagged(&mut self, tags: [&str; 3], tool: &Tool, rule: &str) -> Result<String, CallGrammarError> {
        const KNOWN: [&str; 9] = [
            "type",
            "properties",
            "required",
            "additionalProperties",
            "title",
            "description",
            "$schema",
            "$defs",
            "definitions",
        ];
        check_keywords(&tool.parameters, &KNOWN, || tool.name.clone())?;
        let nothing = Map::new();
        let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&nothing);
        let required = tool.parameters.get("required").and_then(Value::as_array);
        let is_required = |key: &str| required.is_some_and(|names| names.iter().any(|name| name == key));
        if let Some(key) =
            required.into_iter().flatten().filter_map(Value::as_str).find(|&k| !properties.contains_key(k))
        {
            return Err(schema_error(&tool.name, format!("required {key:?} is no property")));
        }
        let [key_open, value_open, close] = tags;
        let mut members = Vec::new();
        for (i, (key, schema)) in properties.iter().enumerate() {
            check_name(key)?;
            let place = format!("{}.{key}", tool.name);
            let value = self.value(schema, &tool.parameters, close, &format!("{rule}_{i}"), &place)?;
            let open = self.text(&format!("{key_open}{key}{value_open}"));
            let optional = if is_required(key) { "" } else { "?" };
            members.push(format!("({open} {value}){optional}"));
        }
        Ok(members.join(" "))
    }

    /// The text of a value, and `close`.
    fn value(
        &mut self,
        schema: &Value,
        root: &Value,
        close: &str,
        rule: &str,
        place: &str,
    ) -> Result<String, CallGrammarError> {
        let types = Types::of(schema);
        if types != Types::default() && !types.string {
            return Ok(format!("{} {}", json_rule(&with_definitions(schema, root)), self.text(close)));
        }
        let choices = schema.get("enum").and_then(Value::as_array).cloned();
        if let Some(choices) = choices.or_else(|| Some(vec![schema.get("const")?.clone()])) {
            let texts =
                choices.iter().map(|choice| json_string(choice.as_str().unwrap_or(&choice.to_string())));
            return Ok(format!("({}) {}", texts.collect::<Vec<_>>().join(" | "), self.text(close)));
        }
        const KNOWN: [&str; 5] = ["type", "title", "description", "default", "examples"];
        check_keywords(schema, &KNOWN, || place.to_owned())?;
        Ok(self.text_until(rule, close))
    }
}

fn check_name(name: &str) -> Result<(), CallGrammarError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if !name.is_empty() && name.chars().all(fits) {
        return Ok(());
    }
    Err(CallGrammarError::Name { name: name.to_owned() })
}

fn schema_error(place: &str, keyword: String) -> CallGrammarError {
    CallGrammarError::Schema { place: place.to_owned(), keyword }
}

fn check_keywords(
    schema: &Value,
    known: &[&str],
    place: impl Fn() -> String,
) -> Result<(), CallGrammarError> {
    let unknown = schema.as_object().into_iter().flatten().find(|(key, _)| !known.contains(&key.as_str()));
    unknown.map_or(Ok(()), |(key, _)| Err(schema_error(&place(), key.clone())))
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
    for key in ["$defs", "definitions"] {
        if let (Some(object), Some(definitions)) = (schema.as_object_mut(), root.get(key)) {
            object.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

/// JSON of a schema, spaced as models were trained on it: a free choice of white space could go on for ever.
fn json_rule(schema: &Value) -> String {
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        let spacing = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        object.insert("x-guidance".to_owned(), spacing);
    }
    format!("%json {schema}")
}
