//! [`Scorer`]: the log-probabilities of given tokens, through the engine.

use crate::adapter::Adapter;
use crate::engine::{
    Engine, PromptLogprobs, PromptToken, Request, RequestError, RequestId, RowObserver, Update,
};
use crate::sample::Key;
use crate::text::TokenizerError;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Tokens, of which all from the index `from` on are scored, each given those before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What the model reads. The last token need not be run, so there may be one more than the context has room for.
    pub tokens: Vec<u32>,
    /// The first token to score, at least 1: of token 0 nothing can be told.
    pub from: usize,
}

/// Why something cannot be scored.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    /// A continuation without tokens has no likelihood.
    #[error("the continuation is empty: it must have at least one token")]
    EmptyContinuation,
    /// A text without tokens has none either.
    #[error("the text is empty: it must have at least one token")]
    EmptyText,
    /// The first token of a text needs one before it.
    #[error("nothing can stand before the first token: the tokenizer has neither a BOS nor an EOS token")]
    NoPrefixToken,
    /// No context could be kept.
    #[error(
        "the continuation has {tokens} tokens, more than the {max_length} that the model is given at a time"
    )]
    ContinuationTooLong {
        /// Its tokens.
        tokens: usize,
        /// The scorer's [maximum length](Scorer::with_max_length).
        max_length: usize,
    },
    /// The model cannot read as much.
    #[error("max_length is {asked}; allowed is 1 to {context}, the model's context")]
    MaxLength {
        /// What was asked for.
        asked: usize,
        /// The model's context length.
        context: usize,
    },
    /// The span has nothing to score, or nothing before what is to be scored.
    #[error(
        "the span of {tokens} tokens is to be scored from token {from} on; allowed is 1 to the last token's index"
    )]
    Span {
        /// Tokens of the span.
        tokens: usize,
        /// Its `from`.
        from: usize,
    },
    /// The text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The engine refused the tokens, or the model computed garbage.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The caller wanted no more.
    #[error("stopped before it was scored")]
    Stopped,
}

/// What became of one span.
pub(super) type Scored = Result<Vec<PromptToken>, ScoreError>;

/// Is shown the whole distribution at each scored token: the span's place, the token's index in it, and the natural
/// log-probabilities of all tokens.
pub(super) type Rows = Arc<dyn Fn(usize, usize, &[f32]) + Send + Sync>;

/// Scores texts with the model of an engine. How many are run at a time is the engine's
/// [`max_running`](crate::engine::EngineOptions::max_running); no result depends on it. With a
/// [prefix cache](crate::engine::EngineOptions::prefix_cache) a context that several continuations share is run once.
#[derive(Debug)]
pub struct Scorer<'a> {
    pub(super) engine: &'a mut Engine,
    adapter: Option<Adapter>,
    max_length: usize,
    bos: bool,
}

impl<'a> Scorer<'a> {
    /// Scores with the model as it is, given as much context as it was made for.
    pub fn new(engine: &'a mut Engine) -> Self {
        let max_length = engine.model().context_length();
        Self { engine, adapter: None, max_length, bos: true }
    }

    /// Changes the model's weights by an adapter.
    #[must_use]
    pub fn with_adapter(self, adapter: Option<Adapter>) -> Self {
        Self { adapter, ..self }
    }

    /// Has the model read at most `max_length` tokens at a time (so that one more can be scored).
    ///
    /// # Errors
    /// [`ScoreError::MaxLength`]: 0, or more than the model's context.
    pub fn with_max_length(self, max_length: usize) -> Result<Self, ScoreError> {
        let context = self.engine.model().context_length();
        if !(1..=context).contains(&max_length) {
            return Err(ScoreError::MaxLength { asked: max_length, context });
        }
        Ok(Self { max_length, ..self })
    }

    /// Whether BOS is put before texts where the tokenizer does that (the default). Texts that a chat template made
    /// have theirs already.
    #[must_use]
    pub fn with_bos(self, bos: bool) -> Self {
        Self { bos, ..self }
    }

    /// Most tokens that the model reads at a time.
    #[must_use]
    pub fn max_length(&self) -> usize {
        self.max_length
    }

    /// What stands before a text that would otherwise begin with nothing: BOS, or EOS where there is no BOS, as in
    /// lm-evaluation-harness.
    #[must_use]
    pub fn prefix_token(&self) -> Option<u32> {
        let tokenizer = self.engine.tokenizer();
        tokenizer.bos().or_else(|| tokenizer.eos())
    }

    /// The tokens of a text, without what the tokenizer puts behind it.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ScoreError> {
        let tokenizer = self.engine.tokenizer();
        let mut ids = tokenizer.encode(text, false)?;
        let bos = tokenizer.bos().filter(|_| self.bos && tokenizer.adds_bos());
        ids.splice(0..0, bos.filter(|bos| ids.first() != Some(bos)));
        Ok(ids)
    }

    /// Scores spans, as many at a time as the engine runs. `each` gets the place of each span with its scored tokens,
    /// in the order in which they come, and says whether to go on. What cannot be scored has an error of its own, and
    /// touches no other.
    pub fn score(
        &mut self,
        spans: impl IntoIterator<Item = Span>,
        each: &mut dyn FnMut(usize, Result<Vec<PromptToken>, ScoreError>) -> ControlFlow<()>,
    ) {
        let mut queue = Queue::new(spans.into_iter(), None);
        while !queue.is_done() {
            for (place, scored) in queue.step(self) {
                if each(place, scored).is_break() {
                    return queue.stop(self);
                }
            }
        }
    }

    /// The last token is "drawn" by a sampler that knows it: so it is scored without being run.
    fn submit(&mut self, place: usize, span: Span, rows: Option<Rows>) -> Result<RequestId, ScoreError> {
        let Span { mut tokens, from } = span;
        let (len, last) = (tokens.len(), tokens.pop());
        let Some(last) = last.filter(|_| (1..len).contains(&from)) else {
            return Err(ScoreError::Span { tokens: len, from });
        };
        let (of_prompt, of_last) = (rows.clone(), rows);
        let prompt_rows = of_prompt.map(|rows| -> Box<dyn RowObserver> {
            Box::new(move |index: usize, logprobs: &[f32]| rows(place, index, logprobs))
        });
        let sampler = move |logprobs: &[f32], _: Key| {
            if let Some(rows) = &of_last {
                rows(place, len - 1, logprobs);
            }
            last
        };
        let prompt_logprobs = (from < tokens.len()).then_some(PromptLogprobs { from, top: 0 });
        Ok(self.engine.submit(Request {
            prompt_logprobs,
            prompt_rows: prompt_rows.filter(|_| prompt_logprobs.is_some()),
            sampler: Some(Box::new(sampler)),
            top_logprobs: 1,
            ignore_eos: true,
            adapter: self.adapter.clone(),
            ..Request::new(tokens, 1)
        })?)
    }

    /// [`Scorer::score`], with the results in the order of the spans. `progress` is told how many are done.
    pub(super) fn score_all(
        &mut self,
        spans: Vec<Span>,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Vec<Scored> {
        let mut all: Vec<Scored> = spans.iter().map(|_| Err(ScoreError::Stopped)).collect();
        let mut done = 0;
        self.score(spans, &mut |place, scored| {
            if let Some(slot) = all.get_mut(place) {
                *slot = scored;
            }
            done += 1;
            progress(done)
        });
        all
    }
}

/// Spans on their way through an engine.
pub(super) struct Queue<I> {
    spans: std::iter::Enumerate<I>,
    open: BTreeMap<RequestId, (usize, Vec<PromptToken>)>,
    rows: Option<Rows>,
    exhausted: bool,
}

impl<I: Iterator<Item = Span>> Queue<I> {
    pub(super) fn new(spans: I, rows: Option<Rows>) -> Self {
        Self { spans: spans.enumerate(), open: BTreeMap::new(), rows, exhausted: false }
    }

    /// Whether all has been told of all spans.
    pub(super) fn is_done(&self) -> bool {
        self.exhausted && self.open.is_empty()
    }

    /// One step of the engine. Returns the spans that have ended, by their places.
    pub(super) fn step(&mut self, scorer: &mut Scorer<'_>) -> Vec<(usize, Scored)> {
        let mut ended = Vec::new();
        // Those that wait are what takes the places of those that end.
        let ahead = 2 * scorer.engine.max_running();
        while self.open.len() < ahead && !self.exhausted {
            match self.spans.next() {
                None => self.exhausted = true,
                Some((place, span)) => match scorer.submit(place, span, self.rows.clone()) {
                    Ok(id) => drop(self.open.insert(id, (place, Vec::new()))),
                    Err(error) => ended.push((place, Err(error))),
                },
            }
        }
        for (id, update) in scorer.engine.step() {
            let Some((_, tokens)) = self.open.get_mut(&id) else { continue };
            let error = match update {
                Update::Prompt(told) => {
                    tokens.extend(told);
                    continue;
                }
                Update::Token(event) => {
                    let greedy = event.top.first().is_none_or(|&(_, best)| best <= event.logprob);
                    let index = event.stats.prompt_tokens;
                    let (token, logprob) = (event.token.unwrap_or_default(), event.logprob);
                    tokens.push(PromptToken { index, token, logprob, greedy, top: Vec::new() });
                    None
                }
                Update::Failed(error) => Some(error),
                Update::Prefill { .. } | Update::Embedding(_) => continue,
            };
            if let Some((place, tokens)) = self.open.remove(&id) {
                ended.push((place, error.map_or(Ok(tokens), |error| Err(error.into()))));
            }
        }
        ended
    }

    /// Ends what is under way.
    pub(super) fn stop(&self, scorer: &mut Scorer<'_>) {
        self.open.keys().for_each(|&id| scorer.engine.cancel(id));
    }
}
