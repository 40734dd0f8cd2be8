//! Flags of `lmx generate` for several replies to one prompt.

use super::model::positive;
use crate::end::End;
use regex::Regex;
use std::num::NonZeroUsize;

/// More replies than this are a slip of the finger.
const REPLIES_MAX: usize = 4096;

/// Several replies to one prompt.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Several replies")]
pub(crate) struct ChoicesArgs {
    /// Replies to print; the first has the seed itself, the others seeds that follow from it
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    n: Option<NonZeroUsize>,
    /// Replies to make, of which the best are printed
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    best_of: Option<NonZeroUsize>,
    /// With --best-of: what is best, the probability of the whole reply or the mean over its tokens
    #[arg(long, value_name = "SCORE", value_enum, requires = "best_of")]
    score: Option<ScoreWord>,
    /// Print the answer that most of the --n replies give
    #[arg(long, requires = "n", conflicts_with = "best_of")]
    vote: bool,
    /// With --vote: what of a reply is its answer, the last match of this regular expression, or of its first group
    /// [default: the whole reply]
    #[arg(long, value_name = "REGEX", requires = "vote")]
    answer: Option<Regex>,
}

/// `--score`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ScoreWord {
    // No doc comments: clap would print each value on lines of its own.
    LogProb,
    LengthNormalized,
}

/// What several replies are for.
#[derive(Clone, Debug)]
pub(crate) enum Choices {
    /// To print them all.
    All(usize),
    /// To print the best of so many.
    Best { of: usize, keep: usize, score: lmx::engine::Score },
    /// To print what most of so many answer.
    Vote { of: usize, answer: Option<Regex> },
}

impl Choices {
    /// How many replies are made.
    pub(crate) fn count(&self) -> usize {
        match *self {
            Choices::All(of) | Choices::Best { of, .. } | Choices::Vote { of, .. } => of,
        }
    }
}

impl ChoicesArgs {
    /// What is asked for; `None` for one plain reply.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag whose value is out of range.
    pub(crate) fn choices(&self) -> Result<Option<Choices>, End> {
        let n = self.n.map_or(1, NonZeroUsize::get);
        let of = self.best_of.map_or(n, NonZeroUsize::get);
        if of < n {
            return Err(End::Usage(format!("--best-of is {of}, which is less than --n {n}")));
        }
        if of > REPLIES_MAX {
            let flag = if self.best_of.is_some() { "--best-of" } else { "--n" };
            return Err(End::Usage(format!("{flag} is {of}: at most {REPLIES_MAX} replies can be made")));
        }
        Ok(if self.vote {
            Some(Choices::Vote { of, answer: self.answer.clone() })
        } else if self.best_of.is_some() {
            let score = match self.score {
                None | Some(ScoreWord::LogProb) => lmx::engine::Score::LogProb,
                Some(ScoreWord::LengthNormalized) => lmx::engine::Score::LengthNormalized,
            };
            Some(Choices::Best { of, keep: n, score })
        } else {
            (n > 1).then_some(Choices::All(n))
        })
    }
}
