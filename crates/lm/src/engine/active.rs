//! A request that waits or runs: its tokens, its sampler, its text.

use super::draft::{DraftRow, Drafter};
use super::observe::Observer;
use super::root::root;
use super::watch::{Watch, guarded};
use super::{DraftStop, Event, FinishReason, Request, RequestError, RequestId, Stats, Update};
use crate::adapter::Adapter;
use crate::cache::{PrefixTokens, SequenceId};
use crate::grammar::Grammar;
use crate::models::Model;
use crate::prompt_cache::PromptCache;
use crate::sample::{
    BuiltinSampler, KeyStream, LogitsProcessor, ProcessorChain, Sampler, log_softmax, random_seed,
    top_logprobs,
};
use crate::text::{Detokenizer, EosSet, StopMatcher, Tokenizer, check_stops};
use lmx_tensor::kernels::Exec;
use std::cmp::Reverse;
use std::time::Instant;

pub(super) struct Active {
    pub(super) id: RequestId,
    /// The prompt, then what was generated.
    pub(super) tokens: Vec<u32>,
    /// Whether prompt and reply may exceed the model's original context; fixed at submission, so that no
    /// result depends on when a token is run.
    pub(super) long_context: bool,
    pub(super) stats: Stats,
    pub(super) adapter: Option<Adapter>,
    /// Whether its cache is kept for a step when it has finished.
    pub(super) return_cache: bool,
    /// Tokens before the first of `tokens`, which its cache holds and nobody knows.
    unknown: usize,
    prompt_len: usize,
    /// Tokens of the prompt that are the system prompt.
    system_len: usize,
    /// Lengths of `tokens` at which a step is to end.
    segment_ends: Vec<usize>,
    /// The length of `tokens` at which the reply is cut.
    length_max: usize,
    sampler: Box<dyn Sampler>,
    keys: KeyStream,
    processors: ProcessorChain,
    grammar: Option<Grammar>,
    drafter: Option<Drafter>,
    pub(super) observer: Observer,
    /// Room for one row of log-probabilities.
    logprobs: Vec<f32>,
    top_logprobs: usize,
    ignore_eos: bool,
    text: TextOut,
    sequence: SequenceId,
    /// Whether its sequence began with a cache of the caller's, which running the tokens again may not give back bit
    /// by bit: so it is never preempted.
    pinned: bool,
    priority: i32,
    pub(super) watch: Watch,
    state: State,
    submitted: Instant,
    first_token: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    /// Waits again, its blocks given up.
    Preempted,
    Finished,
    Failed,
}

/// A drawn token.
struct Draw {
    token: u32,
    logprob: f32,
    /// The most likely tokens with their log-probabilities, descending.
    top: Vec<(u32, f32)>,
}

/// From tokens to text that may be shown.
struct TextOut {
    detokenizer: Detokenizer,
    stop: StopMatcher,
}

impl TextOut {
    /// Text that the token releases, and whether a stop string ended the reply.
    fn push(&mut self, token: u32) -> (String, bool) {
        let piece = self.detokenizer.add(token);
        self.feed(&piece)
    }

    /// What was held back, at the end of the reply; cut before a stop string that only now is complete.
    fn finish(&mut self) -> (String, bool) {
        let piece = self.detokenizer.finish();
        let (mut text, stopped) = self.feed(&piece);
        if !stopped {
            text.push_str(&self.stop.finish());
        }
        (text, stopped)
    }

    fn feed(&mut self, piece: &str) -> (String, bool) {
        let pushed = self.stop.push(piece);
        (pushed.text, pushed.matched)
    }
}

impl Active {
    pub(super) fn new(
        id: RequestId,
        request: Request,
        cache: Option<&PromptCache>,
        sequence: SequenceId,
        model: &dyn Model,
        tokenizer: &Tokenizer,
        now: Instant,
    ) -> Result<Self, RequestError> {
        let (prompt_len, vocab) = (request.tokens.len(), model.vocab());
        let unknown = cache.filter(|c| c.tokens().is_none()).map_or(0, PromptCache::len);
        if prompt_len == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let context = model.context_length();
        if unknown + prompt_len > context {
            return Err(RequestError::ContextExceeded { prompt: unknown + prompt_len, context });
        }
        if let Some(position) = request.tokens.iter().position(|&t| t as usize >= vocab) {
            return Err(RequestError::Token { position, token: request.tokens[position], vocab });
        }
        if let Some(&end) = request.segment_ends.iter().find(|&&end| end == 0 || end > prompt_len) {
            return Err(RequestError::SegmentEnd { end, prompt: prompt_len });
        }
        request.check_told(unknown, vocab)?;
        check_stops(&request.stop)?;
        request.sampling.validate(vocab)?;
        request.processors.validate(vocab)?;
        if let Some(grammar) = request.grammar.as_ref().filter(|grammar| grammar.vocab() != vocab) {
            return Err(RequestError::GrammarVocabulary { grammar: grammar.vocab(), vocab });
        }
        if let Some(speculation) = &request.speculation {
            speculation.validate()?;
            if !model.states().is_empty() {
                return Err(RequestError::Speculation);
            }
        }
        check_adapter(request.adapter.as_ref(), cache, model)?;
        let mut processors = ProcessorChain::new(&request.processors);
        for processor in request.logits_processors {
            processors.push(processor);
        }
        // 32 bits, so that the seed can be typed and stands exactly in JSON.
        let seed = request.seed.unwrap_or_else(|| random_seed() >> 32);
        let splits = request.sampling.splits_per_token();
        let (most, long_context) = extent(model, unknown + prompt_len, request.max_tokens);
        let length_max = most - unknown;
        if let Some(cache) = cache.filter(|c| unknown > 0 && c.long_context() != long_context) {
            return Err(RequestError::CacheContext { long: cache.long_context() });
        }
        let sampler = match request.sampler {
            Some(sampler) => sampler,
            None => Box::new(BuiltinSampler::new(request.sampling)),
        };
        Ok(Self {
            id,
            tokens: request.tokens,
            long_context,
            stats: Stats {
                prompt_tokens: unknown + prompt_len,
                cached_tokens: unknown,
                seed,
                ..Stats::default()
            },
            adapter: request.adapter,
            return_cache: request.return_cache,
            unknown,
            prompt_len,
            system_len: request.system_tokens,
            segment_ends: request.segment_ends,
            length_max,
            sampler,
            keys: KeyStream::new(seed, splits),
            processors,
            drafter: request.speculation.map(|how| Drafter::new(how, request.grammar.as_ref(), prompt_len)),
            grammar: request.grammar,
            observer: Observer::new(request.prompt_logprobs, request.prompt_rows, request.embedding),
            logprobs: Vec::new(),
            top_logprobs: request.top_logprobs,
            ignore_eos: request.ignore_eos,
            text: TextOut { detokenizer: tokenizer.detokenizer(), stop: StopMatcher::new(&request.stop) },
            sequence,
            pinned: unknown > 0,
            priority: request.priority,
            watch: Watch::new(now, request.queue_deadline, request.stall_deadline),
            state: State::Running,
            submitted: Instant::now(),
            first_token: None,
        })
    }

    /// Begins with `sequence`, which holds the first `cached` tokens: part of a cache of the caller's if `pinned`.
    pub(super) fn start(&mut self, sequence: SequenceId, cached: usize, pinned: bool) {
        self.sequence = sequence;
        self.pinned = pinned;
        // What a preempted request finds again was run for it.
        if self.stats.preemptions == 0 {
            self.stats.cached_tokens = cached;
        }
    }

    /// Its place among the others: higher priorities first, then those that came first.
    pub(super) fn rank(&self) -> (Reverse<i32>, RequestId) {
        (Reverse(self.priority), self.id)
    }

    pub(super) fn priority(&self) -> i32 {
        self.priority
    }

    /// Whether its blocks can be given up: running its tokens again gives the same bits.
    pub(super) fn can_be_preempted(&self) -> bool {
        self.state == State::Running && !self.pinned
    }

    /// Whether what it holds cannot be run again.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// What its sequence began with was run by this engine for the same prompt: running it again gives the same bits.
    pub(super) fn unpin(&mut self) {
        self.pinned = false;
    }

    /// Gives its cache of `held` tokens up for the empty `sequence`; all else stays, so that it goes on as if nothing
    /// had happened once its tokens have been run again.
    pub(super) fn preempt(&mut self, sequence: SequenceId, held: usize) {
        self.sequence = sequence;
        // What has been seen need not be seen again.
        self.segment_ends.retain(|&end| self.unknown + end > held);
        self.state = State::Preempted;
        self.stats.preemptions += usize::from(held > 0);
    }

    pub(super) fn is_preempted(&self) -> bool {
        self.state == State::Preempted
    }

    /// Is one of those that run.
    pub(super) fn is_running(&self) -> bool {
        self.state == State::Running
    }

    pub(super) fn resume(&mut self) {
        self.state = State::Running;
    }

    /// Whether all that it lacks of its cache is the token that was drawn last.
    pub(super) fn is_decoding(&self, held: usize) -> bool {
        self.generating() && self.pending(held).len() == 1
    }

    /// All tokens that are known, with those that nobody knows.
    pub(super) fn total(&self) -> usize {
        self.unknown + self.tokens.len()
    }

    /// Tokens that its cache holds and nobody knows.
    pub(super) fn unknown(&self) -> usize {
        self.unknown
    }

    /// How many of its tokens may be taken from a cache.
    pub(super) fn cacheable(&self) -> usize {
        // At the end of a segment it would not be seen.
        let first = self.segment_ends.iter().min().map_or(usize::MAX, |end| end - 1);
        self.observer.cacheable(self.prompt_len).min(first)
    }

    /// How many tokens may follow the `held` ones of its cache until a segment of the prompt ends.
    pub(super) fn until_segment_end(&self, held: usize) -> usize {
        let held = held - self.unknown;
        self.segment_ends.iter().filter(|&&end| end > held).min().map_or(usize::MAX, |end| end - held)
    }

    /// The tokens that follow the `held` ones of its cache.
    pub(super) fn pending(&self, held: usize) -> &[u32] {
        self.tokens.get(held - self.unknown..).unwrap_or_default()
    }

    /// The length of the prompt, with what nobody knows of it.
    pub(super) fn prompt_total(&self) -> usize {
        self.unknown + self.prompt_len
    }

    /// Its cache.
    pub(super) fn sequence(&self) -> SequenceId {
        self.sequence
    }

    pub(super) fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_len]
    }

    /// Its first `held` tokens, as the prefix cache knows them; `None` if they are not known.
    pub(super) fn prefix(&self, held: usize) -> Option<PrefixTokens<'_>> {
        (self.unknown == 0).then(|| PrefixTokens {
            root: root(self.adapter.as_ref(), self.long_context),
            tokens: &self.tokens[..held],
            system: self.system_len,
            prompt: self.prompt_len,
        })
    }

    /// Whether the first token has been drawn.
    pub(super) fn generating(&self) -> bool {
        self.tokens.len() > self.prompt_len
    }

    /// Whether a token is to be drawn at all.
    pub(super) fn wants_logits(&self) -> bool {
        self.length_max > self.prompt_len
    }

    pub(super) fn finished(&self) -> bool {
        matches!(self.state, State::Finished | State::Failed)
    }

    pub(super) fn failed(&self) -> bool {
        self.state == State::Failed
    }

    pub(super) fn fail(&mut self) {
        self.state = State::Failed;
    }

    /// The most tokens that it can come to have, with those that nobody knows.
    pub(super) fn most_tokens(&self) -> usize {
        self.unknown + self.length_max
    }

    /// How many tokens can be guessed: none that would come after the reply's end.
    pub(super) fn guesses_max(&self) -> usize {
        self.length_max.saturating_sub(self.tokens.len() + 1)
    }

    /// Its guesses, if a draft model makes them.
    pub(super) fn draft_row(&mut self) -> Option<&mut DraftRow> {
        match &mut self.drafter {
            Some(Drafter::Model(row)) => Some(row),
            _ => None,
        }
    }

    /// Changes its guesses of a draft model by its tokens and its grammar.
    pub(super) fn with_draft_row(&mut self, change: impl FnOnce(&mut DraftRow, &[u32], Option<&Grammar>)) {
        if let Some(Drafter::Model(row)) = &mut self.drafter {
            change(row, &self.tokens, self.grammar.as_ref());
        }
    }

    /// Draws what it would draw from `logits` itself and adds it to its guesses and, until they are taken back, to its
    /// tokens. `None` if nothing can be drawn, or nothing would follow.
    pub(super) fn guess(&mut self, exec: &Exec, logits: &mut [f32], eos: &EosSet) -> Option<u32> {
        // The grammar of the guesses stands in for that of the reply.
        self.swap_grammar();
        let drawn = self.draw(exec, logits);
        let complete = self.grammar.as_ref().is_some_and(Grammar::is_complete);
        self.swap_grammar();
        let token = drawn.ok()?.token;
        self.tokens.push(token);
        self.draft_row()?.guesses.push(token);
        let ends = complete || eos.contains(token) && !self.ignore_eos;
        (!ends).then_some(token)
    }

    fn swap_grammar(&mut self) {
        if let Some(Drafter::Model(row)) = &mut self.drafter {
            std::mem::swap(&mut row.grammar, &mut self.grammar);
        }
    }

    /// Makes the guesses guesses again: neither tokens nor processors know of them.
    pub(super) fn take_guesses_back(&mut self) {
        let Some(row) = self.draft_row() else { return };
        row.fresh = true;
        let guesses = row.guesses.len();
        self.tokens.truncate(self.tokens.len() - guesses);
        let back = guarded("logits processor", || {
            self.processors.rollback(guesses);
            Ok(())
        });
        if let (Err(_), Some(row)) = (back, self.draft_row()) {
            row.stopped = true;
            self.stats.draft_stop = Some(DraftStop::Failed);
        }
    }

    /// Guesses the tokens after its last one.
    pub(super) fn draft(&mut self) -> Vec<u32> {
        let most = self.guesses_max();
        let drafter = self.drafter.as_mut().filter(|_| self.tokens.len() > self.prompt_len);
        drafter.map_or_else(Vec::new, |drafter| drafter.propose(&self.tokens, most))
    }

    /// `right` of `guessed` guesses, at least 1, were right.
    pub(super) fn learn(&mut self, guessed: usize, right: usize) {
        if let Some(drafter) = &mut self.drafter {
            drafter.learn(guessed, right);
        }
    }

    /// The last token.
    pub(super) fn last_token(&self) -> Option<u32> {
        self.tokens.last().copied()
    }

    /// Goes on after a step in which the cache came to hold `held` tokens: draws a token from `logits` if the
    /// sequence has caught up, which may be the one that was guessed.
    pub(super) fn advance(
        &mut self,
        exec: &Exec,
        logits: Option<&mut [f32]>,
        held: usize,
        eos: &EosSet,
        guess: Option<u32>,
    ) -> Option<Update> {
        let Some(logits) = logits else {
            let done = !self.wants_logits() && self.pending(held).is_empty();
            return done.then(|| {
                self.state = State::Finished;
                Update::Token(Event {
                    token: None,
                    text: String::new(),
                    logprob: 0.0,
                    top: Vec::new(),
                    from_draft: false,
                    finish: Some(FinishReason::Length),
                    stopped_by: None,
                    stats: self.stats.clone(),
                })
            });
        };
        match self.draw(exec, logits) {
            Ok(draw) => Some(Update::Token(self.emit(draw, eos, guess))),
            Err(error) => {
                self.fail();
                Some(Update::Failed(error))
            }
        }
    }

    /// The grammar, which can find out what may follow while the model runs.
    pub(super) fn grammar(&mut self) -> Option<&mut Grammar> {
        self.grammar.as_mut()
    }

    /// Processors, then the grammar, then normalization, then the sampler with the key of this position.
    fn draw(&mut self, exec: &Exec, logits: &mut [f32]) -> Result<Draw, RequestError> {
        guarded("logits processor", || Ok(self.processors.process(&self.tokens, logits)?))?;
        if let Some(grammar) = &mut self.grammar {
            guarded("grammar", || Ok(grammar.apply(logits)?))?;
        }
        self.logprobs.resize(logits.len(), 0.0);
        log_softmax(exec, logits, &mut self.logprobs)?;
        let key = self.keys.key(self.tokens.len() - self.prompt_len);
        let token = guarded("sampler", || Ok(self.sampler.sample(&self.logprobs, key)))?;
        let Some(&logprob) = self.logprobs.get(token as usize) else {
            return Err(RequestError::SampledToken { token, vocab: self.logprobs.len() });
        };
        if let Some(grammar) = &mut self.grammar {
            guarded("grammar", || Ok(grammar.accept(token)?))?;
        }
        guarded("logits processor", || {
            self.processors.accept(token);
            Ok(())
        })?;
        Ok(Draw { token, logprob, top: top_logprobs(&self.logprobs, self.top_logprobs) })
    }

    fn emit(&mut self, draw: Draw, eos: &EosSet, guess: Option<u32>) -> Event {
        let Draw { token, logprob, top } = draw;
        let from_draft = guess == Some(token);
        self.stats.accepted_tokens += usize::from(from_draft);
        self.tokens.push(token);
        self.count_token();
        let complete = self.grammar.as_ref().is_some_and(Grammar::is_complete);
        let (text, finish) = if eos.contains(token) && (complete || !self.ignore_eos) {
            (self.text.finish().0, Some(FinishReason::Stop))
        } else {
            let (mut text, mut stopped) = self.text.push(token);
            let full = self.tokens.len() >= self.length_max;
            if (full || complete) && !stopped {
                let (rest, stopped_late) = self.text.finish();
                text.push_str(&rest);
                stopped = stopped_late || complete;
            }
            let length = full.then_some(FinishReason::Length);
            (text, if stopped { Some(FinishReason::Stop) } else { length })
        };
        if finish.is_some() {
            self.state = State::Finished;
        }
        let stats = self.stats.clone();
        let stopped_by = self.text.stop.found().map(str::to_owned);
        Event { token: Some(token), text, logprob, top, from_draft, finish, stopped_by, stats }
    }

    fn count_token(&mut self) {
        self.stats.generation_tokens += 1;
        match self.first_token {
            None => {
                self.stats.first_token_seconds = self.submitted.elapsed().as_secs_f64();
                self.first_token = Some(Instant::now());
            }
            Some(first) => self.stats.generation_seconds = first.elapsed().as_secs_f64(),
        }
    }
}

/// The most tokens that so long a prompt and its reply come to have, and whether that is more than the model's original
/// context.
pub(super) fn extent(model: &dyn Model, prompt: usize, max_tokens: Option<usize>) -> (usize, bool) {
    let asked = max_tokens.map_or(usize::MAX, |n| prompt.saturating_add(n));
    // A reply may run until every position of the context is used: the last token needs none.
    let most = asked.min(model.context_length() + 1);
    (most, model.original_context().is_some_and(|original| most > original))
}

/// That a request's adapter is of this model, and the one that its prompt cache was made with.
fn check_adapter(
    adapter: Option<&Adapter>,
    cache: Option<&PromptCache>,
    model: &dyn Model,
) -> Result<(), RequestError> {
    let name = |adapter: &Adapter| adapter.name().to_owned();
    if let Some(adapter) = adapter.filter(|adapter| !adapter.fits(model)) {
        return Err(RequestError::Adapter { name: name(adapter) });
    }
    match cache.map(PromptCache::adapter) {
        Some(made_with) if made_with != adapter => {
            Err(RequestError::CacheAdapter { cache: made_with.map(name), request: adapter.map(name) })
        }
        _ => Ok(()),
    }
}
