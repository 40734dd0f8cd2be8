//! `lmx chat`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::form::FormArgs;
use super::model::{ModelArgs, PrefixArgs, RunArgs, TemplateArgs};
use super::sampling::{MaxTokens, SamplingArgs, StopArgs, max_tokens};
use super::speculation::SpeculationArgs;
use super::values::seed;
use crate::end::End;
use lmx::engine::Speculation;
use lmx::grammar::Form;
use lmx::sample::{ProcessorParams, SamplingParams};

/// The words of `lmx chat`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Replies go to standard output; everything else goes to standard error. Type /help in the chat for its \
    commands."
)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    /// Tokens to generate at most in a reply (-1: until the context is full)
    #[arg(long, short, value_name = "N", default_value = "256", value_parser = max_tokens, allow_negative_numbers = true)]
    pub(crate) max_tokens: MaxTokens,
    #[command(flatten)]
    stop: StopArgs,
    /// Seed of the random numbers of the first reply; each later one adds 1
    #[arg(long, value_name = "N", default_value = "0", value_parser = seed, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) prefix: PrefixArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Keep what is typed out of the history file
    #[arg(long)]
    pub(crate) no_history: bool,
    /// Accepted for mlx-lm's sake: lmx runs in one process, where it changes nothing
    #[arg(long)]
    pub(crate) pipeline: bool,
}

/// What `lmx chat` is to do.
#[derive(Debug)]
pub(crate) struct ChatOptions {
    pub(crate) sampling: SamplingParams,
    pub(crate) processors: ProcessorParams,
    pub(crate) stop: Vec<String>,
    pub(crate) form: Option<Form>,
    pub(crate) speculation: Option<Speculation>,
    pub(crate) args: Box<ChatArgs>,
}

impl ChatArgs {
    /// What the words mean.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn validate(self: Box<Self>) -> Result<ChatOptions, End> {
        self.run.kv_window()?;
        self.run.kv_quant.quantization()?;
        let (sampling, processors) = self.sampling.params()?;
        let stop = self.stop.strings()?;
        let form = self.form.form()?;
        let speculation = self.speculation.speculation()?;
        Ok(ChatOptions { sampling, processors, stop, form, speculation, args: self })
    }
}
