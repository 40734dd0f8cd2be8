//! A folder of prefixes, beyond the life of a process.
//!
//! What a sequence holds is written when it ends, so that a process that is killed loses nothing but what runs. Each
//! block of each layer group, and each recurrent state, is a file of its own ([`piece`]): texts that begin alike share
//! files, a window layer's blocks may be there or not, and a text is given up from its end on, file by file. Files are
//! checked when they are read; they are not forced to the disk when they are written, as one that a crash has spoiled is
//! found then.

mod piece;
mod prefixes;

use piece::{Owner, Piece, file_bytes};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Where prefixes are kept beyond the life of a process, and how much of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixDirOptions {
    /// The folder; made if it is not there. Other files in it are left alone.
    pub dir: PathBuf,
    /// Most bytes of its files, of all models together.
    pub bytes_max: u64,
}

impl PrefixDirOptions {
    /// The most bytes that [`PrefixDirOptions::new`] allows: 10 GB.
    pub const BYTES_MAX: u64 = 10_000_000_000;

    /// A folder of at most [`PrefixDirOptions::BYTES_MAX`].
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), bytes_max: Self::BYTES_MAX }
    }
}

/// A folder that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the folder {} cannot be {doing}: {error}", dir.display())]
pub struct PrefixDirError {
    /// The folder.
    pub dir: PathBuf,
    /// What failed: made, written to, read.
    pub doing: &'static str,
    /// Why.
    #[source]
    pub error: io::Error,
}

/// Something that went wrong with the folder and that no request needs to know.
#[derive(Debug, thiserror::Error)]
pub enum PrefixDirWarning {
    /// A file that is not what it should be; it is removed.
    #[error("{} is damaged and is dropped: {why}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file that cannot be read; it is passed over.
    #[error("{} cannot be read: {error}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// Nothing can be stored; it is not tried again.
    #[error("prefixes are no longer stored: {} cannot be written: {error}", file.display())]
    Unwritable {
        /// The file or folder.
        file: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
}

/// How long a file that is being written may take; then whoever wrote it has ended.
const PART_AGE: Duration = Duration::from_secs(3600);
/// How the names of files end that are being written.
const PART: &str = ".lmxpart";

/// An open folder.
#[derive(Debug)]
pub(super) struct PrefixDir {
    options: PrefixDirOptions,
    owner: Owner,
    /// Files that are not looked at again while one prompt is looked for.
    passed_over: HashSet<String>,
    /// Files that were warned of.
    warned: HashSet<String>,
    warnings: Vec<PrefixDirWarning>,
    /// Whether a write has failed.
    quiet: bool,
    parts: u64,
}

/// A file of the folder.
struct Entry {
    name: String,
    bytes: u64,
    used: SystemTime,
}

/// Something to store.
struct Kept<'a> {
    piece: Piece,
    /// Its block: of what was used at the same time, the later blocks are dropped first.
    block: usize,
    tokens: &'a [u32],
    data: Data<'a>,
}

enum Data<'a> {
    Block(&'a [u8]),
    State(&'a [f32]),
}

impl Data<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Block(bytes) => bytes.len(),
            Self::State(values) => size_of_val(*values),
        }
    }
}

impl PrefixDir {
    /// Opens a folder for a store that is what `owner` says.
    ///
    /// # Errors
    /// [`PrefixDirError`] if it cannot be made, written to or read.
    pub(super) fn open(options: PrefixDirOptions, owner: &[&str]) -> Result<Self, PrefixDirError> {
        let dir = options.dir.clone();
        let failed = |doing| move |error| PrefixDirError { dir: dir.clone(), doing, error };
        fs::create_dir_all(&options.dir).map_err(failed.clone()("made"))?;
        let version = piece::VERSION.to_string();
        let mut own = vec![version.as_str(), env!("CARGO_PKG_VERSION")];
        // Blocks are stored as they lie in memory.
        own.push(if cfg!(target_endian = "little") { "little" } else { "big" });
        own.extend(owner);
        let mut opened = Self {
            options,
            owner: Owner::of(&own),
            passed_over: HashSet::new(),
            warned: HashSet::new(),
            warnings: Vec::new(),
            quiet: false,
            parts: 0,
        };
        let part = opened.part();
        fs::write(&part, b"lmx")
            .and_then(|()| fs::remove_file(&part))
            .map_err(failed.clone()("written to"))?;
        opened.scan().map_err(failed("read"))?;
        Ok(opened)
    }

    pub(super) fn take_warnings(&mut self) -> Vec<PrefixDirWarning> {
        std::mem::take(&mut self.warnings)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.options.dir.join(name)
    }

    /// A name that nobody else writes to.
    fn part(&mut self) -> PathBuf {
        self.parts += 1;
        // Folders are shared between machines, too, whose processes may have the same number.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        self.path(&format!(".{}.{}.{now:x}{PART}", std::process::id(), self.parts))
    }

    /// Whether a piece is there.
    fn has(&self, piece: &Piece) -> bool {
        let name = piece.name();
        !self.passed_over.contains(&name) && self.path(&name).exists()
    }

    /// Reads a piece with `data_len` bytes of data: its tokens, and what `take` makes of the data. `None` if it is not
    /// there (any more), or not whole.
    fn read<T>(
        &mut self,
        piece: &Piece,
        block: usize,
        data_len: usize,
        take: impl FnOnce(&[u8]) -> T,
    ) -> Option<(Vec<u32>, T)> {
        let name = piece.name();
        let path = self.path(&name);
        let warning = match read_file(&path, piece, data_len) {
            Ok(Ok(bytes)) => match piece.decode(&bytes, data_len) {
                Ok((tokens, data)) => {
                    touch(&path, age(SystemTime::now(), block));
                    return Some((tokens, take(data)));
                }
                Err(why) => Some(damaged(&path, why.to_owned())),
            },
            Ok(Err(why)) => Some(damaged(&path, why)),
            // Another process has dropped it.
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => Some(PrefixDirWarning::Unreadable { file: path, error }),
        };
        if let Some(warning) = warning.filter(|_| self.warned.insert(name.clone())) {
            self.warnings.push(warning);
        }
        self.passed_over.insert(name);
        None
    }

    /// Stores what is not there yet, and marks the rest as used; the files that were not used for longest give way. Does
    /// nothing if all of it is more than the folder may hold.
    fn store(&mut self, entry: &[Kept<'_>]) {
        let bytes = |kept: &Kept<'_>| file_bytes(kept.tokens.len(), kept.data.len());
        if self.quiet || entry.iter().map(bytes).sum::<u64>() > self.options.bytes_max {
            return;
        }
        let now = SystemTime::now();
        let there = |kept: &&Kept<'_>| {
            // The tail that is there may be another one's.
            !matches!(kept.piece.part, piece::Part::Tail(_))
                && touch(&self.path(&kept.piece.name()), age(now, kept.block))
        };
        let lacking: Vec<&Kept<'_>> = entry.iter().filter(|kept| !there(kept)).collect();
        if lacking.is_empty() {
            return;
        }
        let own: HashSet<String> = entry.iter().map(|kept| kept.piece.name()).collect();
        let mut result = self.make_room(lacking.iter().map(|kept| bytes(kept)).sum(), &own);
        for kept in lacking {
            if result.is_err() {
                break;
            }
            result = self.write(kept, age(now, kept.block));
        }
        if let Err((file, error)) = result {
            self.quiet = true;
            self.warnings.push(PrefixDirWarning::Unwritable { file, error });
        }
    }

    /// Writes one file beside its name, which it then takes.
    fn write(&mut self, kept: &Kept<'_>, used: SystemTime) -> Result<(), (PathBuf, io::Error)> {
        let path = self.path(&kept.piece.name());
        let values: Vec<u8>;
        let data = match kept.data {
            Data::Block(bytes) => bytes,
            Data::State(floats) => {
                values = floats.iter().flat_map(|value| value.to_le_bytes()).collect();
                &values
            }
        };
        let (head, end) = kept.piece.around(kept.tokens, data);
        let part = self.part();
        let written = OpenOptions::new().write(true).create_new(true).open(&part).and_then(|mut file| {
            [&head, data, &end].into_iter().try_for_each(|bytes| file.write_all(bytes))?;
            file.set_modified(used)?;
            fs::rename(&part, &path)
        });
        written.map_err(|error| {
            // What matters is the first error.
            let _ = fs::remove_file(&part);
            (path, error)
        })
    }

    /// Drops the files that were not used for longest until there is room for `bytes`; not those of `own`.
    fn make_room(&self, bytes: u64, own: &HashSet<String>) -> Result<(), (PathBuf, io::Error)> {
        // Others may write to the folder: what is there is counted each time.
        let mut entries = self.scan().map_err(|error| (self.options.dir.clone(), error))?;
        let mut used: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.retain(|entry| !own.contains(&entry.name));
        entries.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
        for entry in entries {
            if used.saturating_add(bytes) <= self.options.bytes_max {
                break;
            }
            let path = self.path(&entry.name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err((path, error)),
                _ => used = used.saturating_sub(entry.bytes),
            }
        }
        Ok(())
    }

    /// The files, without those of others. What processes that have ended did not finish is removed.
    fn scan(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for file in fs::read_dir(&self.options.dir)? {
            let file = file?;
            let name = file.file_name().to_string_lossy().into_owned();
            let (ours, part) = (piece::is_name(&name), name.starts_with('.') && name.ends_with(PART));
            // Files may vanish at any time.
            let Some(metadata) = file.metadata().ok().filter(|m| (ours || part) && m.is_file()) else {
                continue;
            };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if ours {
                entries.push(Entry { name, bytes: metadata.len(), used });
            } else if used.elapsed().is_ok_and(|age| age > PART_AGE) {
                let _ = fs::remove_file(file.path());
            }
        }
        Ok(entries)
    }
}

/// When a block is said to have been used: later ones a little earlier, since they are of no use without those before.
fn age(now: SystemTime, block: usize) -> SystemTime {
    now.checked_sub(Duration::from_micros(block as u64)).unwrap_or(now)
}

/// Marks a file as used. False if it is not there; what else fails changes only how long it stays.
fn touch(path: &Path, used: SystemTime) -> bool {
    match OpenOptions::new().write(true).open(path) {
        Ok(file) => {
            let _ = file.set_modified(used);
            true
        }
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

/// All of a file, if it is as long as it must be; else why not.
fn read_file(path: &Path, piece: &Piece, data_len: usize) -> io::Result<Result<Vec<u8>, String>> {
    let metadata = fs::metadata(path)?;
    // Opening anything else may wait for ever.
    if !metadata.is_file() {
        return Ok(Err("it is not a file".to_owned()));
    }
    if let Err(why) = piece.check_len(metadata.len(), data_len) {
        return Ok(Err(why));
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    File::open(path)?.take(metadata.len()).read_to_end(&mut bytes)?;
    Ok(Ok(bytes))
}

/// Removes a file, and says why.
fn damaged(path: &Path, why: String) -> PrefixDirWarning {
    // If it stays it is passed over.
    let _ = fs::remove_file(path);
    PrefixDirWarning::Damaged { file: path.to_owned(), why }
}
