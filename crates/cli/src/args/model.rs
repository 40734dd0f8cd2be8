//! Flags that say which model runs, and how.

use super::values::{count, json_object, size};
use crate::end::End;
use lmx::cache::{KvQuantError, KvQuantization, KvWindow, PrefixCacheOptions, PrefixDirOptions};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// The model of mlx-lm's commands where none is named.
pub(crate) const DEFAULT_MODEL: &str = "mlx-community/Llama-3.2-3B-Instruct-4bit";

/// More threads than this are a slip of the finger.
const THREADS_MAX: i64 = 1024;

/// Which model.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A model folder, a .gguf file, or a hub id that is in the local hub cache [default: mlx-community/Llama-3.2-3B-Instruct-4bit]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Revision of a hub id: a branch, tag or commit that is in the cache
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
    /// Accepted for mlx-lm's sake: lmx never runs code of a model folder
    #[arg(long)]
    pub(crate) trust_remote_code: bool,
}

impl ModelArgs {
    /// The model that is named, or the default one.
    pub(crate) fn name(&self) -> &str {
        self.model.as_deref().unwrap_or(DEFAULT_MODEL)
    }

    /// The same, but `model` where none is named.
    pub(crate) fn or(&self, model: &str) -> Self {
        Self { model: self.model.clone().or_else(|| Some(model.to_owned())), ..self.clone() }
    }
}

/// How the model runs.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Running")]
pub(crate) struct RunArgs {
    /// Threads to compute with; the result is the same for any number [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// How keys and values are stored: auto is the model's own float type (f16 for GGUF)
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub(crate) kv_dtype: KvDtype,
    /// Positions that a query sees, and keys and values to hold, in layers without a window of their own
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    max_kv_size: Option<NonZeroUsize>,
    /// With --max-kv-size: how many of them are the first positions, the others being the last ones [default: 4]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, requires = "max_kv_size")]
    kv_keep: Option<usize>,
    /// Keys and values to hold at most, of all that runs and of what is kept for later, like 500MB or 2G [default:
    /// half of the free memory]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_negative_numbers = true)]
    pub(crate) kv_memory: Option<usize>,
    #[command(flatten)]
    pub(crate) kv_quant: KvQuantArgs,
    /// Prompt tokens to run at a time; fewer take less memory
    #[arg(long, value_name = "N", default_value = "2048", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) prefill_step_size: NonZeroUsize,
}

impl RunArgs {
    /// The first positions that mlx-lm keeps.
    const KEEP: usize = 4;

    /// What `--max-kv-size` and `--kv-keep` leave of the keys and values.
    ///
    /// # Errors
    /// [`End::Usage`] if the first positions leave no room.
    pub(crate) fn kv_window(&self) -> Result<Option<KvWindow>, End> {
        let Some(size) = self.max_kv_size.map(NonZeroUsize::get) else { return Ok(None) };
        let keep = self.kv_keep.unwrap_or(Self::KEEP);
        KvWindow::new(size, keep).map(Some).map_err(|_| {
            End::Usage(format!(
                "--max-kv-size {size} is too small: it must be above --kv-keep, which is {keep}"
            ))
        })
    }
}

/// What is kept for prompts that begin like earlier ones.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Prompts that begin alike")]
pub(crate) struct PrefixArgs {
    /// Segments of earlier texts to keep in memory at most [default: as many as there is room for]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    prompt_cache_size: Option<NonZeroUsize>,
    /// Bytes of earlier texts to keep in memory at most, like 500MB or 2G [default: what --kv-memory leaves]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_negative_numbers = true)]
    prompt_cache_bytes: Option<usize>,
    /// Keep earlier texts in a folder too, for later runs
    #[arg(long, value_name = "DIR")]
    prompt_cache_dir: Option<PathBuf>,
    /// With --prompt-cache-dir: bytes that the folder may hold, of all models together [default: 10GB]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_negative_numbers = true, requires = "prompt_cache_dir")]
    prompt_cache_dir_bytes: Option<usize>,
}

impl PrefixArgs {
    /// What may be kept in memory. With a bound on what is held (`bounded`) it is meant for all that is held.
    pub(crate) fn memory(&self, bounded: bool) -> PrefixCacheOptions {
        PrefixCacheOptions {
            segments_max: self.prompt_cache_size.map_or(usize::MAX, NonZeroUsize::get),
            bytes_max: self.prompt_cache_bytes.unwrap_or(usize::MAX),
            keep_unseen: !bounded,
        }
    }

    /// The folder, if there is to be one.
    pub(crate) fn dir(&self) -> Option<PrefixDirOptions> {
        let options = PrefixDirOptions::new(self.prompt_cache_dir.as_ref()?);
        let bytes_max = self.prompt_cache_dir_bytes.map_or(options.bytes_max, |bytes| bytes as u64);
        Some(PrefixDirOptions { bytes_max, ..options })
    }

    /// For a single prompt, which there is no earlier one to: what is kept in memory is of use only with a folder.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag that would change nothing.
    pub(crate) fn check_single(&self) -> Result<(), End> {
        let flags = [
            ("--prompt-cache-size", self.prompt_cache_size.is_some()),
            ("--prompt-cache-bytes", self.prompt_cache_bytes.is_some()),
        ];
        match flags.iter().find(|(_, given)| *given && self.prompt_cache_dir.is_none()) {
            Some((flag, _)) => Err(End::Usage(format!(
                "{flag} needs --prompts-file or --prompt-cache-dir: a single prompt has no earlier one to begin like"
            ))),
            None => Ok(()),
        }
    }

    /// For a prompt that goes on from a file.
    ///
    /// # Errors
    /// [`End::Usage`] naming the first flag that was given.
    pub(crate) fn check_none(&self) -> Result<(), End> {
        let flags = [
            ("--prompt-cache-size", self.prompt_cache_size.is_some()),
            ("--prompt-cache-bytes", self.prompt_cache_bytes.is_some()),
            ("--prompt-cache-dir", self.prompt_cache_dir.is_some()),
        ];
        match flags.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(End::Usage(format!(
                "{flag} cannot be used with --prompt-cache-file: the prompt goes on from the file alone"
            ))),
            None => Ok(()),
        }
    }
}

/// Whether keys and values are quantized.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct KvQuantArgs {
    /// Quantize keys and values to this many bits: 2, 3, 4, 5, 6 or 8
    #[arg(long, value_name = "BITS", value_parser = count, allow_negative_numbers = true)]
    kv_bits: Option<usize>,
    /// With --kv-bits: dimensions that share a scale and a bias: 32, 64 or 128 [default: 64]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, requires = "kv_bits")]
    kv_group_size: Option<usize>,
    /// With --kv-bits: the first position that reads quantized keys and values; those before read them as they
    /// were [default: 5000]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, requires = "kv_bits")]
    quantized_kv_start: Option<usize>,
}

impl KvQuantArgs {
    /// What the words mean, if any was given.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn quantization(&self) -> Result<Option<KvQuantization>, End> {
        let Some(bits) = self.kv_bits else { return Ok(None) };
        let group = self.kv_group_size.unwrap_or(KvQuantization::GROUP);
        let start = self.quantized_kv_start.unwrap_or(KvQuantization::START);
        KvQuantization::new(bits, group, start).map(Some).map_err(|error| refused(&error))
    }

    /// Whether keys and values are to be quantized.
    pub(crate) fn is_given(&self) -> bool {
        self.kv_bits.is_some()
    }

    /// The first flag that was given and does not say what `has` does: its name and both values.
    pub(crate) fn conflict(&self, has: KvQuantization) -> Option<(&'static str, usize, usize)> {
        [
            ("--kv-bits", self.kv_bits, has.bits()),
            ("--kv-group-size", self.kv_group_size, has.group()),
            ("--quantized-kv-start", self.quantized_kv_start, has.start()),
        ]
        .into_iter()
        .find_map(|(flag, given, has)| given.filter(|&given| given != has).map(|given| (flag, given, has)))
    }
}

/// What is said where keys and values cannot be quantized so, with the flag that it is about.
pub(crate) fn refused(error: &KvQuantError) -> End {
    let flag = match error {
        KvQuantError::Bits { bits } => format!("--kv-bits {bits}"),
        KvQuantError::Group { group } | KvQuantError::HeadDim { group, .. } => {
            format!("--kv-group-size {group}")
        }
    };
    End::Usage(format!("{flag}: {error}"))
}

/// `--kv-dtype`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KvDtype {
    // No doc comments: clap would print each value on lines of its own.
    #[default]
    Auto,
    F32,
    F16,
    Bf16,
}

/// How a conversation becomes a prompt.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct TemplateArgs {
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system_prompt: Option<String>,
    /// Where the model has no chat template, use ChatML
    #[arg(long)]
    pub(crate) use_default_chat_template: bool,
    /// Variables for the chat template, as a JSON object like '{"enable_thinking": false}'
    #[arg(long, alias = "chat-template-args", value_name = "JSON", value_parser = json_object)]
    pub(crate) chat_template_config: Option<serde_json::Map<String, serde_json::Value>>,
    /// Further tokens that end a reply, as texts or ids
    #[arg(long, value_name = "TOKEN", num_args = 1..)]
    pub(crate) extra_eos_token: Vec<String>,
}

/// A number of at least 1.
pub(crate) fn positive(word: &str) -> Result<NonZeroUsize, String> {
    word.parse().map_err(|_| "expected a whole number of at least 1".to_owned())
}

fn threads(word: &str) -> Result<NonZeroUsize, String> {
    match word.parse::<i64>() {
        Ok(n @ 1..=THREADS_MAX) => positive(&n.to_string()),
        _ => Err(format!("expected a whole number from 1 to {THREADS_MAX}")),
    }
}
