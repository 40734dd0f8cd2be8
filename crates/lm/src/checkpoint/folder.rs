//! A checkpoint folder in the layout of Hugging Face or MLX: its texts and which safetensors files count.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::CheckpointError;

/// The longest `config.json`. A quantization block that lists every layer of a large model takes a few megabytes.
pub(super) const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// The longest index: it names every tensor, some hundred thousand in the largest models.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// The most entries of a folder that are looked at.
const ENTRIES_MAX: usize = 10_000;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// A folder whose links have been checked.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The names of its entries, sorted.
    entries: Vec<String>,
}

/// The safetensors files of a folder.
#[derive(Debug)]
pub(super) struct Shards {
    /// The files, each with the tensors that the index lists in it; empty where there is no index.
    pub(super) files: Vec<(PathBuf, Vec<String>)>,
    /// Safetensors files that are not read.
    pub(super) stray: Vec<String>,
}

impl Folder {
    /// Lists the folder and refuses links that lead out of it, so that a model folder cannot make lmx read, and
    /// perhaps show, other files. In the hub cache, files are links to the repository's `blobs`.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |error| CheckpointError::Io { file: path.to_owned(), error };
        let root = fs::canonicalize(path).map_err(io)?;
        let blobs = hub_blobs(&root);
        let mut entries = Vec::new();
        for entry in fs::read_dir(path).map_err(io)?.take(ENTRIES_MAX) {
            let entry = entry.map_err(io)?;
            let link = entry.path();
            // A link without a target is no file; who needs it will miss it.
            if let Ok(target) = fs::canonicalize(&link) {
                let inside = target.starts_with(&root)
                    || blobs.as_ref().is_some_and(|blobs| target.starts_with(blobs));
                if !inside {
                    return Err(CheckpointError::Link { link, target });
                }
                entries.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        entries.sort();
        Ok(Self { path: path.to_owned(), entries })
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry == name)
    }

    /// The text of a file, if there is one of this name.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        read_text(&self.path.join(name), CONFIG_BYTES_MAX)
    }

    /// What to tell a user who named a folder without `config.json`.
    pub(super) fn hint_without_config(&self) -> String {
        match self.entries.iter().find(|entry| entry.to_ascii_lowercase().ends_with(".gguf")) {
            Some(gguf) => {
                format!("; for its GGUF file give the file itself: {}", self.path.join(gguf).display())
            }
            None => String::new(),
        }
    }

    /// Chooses the weight files: those of the index, else `model.safetensors`, else a complete numbered set.
    pub(super) fn shards(&self) -> Result<Shards, CheckpointError> {
        let files = if self.has(INDEX) {
            self.indexed_files()?
        } else if self.has(SINGLE) {
            BTreeMap::from([(SINGLE.to_owned(), Vec::new())])
        } else {
            self.numbered_files()?
        };
        for (name, tensors) in &files {
            if !self.has(name) {
                let listed_by =
                    if self.has(INDEX) { INDEX } else { "the other shards' numbering" }.to_owned();
                return Err(CheckpointError::MissingShard {
                    shard: self.path.join(name),
                    listed_by,
                    tensors: tensors.len(),
                });
            }
        }
        let stray = |entry: &&String| entry.ends_with(".safetensors") && !files.contains_key(*entry);
        let stray = self.entries.iter().filter(stray).cloned().collect();
        Ok(Shards {
            files: files.into_iter().map(|(name, tensors)| (self.path.join(name), tensors)).collect(),
            stray,
        })
    }

    fn indexed_files(&self) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
        let file = self.path.join(INDEX);
        let wrong = |reason: String| CheckpointError::Index { file: file.clone(), reason };
        let text = read_text(&file, INDEX_BYTES_MAX)?.unwrap_or_default();
        let index: Value =
            serde_json::from_str(&text).map_err(|error| wrong(format!("not valid JSON: {error}")))?;
        let map = index.get("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| {
            wrong("`weight_map` must be an object of tensor names and file names".to_owned())
        })?;
        let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (tensor, shard) in map {
            match shard.as_str().filter(|shard| is_plain_file_name(shard)) {
                Some(shard) => files.entry(shard.to_owned()).or_default().push(tensor.clone()),
                None => {
                    return Err(wrong(format!(
                        "`weight_map` must have a file name in this folder for {tensor:?}, not {shard}"
                    )));
                }
            }
        }
        if files.is_empty() {
            return Err(wrong("`weight_map` is empty".to_owned()));
        }
        Ok(files)
    }

    /// `model-00001-of-00003.safetensors` and so on, of which none may be missing.
    fn numbered_files(&self) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
        let total = self.entries.iter().find_map(|entry| shard_total(entry));
        let Some(total) = total else {
            return Err(CheckpointError::NoWeights {
                folder: self.path.clone(),
                hint: self.hint_without_weights(),
            });
        };
        Ok((1..=total)
            .map(|number| (format!("model-{number:05}-of-{total:05}.safetensors"), Vec::new()))
            .collect())
    }

    fn hint_without_weights(&self) -> String {
        let pickle =
            |entry: &&String| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|ending| entry.ends_with(ending));
        match self.entries.iter().find(pickle) {
            Some(pickle) => format!(
                "; {pickle} is a pickle, which can run code and is never read: convert it to safetensors"
            ),
            None => String::new(),
        }
    }
}

/// The number of shards in the name of the first of them.
fn shard_total(name: &str) -> Option<u32> {
    let total = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?.1;
    // Five digits: 99,999 shards at most.
    total.parse().ok().filter(|_| total.len() == 5)
}

/// A name that stays in the folder whatever it says.
fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// `blobs` of the repository to which a snapshot folder of the hub cache belongs.
fn hub_blobs(root: &Path) -> Option<PathBuf> {
    let snapshots =
        root.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"))?;
    let repository = snapshots.parent()?;
    let is_repository = repository.file_name()?.to_string_lossy().starts_with("models--");
    is_repository.then(|| repository.join("blobs"))
}

/// The text of a file of at most `max` bytes, or `None` if there is no such file.
pub(super) fn read_text(path: &Path, max: u64) -> Result<Option<String>, CheckpointError> {
    let io = |error| CheckpointError::Io { file: path.to_owned(), error };
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(io(ErrorKind::InvalidInput.into())),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    }
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(max + 1).read_to_string(&mut text)).map_err(io)?;
    if read as u64 > max {
        return Err(CheckpointError::TooLong { file: path.to_owned(), max });
    }
    Ok(Some(text))
}
