//! The vocabulary: token text to id and back, in one arena.
//!
//! A quarter of a million tokens as separate strings in two maps cost a second to build; one arena and
//! one table of entry numbers cost a few dozen milliseconds, and every start of the program pays for it.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// Token ids are below this (the largest vocabularies in use have a quarter of a million tokens), so
/// that one hostile id in a file cannot make the id table gigabytes large.
pub(crate) const TOKEN_ID_LIMIT: u32 = 1 << 22;

/// Why a token could not be entered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VocabError {
    #[error("token {token:?} has id {id}; ids must be below {TOKEN_ID_LIMIT}")]
    IdTooLarge { token: String, id: u64 },
    #[error("the token texts together exceed 4 GiB")]
    TooMuchText,
}

/// A token: its place in the arena and its id. Lies in the table itself, so that a look-up costs two
/// cache misses rather than three.
#[derive(Clone, Copy)]
struct Entry {
    start: u32,
    end: u32,
    id: u32,
}

/// Token texts and their ids. Ids may have gaps.
pub(crate) struct Vocab {
    text: String,
    by_text: HashTable<Entry>,
    /// Start and end in the arena; `(MAX, MAX)` for ids without a token.
    by_id: Vec<(u32, u32)>,
    hasher: DefaultHashBuilder,
}

const NO_TOKEN: (u32, u32) = (u32::MAX, u32::MAX);

impl Vocab {
    pub(crate) fn new() -> Self {
        Self {
            text: String::new(),
            by_text: HashTable::new(),
            by_id: Vec::new(),
            hasher: DefaultHashBuilder::default(),
        }
    }

    /// Enters a token. A text entered twice keeps its last id, an id used twice its last text.
    pub(crate) fn insert(&mut self, token: &str, id: u64) -> Result<(), VocabError> {
        let id = match u32::try_from(id) {
            Ok(small) if small < TOKEN_ID_LIMIT => small,
            _ => return Err(VocabError::IdTooLarge { token: token.to_owned(), id }),
        };
        let slot = id as usize;
        if self.by_id.len() <= slot {
            self.by_id.resize(slot + 1, NO_TOKEN);
        }
        let hash = self.hasher.hash_one(token);
        let text = &self.text;
        let place = match self.by_text.find_mut(hash, |e| e.text(text) == token) {
            Some(entry) => {
                entry.id = id;
                (entry.start, entry.end)
            }
            None => self.push(token, hash, id)?,
        };
        if let Some(slot) = self.by_id.get_mut(slot) {
            *slot = place;
        }
        Ok(())
    }

    fn push(&mut self, token: &str, hash: u64, id: u32) -> Result<(u32, u32), VocabError> {
        let position = |at: usize| u32::try_from(at).map_err(|_| VocabError::TooMuchText);
        let (start, end) = (position(self.text.len())?, position(self.text.len() + token.len())?);
        self.text.push_str(token);
        let (text, hasher) = (&self.text, &self.hasher);
        self.by_text.insert_unique(hash, Entry { start, end, id }, |e| hasher.hash_one(e.text(text)));
        Ok((start, end))
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        let hash = self.hasher.hash_one(token);
        self.by_text.find(hash, |e| e.text(&self.text) == token).map(|e| e.id)
    }

    pub(crate) fn token(&self, id: u32) -> Option<&str> {
        let &(start, end) = self.by_id.get(id as usize)?;
        self.text.get(start as usize..end as usize)
    }

    /// One more than the largest id.
    pub(crate) fn id_end(&self) -> u32 {
        self.by_id.len() as u32
    }
}

impl Entry {
    fn text(self, arena: &str) -> &str {
        arena.get(self.start as usize..self.end as usize).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_both_ways_with_gaps_and_repeats() {
        let mut vocab = Vocab::new();
        for (token, id) in [("a", 0), ("", 2), ("é", 7), ("a", 5)] {
            assert!(vocab.insert(token, id).is_ok());
        }
        assert_eq!((vocab.id("a"), vocab.id(""), vocab.id("é")), (Some(5), Some(2), Some(7)));
        assert_eq!((vocab.token(7), vocab.token(2), vocab.token(1)), (Some("é"), Some(""), None));
        assert_eq!((vocab.id_end(), vocab.id("b")), (8, None));
        assert!(vocab.insert("big", u64::from(TOKEN_ID_LIMIT)).is_err());
        assert!(vocab.insert("huge", u64::MAX).is_err());
    }
}
