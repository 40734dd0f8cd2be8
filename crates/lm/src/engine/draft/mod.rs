//! Speculation: tokens that are guessed, and run together with the last one.
//!
//! A guess is right if the request draws that very token there, with its own key for that position. So the reply is the
//! same with and without guesses, at every temperature; what a right guess saves is a forward pass. (Leviathan et al.,
//! "Fast inference from transformers via speculative decoding", 2023, of which this keeps the idea and not the
//! acceptance rule.) Guesses come from the text itself (`ngram`) or from a second model (`model`), which draws them as
//! the request would; how many are worth their time is `depth`'s question.

mod depth;
mod model;
mod ngram;

pub(super) use model::{Draft, DraftRow};
pub use model::{DraftError, DraftModel};
pub use ngram::NgramSpeculation;

use crate::grammar::Grammar;
use crate::sample::ParamError;
use ngram::NgramDrafter;

/// Where guesses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculation {
    /// The text itself.
    Ngram(NgramSpeculation),
    /// The engine's draft model ([`Engine::with_draft`](super::Engine::with_draft)).
    Draft(DraftSpeculation),
}

/// Guesses of a draft model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftSpeculation {
    /// Tokens guessed at once at most, from 1 to [`DraftSpeculation::MOST`].
    pub draft_tokens: usize,
    /// Whether fewer are guessed, or none, where measured times and acceptance say that it is faster; if not, it is
    /// always `draft_tokens`.
    pub adaptive: bool,
}

impl Default for DraftSpeculation {
    fn default() -> Self {
        Self { draft_tokens: 3, adaptive: true }
    }
}

impl DraftSpeculation {
    /// The most that `draft_tokens` can be.
    pub const MOST: usize = NgramSpeculation::MOST;
}

impl From<NgramSpeculation> for Speculation {
    fn from(ngram: NgramSpeculation) -> Self {
        Self::Ngram(ngram)
    }
}

impl From<DraftSpeculation> for Speculation {
    fn from(draft: DraftSpeculation) -> Self {
        Self::Draft(draft)
    }
}

impl Speculation {
    /// Checks the numbers.
    ///
    /// # Errors
    /// Names the one that is out of range.
    pub fn validate(&self) -> Result<(), ParamError> {
        match self {
            Speculation::Ngram(ngram) => ngram.validate(),
            // A draft has no n-gram that could be wrong.
            Speculation::Draft(draft) => {
                NgramSpeculation { draft_tokens: draft.draft_tokens, ..NgramSpeculation::default() }
                    .validate()
            }
        }
    }
}

/// Why a request goes on without guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftStop {
    /// They take longer than they save, for now.
    Unprofitable,
    /// The draft model's keys and values have no room left.
    OutOfMemory,
    /// The text is longer than the draft model's context.
    Context,
    /// The text has a token that the draft model does not know.
    Vocabulary,
    /// The draft model's forward pass failed.
    Failed,
}

impl std::fmt::Display for DraftStop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DraftStop::Unprofitable => "guesses take longer than they save",
            DraftStop::OutOfMemory => "the memory for the draft model's keys and values is full",
            DraftStop::Context => "the text is longer than the draft model's context",
            DraftStop::Vocabulary => "the text has a token that the draft model does not know",
            DraftStop::Failed => "the draft model's forward pass failed",
        })
    }
}

/// One request's guesses.
pub(super) enum Drafter {
    Ngram(NgramDrafter),
    Model(Box<DraftRow>),
}

impl Drafter {
    /// For a request of this `grammar` and so long a `prompt`.
    pub(super) fn new(speculation: Speculation, grammar: Option<&Grammar>, prompt: usize) -> Self {
        match speculation {
            Speculation::Ngram(options) => Self::Ngram(NgramDrafter::new(options)),
            Speculation::Draft(options) => {
                Self::Model(Box::new(DraftRow::new(options, grammar.cloned(), prompt)))
            }
        }
    }

    /// Guesses what follows `tokens`, at most `most` tokens; often nothing.
    pub(super) fn propose(&mut self, tokens: &[u32], most: usize) -> Vec<u32> {
        match self {
            Self::Ngram(drafter) => drafter.propose(tokens, most),
            Self::Model(row) => row.take_proposed(most),
        }
    }

    /// `right` of `guessed` tokens, at least 1, were right.
    pub(super) fn learn(&mut self, guessed: usize, right: usize) {
        match self {
            Self::Ngram(drafter) => drafter.learn(guessed, right),
            Self::Model(row) => row.learn(guessed, right),
        }
    }
}
