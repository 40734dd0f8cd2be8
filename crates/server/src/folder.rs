//! A folder whose entries requests may name.

use std::io;
use std::path::{Path, PathBuf};

/// What the entries of a [`Folder`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    /// Folders that hold a `config.json`, and `.gguf` files.
    Models,
    /// Folders that hold an `adapter_config.json`.
    Adapters,
}

impl Entries {
    fn holds(self, path: &Path) -> bool {
        match self {
            Self::Models if path.is_dir() => path.join("config.json").is_file(),
            Self::Models => {
                path.is_file()
                    && path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
            }
            Self::Adapters => path.join("adapter_config.json").is_file(),
        }
    }
}

/// A folder whose entries requests may name. It is read anew each time, so that entries can come and go; a name is only
/// ever compared with what is there, and never becomes part of a path.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: PathBuf,
    entries: Entries,
}

impl Folder {
    /// The folder `dir`.
    ///
    /// # Errors
    /// If it is not there, or not a folder.
    pub fn open(dir: &Path, entries: Entries) -> io::Result<Self> {
        let dir = dir.canonicalize()?;
        // Says so if it is no folder, or may not be read.
        std::fs::read_dir(&dir)?;
        Ok(Self { dir, entries })
    }

    /// The names of its entries with their paths, in order. Links that lead out of the folder are left out, and so are
    /// hidden entries and names that are not Unicode.
    pub(crate) fn list(&self) -> Vec<(String, PathBuf)> {
        // A folder that has gone, or may not be read any more, has no entries.
        let found = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let named = found.filter_map(|entry| {
            let name = entry.file_name().into_string().ok().filter(|name| !name.starts_with('.'))?;
            let path = entry.path().canonicalize().ok()?;
            (path.starts_with(&self.dir) && path != self.dir && self.entries.holds(&path))
                .then_some((name, path))
        });
        let mut list: Vec<_> = named.collect();
        list.sort();
        list
    }

    /// The path of the entry of that name.
    pub(crate) fn find(&self, name: &str) -> Option<PathBuf> {
        self.list().into_iter().find(|(own, _)| own == name).map(|(_, path)| path)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    #[test]
    fn only_what_is_in_the_folder_can_be_named() {
        let root = tempfile::tempdir().unwrap();
        let (dir, outside) = (root.path().join("models"), root.path().join("outside"));
        for folder in [dir.join("a"), dir.join("empty"), dir.join(".hidden"), outside.clone()] {
            create_dir_all(&folder).unwrap();
            if folder != dir.join("empty") {
                write(folder.join("config.json"), "{}").unwrap();
            }
        }
        for file in ["b.gguf", "C.GGUF", "d.txt"] {
            write(dir.join(file), "").unwrap();
        }
        symlink(&outside, dir.join("out")).unwrap();
        symlink("..", dir.join("up")).unwrap();
        symlink(".", dir.join("self")).unwrap();
        symlink("a", dir.join("alias")).unwrap();
        let folder = Folder::open(&dir, Entries::Models).unwrap();
        let names: Vec<String> = folder.list().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["C.GGUF", "a", "alias", "b.gguf"]);
        assert_eq!(folder.find("alias"), folder.find("a"));
        let whole = outside.to_str().unwrap();
        for name in [
            "",
            ".",
            "..",
            "out",
            "up",
            "self",
            "a/",
            "./a",
            "a/config.json",
            "../outside",
            "d.txt",
            "A",
            whole,
        ] {
            assert_eq!(folder.find(name), None, "{name}");
        }
        assert!(Folder::open(&dir.join("b.gguf"), Entries::Models).is_err());
        assert!(Folder::open(&dir.join("none"), Entries::Models).is_err());
    }
}
