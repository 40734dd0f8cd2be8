//! What can be wrong with a checkpoint beyond one file.

use std::io;
use std::path::PathBuf;

use lmx_tensor::files::FileError;

use super::source::is_hub_id;
use crate::models::ConfigError;

/// Why a checkpoint cannot be used. Messages are one line and name the file or folder first.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum CheckpointError {
    #[error("{name:?} is no folder or file here, and no hub id in the local cache{}{}", looked_in(.caches), fetch_it(.name))]
    NotFound { name: String, caches: Vec<PathBuf> },
    #[error("{}: revision {revision:?} is not in the local cache; it has {}", .repository.display(), list(.known))]
    Revision { repository: PathBuf, revision: String, known: Vec<String> },
    #[error("{}: not a checkpoint: give a folder with config.json and safetensors files, or a .gguf file", .0.display())]
    NotACheckpoint(PathBuf),
    #[error("{}: no config.json{hint}", .folder.display())]
    NoConfig { folder: PathBuf, hint: String },
    #[error("{}: no model.safetensors and no model.safetensors.index.json{hint}", .folder.display())]
    NoWeights { folder: PathBuf, hint: String },
    #[error("{}: the shard is missing, though {listed_by} lists {tensors} tensors in it; was a download interrupted?", .shard.display())]
    MissingShard { shard: PathBuf, listed_by: String, tensors: usize },
    #[error("{}: {reason}", .file.display())]
    Index { file: PathBuf, reason: String },
    #[error("tensor {tensor:?} is both in {} and in {}", .first.display(), .second.display())]
    Duplicate { tensor: String, first: PathBuf, second: PathBuf },
    #[error("{}: tensor {tensor:?} is missing{why}", .place.display())]
    MissingTensor { tensor: String, place: PathBuf, why: String },
    #[error("{}: {} of the checkpoint belong to no part of the model: {}", .place.display(), count(.tensors.len()), list(.tensors))]
    ExtraTensors { tensors: Vec<String>, place: PathBuf },
    #[error("{}: the link leads out of the folder, to {}; only the hub cache may do that", .link.display(), .target.display())]
    Link { link: PathBuf, target: PathBuf },
    #[error("{}: longer than the {max} bytes that such a file may have", .file.display())]
    TooLong { file: PathBuf, max: u64 },
    #[error("{}: {error}", .file.display())]
    Io { file: PathBuf, error: io::Error },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Names for a message: the first few, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN_MAX: usize = 5;
    match names.len() {
        0 => "none".to_owned(),
        n if n > SHOWN_MAX => format!(
            "{} and {} more",
            names.iter().take(SHOWN_MAX).cloned().collect::<Vec<_>>().join(", "),
            n - SHOWN_MAX
        ),
        _ => names.join(", "),
    }
}

fn count(tensors: usize) -> String {
    if tensors == 1 { "1 tensor".to_owned() } else { format!("{tensors} tensors") }
}

/// What helps where the name may be a hub id.
fn fetch_it(name: &str) -> String {
    if name.contains('/') && is_hub_id(name) {
        format!("; lmx downloads nothing: `hf download {name}` puts it there")
    } else {
        String::new()
    }
}

fn looked_in(caches: &[PathBuf]) -> String {
    match caches {
        [] => String::new(),
        _ => format!(
            " ({})",
            caches.iter().map(|cache| cache.display().to_string()).collect::<Vec<_>>().join(", ")
        ),
    }
}
