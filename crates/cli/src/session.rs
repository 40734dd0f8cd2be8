//! A loaded model as the commands use it.

use crate::adapters;
use crate::args::adapter::AdapterArgs;
use crate::args::model::{KvDtype, ModelArgs, PrefixArgs, RunArgs, TemplateArgs, refused};
use crate::device;
use crate::end::End;
use crate::env;
use crate::progress::Progress;
use crate::report::Notices;
use lmx::cache::{KvQuantization, KvWindow, LayerKv, Policy};
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{DraftModel, Engine, EngineOptions, RequestError, Speculation};
use lmx::grammar::{Form, Grammar};
use lmx::models::{Model, kv_spec};
use lmx::prompt_cache::{Identity, PromptCache, PromptCacheFile};
use lmx::sample::SamplingParams;
use lmx::text::{ChatPrompt, ChatTemplate, RenderOptions, SpecialContent, TemplateError, Tokenizer};
use lmx::{Adapter, AdapterFiles, KvType, LoadError, LoadOptions, Loaded};

use serde_json::{Map, Value};
use std::sync::Arc;

/// The template of `--use-default-chat-template`: ChatML, which was transformers' default for models without one.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A loaded model with its engine, tokenizer and template.
pub(crate) struct Session {
    pub(crate) engine: Engine,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// `--adapter-path`
    pub(crate) adapter: Option<Adapter>,
    /// What was read from a prompt-cache file.
    pub(crate) cache: Option<PromptCache>,
    /// For the identity of what is cached.
    checkpoint: Checkpoint,
    /// The chat template; an error may also say that there is none.
    pub(crate) template: Result<ChatTemplate, TemplateError>,
    /// How keys and values are stored, in words.
    pub(crate) kv_format: String,
    kv_quantization: Option<KvQuantization>,
    /// `--chat-template-config`
    variables: Map<String, Value>,
    /// Tokens that XTC must not strike out: newline and end of sequence.
    pub(crate) xtc_special_tokens: Vec<u32>,
}

/// The model's chat template, or with `use_default` ChatML where it has none.
fn chat_template(
    tokenizer: &Tokenizer,
    use_default: bool,
    notices: &mut Notices,
) -> Result<ChatTemplate, TemplateError> {
    let own = tokenizer.chat_template();
    match &own {
        Err(TemplateError::None) if use_default => {
            notices.add("the model has no chat template: ChatML is used (--use-default-chat-template)");
            tokenizer.chat_template_given(CHATML)
        }
        Ok(_) if use_default => {
            notices.add("--use-default-chat-template has no effect: the model has a chat template");
            own
        }
        _ => own,
    }
}

/// What is said where variables of the command line change nothing in the template.
pub(crate) fn notice_idle_variables(
    template: &Result<ChatTemplate, TemplateError>,
    args: &TemplateArgs,
    notices: &mut Notices,
) {
    if let (Ok(template), Some(variables)) = (template, &args.chat_template_config)
        && let Err(why) = template.check_variables(variables, false)
    {
        notices.add(format!("--chat-template-config: {why}"));
    }
}

/// What is said where the template leaves the system message out.
pub(crate) fn notice_dropped_system(prompt: &ChatPrompt, notices: &mut Notices) {
    if prompt.system_dropped {
        notices.add("--system-prompt has no effect: the chat template leaves it out");
    }
}

/// Where a model is looked for.
pub(crate) fn open_options(model: &ModelArgs) -> OpenOptions {
    OpenOptions { revision: model.revision.clone(), hub_cache_dirs: env::hub_cache().into_iter().collect() }
}

/// How many requests run at the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Concurrency {
    /// All of them.
    pub(crate) replies: usize,
    /// Those whose prompts are being read.
    pub(crate) prompts: usize,
}

impl Concurrency {
    /// `count` requests that may all read their prompts.
    pub(crate) fn of(count: usize) -> Self {
        Self { replies: count, prompts: count }
    }
}

/// What a request begins from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reuse<'a> {
    /// There is one request.
    Nothing,
    /// A prompt continues from what it has in common with an earlier one.
    Prefixes(&'a PrefixArgs),
    /// The one request continues from a file.
    File(&'a PromptCacheFile),
}

/// How keys and values are quantized: a file's are what they are, and the flags were compared with it before.
fn quantization(run: &RunArgs, reuse: Reuse<'_>) -> Result<Option<KvQuantization>, End> {
    match reuse {
        Reuse::File(file) if file.quantization().is_some() => Ok(file.quantization()),
        _ => run.kv_quant.quantization(),
    }
}

/// How a rendered conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// With the beginning of a reply.
    Reply,
    /// Within the last message, which the model continues.
    Open,
    /// With the end of the last message.
    Closed,
}

/// The models of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Models<'a> {
    pub(crate) model: &'a ModelArgs,
    /// `--draft-model`
    pub(crate) draft: Option<&'a str>,
    /// Is told how far loading is, besides who sees the bar.
    pub(crate) progress: Option<&'a lmx_server::LoadProgress>,
}

impl<'a> From<&'a ModelArgs> for Models<'a> {
    fn from(model: &'a ModelArgs) -> Self {
        Self { model, draft: None, progress: None }
    }
}

/// What was loaded of [`Models`].
struct LoadedModels {
    model: Loaded,
    draft: Option<Loaded>,
}

/// The bytes of `memory` that go to the draft model: for as many tokens as the model itself gets.
fn draft_share(memory: usize, [model, draft]: [(&dyn Model, KvType); 2]) -> usize {
    let [model, draft] =
        [model, draft].map(|(model, ty)| kv_spec(model, ty).bytes_per_token().max(1) as u128);
    (memory as u128 * draft / (model + draft)) as usize
}

/// Says what `--max-kv-size` does to which layers.
fn note_window(window: KvWindow, layers: &[LayerKv], notices: &mut Notices) {
    let full = layers.iter().filter(|layer| layer.policy == Policy::Full).count();
    if full == 0 {
        return notices.add("--max-kv-size has no effect: every layer of this model has a window of its own");
    }
    let (keep, last) = (window.keep(), window.size() - window.keep());
    let which = if full == layers.len() {
        "all attention layers see".to_owned()
    } else {
        format!("{full} of {} attention layers see", layers.len())
    };
    notices.add_fact(format!("{which} the first {keep} and the last {last} positions (--max-kv-size)"));
}

impl Session {
    /// Loads the models for requests that run together.
    ///
    /// # Errors
    /// Whatever is wrong with the model's files, or with the words for them.
    pub(crate) fn open<'a>(
        models: impl Into<Models<'a>>,
        adapter: &AdapterArgs,
        run: &RunArgs,
        template: &TemplateArgs,
        reuse: Reuse<'_>,
        concurrency: Concurrency,
        notices: &mut Notices,
    ) -> Result<Self, End> {
        let Models { model, draft, progress: watch } = models.into();
        if model.trust_remote_code {
            notices.add("--trust-remote-code has no effect: lmx never runs code of a model folder");
        }
        let adapter = adapters::open(adapter)?;
        let kv_quantization = quantization(run, reuse)?;
        let mut extra_eos = template.extra_eos_token.clone();
        if let Reuse::File(file) = reuse {
            extra_eos.extend(file.notes().eos_token.clone());
        }
        let options = LoadOptions {
            device: device::open(run.threads)?,
            open: open_options(model),
            extra_eos,
            kv_quantization,
        };
        let mut progress = Progress::new("loading");
        let mut show = |done, total| {
            progress.set(done as u64, total as u64);
            watch.inspect(|watch| watch.set(done, total));
        };
        let draft = draft.map(|name| {
            let open = OpenOptions { revision: None, ..options.open.clone() };
            let options = LoadOptions { open, extra_eos: Vec::new(), ..options.clone() };
            lmx::load_with_progress(name, &options, &mut show)
        });
        let draft = draft.transpose().map_err(|error| anyhow::Error::new(error).context("--draft-model"))?;
        let loaded = lmx::load_with_progress(model.name(), &options, &mut show);
        drop(progress);
        let loaded = loaded.map_err(|error| match error {
            LoadError::KvQuant(error) if run.kv_quant.is_given() => refused(&error),
            error => anyhow::Error::new(error).into(),
        })?;
        device::notice().into_iter().for_each(|notice| notices.add(notice));
        loaded.notices.iter().for_each(|notice| notices.add(notice.as_str()));
        let loaded = LoadedModels { model: loaded, draft };
        Self::with(loaded, adapter.as_ref(), run, template, reuse, concurrency, notices)
    }

    /// The engine and the template of what was loaded.
    fn with(
        LoadedModels { model: loaded, draft }: LoadedModels,
        adapter: Option<&AdapterFiles>,
        run: &RunArgs,
        args: &TemplateArgs,
        reuse: Reuse<'_>,
        concurrency: Concurrency,
        notices: &mut Notices,
    ) -> Result<Self, End> {
        let adapter =
            adapter.map(|files| files.fit(&*loaded.model)).transpose().map_err(anyhow::Error::new)?;
        adapter.iter().for_each(|adapter| adapters::note(adapter, notices));
        let template = chat_template(&loaded.tokenizer, args.use_default_chat_template, notices);
        notice_idle_variables(&template, args, notices);
        let layers = loaded.model.layer_kv();
        let (kv_type, kv_window) = match reuse {
            // The flags were compared with the file before.
            Reuse::File(file) => (file.kv_type(), file.bound(&layers)),
            _ => (device::kv_type(run.kv_dtype, loaded.kv_type), run.kv_window()?),
        };
        if run.kv_dtype == KvDtype::Auto {
            notices.add_fact(format!("keys and values are stored as {}", device::name(kv_type)));
        }
        let kv_quantization = quantization(run, reuse)?;
        let mut kv_format = device::name(kv_type).to_owned();
        if let Some(how) = kv_quantization {
            kv_format +=
                &format!(", {} bits in groups of {} from {} on", how.bits(), how.group(), how.start());
            let why = match reuse {
                Reuse::File(file) if file.quantization().is_some() => {
                    format!("as in {}", file.path().display())
                }
                _ => "--kv-bits".to_owned(),
            };
            notices.add_fact(format!(
                "positions from {} on read keys and values of {} bits in groups of {} ({why})",
                how.start(),
                how.bits(),
                how.group()
            ));
        }
        let newline = loaded.tokenizer.encode("\n", false).map_err(anyhow::Error::new)?;
        let eos = loaded.eos.iter().map(|(id, _)| id);
        let xtc_special_tokens = newline.into_iter().chain(eos).collect();
        if let Some(window) = kv_window {
            note_window(window, &layers, notices);
        }
        let prefixes = match reuse {
            Reuse::Prefixes(args) => Some(args),
            _ => None,
        };
        let kv_memory = run.kv_memory.unwrap_or_else(device::default_kv_memory);
        let draft = draft.map(|draft| {
            let draft_type = device::kv_type(run.kv_dtype, draft.kv_type);
            let models = [(&*loaded.model, kv_type), (&*draft.model, draft_type)];
            DraftModel {
                kv_memory: draft_share(kv_memory, models),
                model: draft.model,
                tokenizer: draft.tokenizer,
                kv_type: draft_type,
            }
        });
        let options = EngineOptions {
            kv_window,
            kv_quantization,
            prefill_step_size: run.prefill_step_size.get(),
            max_running: concurrency.replies,
            prompt_concurrency: concurrency.prompts,
            kv_type,
            prefix_cache: prefixes.map(|args| args.memory(kv_window.is_some())),
            kv_memory: kv_memory - draft.as_ref().map_or(0, |draft| draft.kv_memory),
        };
        let engine = Engine::new(loaded.model, Arc::clone(&loaded.tokenizer), loaded.eos, options)
            .map_err(|error| refused(&error))?;
        let engine = match draft {
            Some(draft) => {
                engine.with_draft(draft).map_err(|e| anyhow::Error::new(e).context("--draft-model"))?
            }
            None => engine,
        };
        let mut session = Self {
            xtc_special_tokens,
            engine,
            tokenizer: loaded.tokenizer,
            adapter,
            cache: None,
            checkpoint: loaded.checkpoint,
            template,
            kv_format,
            kv_quantization,
            variables: args.chat_template_config.clone().unwrap_or_default(),
        };
        if let Some(options) = prefixes.and_then(PrefixArgs::dir) {
            // Each prefix says itself which adapter it was run with.
            let identity = session.identity()?.with_adapter(None);
            let opened = session.engine.keep_prefixes_in(options, &identity);
            opened.map_err(|error| End::Usage(format!("--prompt-cache-dir: {error}")))?;
        }
        if let Reuse::File(file) = reuse {
            if file.notes().identity.is_some() {
                file.check_identity(&session.identity()?).map_err(anyhow::Error::new)?;
            }
            session.cache = Some(
                session
                    .engine
                    .load_prompt_cache(file, session.adapter.as_ref())
                    .map_err(anyhow::Error::new)?,
            );
        }
        Ok(session)
    }

    /// What a cache of this session belongs to.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(crate) fn identity(&self) -> anyhow::Result<Identity> {
        let template = self.template.as_ref().ok().and_then(|template| template.source(false));
        Ok(Identity::of(&self.checkpoint, template)?.with_adapter(self.adapter.as_ref()))
    }

    /// Refuses guesses for a model that cannot take them back.
    ///
    /// # Errors
    /// [`RequestError::Speculation`].
    pub(crate) fn check_speculation(&self, speculation: Option<Speculation>) -> Result<(), End> {
        match speculation {
            Some(_) if !self.engine.model().states().is_empty() => {
                Err(End::Failed(RequestError::Speculation.into()))
            }
            _ => Ok(()),
        }
    }

    /// Says what went wrong with the folder of `--prompt-cache-dir`.
    pub(crate) fn note_prefix_warnings(&mut self, notices: &mut Notices) {
        for warning in self.engine.take_prefix_warnings() {
            notices.add(format!("--prompt-cache-dir: {warning}"));
        }
    }

    /// Says so where `--kv-bits` cannot change anything: no reply of `max_tokens` to so long a prompt, or none at all,
    /// gets to the position from which on it acts.
    pub(crate) fn notice_quantization_out_of_reach(
        &self,
        prompt: usize,
        max_tokens: Option<usize>,
        notices: &mut Notices,
    ) {
        let context = self.engine.model().context_length();
        // The last token of a reply is not run.
        let most = max_tokens.map_or(context, |n| prompt.saturating_add(n.saturating_sub(1))).min(context);
        if let Some(how) = self.kv_quantization.filter(|how| most <= how.start()) {
            notices.add(format!(
                "--kv-bits has no effect: it acts from position {} on (--quantized-kv-start), and there are at most \
                 {most} here",
                how.start()
            ));
        }
    }

    /// A conversation as the model sees it. Texts of control tokens in its messages stay text. `variables` of the
    /// template override those of the command line.
    ///
    /// # Errors
    /// The template's own, for instance about roles that it does not take.
    pub(crate) fn render(
        &self,
        messages: &[Value],
        tail: Tail,
        variables: Option<&Map<String, Value>>,
    ) -> anyhow::Result<ChatPrompt> {
        let template = self.template.as_ref().map_err(Clone::clone)?;
        variables.map_or(Ok(()), |own| template.check_variables(own, false))?;
        let options = self.options(tail, variables);
        Ok(self.tokenizer.encode_chat(template, messages, &options, SpecialContent::Plain)?)
    }

    /// The part of a conversation that follows `head`, with which it begins.
    ///
    /// # Errors
    /// The template's own, or if the conversation begins otherwise.
    pub(crate) fn render_after(
        &self,
        head: &str,
        messages: &[Value],
        tail: Tail,
    ) -> anyhow::Result<ChatPrompt> {
        let template = self.template.as_ref().map_err(Clone::clone)?;
        let options = self.options(tail, None);
        Ok(self.tokenizer.encode_chat_after(head, template, messages, &options, SpecialContent::Plain)?)
    }

    fn options(&self, tail: Tail, variables: Option<&Map<String, Value>>) -> RenderOptions {
        RenderOptions {
            add_generation_prompt: tail == Tail::Reply,
            continue_final_message: tail == Tail::Open,
            variables: self
                .variables
                .iter()
                .chain(variables.into_iter().flatten())
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect(),
            ..RenderOptions::default()
        }
    }

    /// The form of a reply, compiled for the model.
    ///
    /// # Errors
    /// The compiler's own.
    pub(crate) fn grammar(&self, form: Option<&Form>) -> anyhow::Result<Option<Grammar>> {
        Ok(form.map(|form| self.engine.grammars()?.compile(form)).transpose()?)
    }

    /// The sampling of a request, with what depends on the model.
    pub(crate) fn sampling(&self, params: &SamplingParams) -> SamplingParams {
        SamplingParams { xtc_special_tokens: self.xtc_special_tokens.clone(), ..params.clone() }
    }
}
