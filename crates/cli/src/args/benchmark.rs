//! `lmx benchmark`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::model::{ModelArgs, RunArgs, positive};
use super::refused::RefusedByBenchmark;
use super::values::{count, seed};
use crate::end::End;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// The words of `lmx benchmark`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The report goes to standard output, progress to standard error.\n\
    Flags of mlx-lm that are refused for now: --pipeline --quantize-activations (-qa)")]
pub(crate) struct BenchmarkArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    /// Tokens of each prompt; several with commas between are measured in turn
    #[arg(long, short, value_name = "N,...", default_value = "512", value_delimiter = ',', value_parser = positive, allow_negative_numbers = true)]
    pub(crate) prompt_tokens: Vec<NonZeroUsize>,
    /// Tokens to generate for each prompt
    #[arg(long, short, value_name = "N", default_value = "1024", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) generation_tokens: NonZeroUsize,
    /// Sequences at a time; several with commas between are measured in turn
    #[arg(long, short, value_name = "N,...", default_value = "1", value_delimiter = ',', value_parser = positive, allow_negative_numbers = true)]
    pub(crate) batch_size: Vec<NonZeroUsize>,
    /// Trials of each, after a shorter one that does not count
    #[arg(long, short, value_name = "N", default_value = "5", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) num_trials: NonZeroUsize,
    /// Seconds to wait before each trial
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = count, allow_negative_numbers = true)]
    pub(crate) delay: usize,
    /// Seed of the prompts
    #[arg(long, value_name = "N", default_value = "0", value_parser = seed, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) against: AgainstArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Draw throughput against batch size and latency against context
    #[arg(long, help_heading = "Output", value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one JSON object, with every trial, instead of the report
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    #[command(flatten)]
    refused: RefusedByBenchmark,
}

/// A server to measure beside lmx.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Beside a server")]
pub(crate) struct AgainstArgs {
    /// Measure a running server of OpenAI's protocol too, turn by turn: its address, like http://127.0.0.1:8080
    #[arg(long, value_name = "URL")]
    pub(crate) against: Option<String>,
    /// The model to ask the server for [default: the first one that it lists]
    #[arg(long, value_name = "NAME", requires = "against")]
    pub(crate) against_model: Option<String>,
    /// The server's key [default: $OPENAI_API_KEY]
    #[arg(long, value_name = "KEY", requires = "against")]
    pub(crate) against_key: Option<String>,
}

impl BenchmarkArgs {
    /// What the words mean.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn validate(self: Box<Self>) -> Result<Box<Self>, End> {
        self.refused.check()?;
        self.run.kv_window()?;
        self.run.kv_quant.quantization()?;
        if let Some(url) = &self.against.against
            && !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme))
        {
            return Err(End::Usage(format!(
                "--against {url} is no address: it must begin with http:// or https://"
            )));
        }
        Ok(self)
    }
}
