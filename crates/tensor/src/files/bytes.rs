//! Shared bytes: a mapped file or a vector, and a range of it.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

/// A range of a memory-mapped file or of a vector. A clone or a [`slice`](Self::slice) shares the memory.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<Owner>,
    range: Range<usize>,
}

enum Owner {
    Map(Mmap),
    Vec(Vec<u8>),
}

impl Bytes {
    /// Maps a whole file. `None` if the path is not a regular file (a folder, a pipe, a device).
    ///
    /// # Errors
    /// The system's, if the file cannot be opened or mapped.
    pub fn map(path: &Path) -> io::Result<Option<Self>> {
        // Asked before opening, since opening a pipe would wait for its writer.
        if !std::fs::metadata(path)?.is_file() {
            return Ok(None);
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Some(Self::from(Vec::new())));
        }
        // SAFETY: the map is read-only and private, and only ever lent as bytes, of which every pattern is valid.
        // That nobody changes or cuts the file while it is mapped cannot be enforced; it is what every loader
        // of mapped checkpoints asks of its users (a cut file ends the process with SIGBUS).
        let map = unsafe { Mmap::map(&file) }?;
        let range = 0..map.len();
        Ok(Some(Self { owner: Arc::new(Owner::Map(map)), range }))
    }

    /// A part of these bytes; `None` if `range` is not within `0..len`.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self { owner: Arc::clone(&self.owner), range: start..start + range.len() })
    }

    /// Takes the pages of a part of a mapped file out of this process, for it has been read and will hardly be read
    /// again. They stay in the system's page cache, from where a later read brings them back. Beyond `len`, or of a
    /// vector, nothing happens.
    pub fn release(&self, range: Range<usize>) {
        let end = range.end.min(self.range.len());
        if range.start >= end {
            return;
        }
        #[cfg(unix)]
        if let Owner::Map(map) = &*self.owner {
            let (start, advice) = (self.range.start + range.start, memmap2::UncheckedAdvice::DontNeed);
            // SAFETY: no one writes to the map, so a page that is read again is filled from the file with the bytes
            // that it had. A refusal costs memory only.
            let _ = unsafe { map.unchecked_advise_range(advice, start, end - range.start) };
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(Owner::Vec(bytes)), range }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all = match &*self.owner {
            Owner::Map(map) => &map[..],
            Owner::Vec(bytes) => bytes,
        };
        // The range is within the owner from the constructors on.
        all.get(self.range.clone()).unwrap_or_default()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &*self.owner {
            Owner::Map(_) => "mapped",
            Owner::Vec(_) => "owned",
        };
        write!(f, "Bytes({kind}, {:?})", self.range)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed unwrap is a failed test")]
mod tests {
    use super::Bytes;

    #[test]
    fn slices_stay_within_their_parent() {
        let bytes = Bytes::from(vec![0, 1, 2, 3, 4, 5]);
        let middle = bytes.slice(2..5).unwrap();
        assert_eq!(&middle[..], [2, 3, 4]);
        assert_eq!(&middle.slice(1..3).unwrap()[..], [3, 4]);
        assert_eq!(middle.slice(3..3).unwrap().len(), 0);
        assert!(middle.slice(0..4).is_none(), "beyond the slice though within the vector");
        #[allow(clippy::reversed_empty_ranges, reason = "what is tested")]
        let reversed = middle.slice(2..1);
        assert!(reversed.is_none());
        assert!(bytes.slice(usize::MAX - 1..usize::MAX).is_none());
    }

    #[test]
    fn maps_files_and_only_files() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Bytes::map(folder.path()).unwrap().is_none());
        let path = folder.path().join("file");
        assert!(Bytes::map(&path).is_err());
        std::fs::write(&path, b"").unwrap();
        assert_eq!(Bytes::map(&path).unwrap().unwrap().len(), 0);
        std::fs::write(&path, b"abc").unwrap();
        let bytes = Bytes::map(&path).unwrap().unwrap();
        assert_eq!(&bytes.slice(1..3).unwrap()[..], b"bc");
        for range in [0..3, 1..2, 2..9, 3..9] {
            bytes.slice(1..3).unwrap().release(range);
            assert_eq!(&bytes[..], b"abc", "what is given back can be read again");
        }
    }
}
