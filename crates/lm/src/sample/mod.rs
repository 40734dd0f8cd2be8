//! From logits to the next token: logits processors, then log-probabilities, then a sampler.
//!
//! ```text
//! logits ─► processors (bias, penalties, the user's) ─► log_softmax ─► sampler(key) ─► token
//! ```
//!
//! * [`SamplingParams`] and [`ProcessorParams`] are what a request asks for; `validate` refuses what makes no sense.
//! * [`BuiltinSampler`] filters and draws as mlx-lm does: top-p, min-p, XTC and top-k on the untempered
//!   log-probabilities, temperature last.
//! * [`ProcessorChain`] runs the built-in processors in mlx-lm's order, then the user's own.
//! * [`KeyStream`] gives position n of a request its own random [`Key`], the one with which mlx would draw there, so
//!   that a draw never depends on other requests, on batching or on speculation.
//!
//! [`Sampler`] and [`LogitsProcessor`] are the two traits for code of your own; closures implement them.

mod filters;
mod logprobs;
mod params;
mod processors;
mod random;
mod reasoning_budget;
mod sampler;

pub(crate) use logprobs::{argmax, exp};
pub use logprobs::{log_softmax, top_logprobs};
pub(crate) use params::require;
pub use params::{ParamError, ProcessorParams, SamplingParams, parse_logit_bias};
pub use processors::ProcessorChain;
pub use random::{Key, KeyStream, fold_seed, random_seed};
pub use reasoning_budget::ReasoningBudget;
pub use sampler::BuiltinSampler;

/// Chooses the next token. An engine may call it from a different thread at each position.
pub trait Sampler: Send {
    /// Picks a token id, an index into `logprobs`.
    ///
    /// `logprobs` comes from [`log_softmax`]: natural logarithms, one per token of the vocabulary, no NaN, at least one
    /// finite, `-inf` where a token is impossible. `key` is all the randomness there is for this position: the
    /// same arguments must give the same token.
    fn sample(&mut self, logprobs: &[f32], key: Key) -> u32;
}

impl<F: FnMut(&[f32], Key) -> u32 + Send> Sampler for F {
    fn sample(&mut self, logprobs: &[f32], key: Key) -> u32 {
        self(logprobs, key)
    }
}

/// Changes logits before they are normalised. An engine may call it from a different thread at each position.
pub trait LogitsProcessor: Send {
    /// Changes `logits` (one per token of the vocabulary) for the token that follows `history`: the prompt's tokens,
    /// then the generated ones.
    ///
    /// # Errors
    /// Whatever the processor cannot do ends this request, and only this one.
    fn process(&mut self, history: &[u32], logits: &mut [f32]) -> Result<(), SampleError>;

    /// `token` was generated: the next history ends with it. For processors that keep state.
    fn accept(&mut self, token: u32) {
        let _ = token;
    }

    /// The last `tokens` accepted tokens are taken back (speculation guessed wrong). State must become what
    /// it was before they were accepted.
    fn rollback(&mut self, tokens: usize) {
        let _ = tokens;
    }
}

impl<F: FnMut(&[u32], &mut [f32]) -> Result<(), SampleError> + Send> LogitsProcessor for F {
    fn process(&mut self, history: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
        self(history, logits)
    }
}

/// Why no token can be chosen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The model or a processor computed garbage.
    #[error("the logit of token {token} is {value}: logits must be finite or -inf")]
    NotANumber {
        /// The first such token's id.
        token: usize,
        /// NaN or `inf`.
        value: f32,
    },
    /// Every token was forbidden.
    #[error("all {vocab} logits are -inf, so that no token can follow")]
    NoCandidate {
        /// The number of logits.
        vocab: usize,
    },
    /// A user's processor failed.
    #[error("logits processor: {0}")]
    Processor(#[source] Box<dyn std::error::Error + Send + Sync>),
}
