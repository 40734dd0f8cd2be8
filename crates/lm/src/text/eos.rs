//! The tokens that end a reply.

use std::collections::BTreeMap;
use std::fmt;

/// Who says that a token ends a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EosSource {
    /// `eos_token_id` of config.json, or of the GGUF metadata.
    Config,
    /// `eos_token_id` of generation_config.json.
    GenerationConfig,
    /// The tokenizer's own `eos_token`.
    Tokenizer,
    /// The user's `--extra-eos-token`.
    User,
}

impl fmt::Display for EosSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EosSource::Config => "config",
            EosSource::GenerationConfig => "generation_config",
            EosSource::Tokenizer => "tokenizer",
            EosSource::User => "user",
        })
    }
}

/// The end-of-sequence tokens: the union of all sources, each token with the first that named it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EosSet(BTreeMap<u32, EosSource>);

impl EosSet {
    /// Adds a token; an earlier source of the same token stays.
    pub fn insert(&mut self, id: u32, source: EosSource) {
        self.0.entry(id).or_insert(source);
    }

    /// Whether the token ends a reply.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains_key(&id)
    }

    /// All tokens with their sources, by id.
    pub fn iter(&self) -> impl Iterator<Item = (u32, EosSource)> {
        self.0.iter().map(|(&id, &source)| (id, source))
    }
}

#[cfg(test)]
mod tests {
    use super::{EosSet, EosSource};

    #[test]
    fn the_set_is_the_union_and_keeps_the_first_source() {
        let mut set = EosSet::default();
        for (id, source) in
            [(1, EosSource::Config), (106, EosSource::GenerationConfig), (1, EosSource::Tokenizer)]
        {
            set.insert(id, source);
        }
        let all: Vec<_> = set.iter().collect();
        assert_eq!(all, [(1, EosSource::Config), (106, EosSource::GenerationConfig)]);
        assert!(set.contains(106) && !set.contains(2));
    }
}
