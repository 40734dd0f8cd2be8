//! What comes out of the engine.

use super::{DraftStop, PromptToken, RequestError};

/// One thing that happened to a request in a step.
#[derive(Debug)]
pub enum Update {
    /// Part of the prompt has been run.
    Prefill {
        /// Prompt tokens that the cache holds.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// Tokens of the prompt that [`Request::prompt_logprobs`](super::Request::prompt_logprobs) asked for.
    Prompt(Vec<PromptToken>),
    /// The vector that [`Request::embedding`](super::Request::embedding) asked for; its length is the hidden size.
    Embedding(Vec<f32>),
    /// A token was generated, or the request ended.
    Token(Event),
    /// The request ended with an error of its own; others are not touched.
    Failed(RequestError),
}

/// A generated token.
#[derive(Clone, Debug)]
pub struct Event {
    /// The token; `None` only where a request ends without one (`max_tokens` 0).
    pub token: Option<u32>,
    /// Text that may be shown now: never a broken character, never part of a stop string. It may lag behind the
    /// tokens and may be empty; joined over all events it is the reply.
    pub text: String,
    /// Natural log of the token's probability, after logits processors, before temperature and filters.
    pub logprob: f32,
    /// The most likely tokens and their log-probabilities, descending, as many as asked for.
    pub top: Vec<(u32, f32)>,
    /// Whether a draft proposed the token.
    pub from_draft: bool,
    /// Set on the last event of a request.
    pub finish: Option<FinishReason>,
    /// The stop string that ended the request, if one did.
    pub stopped_by: Option<String>,
    /// What the request cost so far.
    pub stats: Stats,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// `max_tokens`, or the model's context is full.
    Length,
}

impl FinishReason {
    /// The word of the JSON output and of the OpenAI protocol.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// What a request cost so far. Times are in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them whose keys and values were already held.
    pub cached_tokens: usize,
    /// Tokens generated, an end-of-sequence token included.
    pub generation_tokens: usize,
    /// Tokens that were guessed.
    pub drafted_tokens: usize,
    /// Guesses that were right.
    pub accepted_tokens: usize,
    /// Time of the steps of the draft model in which it guessed for this request, among others.
    pub draft_seconds: f64,
    /// Why the draft model guesses nothing at the moment; `None` while it does, and without one.
    pub draft_stop: Option<DraftStop>,
    /// How often the request gave its keys and values up to others, and ran its tokens again.
    pub preemptions: usize,
    /// From submission to the first token.
    pub first_token_seconds: f64,
    /// From the first token to the last.
    pub generation_seconds: f64,
    /// The position from which on queries have read quantized keys and values, if the request has come so far.
    pub kv_quantized_from: Option<usize>,
    /// The seed that the request's draws came from.
    pub seed: u64,
}

impl Stats {
    /// Prompt tokens run per second until the first token.
    #[must_use]
    pub fn prompt_tps(&self) -> f64 {
        rate(self.prompt_tokens - self.cached_tokens.min(self.prompt_tokens), self.first_token_seconds)
    }

    /// Tokens per second after the first (0 for fewer than two tokens).
    #[must_use]
    pub fn generation_tps(&self) -> f64 {
        rate(self.generation_tokens.saturating_sub(1), self.generation_seconds)
    }
}

fn rate(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}
