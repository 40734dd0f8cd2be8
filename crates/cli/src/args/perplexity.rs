//! `lmx perplexity`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::model::{ModelArgs, RunArgs, positive};
use super::values::count;
use crate::end::End;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// The data set of mlx-lm's command where none is named.
const DEFAULT_DATA: &str = "allenai/tulu-3-sft-mixture";

/// The words of `lmx perplexity`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Protocols: windows (mlx-lm's) concatenates shuffled records and cuts rows; documents reads each record \
by itself, behind BOS (lm-evaluation-harness's); strided slides a window over all of the text (transformers')."
)]
pub(crate) struct PerplexityArgs {
    /// A model folder, a .gguf file, or a hub id that is in the local hub cache
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: String,
    /// Revision of a hub id: a branch, tag or commit that is in the cache
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Accepted for mlx-lm's sake: lmx never runs code of a model folder
    #[arg(long)]
    trust_remote_code: bool,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    /// Windows that are run at the same time; the result is the same for any number
    #[arg(long, value_name = "N", default_value = "8", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) batch_size: NonZeroUsize,
    #[command(flatten)]
    pub(crate) data: DataArgs,
    #[command(flatten)]
    pub(crate) protocol: ProtocolArgs,
    /// Score a second model on the same tokens: the difference, KL divergence and agreement
    #[arg(long, value_name = "MODEL")]
    pub(crate) against: Option<String>,
    /// With --against: draw the differences into a file
    #[arg(long, value_name = "FILE.svg", requires = "against")]
    pub(crate) plot: Option<PathBuf>,
    /// Print a JSON object with all that is needed to repeat the measurement
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// Which texts.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// A hub data set that is in the local hub cache, or a folder of files [default: allenai/tulu-3-sft-mixture]
    #[arg(long, value_name = "DATA")]
    data_path: Option<String>,
    /// A file: .jsonl, .json or .parquet with text, messages, or prompt and completion; anything else is one text
    #[arg(long, value_name = "FILE", conflicts_with = "data_path")]
    pub(crate) data: Option<PathBuf>,
    /// With --data-path: the split to read
    #[arg(long, value_name = "NAME", default_value = "train", conflicts_with = "data")]
    pub(crate) split: String,
    /// The order in which records are drawn: numpy's of the same seed
    #[arg(long, value_name = "SEED", default_value_t = 123, allow_negative_numbers = true)]
    pub(crate) seed: u32,
}

impl DataArgs {
    /// The folder or hub data set, where no file is named.
    pub(crate) fn path(&self) -> &str {
        self.data_path.as_deref().unwrap_or(DEFAULT_DATA)
    }
}

/// How they are scored.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Protocol")]
pub(crate) struct ProtocolArgs {
    /// In which windows texts are read
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub(crate) protocol: ProtocolName,
    /// Tokens that the model reads at a time [default: 512, for documents the model's context]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    sequence_length: Option<usize>,
    /// Windows to score, for documents records; -1 for all
    #[arg(long, value_name = "N", default_value_t = 256, allow_negative_numbers = true)]
    num_samples: i64,
    /// With strided and documents: tokens that each window after the first scores; the others are its context [default:
    /// half of --sequence-length for strided, all of it for documents]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    stride: Option<usize>,
    /// Where BOS stands: auto is where the protocol has it, always is before every window, never is nowhere
    #[arg(long, value_name = "RULE", value_enum, default_value_t)]
    pub(crate) bos: Bos,
}

/// `--protocol`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ProtocolName {
    // No doc comments: clap would print each value on lines of its own.
    #[default]
    Windows,
    Documents,
    Strided,
}

impl ProtocolName {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Windows => "windows",
            Self::Documents => "documents",
            Self::Strided => "strided",
        }
    }
}

/// `--bos`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Bos {
    #[default]
    Auto,
    Always,
    Never,
}

impl Bos {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        }
    }
}

/// What [`ProtocolArgs`] come to for a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProtocolOptions {
    pub(crate) name: ProtocolName,
    pub(crate) length: usize,
    pub(crate) stride: usize,
    pub(crate) bos: Bos,
    /// `None` for all.
    pub(crate) samples: Option<usize>,
}

impl ProtocolArgs {
    /// What is known without a model.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    fn check(&self) -> Result<(), End> {
        if self.num_samples == 0 || self.num_samples < -1 {
            let n = self.num_samples;
            return Err(End::Usage(format!("--num-samples {n}: allowed is 1 or more, and -1 for all")));
        }
        if let Some(length) = self.sequence_length.filter(|&length| length < 2) {
            return Err(End::Usage(format!("--sequence-length {length}: allowed is 2 or more")));
        }
        if self.stride.is_some() && self.protocol == ProtocolName::Windows {
            return Err(End::Usage(
                "--stride needs --protocol strided or documents: windows lie side by side".to_owned(),
            ));
        }
        if self.stride == Some(0) {
            return Err(End::Usage("--stride 0: allowed is 1 to --sequence-length".to_owned()));
        }
        Ok(())
    }

    /// For a model of this context length.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn options(&self, context: usize) -> Result<ProtocolOptions, End> {
        let default = if self.protocol == ProtocolName::Documents { context } else { context.min(512) };
        let length = self.sequence_length.unwrap_or(default);
        if length > context {
            let why = format!("allowed is 2 to {context}, the model's context");
            return Err(End::Usage(format!("--sequence-length {length}: {why}")));
        }
        let default = if self.protocol == ProtocolName::Strided { length.div_ceil(2) } else { length };
        let stride = self.stride.unwrap_or(default);
        if stride > length {
            return Err(End::Usage(format!(
                "--stride {stride}: allowed is 1 to --sequence-length, which is {length}"
            )));
        }
        let samples = usize::try_from(self.num_samples).ok();
        Ok(ProtocolOptions { name: self.protocol, length, stride, bos: self.bos, samples })
    }
}

impl PerplexityArgs {
    /// Checks what can be checked without a model.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag.
    pub(crate) fn validate(&self) -> Result<&Self, End> {
        self.protocol.check()?;
        self.run.kv_window()?;
        self.run.kv_quant.quantization()?;
        if self.plot.is_some() && self.against.is_none() {
            return Err(End::Usage(
                "--plot needs --against: one model alone has nothing to be drawn against".to_owned(),
            ));
        }
        let folder =
            self.plot.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(End::Usage(format!("--plot: there is no folder {}", folder.display())));
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
}
