//! Flags that guess tokens: they change how fast a reply comes, never what it is.

use super::model::positive;
use crate::end::End;
use lmx::engine::{DraftSpeculation, NgramSpeculation, Speculation};
use std::num::NonZeroUsize;

/// Guessing from the text itself, or with a second model.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArgs {
    /// Guess what follows from what followed the last time that the same tokens came; the text is the same without
    #[arg(long)]
    ngram_spec: bool,
    /// With --ngram-spec: tokens that must be the same [default: 3]
    #[arg(long, value_name = "N", requires = "ngram_spec", value_parser = positive, allow_negative_numbers = true)]
    ngram_n: Option<NonZeroUsize>,
    /// Guess what follows with a smaller model of the same vocabulary; the text is the same without
    #[arg(long, value_name = "MODEL", conflicts_with = "ngram_spec")]
    draft_model: Option<String>,
    /// With --ngram-spec or --draft-model: tokens to guess at once at most; fewer are guessed where guesses are wrong
    /// or do not pay [default: 3]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    num_draft_tokens: Option<NonZeroUsize>,
}

impl SpeculationArgs {
    /// How tokens are guessed, if they are.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn speculation(&self) -> Result<Option<Speculation>, End> {
        if self.draft_model.is_some() {
            return self.draft().map(Some);
        }
        if !self.ngram_spec {
            return match self.num_draft_tokens {
                None => Ok(None),
                Some(_) => Err(End::Usage(
                    "--num-draft-tokens needs --ngram-spec or --draft-model: nothing is guessed without"
                        .into(),
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
        Ok(Some(speculation.into()))
    }

    fn draft(&self) -> Result<Speculation, End> {
        let default = DraftSpeculation::default();
        let draft_tokens = self.num_draft_tokens.map_or(default.draft_tokens, NonZeroUsize::get);
        let speculation = Speculation::from(DraftSpeculation { draft_tokens, ..default });
        speculation.validate().map_err(|error| {
            End::Usage(format!("--num-draft-tokens must be {}, but is {}", error.allowed, error.value))
        })?;
        Ok(speculation)
    }

    /// The model that guesses, if one does.
    pub(crate) fn draft_model(&self) -> Option<&str> {
        self.draft_model.as_deref()
    }
}
