//! Flags of `lmx generate` for many prompts.

use super::model::positive;
use crate::end::End;
use crate::session::Concurrency;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Many prompts at once.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Many prompts")]
pub(crate) struct PromptsArgs {
    /// Answer every line of a file: JSON objects with prompt, messages or token_ids, and options of their own
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["prompt", "json", "prompt_cache_file", "n", "best_of"])]
    pub(crate) prompts_file: Option<PathBuf>,
    /// Where the replies go, a JSON object a line; goes on where an earlier run stopped [default: standard output]
    #[arg(long, value_name = "FILE.jsonl", requires = "prompts_file")]
    pub(crate) output: Option<PathBuf>,
    /// Replies that are made at the same time [default: 32]
    #[arg(long, value_name = "N", requires = "prompts_file", value_parser = positive, allow_negative_numbers = true)]
    decode_concurrency: Option<NonZeroUsize>,
    /// Prompts that are read at the same time; they share --prefill-step-size [default: 8]
    #[arg(long, value_name = "N", requires = "prompts_file", value_parser = positive, allow_negative_numbers = true)]
    prompt_concurrency: Option<NonZeroUsize>,
}

impl PromptsArgs {
    /// Requests of the file that run at the same time.
    pub(crate) fn concurrency(&self) -> Concurrency {
        Concurrency {
            replies: self.decode_concurrency.map_or(32, NonZeroUsize::get),
            prompts: self.prompt_concurrency.map_or(8, NonZeroUsize::get),
        }
    }

    /// # Errors
    /// [`End::Usage`] if the replies would overwrite the prompts, or if there are none that a flag would act on.
    pub(crate) fn check(&self) -> Result<(), End> {
        // clap does not ask for a file beside a flag that conflicts with it.
        let idle = [
            ("--output", self.output.is_some()),
            ("--decode-concurrency", self.decode_concurrency.is_some()),
            ("--prompt-concurrency", self.prompt_concurrency.is_some()),
        ];
        if let Some((flag, _)) = idle.iter().find(|(_, given)| *given && self.prompts_file.is_none()) {
            return Err(End::Usage(format!("{flag} needs --prompts-file")));
        }
        let same = |a: &PathBuf, b: &PathBuf| {
            a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
        };
        match (&self.prompts_file, &self.output) {
            (Some(input), Some(output)) if same(input, output) => {
                Err(End::Usage("--output is the same file as --prompts-file".to_owned()))
            }
            _ => Ok(()),
        }
    }
}
