//! `lmx inspect`: its words.

use super::model::{KvDtype, KvQuantArgs, ModelArgs, positive};
use std::num::NonZeroUsize;

/// The words of `lmx inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Forecast the memory for this many tokens [default: the model's context length]
    #[arg(long, value_name = "N", value_parser = context, allow_negative_numbers = true)]
    pub(crate) context: Option<NonZeroUsize>,
    /// How keys and values would be stored: auto is the model's own float type (f16 for GGUF)
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub(crate) kv_dtype: KvDtype,
    #[command(flatten)]
    pub(crate) kv_quant: KvQuantArgs,
    /// Prompt tokens that would run at a time
    #[arg(long, value_name = "N", default_value = "2048", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) prefill_step_size: NonZeroUsize,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Longer contexts than any model's are a slip of the finger.
const CONTEXT_MAX: usize = 1 << 31;

fn context(word: &str) -> Result<NonZeroUsize, String> {
    let context = positive(word).ok().filter(|tokens| tokens.get() <= CONTEXT_MAX);
    context.ok_or_else(|| format!("expected a whole number from 1 to {CONTEXT_MAX}"))
}
