//! `lmx evaluate`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::model::{ModelArgs, RunArgs, TemplateArgs, positive};
use super::values::{count, number};
use crate::end::End;
use lmx::sample::SamplingParams;
use serde_json::{Number, Value};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// The words of `lmx evaluate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The tasks' table goes to standard output, everything else to standard error.\n\
    The harness is not part of lmx: pip install lm-eval")]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    /// Tasks of the harness, by name or pattern (mmlu_*)
    #[arg(long, value_name = "TASK", num_args = 1.., value_delimiter = ',', required = true)]
    pub(crate) tasks: Vec<String>,
    /// Folder of further tasks: YAML files; may be given several times
    #[arg(long, value_name = "DIR")]
    pub(crate) include_path: Vec<PathBuf>,
    /// Where the harness writes its results and samples
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) output_dir: PathBuf,
    /// Sequences that run at a time; no result depends on it
    #[arg(long, value_name = "N", default_value = "8", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) batch_size: NonZeroUsize,
    /// Examples in each prompt [default: the task's own]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub(crate) num_shots: Option<usize>,
    /// Tokens to generate at most, whatever the task says [default: the task's own, else 8192]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<NonZeroUsize>,
    /// Tokens that the model is given at most; longer prompts lose their beginning [default: the model's context]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) max_length: Option<NonZeroUsize>,
    /// Documents of each task to use: a number, or below 1 a part of them; for tests, not for results to publish
    #[arg(long, value_name = "N", value_parser = limit, allow_negative_numbers = true)]
    pub(crate) limit: Option<Number>,
    /// Seed of the examples that are chosen, and of the random numbers
    #[arg(long, value_name = "N", default_value_t = 123)]
    pub(crate) seed: u32,
    /// Give examples as turns of a conversation, not in one message
    #[arg(long)]
    pub(crate) fewshot_as_multiturn: bool,
    /// Put prompts through the model's chat template [default: if it has one]
    #[arg(long, overrides_with = "no_apply_chat_template")]
    apply_chat_template: bool,
    /// Leave prompts as they are
    #[arg(long, overrides_with = "apply_chat_template")]
    no_apply_chat_template: bool,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    /// Allow tasks that run code which the model has written
    #[arg(long)]
    pub(crate) confirm_run_unsafe_code: bool,
    /// Temperature of generated texts [default: the task's own, which is 0 for most]
    #[arg(long, help_heading = "Sampling", value_name = "T", value_parser = number, allow_negative_numbers = true)]
    temp: Option<f64>,
    /// Keep the most likely tokens that together have this probability
    #[arg(long, help_heading = "Sampling", value_name = "P", value_parser = number, requires = "temp", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Keep this many of the most likely tokens
    #[arg(long, help_heading = "Sampling", value_name = "K", value_parser = count, requires = "temp", allow_negative_numbers = true)]
    top_k: Option<usize>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// The Python that has lm-evaluation-harness [default: that of the lm_eval in PATH, else python3]
    #[arg(long, help_heading = "Harness", value_name = "PYTHON")]
    pub(crate) python: Option<PathBuf>,
    /// Print one JSON object, with the tasks' metrics, instead of the table
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// What `lmx evaluate` is to do.
#[derive(Debug)]
pub(crate) struct EvaluateOptions {
    /// How texts are drawn, whatever the task says.
    pub(crate) sampling: Option<SamplingParams>,
    /// `None`: if the model has a template.
    pub(crate) apply_chat_template: Option<bool>,
    pub(crate) args: Box<EvaluateArgs>,
}

impl EvaluateArgs {
    /// What the words mean.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn validate(self: Box<Self>) -> Result<EvaluateOptions, End> {
        if self.model.model.is_none() {
            return Err(End::Usage("--model is required".to_owned()));
        }
        self.run.kv_window()?;
        self.run.kv_quant.quantization()?;
        let off = SamplingParams::default();
        let sampling = self.temp.map(|temperature| SamplingParams {
            temperature,
            top_p: self.top_p.unwrap_or(off.top_p),
            top_k: self.top_k.unwrap_or(off.top_k),
            ..off
        });
        if let Some(sampling) = &sampling {
            sampling.validate(usize::MAX).map_err(|error| super::sampling::out_of_range(&error))?;
        }
        if let Some(folder) = self.include_path.iter().find(|folder| !folder.is_dir()) {
            return Err(End::Usage(format!("--include-path {} is no folder", folder.display())));
        }
        let apply_chat_template = match (self.apply_chat_template, self.no_apply_chat_template) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        };
        Ok(EvaluateOptions { sampling, apply_chat_template, args: self })
    }
}

/// A number of documents as the harness takes it: a whole number is a count, one below 1 a part.
fn limit(word: &str) -> Result<Number, String> {
    let whole = word.parse::<u64>().ok().filter(|&count| count > 0).map(Number::from);
    let part =
        || word.parse::<f64>().ok().filter(|part| *part > 0.0 && *part < 1.0).and_then(Number::from_f64);
    whole
        .or_else(part)
        .ok_or_else(|| "expected a whole number of at least 1, or a part between 0 and 1".to_owned())
}

impl EvaluateOptions {
    /// What the harness is told.
    pub(crate) fn for_harness(&self) -> Value {
        let args = &self.args;
        serde_json::json!({
            "model": args.model.name(),
            "tasks": args.tasks,
            "include_path": args.include_path,
            "output_dir": args.output_dir,
            "batch_size": args.batch_size.get(),
            "num_shots": args.num_shots,
            "limit": args.limit,
            "seed": args.seed,
            "fewshot_as_multiturn": args.fewshot_as_multiturn,
            "system_prompt": args.template.system_prompt,
            "confirm_run_unsafe_code": args.confirm_run_unsafe_code,
        })
    }
}
