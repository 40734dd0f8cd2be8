//! What goes into the engine.

use super::{Pooling, PromptLogprobs, RowObserver, Speculation};
use crate::adapter::Adapter;
use crate::grammar::{Grammar, GrammarError};
use crate::prompt_cache::PromptCache;
use crate::sample::{
    LogitsProcessor, ParamError, ProcessorParams, SampleError, Sampler, SamplingParams, require,
};
use std::time::Duration;

/// One request: tokens and how to continue them.
#[derive(Default)]
pub struct Request {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// The prompt as a text, in place of `tokens`, which must then be empty. It is encoded with the special tokens that
    /// the tokenizer puts around a text.
    pub text: Option<String>,
    /// How many of the prompt's first tokens are a system prompt, which the prefix cache keeps longest, at most all; 0 if
    /// that is not known.
    pub system_tokens: usize,
    /// Where parts of the prompt end, as numbers of its tokens, each from 1 to all of them: a step ends at each, so that
    /// [`super::Engine::extract_cache`] gives just what came before ([`super::Update::Prefill`] tells of it). What the
    /// prefix cache holds beyond the first of them is run again.
    pub segment_ends: Vec<usize>,
    /// What to begin from. If its tokens are known, `tokens` is the whole prompt, of which it saves the longest
    /// common prefix; if not, the prompt is what it holds and then `tokens`.
    pub cache: Option<PromptCache>,
    /// Most tokens to generate; `None` means until the context is full, 0 means to run the prompt only.
    pub max_tokens: Option<usize>,
    /// Temperature and filters of the built-in sampler.
    pub sampling: SamplingParams,
    /// Penalties and biases.
    pub processors: ProcessorParams,
    /// Texts that end the reply; they are not part of it.
    pub stop: Vec<String>,
    /// Where the draws come from; `None` picks one, which [`super::Stats`] reports.
    pub seed: Option<u64>,
    /// The form of the reply, compiled for this model's vocabulary. It acts after the logits processors, so that all
    /// log-probabilities are those among the tokens that it allows.
    pub grammar: Option<Grammar>,
    /// Guesses of the tokens that follow; they change how fast the reply comes, never what it is.
    pub speculation: Option<Speculation>,
    /// What changes the model's weights for this request; loaded for the engine's model.
    pub adapter: Option<Adapter>,
    /// Keep the cache when the request has finished: for [`super::Engine::extract_cache`] until the next step, or in the
    /// [`super::Reply`].
    pub return_cache: bool,
    /// How many of the most likely tokens each event lists, at most all.
    pub top_logprobs: usize,
    /// What is to be told of the prompt's own tokens. They are run even where a cache holds them.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Is shown the whole distribution at each token that `prompt_logprobs` tells of, which must be given too.
    pub prompt_rows: Option<Box<dyn RowObserver>>,
    /// One vector for the whole prompt; most useful with `max_tokens` 0.
    pub embedding: Option<Pooling>,
    /// Generate past end-of-sequence tokens. A reply with a grammar ends with it nevertheless.
    pub ignore_eos: bool,
    /// Higher ones are admitted first, run their prompts first and are preempted last; among equal ones those that were
    /// submitted first.
    pub priority: i32,
    /// The longest time from submission until the request is admitted to the batch for the first time; after that it
    /// fails. `None` for any.
    pub queue_deadline: Option<Duration>,
    /// The longest time without progress once it was admitted (no prompt token run and no token delivered, preempted or
    /// not); after that it fails, and what was delivered stands. `None` for any.
    pub stall_deadline: Option<Duration>,
    /// The caller's own sampler, in place of the built-in one.
    pub sampler: Option<Box<dyn Sampler>>,
    /// The caller's own processors, run after the built-in ones.
    pub logits_processors: Vec<Box<dyn LogitsProcessor>>,
}

impl Request {
    /// A greedy request of at most `max_tokens` tokens.
    #[must_use]
    pub fn new(tokens: Vec<u32>, max_tokens: usize) -> Self {
        Self { tokens, max_tokens: Some(max_tokens), ..Self::default() }
    }

    /// A greedy request of at most `max_tokens` tokens that continues a text.
    #[must_use]
    pub fn from_text(text: impl Into<String>, max_tokens: usize) -> Self {
        Self { text: Some(text.into()), ..Self::new(Vec::new(), max_tokens) }
    }

    /// That the prompt, which follows `unknown` tokens that nobody knows, has the parts that it is said to have, and that what
    /// is to be told of tokens can be told.
    pub(super) fn check_told(&self, unknown: usize, vocab: usize) -> Result<(), ParamError> {
        let at_most = |field, value, most: usize, what: &str| {
            require(field, value, value <= most, &format!("an integer from 0 to {most}, {what}"))
        };
        let (prompt, tokens) = (self.tokens.len(), "the prompt's number of tokens");
        at_most("system_tokens", self.system_tokens, prompt, tokens)?;
        at_most("top_logprobs", self.top_logprobs, vocab, "the vocabulary's size")?;
        match self.prompt_logprobs {
            Some(asked) => {
                at_most("prompt_logprobs.from", asked.from, prompt, tokens)?;
                at_most("prompt_logprobs.top", asked.top, vocab, "the vocabulary's size")?;
            }
            None => {
                let rows = self.prompt_rows.as_ref().map(|_| "an observer");
                require("prompt_rows", rows, rows.is_none(), "None without prompt_logprobs")?;
            }
        }
        let whole = unknown == 0 || self.embedding != Some(Pooling::Mean);
        let why = "Last or None where the tokens of the prompt cache are not known";
        require("embedding", self.embedding, whole, why)
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("tokens", &self.tokens.len())
            .field("max_tokens", &self.max_tokens)
            .field("sampling", &self.sampling)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// Why a request was refused, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Nothing to continue.
    #[error("the prompt is empty: it must hold at least one token")]
    EmptyPrompt,
    /// Two prompts.
    #[error("text: the prompt is given as {tokens} token ids too; one of text and tokens must be left out")]
    TextAndTokens {
        /// Tokens of the request.
        tokens: usize,
    },
    /// The text of the prompt cannot be encoded.
    #[error("text: {0}")]
    Text(#[from] crate::text::TokenizerError),
    /// More tokens than the model was made for.
    #[error("the prompt has {prompt} tokens, more than the model's context of {context}")]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// The model's context length.
        context: usize,
    },
    /// A token that the model does not know.
    #[error("prompt token {position} is id {token}, outside the vocabulary of {vocab}")]
    Token {
        /// Index in the prompt.
        position: usize,
        /// The id.
        token: u32,
        /// The number of ids.
        vocab: usize,
    },
    /// A part of the prompt ends where the prompt does not reach.
    #[error("segment_ends must be numbers of prompt tokens from 1 to {prompt}, but one is {end}")]
    SegmentEnd {
        /// The value.
        end: usize,
        /// Tokens of the prompt.
        prompt: usize,
    },
    /// A stop string is empty or too long, or there are too many.
    #[error(transparent)]
    Stop(#[from] crate::text::StopError),
    /// A sampling or processor parameter is out of range.
    #[error(transparent)]
    Parameter(#[from] ParamError),
    /// The logits cannot be sampled.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The model cannot take a guess back.
    #[error(
        "speculation is not possible with this model: its recurrent state cannot be taken back token by token"
    )]
    Speculation,
    /// The engine has nothing to guess with.
    #[error("speculation with a draft model was asked for, but the engine has none")]
    NoDraft,
    /// The grammar cannot go on.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The grammar was compiled for other logits.
    #[error("the grammar is for a vocabulary of {grammar} tokens, but the model has {vocab}")]
    GrammarVocabulary {
        /// Logits that the grammar is for.
        grammar: usize,
        /// The model's.
        vocab: usize,
    },
    /// The prompt cache is of another model, or of another form.
    #[error("the prompt cache does not fit: {0}")]
    Cache(crate::cache::KvError),
    /// The prompt cache is for shorter sequences, or for longer ones, and cannot be computed again.
    #[error("the prompt cache is for a {} context, and its tokens are not known", if *.long { "long" } else { "short" })]
    CacheContext {
        /// Whether it is for sequences that exceed the model's original context.
        long: bool,
    },
    /// The adapter is of another model.
    #[error("the adapter {name} was not loaded for this engine's model")]
    Adapter {
        /// Its name.
        name: String,
    },
    /// The prompt cache holds what another adapter made, or none.
    #[error("the prompt cache was made {}, but the request is to run {}", with(.cache.as_ref()), with(.request.as_ref()))]
    CacheAdapter {
        /// The name of the cache's adapter, if it has one.
        cache: Option<String>,
        /// The name of the request's adapter, if it has one.
        request: Option<String>,
    },
    /// The KV budget cannot hold the request even alone.
    #[error("the request does not fit into memory: {0}")]
    OutOfMemory(crate::cache::KvError),
    /// It was not admitted in time.
    #[error("queue_deadline: the request was not admitted within {} s", .limit.as_secs_f64())]
    QueueDeadline {
        /// The request's `queue_deadline`.
        limit: Duration,
    },
    /// It was admitted, and made no progress for too long.
    #[error("stall_deadline: the request made no progress for {} s", .limit.as_secs_f64())]
    StallDeadline {
        /// The request's `stall_deadline`.
        limit: Duration,
    },
    /// The engine takes no more requests, or ended this one before it had finished.
    #[error("the engine shuts down")]
    Shutdown,
    /// Code that belongs to this request panicked.
    #[error("the request's {part} panicked: {message}")]
    Panicked {
        /// Which code.
        part: &'static str,
        /// What the panic said.
        message: String,
    },
    /// The caller's sampler chose a token that there is not.
    #[error("the request's sampler chose token {token}, outside the vocabulary of {vocab}")]
    SampledToken {
        /// The id.
        token: u32,
        /// The number of ids.
        vocab: usize,
    },
    /// The forward pass of the batch that the request was in failed.
    #[error("the forward pass failed: {0}")]
    Forward(std::sync::Arc<crate::models::ForwardError>),
}

fn with(adapter: Option<&String>) -> String {
    adapter.map_or_else(|| "without an adapter".to_owned(), |name| format!("with adapter {name}"))
}
