//! The flag that changes the model's weights.

/// Which adapter.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct AdapterArgs {
    /// A LoRA or DoRA adapter of mlx-lm's, applied to the model as it runs: a folder, or a hub id that is in the local
    /// hub cache
    #[arg(long, value_name = "PATH")]
    pub(crate) adapter_path: Option<String>,
}
