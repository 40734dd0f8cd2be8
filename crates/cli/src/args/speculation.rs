//! Flags that guess tokens: they change how fast a reply comes, never what it is.

use super::model::positive;
use crate::end::End;
use lmx::engine::NgramSpeculation;
use std::num::NonZeroUsize;

/// Guessing from the text itself.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArgs {
    /// Guess what follows from what followed the last time that the same tokens came; the text is the same without
    #[arg(long)]
    ngram_spec: bool,
    /// With --ngram-spec: tokens that must be the same [default: 3]
    #[arg(long, value_name = "N", requires = "ngram_spec", value_parser = positive, allow_negative_numbers = true)]
    ngram_n: Option<NonZeroUsize>,
    /// With --ngram-spec: tokens to guess at once at most; fewer are guessed where guesses are wrong [default: 3]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    num_draft_tokens: Option<NonZeroUsize>,
}

impl SpeculationArgs {
    /// How tokens are guessed, if they are.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn speculation(&self) -> Result<Option<NgramSpeculation>, End> {
        if !self.ngram_spec {
            return match self.num_draft_tokens {
                None => Ok(None),
                Some(_) => Err(End::Usage(
                    "--num-draft-tokens needs --ngram-spec: nothing is guessed without".into(),
                )),
            };
        }
        let default = NgramSpeculation::default();
        let speculation = NgramSpeculation {
            ngram: self.ngram_n.map_or(default.ngram, NonZeroUsize::get),
            draft_tokens: self.num_draft_tokens.map_or(default.draft_tokens, NonZeroUsize::get),
        };
        speculation.validate().map_err(|error| {
            let flag = if error.field == "ngram" { "--ngram-n" } else { "--num-draft-tokens" };
            End::Usage(format!("{flag} must be {}, but is {}", error.allowed, error.value))
        })?;
        Ok(Some(speculation))
    }
}
