//! Why an adapter cannot be used.

use crate::checkpoint::CheckpointError;
use crate::models::ConfigError;
use lmx_tensor::OpError;
use lmx_tensor::files::FileError;
use std::path::PathBuf;

/// Why an adapter cannot be used. Messages are one line and name the file or folder first.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AdapterError {
    #[error("adapter {0}")]
    Checkpoint(#[from] CheckpointError),
    #[error("{}: no folder, which an adapter must be: {} and {}", .0.display(), super::files::CONFIG, super::files::WEIGHTS)]
    NotAFolder(PathBuf),
    #[error("{}: the adapter has no {file}", .folder.display())]
    NoFile { folder: PathBuf, file: &'static str },
    #[error("{}: the adapter is in PEFT's format, which has other names and scales; lmx reads mlx-lm's", .0.display())]
    Peft(PathBuf),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{config}: `lora_parameters.keys` has {key:?}, but no module of the model is called so{where_}")]
    Key { config: String, key: String, where_: String },
    #[error("{config}: the adapter changes no module of the model")]
    Nothing { config: String },
    #[error("{}: tensor {tensor:?} is missing, though the adapter's configuration has it change {module}", .file.display())]
    MissingTensor { file: PathBuf, tensor: String, module: String },
    #[error("{}: tensor {tensor:?} belongs to no module that the adapter's configuration has it change", .file.display())]
    ExtraTensor { file: PathBuf, tensor: String },
    #[error("{}: tensor {second:?} is {first:?} again", .file.display())]
    Duplicate { file: PathBuf, first: String, second: String },
    #[error("{config}: the adapter changes {module}, {why}")]
    Module { config: String, module: String, why: &'static str },
    #[error(transparent)]
    Op(#[from] OpError),
}
