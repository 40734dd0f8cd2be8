//! Prefixes in the store: sequences leave their blocks behind, and begin with those of others.

use super::block::BLOCK;
use super::error::KvError;
use super::prefix::{Found, Holding, PrefixCache, PrefixCacheOptions, PrefixStats, PrefixTokens};
use super::spec::LayerGroup;
use super::state::States;
use super::store::{KvStore, Sequence, SequenceId};
use lmx_tensor::kernels::attention::KvQuant;
use std::sync::Arc;

/// Set in the roots of blocks that are quantized.
pub(super) const QUANTIZED: u64 = 1 << 63;

impl KvStore {
    /// The same store, which keeps what sequences leave behind, as far as `options` and the budget allow.
    #[must_use]
    pub fn with_prefixes(mut self, options: PrefixCacheOptions) -> Self {
        self.prefixes = Some(PrefixCache::new(options));
        self
    }

    /// What the prefix cache holds and has done; all zero without one.
    #[must_use]
    pub fn prefix_stats(&self) -> PrefixStats {
        self.prefixes.as_ref().map(PrefixCache::stats).unwrap_or_default()
    }

    /// Forgets all stored prefixes, but not those in a folder.
    pub fn clear_prefixes(&mut self) {
        self.prefixes.iter_mut().for_each(PrefixCache::clear);
    }

    /// As [`KvStore::commit`]; before blocks that no later query sees are dropped, the whole blocks are stored
    /// as a prefix. `entry` has all tokens of the sequence, the new ones included.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn commit_prefix(
        &mut self,
        id: SequenceId,
        tokens: usize,
        entry: &PrefixTokens<'_>,
    ) -> Result<(), KvError> {
        let before = self.get(id)?.len;
        self.advance(id, tokens)?;
        let keep_unseen = self.prefixes.as_ref().is_some_and(|p| p.options().keep_unseen);
        if keep_unseen && before / BLOCK < (before + tokens) / BLOCK {
            self.store_prefix(id, entry, false);
        }
        self.drop_unseen(id)
    }

    /// Ends a sequence: what it holds, a partial last block included, is stored as a prefix, in the folder too if there
    /// is one.
    pub fn leave_prefix(&mut self, id: SequenceId, entry: &PrefixTokens<'_>) {
        self.store_prefix(id, entry, true);
        self.write_prefix(id, entry);
        self.remove(id);
    }

    /// As [`KvStore::leave_prefix`], for a sequence that will be continued: it is not written to the folder.
    pub fn set_aside(&mut self, id: SequenceId, entry: &PrefixTokens<'_>) {
        self.store_prefix(id, entry, true);
        self.remove(id);
    }

    /// Bytes that can be had for running sequences: what is free, and what stored prefixes would give back.
    #[must_use]
    pub fn available_bytes(&self) -> usize {
        let free = self.budget.limit().saturating_sub(self.budget.used());
        free.saturating_add(self.prefixes.as_ref().map_or(0, PrefixCache::evictable))
    }

    /// Bytes that a sequence which begins like `tokens` would share with others that run.
    #[must_use]
    pub fn shared_bytes(&self, root: u64, tokens: &[u32], limit: usize) -> usize {
        // One of the owners is the cache, one is what was found.
        let shared = |found: Found| {
            let blocks = found.tables.iter().flatten().flatten();
            blocks.filter(|block| Arc::strong_count(block) > 2).map(|block| block.bytes()).sum()
        };
        self.find_prefix(root, tokens, limit).map_or(0, |(_, found)| shared(found))
    }

    fn store_prefix(&mut self, id: SequenceId, entry: &PrefixTokens<'_>, tail: bool) {
        let Some(prefixes) = self.prefixes.as_mut() else { return };
        let Some(sequence) = self.sequences.iter().find(|s| s.id == id) else { return };
        debug_assert_eq!(sequence.len, entry.tokens.len(), "the tokens of the sequence");
        // Where a file lacked positions, or was of floats behind the start, blocks are not what their tokens say.
        if !sequence.late && sequence.gaps.iter().all(|&gap| gap == 0) {
            let (tables, states) = (&sequence.tables, &sequence.states.by_block());
            let root = entry.root | if sequence.quant.is_some() { QUANTIZED } else { 0 };
            prefixes.insert(&PrefixTokens { root, ..*entry }, Holding { tables, states }, tail);
            if !prefixes.options().keep_unseen {
                prefixes.drop_unseen(root, entry.tokens, &self.spec.groups);
            }
        }
    }

    /// How many of the first `limit` tokens are stored, so that a sequence could begin with them.
    #[must_use]
    pub fn stored_prefix(&self, root: u64, tokens: &[u32], limit: usize) -> usize {
        self.find_prefix(root, tokens, limit).map_or(0, |(_, found)| found.len)
    }

    /// Starts a sequence with the longest stored prefix of `tokens`, at most `limit` long. Returns it and its
    /// length, or `None` if not even the first token is stored. Nothing is copied until the sequence writes.
    pub fn add_prefix(&mut self, root: u64, tokens: &[u32], limit: usize) -> Option<(SequenceId, usize)> {
        let found = self.find_prefix(root, tokens, limit);
        self.prefixes.as_mut()?.touch(found.as_ref().map(|(_, found)| found));
        let (quant, found) = found?;
        let states = States::taken_over(found.len, &found.states);
        let sequence = Sequence::new(found.len, quant, found.tables, states);
        Some((self.push(sequence), found.len))
    }

    /// What is stored quantized counts from where quantization starts, floats count up to there.
    pub(super) fn find_prefix(
        &self,
        root: u64,
        tokens: &[u32],
        limit: usize,
    ) -> Option<(Option<KvQuant>, Found)> {
        let (prefixes, spec) = (self.prefixes.as_ref()?, &self.spec);
        let find = |root, limit| prefixes.find(root, tokens, limit, &spec.groups, !spec.states.is_empty());
        let Some(how) = spec.quantization else { return find(root, limit).map(|found| (None, found)) };
        let quantized = find(root | QUANTIZED, limit).filter(|found| found.len >= how.start());
        let floats = || find(root, limit.min(how.start())).map(|found| (None, found));
        quantized.map(|found| (Some(how.quant()), found)).or_else(floats)
    }

    /// Drops stored prefixes until the sequence has room for `tokens` more, as far as that is possible.
    pub(super) fn make_room(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        if self.prefixes.is_none() {
            return Ok(());
        }
        let sequence = self.get(id)?;
        let (first, last) = (sequence.len / BLOCK, (sequence.len + tokens).div_ceil(BLOCK));
        let needed = |(group, table): (&LayerGroup, &Vec<Option<Arc<_>>>)| {
            let own = |index: usize| matches!(table.get(index), Some(Some(b)) if Arc::strong_count(b) == 1);
            group.block_bytes(sequence.quant) * (first..last).filter(|&index| !own(index)).count()
        };
        let bytes = self.spec.groups.iter().zip(&sequence.tables).map(needed).sum();
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.make_room(&self.budget, bytes);
        }
        Ok(())
    }
}
