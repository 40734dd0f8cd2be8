//! From what the user names as the model to the folder or file that holds it.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::folder::read_text;

/// The longest text in a `refs` file of the hub cache, in bytes: a commit hash.
const REF_BYTES_MAX: u64 = 256;

/// Where to look for a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Branch, tag or commit of a hub id; `main` if none.
    pub revision: Option<String>,
    /// The local hub caches, searched in order: folders that hold `models--ORG--NAME`.
    pub hub_cache_dirs: Vec<PathBuf>,
}

/// A checkpoint's place on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A folder in the layout of Hugging Face or MLX.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// The snapshot folder of a hub id.
    Hub(PathBuf),
}

impl ModelSource {
    /// Finds what `name` means: a folder, a `.gguf` file, or a hub id in the local cache. An existing path wins.
    ///
    /// # Errors
    /// [`CheckpointError::NotFound`], [`CheckpointError::Revision`], or [`CheckpointError::NotACheckpoint`] for a
    /// file of another kind.
    pub fn resolve(name: &str, options: &OpenOptions) -> Result<Self, CheckpointError> {
        let path = Path::new(name);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.exists() {
            return match path.extension() {
                Some(extension) if extension.eq_ignore_ascii_case("gguf") => Ok(Self::Gguf(path.to_owned())),
                _ => Err(CheckpointError::NotACheckpoint(path.to_owned())),
            };
        }
        if let Some(snapshot) = cached("models", name, options)? {
            return Ok(Self::Hub(snapshot));
        }
        Err(CheckpointError::NotFound { name: name.to_owned(), caches: options.hub_cache_dirs.clone() })
    }

    /// The folder or file.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(path) | Self::Gguf(path) | Self::Hub(path) => path,
        }
    }
}

/// The snapshot folder of a hub data set that is in a local cache; `None` if it is in none.
///
/// # Errors
/// [`CheckpointError::Revision`].
pub fn cached_dataset(name: &str, options: &OpenOptions) -> Result<Option<PathBuf>, CheckpointError> {
    cached("datasets", name, options)
}

/// The snapshot folder of a hub repository of a kind.
fn cached(kind: &str, name: &str, options: &OpenOptions) -> Result<Option<PathBuf>, CheckpointError> {
    let folder = format!("{kind}--{}", name.replace('/', "--"));
    let mut repositories = options.hub_cache_dirs.iter().map(|cache| cache.join(&folder));
    let repository = repositories.find(|repository| is_hub_id(name) && repository.is_dir());
    let revision = options.revision.as_deref().unwrap_or("main");
    repository.map(|repository| snapshot(&repository, revision)).transpose()
}

/// `NAME` or `ORG/NAME`, as the hub allows them.
pub(super) fn is_hub_id(name: &str) -> bool {
    let part = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(allowed) && !part.starts_with(['.', '-']) && !part.contains("--")
    };
    !name.contains("..") && name.split('/').count() <= 2 && name.split('/').all(part)
}

/// The snapshot of a revision: a commit's own folder, or the one that `refs/REVISION` names.
fn snapshot(repository: &Path, revision: &str) -> Result<PathBuf, CheckpointError> {
    let unknown = || CheckpointError::Revision {
        repository: repository.to_owned(),
        revision: revision.to_owned(),
        known: known_revisions(repository),
    };
    // Revisions come from the command line, but become part of a path.
    if !revision.split('/').all(|part| !part.is_empty() && part != "." && part != "..") {
        return Err(unknown());
    }
    let snapshots = repository.join("snapshots");
    if !revision.contains('/') && snapshots.join(revision).is_dir() {
        return Ok(snapshots.join(revision));
    }
    let commit = read_text(&repository.join("refs").join(revision), REF_BYTES_MAX)?.ok_or_else(unknown)?;
    let commit = commit.trim();
    let is_hash = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit());
    match snapshots.join(commit) {
        folder if is_hash && folder.is_dir() => Ok(folder),
        _ => Err(unknown()),
    }
}

fn known_revisions(repository: &Path) -> Vec<String> {
    let mut known: Vec<String> = ["refs", "snapshots"]
        .iter()
        .filter_map(|kind| fs::read_dir(repository.join(kind)).ok())
        .flat_map(|entries| entries.flatten().take(100))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    known.sort();
    known
}
