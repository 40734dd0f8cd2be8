//! What of a chat's reply is content, what thought, what a call of a tool.

use crate::error::{ApiError, ApiResult};
use crate::fields::Sampling;
use crate::model::Model;
use crate::openai::new_id;
use crate::openai::tools::Choice;
use lmx::engine::{Event, FinishReason, Request};
use lmx::grammar::{Form, Grammar};
use lmx::sample::ReasoningBudget;
use lmx::text::reply::{
    CallGrammar, Reply, ReplyEnd, ReplyOptions, ReplyParser, ReplyPart, ToolFormat, Tools,
};
use serde_json::{Value, json};

/// What a request says of tools.
pub(crate) struct Tooling {
    pub(crate) tools: Vec<Value>,
    pub(crate) choice: Choice,
    pub(crate) parallel: bool,
}

/// How a reply is written, and read.
pub(crate) struct Shape {
    options: ReplyOptions,
    form: Option<(&'static str, Form)>,
    /// Tokens of thoughts at most.
    budget: Option<usize>,
    /// Whether there may be several calls.
    parallel: bool,
}

impl Shape {
    /// How the reply to `prompt` is written.
    ///
    /// # Errors
    /// Names the field that asks for what this model cannot be made to write.
    pub(crate) fn new(
        model: &Model,
        prompt: &[u32],
        tooling: Tooling,
        form: Option<(&'static str, Form)>,
        budget: Option<usize>,
    ) -> ApiResult<Self> {
        let Tooling { tools, choice, parallel } = tooling;
        let thinking = model.tokenizer.thinking_markers();
        let in_reasoning = thinking.as_ref().is_some_and(|markers| markers.opened_by(prompt));
        let tools = Tools::new(&tools);
        if let (Some((field, _)), true) = (&form, in_reasoning) {
            let why = "cannot be enforced: this model's replies begin with thoughts; turn them off";
            return Err(ApiError::field(*field, format!("{field} {why}")));
        }
        let form = match (choice, form) {
            (Choice::Required | Choice::Named(_), Some((field, _))) => {
                let why = "and a tool_choice that asks for a call exclude each other";
                return Err(ApiError::field(field, format!("{field} {why}")));
            }
            (choice, None) => call_form(model, &tools, choice, parallel, in_reasoning)?,
            (Choice::Auto | Choice::Off, form) => form,
        };
        let has_tools = tools.iter().next().is_some();
        let options = ReplyOptions {
            thinking,
            in_reasoning,
            format: model.tool_format,
            tools,
            calls_are_text: !has_tools,
            reasoning_is_content: false,
        };
        if budget.is_some() && options.thinking.is_none() {
            let why = "a budget for thoughts has no effect: this model does not think";
            return Err(ApiError::field("max_reasoning_tokens", why));
        }
        Ok(Self { options, form, budget, parallel })
    }

    /// The form of the reply, compiled.
    ///
    /// # Errors
    /// Names the field that asks for it.
    pub(crate) fn grammar(&self, model: &Model, sampling: &Sampling) -> ApiResult<Option<Grammar>> {
        let Some((field, form)) = &self.form else { return Ok(None) };
        sampling.check_with_form()?;
        model.grammar(field, form).map(Some)
    }

    /// Makes a request's reply keep to it, and to its `grammar`.
    pub(crate) fn constrain(&self, grammar: Option<Grammar>, request: &mut Request) {
        request.grammar = grammar;
        if let (Some(budget), Some(markers)) = (self.budget, &self.options.thinking) {
            let (start, end) = (markers.start_tokens.clone(), markers.end_tokens.clone());
            let budget = ReasoningBudget::new(start, end, budget, self.options.in_reasoning);
            request.logits_processors.push(Box::new(budget));
        }
    }
}

/// The form of a reply that must call a tool, or of one that may call strict tools; with the field that asks for it.
fn call_form(
    model: &Model,
    tools: &Tools,
    choice: Choice,
    parallel: bool,
    in_reasoning: bool,
) -> ApiResult<Option<(&'static str, Form)>> {
    let optional = choice == Choice::Auto;
    let field = if optional { "tools" } else { "tool_choice" };
    let only = match choice {
        Choice::Named(name) => Some(name),
        Choice::Off => return Ok(None),
        Choice::Auto if !tools.iter().any(|tool| tool.strict) => return Ok(None),
        Choice::Auto | Choice::Required => None,
    };
    let format = match model.tool_format {
        Some(format) => format,
        // No text of this model is taken for a call.
        None if optional => return Ok(None),
        None => {
            let why = "this model has no format for tool calls that could be enforced (--tool-parser)";
            return Err(ApiError::field(field, format!("{field}: {why}")));
        }
    };
    let tokenizer = &model.tokenizer;
    let thinking = tokenizer.thinking_markers();
    let control = |text: &str| tokenizer.id(text).filter(|&id| tokenizer.is_control(id));
    let free_text = optional.then(|| {
        let ids = (0..model.vocab).filter_map(|id| u32::try_from(id).ok());
        ids.filter(|id| tokenizer.is_control(*id) && !model.ends.contains(id)).collect()
    });
    let grammar = CallGrammar { only, parallel, thinking, in_reasoning, free_text };
    let lark = grammar.lark(format, tools, &control);
    let strict = if optional { "strict: " } else { "" };
    let lark = lark.map_err(|error| ApiError::field(field, format!("{field}: {strict}{error}")))?;
    Ok(Some((field, Form::Lark(lark))))
}

/// The id of a call to which the model gave none.
fn call_id(short: bool) -> String {
    const SHORT: usize = 9;
    if short { new_id("").chars().take(SHORT).collect() } else { new_id("call_") }
}

/// A reply, while it comes.
pub(crate) struct Parts {
    parser: ReplyParser,
    reply: Reply,
    /// The ids of its calls.
    ids: Vec<String>,
    reasoning_tokens: usize,
    finish: Option<&'static str>,
    /// The template takes nine letters and digits only.
    short_ids: bool,
    /// What comes after the first call is not wanted.
    one_call: bool,
    /// The first call has ended.
    called: bool,
}

impl Parts {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self {
            parser: ReplyParser::new(shape.options.clone()),
            reply: Reply::default(),
            ids: Vec::new(),
            reasoning_tokens: 0,
            finish: None,
            short_ids: shape.options.format.is_some_and(ToolFormat::wants_short_ids),
            one_call: !shape.parallel,
            called: false,
        }
    }

    /// Takes what a token released; returns the parts that are certain now.
    pub(crate) fn push(&mut self, event: &Event) -> Vec<ReplyPart> {
        self.reasoning_tokens += usize::from(event.token.is_some() && self.parser.in_reasoning());
        let mut parts = self.parser.push(&event.text);
        if let Some(finish) = event.finish {
            let end = if finish == FinishReason::Stop { ReplyEnd::Stop } else { ReplyEnd::Cut };
            parts.extend(self.parser.finish(end));
        }
        if self.one_call {
            parts.retain(|part| {
                let wanted = !self.called;
                self.called |= matches!(part, ReplyPart::ToolCallEnd { .. });
                wanted
            });
        }
        for part in &parts {
            if let ReplyPart::ToolCallStart { id, .. } = part {
                self.ids.push(id.clone().unwrap_or_else(|| call_id(self.short_ids)));
            }
            self.reply.add(part.clone());
        }
        if let Some(finish) = event.finish {
            let calls = finish == FinishReason::Stop && self.reply.calls_tools();
            self.finish = Some(if calls { "tool_calls" } else { finish.as_str() });
        }
        parts
    }

    /// Why the reply ended, in OpenAI's words.
    pub(crate) fn finish(&self) -> Option<&'static str> {
        self.finish
    }

    /// The id of a call.
    pub(crate) fn call_id(&self, index: usize) -> &str {
        self.ids.get(index).map_or("", String::as_str)
    }

    pub(crate) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// The message of a chat completion.
    pub(crate) fn message(&self) -> Value {
        let Reply { content, reasoning, tool_calls } = &self.reply;
        let mut message = json!({"role": "assistant", "content": (!content.is_empty()).then_some(content), "refusal": null});
        let Value::Object(map) = &mut message else { return message };
        if !reasoning.is_empty() {
            map.insert("reasoning_content".to_owned(), reasoning.as_str().into());
            map.insert("reasoning".to_owned(), reasoning.as_str().into());
        }
        if !tool_calls.is_empty() {
            let calls = tool_calls.iter().enumerate().map(|(index, call)| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": self.call_id(index), "type": "function", "function": function})
            });
            map.insert("tool_calls".to_owned(), calls.collect());
        } else if content.is_empty() && reasoning.is_empty() {
            map.insert("content".to_owned(), "".into());
        }
        message
    }
}
