//! `lmx generate`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::choices::{Choices, ChoicesArgs};
use super::form::FormArgs;
use super::model::{ModelArgs, PrefixArgs, RunArgs, TemplateArgs};
use super::prompts::PromptsArgs;
use super::refused::RefusedByGenerate;
use super::sampling::{MaxTokens, SamplingArgs, StopArgs, max_tokens};
use super::speculation::SpeculationArgs;
use super::values::{boolean, expand_escapes, seed};
use crate::end::End;
use lmx::engine::Speculation;
use lmx::grammar::Form;
use lmx::sample::{ProcessorParams, SamplingParams};
use std::path::PathBuf;

/// The words of `lmx generate`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Text goes to standard output as it is made; everything else goes to standard error.\n\
    Flags of mlx-lm that are refused for now: --image --quantize-activations (-qa)"
)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    /// What to answer or continue; \n and \t are expanded, - reads standard input
    #[arg(long, short, value_name = "TEXT", default_value = "hello")]
    prompt: String,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    /// How the reply begins; the model continues from there
    #[arg(long, value_name = "TEXT")]
    pub(crate) prefill_response: Option<String>,
    /// Send the prompt as it is, without a chat template
    #[arg(long, conflicts_with = "use_default_chat_template")]
    pub(crate) ignore_chat_template: bool,
    /// Go on from a file of lmx cache-prompt or mlx_lm.cache_prompt, whose user turn the prompt continues; the
    /// model, the type of keys and values, their quantization and --max-kv-size are the file's
    #[arg(long, value_name = "FILE", conflicts_with_all = ["n", "best_of"])]
    pub(crate) prompt_cache_file: Option<PathBuf>,
    /// Tokens to generate at most (-1: until the context is full)
    #[arg(long, short, value_name = "N", default_value = "100", value_parser = max_tokens, allow_negative_numbers = true)]
    pub(crate) max_tokens: MaxTokens,
    #[command(flatten)]
    stop: StopArgs,
    /// Seed of the random numbers [default: a new one each time]
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    choices: ChoicesArgs,
    #[command(flatten)]
    pub(crate) prompts: PromptsArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) prefix: PrefixArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Print statistics after the text (on standard error)
    #[arg(long, help_heading = "Output", value_name = "BOOL", num_args = 0..=1, default_value = "true", default_missing_value = "true", value_parser = boolean)]
    pub(crate) verbose: bool,
    /// Print one JSON object instead of the text
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    #[command(flatten)]
    refused: RefusedByGenerate,
}

/// Where the prompt comes from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// The command line.
    Text(String),
    /// Standard input, all of it.
    Stdin,
}

/// What `lmx generate` is to do.
#[derive(Debug)]
pub(crate) struct GenerateOptions {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: SamplingParams,
    pub(crate) processors: ProcessorParams,
    pub(crate) stop: Vec<String>,
    pub(crate) form: Option<Form>,
    pub(crate) speculation: Option<Speculation>,
    pub(crate) choices: Option<Choices>,
    pub(crate) args: Box<GenerateArgs>,
}

impl GenerateArgs {
    /// What the words mean.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn validate(self: Box<Self>) -> Result<GenerateOptions, End> {
        self.refused.check()?;
        self.run.kv_window()?;
        self.prompts.check()?;
        self.run.kv_quant.quantization()?;
        if self.prompt_cache_file.is_some() && self.template.system_prompt.is_some() {
            let why = "the cached prompt has begun already, with or without a system prompt";
            return Err(End::Usage(format!(
                "--system-prompt cannot be used with --prompt-cache-file: {why}"
            )));
        }
        if self.prompt_cache_file.is_some() {
            self.prefix.check_none()?;
        } else if self.prompts.prompts_file.is_none() {
            self.prefix.check_single()?;
        }
        let (sampling, processors) = self.sampling.params()?;
        let stop = self.stop.strings()?;
        let form = self.form.form()?;
        let speculation = self.speculation.speculation()?;
        let choices = self.choices.choices()?;
        // mlx-lm expands first, then looks for the dash.
        let prompt = match expand_escapes(&self.prompt).as_str() {
            "-" => Prompt::Stdin,
            text => Prompt::Text(text.to_owned()),
        };
        Ok(GenerateOptions { prompt, sampling, processors, stop, form, speculation, choices, args: self })
    }
}
