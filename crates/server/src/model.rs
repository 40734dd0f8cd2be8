//! A loaded model.

use crate::adapters;
use crate::error::{ApiError, ApiResult};
use crate::worker::{EngineHandle, Worker};
use lmx::adapter::Adapter;
use lmx::engine::{Engine, Speculation};
use lmx::grammar::{Form, Grammar, Grammars};
use lmx::text::reply::ToolFormat;
use lmx::text::{ChatPrompt, ChatTemplate, RenderOptions, SpecialContent, TemplateError, Tokenizer};
use serde_json::Value;
use std::sync::{Arc, OnceLock};

/// What a loader makes of a model's name: its engine, and all that turns text into tokens and back.
pub struct LoadedModel {
    /// Runs its requests.
    pub engine: Engine,
    /// The chat template; an error may also say that there is none.
    pub template: Result<ChatTemplate, TemplateError>,
    /// Tokens that XTC must not strike out: newline and end of sequence.
    pub xtc_special_tokens: Vec<u32>,
    /// How it writes tool calls, if it does.
    pub tool_format: Option<ToolFormat>,
    /// What changes its weights, for every request.
    pub adapter: Option<Adapter>,
    /// How tokens are guessed, for every request.
    pub speculation: Option<Speculation>,
}

/// Loads a model by the name under which it is served; an error is for people.
pub type Loader = Arc<dyn Fn(&str) -> Result<LoadedModel, String> + Send + Sync>;

/// A loaded model, without its engine.
pub(crate) struct Model {
    /// As requests name it.
    pub(crate) name: String,
    /// Tells its engine from those that were loaded under the same name before.
    pub(crate) engine: EngineHandle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: Result<ChatTemplate, TemplateError>,
    pub(crate) xtc_special_tokens: Vec<u32>,
    pub(crate) tool_format: Option<ToolFormat>,
    pub(crate) adapter: Option<Adapter>,
    pub(crate) speculation: Option<Speculation>,
    /// Logits.
    pub(crate) vocab: usize,
    pub(crate) context_length: usize,
    /// Those of requests; `adapter` is not among them.
    pub(crate) adapters: adapters::Kept,
    /// Tokens that end a reply.
    pub(crate) ends: Vec<u32>,
    grammars: OnceLock<Result<Grammars, String>>,
    make_grammars: Box<dyn Fn() -> Result<Grammars, lmx::grammar::GrammarError> + Send + Sync>,
}

impl Model {
    /// Gives the engine of what was loaded as `name` to the worker.
    ///
    /// # Errors
    /// 503 if the server is stopping.
    pub(crate) fn new(name: String, loaded: LoadedModel, worker: &Worker) -> ApiResult<Self> {
        let LoadedModel { engine, template, xtc_special_tokens, tool_format, adapter, speculation } = loaded;
        let (tokenizer, eos) = (Arc::clone(engine.tokenizer()), engine.eos().clone());
        let vocab = engine.model().vocab();
        let context_length = engine.model().context_length();
        let own = Arc::clone(&tokenizer);
        Ok(Self {
            name,
            engine: worker.add(engine)?,
            tokenizer,
            template,
            xtc_special_tokens,
            tool_format,
            adapter,
            speculation,
            vocab,
            context_length,
            adapters: adapters::Kept::default(),
            ends: eos.iter().map(|(id, _)| id).collect(),
            grammars: OnceLock::new(),
            make_grammars: Box::new(move || Grammars::new(&own, &eos, vocab)),
        })
    }

    /// Compiles the form of a reply.
    pub(crate) fn grammar(&self, field: &str, form: &Form) -> ApiResult<Grammar> {
        let grammars =
            self.grammars.get_or_init(|| (self.make_grammars)().map_err(|error| error.to_string()));
        let grammars = grammars.as_ref().map_err(|error| ApiError::field(field, error.clone()))?;
        grammars.compile(form).map_err(|error| ApiError::field(field, format!("{field}: {error}")))
    }

    /// A conversation as the model sees it. Texts of control tokens in its messages stay text.
    pub(crate) fn render(&self, messages: &[Value], options: &RenderOptions) -> ApiResult<ChatPrompt> {
        let template = self.template.as_ref().map_err(|error| {
            ApiError::bad(format!("{} cannot chat: {error}; /v1/completions takes plain text", self.name))
        })?;
        let rendered = self.tokenizer.encode_chat(template, messages, options, SpecialContent::Plain);
        rendered.map_err(|error| ApiError::field("messages", format!("messages: {error}")))
    }

    /// Plain text as the model sees it.
    pub(crate) fn encode(&self, text: &str) -> ApiResult<Vec<u32>> {
        let encoded = self.tokenizer.encode(text, true);
        encoded.map_err(|error| ApiError::field("prompt", format!("prompt: {error}")))
    }
}
