//! A conversation and what its next message may be: what all protocols with messages have in common.

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::model::Model;
use crate::openai::tools::Choice;
use crate::reply::{Shape, Tooling};
use lmx::grammar::Form;
use lmx::text::RenderOptions;
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
        let mut variables = app.options.defaults.template.clone();
        variables.append(&mut self.variables);
        if let Some((field, effort)) = &self.effort {
            let never = think(model, field, effort, &mut variables)?;
            self.budget = if never { Some(0) } else { self.budget };
        }
        if self.form.is_some() {
            // A form is one of the whole reply.
            variables.entry("enable_thinking").or_insert(false.into());
        }
        if self.tooling.choice == Choice::Off {
            self.tooling.tools.clear();
        }
        let tools = Some(self.tooling.tools.clone()).filter(|tools| !tools.is_empty());
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

/// The text of the model's template.
fn template(model: &Model) -> &str {
    model.template.as_ref().ok().and_then(|template| template.source(false)).unwrap_or_default()
}

/// Whether the model's template takes words for how much to think.
pub(crate) fn reads_effort(model: &Model) -> bool {
    template(model).contains("reasoning_effort")
}

/// What `effort`, the value of `field`, comes to: variables for the template, and whether thoughts must be kept from the model
/// because its template cannot turn them off.
fn think(model: &Model, field: &str, effort: &str, variables: &mut Map<String, Value>) -> ApiResult<bool> {
    let thinks = model.tokenizer.thinking_markers().is_some();
    match effort {
        "none" if thinks => {
            variables.insert("enable_thinking".to_owned(), false.into());
            return Ok(!template(model).contains("enable_thinking"));
        }
        "none" if reads_effort(model) => {
            let why = "cannot be none: this model cannot be kept from thinking";
            return Err(ApiError::field(field, format!("{field} {why}")));
        }
        "none" => {}
        word if reads_effort(model) => {
            variables.insert("reasoning_effort".to_owned(), word.into());
        }
        "minimal" | "low" | "medium" | "high" | "xhigh" | "max" if thinks => {
            variables.insert("enable_thinking".to_owned(), true.into());
        }
        word => {
            let why = if thinks {
                "is none, minimal, low, medium, high, xhigh or max"
            } else {
                "can only be none: the model does not think"
            };
            return Err(ApiError::field(field, format!("{field} {why}, not {word:?}")));
        }
    }
    Ok(false)
}
