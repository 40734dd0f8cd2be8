//! A loaded model.

use crate::adapters;
use crate::app::aside;
use crate::conversation::KWARGS;
use crate::error::{ApiError, ApiResult};
use crate::worker::{EngineHandle, Worker};
use lmx::adapter::Adapter;
use lmx::engine::{Engine, Speculation};
use lmx::grammar::{Form, Grammar, Grammars};
use lmx::text::reply::ToolFormat;
use lmx::text::{ChatPrompt, ChatTemplate, RenderOptions, SpecialContent, TemplateError, Tokenizer};
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What a loader makes of a model: its engine, and all that turns text into tokens and back.
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

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// What the server was told when it started.
    Named(String),
    /// An entry of the folder of models.
    Entry(PathBuf),
}

/// Makes models of their sources; an error is for people.
pub trait Loader: Send + Sync {
    /// Bytes of the model's weights, as they lie on the disk.
    ///
    /// # Errors
    /// If the model is not there.
    fn bytes(&self, source: &Source) -> Result<usize, String>;

    /// Loads the model.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    fn load(&self, source: &Source, progress: &LoadProgress) -> Result<LoadedModel, String>;
}

/// How much of a model has been loaded.
#[derive(Debug, Default)]
pub struct LoadProgress {
    done: AtomicUsize,
    total: AtomicUsize,
}

impl LoadProgress {
    /// `done` parts of `total` are loaded.
    pub fn set(&self, done: usize, total: usize) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// From 0 to 1.
    pub(crate) fn fraction(&self) -> f64 {
        let [done, total] = [&self.done, &self.total].map(|part| part.load(Ordering::Relaxed));
        (done as f64 / total.max(1) as f64).min(1.0)
    }
}

/// A loaded model, without its engine.
pub(crate) struct Model {
    /// As requests name it.
    pub(crate) name: String,
    /// Bytes of its weights on the disk.
    bytes: usize,
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
    /// Numbers of an embedding.
    pub(crate) width: usize,
    pub(crate) context_length: usize,
    /// Those of requests; `adapter` is not among them.
    pub(crate) adapters: adapters::Kept,
    /// Tokens that end a reply.
    pub(crate) ends: Vec<u32>,
    grammars: OnceLock<Result<Grammars, String>>,
    make_grammars: Box<dyn Fn() -> Result<Grammars, lmx::grammar::GrammarError> + Send + Sync>,
}

impl Model {
    /// Gives the engine of what was loaded as `name` to the worker; its weights have `bytes`.
    ///
    /// # Errors
    /// 503 if the server is stopping.
    pub(crate) fn new(name: String, bytes: usize, loaded: LoadedModel, worker: &Worker) -> ApiResult<Self> {
        let LoadedModel { engine, template, xtc_special_tokens, tool_format, adapter, speculation } = loaded;
        let (tokenizer, eos) = (Arc::clone(engine.tokenizer()), engine.eos().clone());
        let (vocab, width) = (engine.model().vocab(), engine.model().width());
        let context_length = engine.model().context_length();
        let own = Arc::clone(&tokenizer);
        Ok(Self {
            engine: worker.add(&name, engine)?,
            name,
            bytes,
            tokenizer,
            template,
            xtc_special_tokens,
            tool_format,
            adapter,
            speculation,
            vocab,
            width,
            context_length,
            adapters: adapters::Kept::default(),
            ends: eos.iter().map(|(id, _)| id).collect(),
            grammars: OnceLock::new(),
            make_grammars: Box::new(move || Grammars::new(&own, &eos, vocab)),
        })
    }

    /// Bytes of its weights, and of the keys and values that it holds now.
    pub(crate) fn held(&self) -> usize {
        self.bytes.saturating_add(self.engine.kv_bytes())
    }

    /// Compiles the form of a reply.
    pub(crate) fn grammar(&self, field: &str, form: &Form) -> ApiResult<Grammar> {
        let grammars =
            self.grammars.get_or_init(|| (self.make_grammars)().map_err(|error| error.to_string()));
        let grammars = grammars.as_ref().map_err(|error| ApiError::field(field, error.clone()))?;
        // A short form may be much work, too.
        let compiled = aside(|| grammars.compile(form));
        compiled.map_err(|error| ApiError::field(field, format!("{field}: {error}")))
    }

    /// Refuses variables of a request that would change nothing in the chat template.
    pub(crate) fn check_variables(&self, own: &Map<String, Value>, with_tools: bool) -> ApiResult<()> {
        // Where there is no template, rendering tells of that.
        let Ok(template) = &self.template else { return Ok(()) };
        template.check_variables(own, with_tools).map_err(|error| {
            let field = match &error {
                TemplateError::Variable { name, .. } => format!("{KWARGS}.{name}"),
                _ => KWARGS.to_owned(),
            };
            ApiError::field(&field, format!("{field}: {error}"))
        })
    }

    /// A conversation as the model sees it. Texts of control tokens in its messages stay text.
    pub(crate) fn render(&self, messages: &[Value], options: &RenderOptions) -> ApiResult<ChatPrompt> {
        let template = self.template.as_ref().map_err(|error| {
            ApiError::bad(format!("{} cannot chat: {error}; /v1/completions takes plain text", self.name))
        })?;
        if options.tools.is_some() && !template.reads("tools", true) {
            let why = "the model's chat template does not show tools to it; another one is given by --chat-template";
            return Err(ApiError::field("tools", format!("tools: {why}")));
        }
        let source = template.source(options.tools.is_some()).unwrap_or_default();
        let calls = |message: &Value| message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        if let Some(index) = messages.iter().position(calls)
            && !source.contains("tool_calls")
        {
            let why = "the model's chat template does not show calls to it";
            return Err(ApiError::field("messages", format!("messages[{index}].tool_calls: {why}")));
        }
        let mut texts = Vec::new();
        let given = messages.iter().chain(options.tools.iter().flatten()).chain(options.variables.values());
        given.for_each(|value| collect_texts(value, &mut texts));
        self.check_length("messages", texts.iter().copied())?;
        let rendered = self.tokenizer.encode_chat(template, messages, options, SpecialContent::Plain);
        let rendered = rendered.map_err(|error| ApiError::field("messages", format!("messages: {error}")))?;
        if rendered.system_dropped {
            tracing::warn!(model = self.name, "the chat template leaves out the system message");
        }
        Ok(rendered)
    }

    /// Refuses texts that are much too long for the model by how they begin: reading all of them could take minutes.
    pub(crate) fn check_length<'a>(
        &self,
        field: &str,
        texts: impl Iterator<Item = &'a str> + Clone,
    ) -> ApiResult<()> {
        /// More bytes than a token of any usual text has.
        const TOKEN_BYTES: usize = 16;
        let mut room = self.context_length.saturating_mul(TOKEN_BYTES);
        if texts.clone().map(str::len).sum::<usize>() <= room {
            return Ok(());
        }
        let mut tokens = 0;
        for text in texts {
            let head = text.split_at(text.floor_char_boundary(room)).0;
            // What cannot be encoded is told of later.
            tokens += self.tokenizer.encode(head, false).map_or(0, |ids| ids.len());
            room -= head.len();
        }
        // Twice as many, so that it does not matter where the text was cut.
        let most = self.context_length.saturating_mul(2);
        if tokens <= most {
            return Ok(());
        }
        let message =
            format!("the prompt has more than {most} tokens; the model's context is {}", self.context_length);
        Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::field(field, message) })
    }

    /// Plain text as the model sees it.
    pub(crate) fn encode(&self, text: &str) -> ApiResult<Vec<u32>> {
        self.check_length("prompt", std::iter::once(text))?;
        let encoded = self.tokenizer.encode(text, true);
        encoded.map_err(|error| ApiError::field("prompt", format!("prompt: {error}")))
    }
}

/// The texts within a value, but for the names of fields.
fn collect_texts<'v>(value: &'v Value, texts: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(list) => list.iter().for_each(|value| collect_texts(value, texts)),
        Value::Object(map) => map.values().for_each(|value| collect_texts(value, texts)),
        _ => {}
    }
}
