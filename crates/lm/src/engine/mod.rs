//! The engine: many requests over one model.
//!
//! A step is three verbs: *schedule* (which sequences advance by how many tokens), *run* (one forward pass over
//! that ragged batch) and *deliver* (sample, match stops, emit, retire). There is no prefill phase and no decode
//! phase: a sequence has tokens that it knows and tokens that the cache holds, and each step lets the second
//! catch up with the first. A request's result does not depend on the others, nor on how its prompt was cut.

mod active;
mod batch;
mod choices;
mod deliver;
mod draft;
mod event;
mod generation;
mod observe;
mod request;
mod root;
mod schedule;
mod watch;

pub use batch::{BatchGenerator, BatchStats};
pub use choices::{Reply, Score, Vote, best, majority_vote};
pub use draft::{DraftError, DraftModel, DraftSpeculation, DraftStop, NgramSpeculation, Speculation};
pub use event::{Event, FinishReason, Stats, Update};
pub use generation::Generation;
pub use observe::{Pooling, PromptLogprobs, PromptToken, RowObserver};
pub use request::{Request, RequestError};
pub use watch::Liveness;

use crate::adapter::Adapter;
use crate::cache::{
    KvError, KvQuantError, KvQuantization, KvStore, KvWindow, PrefixCacheOptions, PrefixDirError,
    PrefixDirOptions, PrefixDirWarning, PrefixStats,
};
use crate::grammar::{Grammar, GrammarError, Grammars};
use crate::models::{Model, StepInputs};
use crate::prompt_cache::{Identity, PromptCache, PromptCacheError, PromptCacheFile};
use crate::text::{EosSet, Tokenizer};
use active::Active;
use draft::Draft;
use lmx_tensor::kernels::attention::KvType;
use root::root;
use schedule::Planned;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use watch::{Clock, guarded};

/// Names a request of an [`Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// How an engine runs.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Most prompt tokens that one step runs, over all sequences (at least 1), beside one token of each sequence that
    /// generates: the longest that a prompt holds the others up.
    pub prefill_step_size: usize,
    /// Most sequences whose prompts are run at the same time (at least 1). They share `prefill_step_size`: higher
    /// priorities first, those of one priority evenly, so that a short prompt need not wait for the end of a long one.
    pub prompt_concurrency: usize,
    /// Most sequences that advance together (at least 1); later ones wait, in the order of their priorities and then of
    /// their submission, and none overtakes one that waits for memory.
    pub max_running: usize,
    /// How keys and values are stored.
    pub kv_type: KvType,
    /// What queries see of each layer that would see everything; `None` for everything.
    pub kv_window: Option<KvWindow>,
    /// From which position on keys and values are quantized, and how; `None` for never.
    pub kv_quantization: Option<KvQuantization>,
    /// Most bytes of keys and values. When they are used up, the sequence of the lowest priority that came last is
    /// preempted: it gives its blocks up, waits, runs its tokens again and goes on with the same result.
    pub kv_memory: usize,
    /// How much is kept of what has been run, so that a prompt that begins like an earlier one continues from
    /// there; `None` for nothing. Counts against `kv_memory`, and gives way to what runs.
    pub prefix_cache: Option<PrefixCacheOptions>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            prefill_step_size: 2048,
            prompt_concurrency: 8,
            max_running: 32,
            kv_type: KvType::F16,
            kv_window: None,
            kv_quantization: None,
            kv_memory: usize::MAX,
            prefix_cache: None,
        }
    }
}

impl EngineOptions {
    /// The empty store of a model's keys and values.
    fn store(&self, model: &dyn Model, ty: KvType, memory: usize) -> Result<KvStore, KvQuantError> {
        let spec = crate::models::kv_spec(model, ty);
        let spec = match self.kv_window {
            Some(window) => spec.bounded(window),
            None => spec,
        };
        let spec = match self.kv_quantization {
            Some(how) => spec.quantized(how)?,
            None => spec,
        };
        let kv = KvStore::new(spec, memory);
        Ok(match self.prefix_cache {
            Some(limits) => kv.with_prefixes(limits),
            None => kv,
        })
    }
}

/// Runs requests over one model.
pub struct Engine {
    model: Box<dyn Model>,
    tokenizer: Arc<Tokenizer>,
    eos: EosSet,
    options: EngineOptions,
    kv: KvStore,
    /// In the order of their ranks, like those that run.
    waiting: VecDeque<Active>,
    running: Vec<Active>,
    /// What requests left that finished in the last step.
    left: Vec<(RequestId, PromptCache)>,
    next_id: u64,
    clock: Clock,
    draft: Option<Draft>,
}

impl Engine {
    /// An engine over `model`.
    ///
    /// # Errors
    /// [`KvQuantError::HeadDim`] if keys and values of this model cannot be quantized as the options say.
    pub fn new(
        model: Box<dyn Model>,
        tokenizer: Arc<Tokenizer>,
        eos: EosSet,
        options: EngineOptions,
    ) -> Result<Self, KvQuantError> {
        let kv = options.store(&*model, options.kv_type, options.kv_memory)?;
        let (waiting, running) = (VecDeque::new(), Vec::new());
        let clock = Clock::new(Box::new(Instant::now));
        let (left, draft) = (Vec::new(), None);
        Ok(Self { model, tokenizer, eos, options, kv, waiting, running, left, next_id: 0, clock, draft })
    }

    /// The same engine with a draft model, which guesses for the requests that ask for it ([`Speculation::Draft`]).
    ///
    /// # Errors
    /// [`DraftError`]: a model with recurrent state, or tokenizers that differ.
    pub fn with_draft(mut self, draft: DraftModel) -> Result<Self, DraftError> {
        self.draft = Some(Draft::new(draft, &*self.model, &self.tokenizer, &self.options)?);
        Ok(self)
    }

    /// The draft model's keys and values, if there is one.
    #[must_use]
    pub fn draft_kv(&self) -> Option<&KvStore> {
        self.draft.as_ref().map(Draft::kv)
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The tokens that end a reply.
    #[must_use]
    pub fn eos(&self) -> &EosSet {
        &self.eos
    }

    /// Most requests that run at the same time.
    pub(crate) fn max_running(&self) -> usize {
        self.options.max_running.max(1)
    }

    /// Compiles grammars for the requests of this engine; takes tens of milliseconds for a large vocabulary.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`].
    pub fn grammars(&self) -> Result<Grammars, GrammarError> {
        Grammars::new(&self.tokenizer, &self.eos, self.model.vocab())
    }

    /// The keys and values of all sequences.
    #[must_use]
    pub fn kv(&self) -> &KvStore {
        &self.kv
    }

    /// What the prefix cache holds and has done.
    #[must_use]
    pub fn prefix_stats(&self) -> PrefixStats {
        self.kv.prefix_stats()
    }

    /// Keeps what requests leave in a folder too, where later processes find it; `identity` says of which model. Without
    /// [`EngineOptions::prefix_cache`] there is one from now on, of the default limits.
    ///
    /// # Errors
    /// [`PrefixDirError`] if the folder cannot be used.
    pub fn keep_prefixes_in(
        &mut self,
        options: PrefixDirOptions,
        identity: &Identity,
    ) -> Result<(), PrefixDirError> {
        self.kv.keep_prefixes_in(options, &identity.of_values())
    }

    /// What went wrong with the folder of [`Engine::keep_prefixes_in`] since this was last asked. Requests go on as if
    /// the folder were empty.
    pub fn take_prefix_warnings(&mut self) -> Vec<PrefixDirWarning> {
        self.kv.take_prefix_warnings()
    }

    /// How many of a prompt's tokens a request with `adapter` would find in the prefix cache, its folder aside.
    #[must_use]
    pub fn cached_tokens(&self, prompt: &[u32], adapter: Option<&Adapter>) -> usize {
        let stored = |long| self.kv.stored_prefix(root(adapter, long), prompt, prompt.len());
        stored(false).max(stored(true))
    }

    /// Forgets what requests left for others, except in a folder.
    pub fn clear_prefixes(&mut self) {
        self.kv.clear_prefixes();
        if let Some(draft) = &mut self.draft {
            draft.clear_prefixes();
        }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`RequestError`] naming the field; the other requests are not touched.
    pub fn submit(&mut self, mut request: Request) -> Result<RequestId, RequestError> {
        if self.clock.is_closing() {
            return Err(RequestError::Shutdown);
        }
        if matches!(request.speculation, Some(Speculation::Draft(_))) && self.draft.is_none() {
            return Err(RequestError::NoDraft);
        }
        self.encode(&mut request)?;
        let now = self.clock.now();
        let id = RequestId(self.next_id);
        let cache = request.cache.take();
        if cache.is_none() {
            self.check_fits(request.tokens.len())?;
        }
        let sequence = match &cache {
            Some(cache) => cache.fork_into(&mut self.kv).map_err(RequestError::Cache)?,
            None => self.kv.add(),
        };
        match Active::new(id, request, cache.as_ref(), sequence, &*self.model, &self.tokenizer, now) {
            Ok(mut active) => {
                self.next_id += 1;
                if let Some(cache) = cache {
                    self.begin_from(&mut active, &cache);
                }
                if self.is_idle() {
                    self.clock.heard = now;
                }
                self.enqueue(active);
                Ok(id)
            }
            Err(error) => {
                self.kv.remove(sequence);
                Err(error)
            }
        }
    }

    /// Cuts a request's sequence, which holds what `cache` does, to the prefix that the prompt has in common with it.
    fn begin_from(&mut self, active: &mut Active, cache: &PromptCache) {
        let Some(known) = cache.tokens() else { return };
        let sequence = active.sequence();
        let common = known.iter().zip(active.prompt()).take_while(|(a, b)| a == b).count();
        let common = if cache.long_context() == active.long_context { common } else { 0 };
        // The last prompt token is run again where its logits are needed.
        let common = common.min(active.prompt().len() - usize::from(active.wants_logits()));
        let common = common.min(active.cacheable());
        match self.kv.trim(sequence, known.len() - common) {
            Ok(()) => active.start(sequence, common, common > 0),
            // A window has dropped what the shorter one would need: all of it is run again.
            Err(_) => {
                self.kv.remove(sequence);
                active.start(self.kv.add(), 0, false);
            }
        }
    }

    /// What the prefix cache holds of a sequence that was run with `adapter` and begins with `tokens`: perhaps less than
    /// all of them, perhaps nothing. It shares the engine's budget.
    ///
    /// # Errors
    /// None that can happen: the sequence exists.
    pub fn prompt_cache(
        &mut self,
        tokens: &[u32],
        adapter: Option<&Adapter>,
    ) -> Result<PromptCache, KvError> {
        let stored = |long| self.kv.stored_prefix(root(adapter, long), tokens, tokens.len());
        let long = stored(true) > stored(false);
        let found = self.kv.add_prefix(root(adapter, long), tokens, tokens.len());
        let (sequence, len) = found.unwrap_or_else(|| (self.kv.add(), 0));
        let known = tokens.get(..len).unwrap_or_default().to_vec();
        let cache = PromptCache::of(&self.kv, sequence, Some(known), long);
        self.kv.remove(sequence);
        Ok(cache?.made_with(adapter.cloned()))
    }

    /// Reads a prompt cache into the engine's budget, for requests with `adapter`.
    ///
    /// # Errors
    /// [`PromptCacheError`] naming what does not fit; the adapter that the file was made with, if it says so.
    pub fn load_prompt_cache(
        &self,
        file: &PromptCacheFile,
        adapter: Option<&Adapter>,
    ) -> Result<PromptCache, PromptCacheError> {
        file.load_with(self.kv.spec(), self.kv.budget(), adapter)
    }

    /// Ends a request now; nothing more is heard of it. Unknown ids are ignored: the request may just have
    /// finished.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(active) =
            self.waiting.iter().position(|a| a.id == id).and_then(|i| self.waiting.remove(i))
        {
            self.kv.remove(active.sequence());
        }
        if let Some(index) = self.running.iter().position(|a| a.id == id) {
            let active = self.running.remove(index);
            self.retire(active);
        }
    }

    /// What a request that has not ended cost so far.
    #[must_use]
    pub fn stats(&self, id: RequestId) -> Option<Stats> {
        self.running.iter().chain(&self.waiting).find(|a| a.id == id).map(|a| a.stats.clone())
    }

    /// Whether no request is waiting or running.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Runs one request alone and streams its events; dropping the stream cancels it.
    ///
    /// # Errors
    /// [`RequestError`] naming the field.
    pub fn generate(&mut self, request: Request) -> Result<Generation<'_>, RequestError> {
        let id = self.submit(request)?;
        Ok(Generation::new(self, id))
    }

    /// Advances every sequence that can advance. Returns what happened, in order, nothing if idle. A sequence that
    /// generates gets a token in every step, unless it is preempted.
    pub fn step(&mut self) -> Vec<(RequestId, Update)> {
        let mut updates = Vec::new();
        self.left.clear();
        self.expire(&mut updates);
        self.admit();
        if let Some(draft) = &mut self.draft {
            draft.propose(&mut self.running, &self.kv, self.options.prefill_step_size, &self.eos);
        }
        let (inputs, plan) = self.schedule(&mut updates);
        if !plan.is_empty() {
            let start = Instant::now();
            self.run(&inputs, &plan, &mut updates);
            let decodes = plan.iter().all(|planned| planned.rows.len() == planned.count);
            if let Some(draft) = self.draft.as_mut().filter(|_| decodes) {
                draft.costs.add_target(inputs.tokens.len(), start.elapsed());
            }
        }
        self.settle();
        if updates.iter().any(|(_, update)| matches!(update, Update::Token(_))) {
            self.clock.heard = self.clock.now();
        }
        updates
    }

    /// One forward pass, then samples for the sequences that have caught up.
    fn run(&mut self, inputs: &StepInputs, plan: &[Planned], updates: &mut Vec<(RequestId, Update)>) {
        let rows: Vec<usize> = plan.iter().flat_map(|p| p.rows.clone()).collect();
        let drawing = |index: usize| plan.iter().any(|p| p.index == index && !p.rows.is_empty());
        let drawing = self.running.iter_mut().enumerate().filter(|&(index, _)| drawing(index));
        let grammars: Vec<&mut Grammar> = drawing.filter_map(|(_, active)| active.grammar()).collect();
        let (model, kv) = (&*self.model, &mut self.kv);
        let result = std::thread::scope(|scope| {
            if !grammars.is_empty() {
                // What fails here fails again where the request is the one to be told.
                let prepare = |grammar: &mut Grammar| drop(guarded("grammar", || Ok(grammar.prepare()?)));
                scope.spawn(move || grammars.into_iter().for_each(prepare));
            }
            let hidden = model.hidden(inputs, kv)?;
            let head = |rows: &[usize]| model.head(&hidden, rows, &inputs.adapters);
            let logits = if rows.is_empty() { None } else { Some(head(&rows)?) };
            Ok((hidden, logits))
        });
        match result {
            Ok((hidden, logits)) => {
                self.observe(&hidden, inputs, plan, updates);
                self.deliver(plan, logits, updates);
            }
            Err(error) => {
                // The batch cannot be run at all: the error belongs to every row of it.
                let error = Arc::new(error);
                for planned in plan {
                    let active = &mut self.running[planned.index];
                    active.fail();
                    let error = RequestError::Forward(Arc::clone(&error));
                    updates.push((active.id, Update::Failed(error)));
                }
            }
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("options", &self.options)
            .field("waiting", &self.waiting.len())
            .field("running", &self.running.len())
            .finish_non_exhaustive()
    }
}
