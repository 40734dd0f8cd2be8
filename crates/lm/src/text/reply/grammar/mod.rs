//! Grammars of replies that call a tool, for `tool_choice` `required`, a named function, and strict schemas.

mod arguments;
mod lark;
mod style;

use super::format::ToolFormat;
use super::json_text::json_string;
use super::tools::{Tool, Tools};
use crate::grammar::Form;
use crate::text::ThinkingMarkers;
use lark::{ANY, Channel, Lark};
use serde_json::{Value, json};
use style::{Style, style};

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
    /// The reply may be text without a call, and with calls between its texts. Calls of tools that are
    /// [strict](Tool::strict) keep to their schemas then, those of the others may have any arguments. These are the
    /// control tokens that the text may have: those of the vocabulary that do not end a reply.
    pub free_text: Option<Vec<u32>>,
}

/// Why a call cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallGrammarError {
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
        let has_args = control("[ARGS]").is_some();
        let style = style(format, has_args);
        let wanted = |tool: &&Tool| self.only.as_ref().is_none_or(|name| *name == tool.name);
        let wanted: Vec<&Tool> = tools.iter().filter(wanted).collect();
        if wanted.is_empty() {
            return Err(match &self.only {
                Some(name) => CallGrammarError::Unknown { name: name.clone() },
                None => CallGrammarError::NoTool,
            });
        }
        for tool in &wanted {
            let size = Form::JsonSchema(self.schema(tool)).check_size();
            size.map_err(|error| schema_error(&tool.name, error.to_string()))?;
        }
        let mut lark = Lark::new(control);
        let start = match &self.free_text {
            None => self.calls(format, &style, &wanted, &mut lark)?,
            Some(controls) => {
                // A name before such a token is a call.
                let separators = ["[ARGS]", "[CALL_ID]"].map(control);
                let mut controls: Vec<u32> =
                    controls.iter().copied().filter(|&id| !separators.contains(&Some(id))).collect();
                controls.sort_unstable();
                match format {
                    ToolFormat::Harmony => self.messages(&style, &wanted, &controls, &mut lark)?,
                    _ => self.text_with_calls(format, style, &wanted, &controls, &mut lark)?,
                }
            }
        };
        Ok(lark.finish(&start))
    }

    /// A reply of calls.
    fn calls(
        &self,
        format: ToolFormat,
        style: &Style,
        tools: &[&Tool],
        lark: &mut Lark<'_>,
    ) -> Result<String, CallGrammarError> {
        self.call_rule(style, tools, lark)?;
        let thoughts = self.thoughts(format, lark);
        Ok(format!("{thoughts} {}", self.block(style, lark)))
    }

    /// The calls between their markers.
    fn block(&self, style: &Style, lark: &Lark<'_>) -> String {
        let [before, between, after] = [style.before, style.between, style.after].map(|text| lark.text(text));
        let more = if self.parallel { format!("({between} call)*") } else { String::new() };
        format!("{before} call {more} {after}")
    }

    /// Writes the rule `call`: of any of `tools`.
    fn call_rule(&self, style: &Style, tools: &[&Tool], lark: &mut Lark<'_>) -> Result<(), CallGrammarError> {
        let mut names = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let name = format!("call_{i}");
            let arguments = lark.arguments(style.arguments, &tool.name, &self.schema(tool), &name)?;
            let written = style.call.replace("{name}", &tool.name);
            let (before, after) = written.split_once("{arguments}").unwrap_or((&written, ""));
            let before = match before.split_once("{number}") {
                Some((first, second)) => format!("{} /[0-9]{{1,3}}/ {}", lark.text(first), lark.text(second)),
                None => lark.text(before),
            };
            let after = lark.text(after);
            lark.rules.push(format!("{name}: {before} {arguments} {after}"));
            names.push(name);
        }
        lark.rules.push(format!("call: {}", names.join(" | ")));
        Ok(())
    }

    /// The schema to which the arguments of `tool` are held.
    fn schema(&self, tool: &Tool) -> Value {
        if self.free_text.is_none() || tool.strict {
            return tool.parameters.clone();
        }
        json!({"type": "object", "additionalProperties": true})
    }

    /// Text in which a marker begins calls.
    fn text_with_calls(
        &self,
        format: ToolFormat,
        mut style: Style,
        tools: &[&Tool],
        controls: &[u32],
        lark: &mut Lark<'_>,
    ) -> Result<String, CallGrammarError> {
        let start = format.start();
        // The marker is read with the text before it.
        if let Some(before) = style.before.strip_prefix(start) {
            style.before = before;
        } else if let Some(call) = style.call.strip_prefix(start) {
            style.call = call;
        }
        self.call_rule(&style, tools, lark)?;
        // Such calls have a marker each.
        let single = style.before.is_empty() && style.after.is_empty() && format != ToolFormat::Llama3;
        let block = Self { parallel: self.parallel && !single, ..self.clone() }.block(&style, lark);
        let behind = if self.parallel { "content" } else { "" };
        let mut content = vec![(start, format!("{block} {behind}"))];
        if let Some(thinking) = &self.thinking {
            content.push((&thinking.start, "thoughts".to_owned()));
            let end = [(thinking.end.as_str(), "fresh".to_owned())];
            lark.channel(&Channel {
                name: "thoughts",
                text: ANY,
                triggers: &end,
                banned: &[start],
                controls,
                after: "thoughts",
            });
        }
        let (text, fresh) = match format {
            // A reply that begins with a brace is a call too, and so is what follows a call like that.
            ToolFormat::Llama3 => {
                ("/[\\s,;]*([^\\s,;{](?s:.*))?/", format!("content | /\\s*/ {block} {behind}"))
            }
            _ => (ANY, "content".to_owned()),
        };
        lark.channel(&Channel {
            name: "content",
            text,
            triggers: &content,
            banned: &[],
            controls,
            after: "content",
        });
        lark.rules.push(format!("fresh: {fresh}"));
        let thinks = self.in_reasoning && self.thinking.is_some();
        Ok(if thinks { "thoughts" } else { "fresh" }.to_owned())
    }

    /// Messages, of which some are calls.
    fn messages(
        &self,
        style: &Style,
        tools: &[&Tool],
        controls: &[u32],
        lark: &mut Lark<'_>,
    ) -> Result<String, CallGrammarError> {
        const MESSAGE: &str = "<|message|>";
        let mut recipients = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let name = format!("call_{i}");
            let arguments = lark.arguments(style.arguments, &tool.name, &self.schema(tool), &name)?;
            let behind = if self.parallel { "content" } else { "" };
            let triggers = [(MESSAGE, format!("{arguments} {behind}"))];
            // What follows the name is none of it; behind a token nothing is.
            let (text, rest) = ("/([\\s<](?s:.*))?/", format!("{name}_rest"));
            let channel =
                Channel { name: &name, text, triggers: &triggers, banned: &[], controls, after: &rest };
            lark.channel(&channel);
            if !controls.is_empty() {
                lark.channel(&Channel { name: &rest, text: ANY, ..channel });
            }
            recipients.push(format!("{} {name}", json_string(&format!("functions.{}", tool.name))));
        }
        let header = || "header".to_owned();
        let content = [("<|channel|>", header()), ("<|start|>", header())];
        let header = [(MESSAGE, "content".to_owned()), ("to=", format!("({})", recipients.join(" | ")))];
        for (name, triggers) in [("content", &content), ("header", &header)] {
            lark.channel(&Channel { name, text: ANY, triggers, banned: &[], controls, after: name });
        }
        Ok("content".to_owned())
    }

    /// What may come before the calls.
    fn thoughts(&self, format: ToolFormat, lark: &mut Lark<'_>) -> String {
        let message = lark.text("<|message|>");
        let messages = match format {
            ToolFormat::Harmony => {
                Some((lark.text("<|channel|>analysis<|message|>"), "<|end|>", "<|channel|>", String::new()))
            }
            ToolFormat::MuseSpark => Some((
                format!("/ ?to=self/ {message}"),
                "<|eom|>",
                format.start(),
                format!("(/ ?to=[A-Za-z0-9_.-]{{1,64}}/ {message})?"),
            )),
            _ => None,
        };
        if let Some((open, end, banned, header)) = messages {
            let end = lark.text_until("thoughts", end, &[banned]);
            let next = lark.text("<|start|>assistant");
            return match self.in_reasoning {
                true => format!("{end} {next} {header}"),
                false => format!("({open} {end} {next})? {header}"),
            };
        }
        let Some(thinking) = &self.thinking else { return String::new() };
        let banned = [format.start()];
        let end = lark.text_until("thoughts", &thinking.end, &banned);
        if self.in_reasoning {
            return format!("{end} /\\n{{0,2}}/");
        }
        format!("({} {end} /\\n{{0,2}}/)?", lark.text(&thinking.start))
    }
}

fn schema_error(place: &str, keyword: impl Into<String>) -> CallGrammarError {
    CallGrammarError::Schema { place: place.to_owned(), keyword: keyword.into() }
}
