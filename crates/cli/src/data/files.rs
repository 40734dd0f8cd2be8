//! From what the user names as a data set to its files.

use crate::env;
use anyhow::{Context, anyhow};
use lmx::checkpoint::{OpenOptions, cached_dataset};
use std::path::{Path, PathBuf};

/// Kinds of files that hold records.
const EXTENSIONS: [&str; 4] = ["parquet", "jsonl", "json", "txt"];
/// Names of splits that mean no other.
const SPLITS: [&str; 7] = ["train", "training", "validation", "valid", "dev", "test", "testing"];
/// Folders within folders that are looked at.
const DEPTH: usize = 4;

/// The files of a split: of a folder, or of a hub data set in the local cache. As in the `datasets` package they are
/// those whose path has the split's name in it as a word; where no path has any, all are the split train.
///
/// # Errors
/// A name that is neither, or a split without files.
pub(super) fn of(name: &str, split: &str) -> anyhow::Result<Vec<PathBuf>> {
    let hub_cache_dirs: Vec<PathBuf> = env::hub_cache().into_iter().collect();
    let path = Path::new(name);
    if path.is_file() {
        return Err(anyhow!("--data-path {name} is a file: name it with --data"));
    }
    let folder = if path.is_dir() {
        path.to_owned()
    } else {
        let options = OpenOptions { revision: None, hub_cache_dirs };
        cached_dataset(name, &options)?.with_context(|| {
            format!(
                "data set {name} is neither a folder nor in the local hub cache, and lmx downloads nothing yet: run hf \
                 download --repo-type dataset {name}, or name a file with --data"
            )
        })?
    };
    let mut all = Vec::new();
    collect(&folder, DEPTH, &mut all)?;
    all.sort();
    let has = |path: &PathBuf, split: &str| {
        let relative = path.strip_prefix(&folder).unwrap_or(path).to_string_lossy().to_lowercase();
        relative.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == split)
    };
    let named = all.iter().any(|path| SPLITS.iter().any(|split| has(path, split)));
    let chosen: Vec<PathBuf> =
        all.iter().filter(|path| if named { has(path, split) } else { split == "train" }).cloned().collect();
    match (all.is_empty(), chosen.is_empty()) {
        (true, _) => Err(anyhow!("{}: there are no files of {}", folder.display(), EXTENSIONS.join(", "))),
        (false, true) => {
            Err(anyhow!("{}: there is no file of the split {split} (--split)", folder.display()))
        }
        (false, false) => Ok(chosen),
    }
}

fn collect(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let cannot = || format!("cannot read {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Notes about the data, not data.
        if name.starts_with('.') || name == "dataset_infos.json" {
            continue;
        }
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
        match () {
            () if path.is_dir() && depth > 0 => collect(&path, depth - 1, files)?,
            () if EXTENSIONS.contains(&extension.as_str()) => files.push(path),
            () => {}
        }
    }
    Ok(())
}

/// BLAKE3 of the bytes of files, one after the other.
pub(super) fn hash(files: &[PathBuf]) -> anyhow::Result<String> {
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let file = std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        hasher.update_reader(file).with_context(|| format!("cannot read {}", path.display()))?;
    }
    Ok(hasher.finalize().to_hex().to_string())
}
