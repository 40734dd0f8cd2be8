//! A conversation and what its next message may be: what all protocols with messages have in common.

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::model::Model;
use crate::openai::tools::Choice;
use crate::reply::{Shape, Tooling};
use lmx::grammar::Form;
use lmx::text::{RenderOptions, THINKING};
use serde_json::{Map, Value};

/// A conversation that is to be continued by a message.
pub(crate) struct Conversation {
    /// As chat templates want them.
    pub(crate) messages: Vec<Value>,
    /// Whether the last one is the beginning of the message that is asked for.
    pub(crate) continues: bool,
    pub(crate) tooling: Tooling,
    /// The form of the message, and the field that asks for it.
    pub(crate) form: Option<(&'static str, Form)>,
    /// How much to think, and the field that says so.
    pub(crate) effort: Option<(&'static str, String)>,
    /// Tokens of thoughts at most.
    pub(crate) budget: Option<usize>,
    /// Variables of the chat template, beside those of the server.
    pub(crate) variables: Map<String, Value>,
}

impl Conversation {
    /// The tokens of the prompt, and how the message behind it is written.
    ///
    /// # Errors
    /// Names the field that asks for what the model or its template cannot do.
    pub(crate) fn render(mut self, app: &App, model: &Model) -> ApiResult<(Vec<u32>, Shape)> {
        if self.tooling.choice == Choice::Off {
            self.tooling.tools.clear();
        }
        let tools = Some(self.tooling.tools.clone()).filter(|tools| !tools.is_empty());
        let thoughts = Thoughts { model, with_tools: tools.is_some() };
        let mut own = self.variables;
        if let Some((field, effort)) = &self.effort {
            let never = thoughts.keep_to(field, effort, &mut own)?;
            self.budget = if never { Some(0) } else { self.budget };
        }
        if let Some(on) = own.get(THINKING).and_then(Value::as_bool)
            && !thoughts.template_reads(THINKING)
        {
            own.shift_remove(THINKING);
            let never = thoughts.turn(&format!("{KWARGS}.{THINKING}"), on, &mut own)?;
            self.budget = if never { Some(0) } else { self.budget };
        }
        model.check_variables(&own, tools.is_some())?;
        let mut variables = app.options.defaults.template.clone();
        variables.append(&mut own);
        if let (Some(_), Some(switch)) = (&self.form, thoughts.switch()) {
            // A form is one of the whole reply.
            variables.entry(switch).or_insert(false.into());
        }
        let options = RenderOptions {
            add_generation_prompt: !self.continues,
            continue_final_message: self.continues,
            tools,
            variables,
            ..RenderOptions::default()
        };
        let prompt = model.render(&self.messages, &options)?;
        let shape = Shape::new(model, &prompt.ids, self.tooling, self.form, self.budget)?;
        Ok((prompt.ids, shape))
    }
}

/// The field with variables of the chat template.
pub(crate) const KWARGS: &str = "chat_template_kwargs";
/// The variable for how much to think.
const EFFORT: &str = "reasoning_effort";

/// How a model is told to think, or not to.
pub(crate) struct Thoughts<'m> {
    pub(crate) model: &'m Model,
    /// Whether it is shown tools.
    pub(crate) with_tools: bool,
}

impl Thoughts<'_> {
    fn template_reads(&self, variable: &str) -> bool {
        self.model.template.as_ref().is_ok_and(|template| template.reads(variable, self.with_tools))
    }

    /// The variable by which the template turns thoughts on and off.
    fn switch(&self) -> Option<&'static str> {
        [THINKING, "thinking"].into_iter().find(|name| self.template_reads(name))
    }

    /// Whether the template takes words for how much to think.
    pub(crate) fn reads_effort(&self) -> bool {
        self.template_reads(EFFORT)
    }

    /// What `effort`, the value of `field`, comes to: `own` variables for the template, and whether thoughts must be kept
    /// from the model because its template cannot turn them off.
    fn keep_to(&self, field: &str, effort: &str, own: &mut Map<String, Value>) -> ApiResult<bool> {
        match effort {
            "none" => self.turn(field, false, own),
            word if self.reads_effort() => set(own, EFFORT, word.into(), field).map(|()| false),
            "minimal" | "low" | "medium" | "high" | "xhigh" | "max" => self.turn(field, true, own),
            word => {
                let why = "is none, minimal, low, medium, high, xhigh or max";
                Err(ApiError::field(field, format!("{field} {why}, not {word:?}")))
            }
        }
    }

    /// The same for `on` or off.
    fn turn(&self, field: &str, on: bool, own: &mut Map<String, Value>) -> ApiResult<bool> {
        let thinks = self.model.tokenizer.thinking_markers().is_some();
        let why = match self.switch() {
            Some(switch) => return set(own, switch, on.into(), field).map(|()| false),
            None if thinks => return Ok(!on),
            None if on => "cannot turn thoughts on: this model does not think",
            None if self.reads_effort() => {
                "cannot turn thoughts off: this model cannot be kept from thinking"
            }
            None => return Ok(false),
        };
        Err(ApiError::field(field, format!("{field} {why}")))
    }
}

/// Sets a variable for `field`, unless the request itself says something else.
fn set(own: &mut Map<String, Value>, name: &str, value: Value, field: &str) -> ApiResult<()> {
    if own.get(name).is_some_and(|said| !said.is_null() && *said != value) {
        let message = format!("{field} and {KWARGS}.{name} contradict each other");
        return Err(ApiError::field(field, message));
    }
    own.insert(name.to_owned(), value);
    Ok(())
}
