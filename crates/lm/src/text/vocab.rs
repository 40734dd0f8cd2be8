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

#[derive(Clone, Copy)]
struct Entry {
    start: u32,
    end: u32,
    id: u32,
}

const NONE: u32 = u32::MAX;

/// Token texts and their ids. Ids may have gaps.
pub(crate) struct Vocab {
    text: String,
    entries: Vec<Entry>,
    by_text: HashTable<u32>,
    by_id: Vec<u32>,
    hasher: DefaultHashBuilder,
}

impl Vocab {
    pub(crate) fn new() -> Self {
        Self {
            text: String::new(),
            entries: Vec::new(),
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
            self.by_id.resize(slot + 1, NONE);
        }
        let number = match self.find(token) {
            Some(number) => {
                if let Some(entry) = self.entries.get_mut(number as usize) {
                    entry.id = id;
                }
                number
            }
            None => self.push(token, id)?,
        };
        if let Some(slot) = self.by_id.get_mut(slot) {
            *slot = number;
        }
        Ok(())
    }

    fn push(&mut self, token: &str, id: u32) -> Result<u32, VocabError> {
        let start = u32::try_from(self.text.len()).map_err(|_| VocabError::TooMuchText)?;
        let end =
            u32::try_from(self.text.len() + token.len()).map_err(|_| VocabError::TooMuchText)?;
        let number = u32::try_from(self.entries.len()).map_err(|_| VocabError::TooMuchText)?;
        self.text.push_str(token);
        self.entries.push(Entry { start, end, id });
        let (text, entries, hasher) = (&self.text, &self.entries, &self.hasher);
        self.by_text.insert_unique(hasher.hash_one(token), number, |&n| {
            hasher.hash_one(text_of(text, entries, n).unwrap_or_default())
        });
        Ok(number)
    }

    fn find(&self, token: &str) -> Option<u32> {
        let hash = self.hasher.hash_one(token);
        self.by_text
            .find(hash, |&n| text_of(&self.text, &self.entries, n) == Some(token))
            .copied()
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        let number = self.find(token)?;
        Some(self.entries.get(number as usize)?.id)
    }

    pub(crate) fn token(&self, id: u32) -> Option<&str> {
        let number = *self.by_id.get(id as usize)?;
        text_of(&self.text, &self.entries, number)
    }

    /// One more than the largest id.
    pub(crate) fn id_end(&self) -> u32 {
        self.by_id.len() as u32
    }

    /// How many different tokens there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn text_of<'t>(text: &'t str, entries: &[Entry], number: u32) -> Option<&'t str> {
    let entry = entries.get(number as usize)?;
    text.get(entry.start as usize..entry.end as usize)
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
        assert_eq!((vocab.id_end(), vocab.len(), vocab.id("b")), (8, 3, None));
        assert!(vocab.insert("big", u64::from(TOKEN_ID_LIMIT)).is_err());
        assert!(vocab.insert("huge", u64::MAX).is_err());
    }
}
