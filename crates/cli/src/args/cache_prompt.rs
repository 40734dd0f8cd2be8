//! `lmx cache-prompt`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::model::{ModelArgs, RunArgs, TemplateArgs};
use crate::end::End;
use std::path::PathBuf;

/// The words of `lmx cache-prompt`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The file has mlx-lm's layout: mlx_lm.generate continues it too.")]
pub(crate) struct CachePromptArgs {
    /// A model folder, a .gguf file, or a hub id that is in the local hub cache
    #[arg(long, value_name = "MODEL", default_value = "mlx_model")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    /// Revision of a hub id: a branch, tag or commit that is in the cache
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Accepted for mlx-lm's sake: lmx never runs code of a model folder
    #[arg(long)]
    trust_remote_code: bool,
    /// The beginning of what the user says; - reads standard input
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: String,
    /// The file to write; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_cache_file: PathBuf,
    /// A further token that will end the reply, as a text or an id
    #[arg(long, value_name = "TOKEN")]
    pub(crate) eos_token: Option<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

impl CachePromptArgs {
    /// Checks what can be checked without a model.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn validate(&self) -> Result<&Self, End> {
        let bounded = self.run.kv_window()?.is_some();
        self.run.kv_quant.quantization()?;
        if bounded && self.run.kv_quant.is_given() {
            let why = "a file has no place for quantized keys and values in a window";
            return Err(End::Usage(format!("--kv-bits cannot be used with --max-kv-size: {why}")));
        }
        Ok(self)
    }

    pub(crate) fn model_args(&self) -> ModelArgs {
        ModelArgs {
            model: Some(self.model.clone()),
            revision: self.revision.clone(),
            trust_remote_code: self.trust_remote_code,
        }
    }

    pub(crate) fn template_args(&self) -> TemplateArgs {
        TemplateArgs { extra_eos_token: self.eos_token.iter().cloned().collect(), ..TemplateArgs::default() }
    }
}
