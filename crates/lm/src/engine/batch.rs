//! Many requests that come and go, in the hands of a caller who steps: mlx-lm's `BatchGenerator` over the engine.

use super::active::Active;
use super::{Engine, Event, Request, RequestError, RequestId, Stats, Update};
use crate::prompt_cache::PromptCache;
use std::collections::BTreeMap;
use std::time::Instant;

/// Requests that join and leave between the steps of an engine. Each step that it iterates over returns what happened
/// to whom; the end of the iteration only means that nothing is left to do, until more is inserted. Dropping it removes
/// what it inserted.
///
/// A cache can be taken after any step; [`BatchGenerator::insert_segments`] has steps end where parts of a prompt do.
///
/// ```no_run
/// # fn run(mut engine: lmx::engine::Engine) -> Result<(), Box<dyn std::error::Error>> {
/// use lmx::engine::{BatchGenerator, Request, Update};
///
/// let mut batch = BatchGenerator::new(&mut engine);
/// let first = batch.insert(Request::from_text("The capital of France is", 40))?;
/// let second = batch.insert(Request { return_cache: true, ..Request::new(vec![1, 2, 3], 40) })?;
/// while let Some(updates) = batch.next() {
///     for (id, update) in updates {
///         let Update::Token(event) = update else { continue };
///         if id == first && event.text.contains('.') {
///             batch.remove(first);
///         }
///         if id == second && event.finish.is_some() {
///             let cache = batch.extract_cache(second);
///         }
///     }
/// }
/// println!("{:?}", batch.stats());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BatchGenerator<'a> {
    engine: &'a mut Engine,
    /// What those that have not ended cost so far.
    open: BTreeMap<RequestId, Stats>,
    /// Without those.
    ended: BatchStats,
}

/// What the requests of a [`BatchGenerator`] cost so far, those that have failed or were removed included.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchStats {
    /// Requests inserted.
    pub requests: usize,
    /// Tokens of their prompts.
    pub prompt_tokens: usize,
    /// Those of them whose keys and values were already held.
    pub cached_tokens: usize,
    /// Tokens generated, end-of-sequence tokens included.
    pub generation_tokens: usize,
    /// Tokens that were guessed.
    pub drafted_tokens: usize,
    /// Guesses that were right.
    pub accepted_tokens: usize,
    /// How often a request gave its keys and values up to others.
    pub preemptions: usize,
    /// Steps run.
    pub steps: usize,
    /// Time spent in them, in seconds.
    pub seconds: f64,
}

impl BatchStats {
    fn add(&mut self, stats: &Stats) {
        self.requests += 1;
        self.prompt_tokens += stats.prompt_tokens;
        self.cached_tokens += stats.cached_tokens;
        self.generation_tokens += stats.generation_tokens;
        self.drafted_tokens += stats.drafted_tokens;
        self.accepted_tokens += stats.accepted_tokens;
        self.preemptions += stats.preemptions;
    }

    /// Prompt tokens run per second of all steps, those that generate included (0 before the first).
    #[must_use]
    pub fn prompt_tps(&self) -> f64 {
        let run = self.prompt_tokens.saturating_sub(self.cached_tokens);
        if self.seconds > 0.0 { run as f64 / self.seconds } else { 0.0 }
    }

    /// Tokens generated per second of all steps, those that run prompts included (0 before the first).
    #[must_use]
    pub fn generation_tps(&self) -> f64 {
        if self.seconds > 0.0 { self.generation_tokens as f64 / self.seconds } else { 0.0 }
    }
}

impl<'a> BatchGenerator<'a> {
    /// A handle to an engine, whose requests go on beside those that are inserted.
    pub fn new(engine: &'a mut Engine) -> Self {
        Self { engine, open: BTreeMap::new(), ended: BatchStats::default() }
    }

    /// The engine, for what it tells: its tokenizer, what its keys and values take up, whether it gets on.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        self.engine
    }

    /// Queues a request, with its own options.
    ///
    /// # Errors
    /// [`RequestError`] naming the field; the other requests are not touched.
    pub fn insert(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let id = self.engine.submit(request)?;
        self.open.insert(id, self.engine.stats(id).unwrap_or_default());
        Ok(id)
    }

    /// Queues a request whose prompt comes in parts, after its own tokens if it has any: the step that runs the last token
    /// of a part runs nothing of the next one, so that [`BatchGenerator::extract_cache`] gives what the parts so far left.
    /// Empty parts count for nothing.
    ///
    /// # Errors
    /// As [`BatchGenerator::insert`].
    pub fn insert_segments(
        &mut self,
        segments: &[Vec<u32>],
        mut request: Request,
    ) -> Result<RequestId, RequestError> {
        for segment in segments {
            request.segment_ends.extend(Some(request.tokens.len()).filter(|&end| end > 0));
            request.tokens.extend(segment);
        }
        self.insert(request)
    }

    /// Ends a request now and frees what it holds; nothing more is heard of it. Unknown ids are ignored: the request may
    /// just have finished.
    pub fn remove(&mut self, id: RequestId) {
        self.engine.cancel(id);
        self.end(id);
    }

    /// [`Engine::extract_cache`].
    pub fn extract_cache(&mut self, id: RequestId) -> Option<PromptCache> {
        self.engine.extract_cache(id)
    }

    /// What all requests cost until the last step.
    #[must_use]
    pub fn stats(&self) -> BatchStats {
        let mut sum = self.ended.clone();
        self.open.values().for_each(|stats| sum.add(stats));
        sum
    }

    fn end(&mut self, id: RequestId) {
        if let Some(stats) = self.open.remove(&id) {
            self.ended.add(&stats);
        }
    }

    fn note(&mut self, id: RequestId, update: &Update) {
        match update {
            Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
            Update::Token(Event { stats, finish, .. }) => {
                if let Some(open) = self.open.get_mut(&id) {
                    open.clone_from(stats);
                }
                if finish.is_some() {
                    self.end(id);
                }
            }
            Update::Failed(_) => self.end(id),
        }
    }
}

impl Iterator for BatchGenerator<'_> {
    type Item = Vec<(RequestId, Update)>;

    /// Runs a step; `None` if no request waits or runs.
    fn next(&mut self) -> Option<Self::Item> {
        if self.engine.is_idle() {
            return None;
        }
        let started = Instant::now();
        let updates = self.engine.step();
        self.ended.steps += 1;
        self.ended.seconds += started.elapsed().as_secs_f64();
        updates.iter().for_each(|(id, update)| self.note(*id, update));
        Some(updates)
    }
}

impl Drop for BatchGenerator<'_> {
    fn drop(&mut self) {
        self.open.keys().for_each(|&id| self.engine.cancel(id));
    }
}

impl Engine {
    /// The keys and values of a request that waits or runs, or of one with [`Request::return_cache`] that finished in the
    /// last step (once). They are shared, not copied, count against the engine's budget until they are dropped, and are
    /// those of all its tokens but the ones that are still to be run, like the last that was drawn. `None` if there is no
    /// such request.
    pub fn extract_cache(&mut self, id: RequestId) -> Option<PromptCache> {
        let left = self.left_by(id);
        left.or_else(|| {
            let active = self.running.iter().chain(&self.waiting).find(|active| active.id == id)?;
            self.cache_of(active)
        })
    }

    /// What a request left that finished in the last step.
    pub(super) fn left_by(&mut self, id: RequestId) -> Option<PromptCache> {
        let place = self.left.iter().position(|(left, _)| *left == id)?;
        Some(self.left.swap_remove(place).1)
    }

    /// Keeps the cache of a request that has finished, if that was asked for.
    pub(super) fn keep_cache(&mut self, active: &Active) {
        if active.return_cache && !active.failed() {
            self.left.extend(self.cache_of(active).map(|cache| (active.id, cache)));
        }
    }

    fn cache_of(&self, active: &Active) -> Option<PromptCache> {
        let sequence = active.sequence();
        let known = active.prefix(self.kv.len(sequence)).map(|prefix| prefix.tokens.to_vec());
        let cache = PromptCache::of(&self.kv, sequence, known, active.long_context);
        // The sequence exists, and the store is of the same form.
        cache.ok().map(|cache| cache.made_with(active.adapter.clone()))
    }

    /// Puts the tokens of a prompt that is a text in its place.
    pub(super) fn encode(&self, request: &mut Request) -> Result<(), RequestError> {
        let Some(text) = request.text.take() else { return Ok(()) };
        if !request.tokens.is_empty() {
            return Err(RequestError::TextAndTokens { tokens: request.tokens.len() });
        }
        request.tokens = self.tokenizer.encode(&text, true)?;
        Ok(())
    }
}
