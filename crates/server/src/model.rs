//! Models that requests can name.

use crate::adapters;
use crate::error::{ApiError, ApiResult};
use crate::worker::Worker;
use lmx::adapter::Adapter;
use lmx::engine::{Engine, Speculation};
use lmx::grammar::{Form, Grammar, Grammars};
use lmx::text::reply::ToolFormat;
use lmx::text::{ChatPrompt, ChatTemplate, RenderOptions, SpecialContent, TemplateError, Tokenizer};
use serde_json::Value;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::OnceCell;

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
    /// Tells it from models that were loaded under the same name before.
    pub(crate) id: u64,
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
    grammars: OnceLock<Result<Grammars, String>>,
    make_grammars: Box<dyn Fn() -> Result<Grammars, lmx::grammar::GrammarError> + Send + Sync>,
}

impl Model {
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

/// A name that requests may give.
struct Slot {
    loaded: OnceCell<Arc<Model>>,
    created: u64,
}

/// All models that are served, each loaded when it is first asked for.
pub(crate) struct Models {
    slots: Vec<(String, Slot)>,
    loader: Loader,
    worker: Worker,
    ids: AtomicU64,
}

/// What `/v1/models` says of one.
pub(crate) struct Listed<'a> {
    pub(crate) name: &'a str,
    pub(crate) created: u64,
    pub(crate) model: Option<&'a Arc<Model>>,
}

impl Models {
    /// The first of `names` is the default.
    pub(crate) fn new(names: Vec<String>, loader: Loader, worker: Worker) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let slot = |name| (name, Slot { loaded: OnceCell::new(), created });
        Self { slots: names.into_iter().map(slot).collect(), loader, worker, ids: AtomicU64::new(0) }
    }

    /// The model of that name; absent and `default_model` are the first one.
    pub(crate) async fn get(&self, name: Option<&str>) -> ApiResult<Arc<Model>> {
        let found = match name {
            None | Some("default_model") => self.slots.first(),
            Some(name) => self.slots.iter().find(|(own, _)| own == name),
        };
        let Some((name, slot)) = found else { return Err(ApiError::no_model(name.unwrap_or_default())) };
        slot.loaded.get_or_try_init(|| self.load(name.clone())).await.cloned()
    }

    async fn load(&self, name: String) -> ApiResult<Arc<Model>> {
        let (loader, own) = (Arc::clone(&self.loader), name.clone());
        let loaded = tokio::task::spawn_blocking(move || loader(&own)).await;
        let failed = |why: String| ApiError::unavailable(format!("the model {name} cannot be loaded: {why}"));
        let loaded = loaded.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
        let LoadedModel { engine, template, xtc_special_tokens, tool_format, adapter, speculation } = loaded;
        let (tokenizer, eos) = (Arc::clone(engine.tokenizer()), engine.eos().clone());
        let vocab = engine.model().vocab();
        let context_length = engine.model().context_length();
        let own = Arc::clone(&tokenizer);
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        self.worker.add(id, engine)?;
        Ok(Arc::new(Model {
            name,
            id,
            tokenizer,
            template,
            xtc_special_tokens,
            tool_format,
            adapter,
            speculation,
            vocab,
            context_length,
            adapters: adapters::Kept::default(),
            grammars: OnceLock::new(),
            make_grammars: Box::new(move || Grammars::new(&own, &eos, vocab)),
        }))
    }

    pub(crate) fn list(&self) -> impl Iterator<Item = Listed<'_>> {
        self.slots.iter().map(|(name, slot)| Listed { name, created: slot.created, model: slot.loaded.get() })
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }
}
