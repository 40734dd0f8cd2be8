//! The store of all sequences' blocks.

use super::block::{BLOCK, Block, BlockBudget};
use super::prefix::{PrefixCache, Tables};
use super::spec::{KvSpec, Policy};
use lmx_tensor::kernels::attention::write_kv;
use std::sync::Arc;

/// Names a sequence of a [`KvStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// Why the store refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KvError {
    /// The budget does not hold the blocks that a step needs.
    #[error("the KV budget is spent: {used} of {limit} bytes are in use and {needed} more are needed")]
    OutOfMemory {
        /// Bytes of living blocks.
        used: usize,
        /// The budget.
        limit: usize,
        /// Bytes of the block that could not be had.
        needed: usize,
    },
    /// A trim asked for more than can be undone.
    #[error("cannot trim to position {target}: the nearest reachable position is {reachable}")]
    Unreachable {
        /// The length asked for.
        target: usize,
        /// The nearest length that a sequence can still return to; 0 means starting over.
        reachable: usize,
    },
    /// A window without room for the query's own position.
    #[error("a window of {size} positions cannot keep the first {keep}: at most {} of them", size.saturating_sub(1))]
    Window {
        /// Positions seen in all.
        size: usize,
        /// Those of them that are the first of the sequence.
        keep: usize,
    },
    /// What a sequence is to hold is not enough to go on from it.
    #[error(
        "{len} tokens of which only the first {first} and those from {last} on are held cannot be continued"
    )]
    Lacking {
        /// Tokens of the sequence.
        len: usize,
        /// How many of the first ones are held.
        first: usize,
        /// Where the last ones begin that are held.
        last: usize,
    },
    /// The sequence is of a model, or of a form, that this store does not keep.
    #[error("the cache holds {found}; it is needed as {expected}")]
    OtherSpec {
        /// What it keeps.
        found: String,
        /// What the store keeps.
        expected: String,
    },
    /// No such sequence.
    #[error("unknown sequence")]
    UnknownSequence,
}

/// One sequence's blocks.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Tokens held: positions `0..len` have been written (windows may have dropped early ones).
    pub(super) len: usize,
    /// For each group, its blocks by absolute block number; `None` where dropped.
    pub(super) tables: Tables,
    /// For each group, where what it has read from a file begins, its window's first positions aside; 0 if there
    /// is no such gap. Blocks that hold a position before it are not whole.
    pub(super) gaps: Vec<usize>,
}

/// All sequences' keys and values, under one budget.
#[derive(Debug)]
pub struct KvStore {
    pub(super) spec: KvSpec,
    pub(super) budget: Arc<BlockBudget>,
    pub(super) sequences: Vec<Sequence>,
    next_id: u64,
    /// What sequences left for others that begin like them, if that is asked for.
    pub(super) prefixes: Option<PrefixCache>,
}

impl KvStore {
    /// An empty store for a model of the given spec, at most `budget_bytes` large.
    #[must_use]
    pub fn new(spec: KvSpec, budget_bytes: usize) -> Self {
        Self::with_budget(spec, BlockBudget::new(budget_bytes))
    }

    /// An empty store whose blocks are counted against a budget that others may share.
    #[must_use]
    pub fn with_budget(spec: KvSpec, budget: Arc<BlockBudget>) -> Self {
        Self { spec, budget, sequences: Vec::new(), next_id: 0, prefixes: None }
    }

    /// The layer groups.
    #[must_use]
    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// What the blocks are counted against.
    #[must_use]
    pub fn budget(&self) -> &Arc<BlockBudget> {
        &self.budget
    }

    /// Starts an empty sequence.
    pub fn add(&mut self) -> SequenceId {
        let groups = self.spec.groups.len();
        self.push(0, vec![Vec::new(); groups], vec![0; groups])
    }

    /// Starts a sequence of `len` tokens that holds `tables`.
    pub(super) fn push(&mut self, len: usize, tables: Tables, gaps: Vec<usize>) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.push(Sequence { id, len, tables, gaps });
        id
    }

    /// A second sequence with the same tokens; nothing is copied until one of the two writes.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn fork(&mut self, of: SequenceId) -> Result<SequenceId, KvError> {
        let Sequence { len, tables, gaps, .. } = self.get(of)?.clone();
        Ok(self.push(len, tables, gaps))
    }

    /// Forgets a sequence; its blocks are freed unless a fork shares them.
    pub fn remove(&mut self, id: SequenceId) {
        self.sequences.retain(|s| s.id != id);
    }

    /// The number of tokens that a sequence holds (0 if it is unknown).
    #[must_use]
    pub fn len(&self, id: SequenceId) -> usize {
        self.get(id).map_or(0, |s| s.len)
    }

    /// Whether no sequence is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence, KvError> {
        self.sequences.iter().find(|s| s.id == id).ok_or(KvError::UnknownSequence)
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, KvError> {
        self.sequences.iter_mut().find(|s| s.id == id).ok_or(KvError::UnknownSequence)
    }

    /// Makes room for `tokens` more tokens: afterwards the blocks of positions `len..len + tokens` exist and
    /// belong to this sequence alone, so that [`KvStore::write`] can fill them. Stored prefixes give way to it.
    ///
    /// # Errors
    /// [`KvError::OutOfMemory`]; what was allocated so far stays with the sequence.
    pub fn reserve(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        self.make_room(id, tokens)?;
        let groups: Vec<usize> = self.spec.groups.iter().map(super::LayerGroup::block_bytes).collect();
        let budget = Arc::clone(&self.budget);
        let sequence = self.get_mut(id)?;
        let first = sequence.len / BLOCK;
        let last = (sequence.len + tokens).div_ceil(BLOCK);
        for (table, &bytes) in sequence.tables.iter_mut().zip(&groups) {
            let out_of_memory =
                || KvError::OutOfMemory { used: budget.used(), limit: budget.limit(), needed: bytes };
            if table.len() < last {
                table.resize(last, None);
            }
            for slot in table.iter_mut().take(last).skip(first) {
                match slot {
                    None => {
                        let block = Block::new(bytes, &budget).ok_or_else(out_of_memory)?;
                        *slot = Some(Arc::new(block));
                    }
                    // A fork shares the block: copy on write.
                    Some(block) => {
                        if Arc::get_mut(block).is_none() {
                            *block = Arc::new(block.copy().ok_or_else(out_of_memory)?);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Stores the keys and values `k`, `v` (`[tokens][kv_heads][head_dim]`) of `layer` at the positions after
    /// the sequence's length. The room must have been reserved.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn write(&mut self, id: SequenceId, layer: usize, k: &[f32], v: &[f32]) -> Result<(), KvError> {
        let (group, place) = self.spec.layers[layer];
        let shape = self.spec.groups[group].shape;
        let width = shape.kv_heads * shape.head_dim;
        let sequence = self.get_mut(id)?;
        let first = sequence.len;
        for (i, (k, v)) in k.chunks_exact(width).zip(v.chunks_exact(width)).enumerate() {
            let position = first + i;
            let block = sequence.tables[group].get_mut(position / BLOCK).and_then(Option::as_mut);
            // `reserve` made the block unique; a block that is not is a bug of the caller.
            let block = block.and_then(Arc::get_mut);
            debug_assert!(block.is_some(), "position {position} was not reserved");
            if let Some(block) = block {
                write_kv(&shape, block.slab_mut(place, shape.bytes()), position % BLOCK, k, v);
            }
        }
        Ok(())
    }

    /// The slabs of `layer`, by absolute block number, `None` where dropped.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn slabs(&self, id: SequenceId, layer: usize) -> Result<Vec<Option<&[u8]>>, KvError> {
        let (group, place) = self.spec.layers[layer];
        let bytes = self.spec.groups[group].shape.bytes();
        let table = &self.get(id)?.tables[group];
        Ok(table.iter().map(|b| b.as_ref().map(|b| b.slab(place, bytes))).collect())
    }

    /// Counts `tokens` written tokens as held, and drops the blocks that no later query can see.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn commit(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        self.get_mut(id)?.len += tokens;
        self.drop_unseen(id)
    }

    pub(super) fn drop_unseen(&mut self, id: SequenceId) -> Result<(), KvError> {
        let policies: Vec<Policy> = self.spec.groups.iter().map(|g| g.policy).collect();
        let sequence = self.get_mut(id)?;
        for (table, policy) in sequence.tables.iter_mut().zip(policies) {
            for slot in &mut table[policy.unseen_blocks(sequence.len)] {
                *slot = None;
            }
        }
        Ok(())
    }

    /// Removes the last `tokens` tokens, exactly.
    ///
    /// # Errors
    /// [`KvError::Unreachable`] if a window has dropped tokens that the shorter sequence would need (the
    /// sequence is left as it was), [`KvError::UnknownSequence`].
    pub fn trim(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        let policies: Vec<Policy> = self.spec.groups.iter().map(|g| g.policy).collect();
        let sequence = self.get_mut(id)?;
        let target = sequence.len.checked_sub(tokens);
        let reachable = target.map_or(0, |target| sequence.reachable(&policies, target));
        match target {
            Some(target) if target == reachable => {
                for (table, gap) in sequence.tables.iter_mut().zip(&mut sequence.gaps) {
                    table.truncate(target.div_ceil(BLOCK));
                    // Below its gap a sequence is whole again.
                    *gap = if *gap > target { 0 } else { *gap };
                }
                sequence.len = target;
                Ok(())
            }
            _ => Err(KvError::Unreachable { target: target.unwrap_or(0), reachable }),
        }
    }

    /// Whether the sequence can be trimmed to `target` tokens.
    #[must_use]
    pub fn can_trim_to(&self, id: SequenceId, target: usize) -> bool {
        let policies: Vec<Policy> = self.spec.groups.iter().map(|g| g.policy).collect();
        self.get(id).is_ok_and(|s| target <= s.len && s.reachable(&policies, target) == target)
    }
}

impl Sequence {
    /// The nearest length at or after `target` from which it can go on: its next query must find all it may see.
    /// Starting over is always possible.
    fn reachable(&self, policies: &[Policy], target: usize) -> usize {
        let held = |((table, &gap), &policy): ((&Vec<_>, &usize), &Policy), target: usize| {
            let Some(window) = policy.window() else { return target };
            let kept = window.keep.div_ceil(BLOCK);
            let dropped = table.iter().skip(kept).take_while(|b| Option::is_none(b)).count();
            // Either nothing behind the target is lacking, or the query at position p, which sees the positions
            // from p + 1 - (size - keep) on, begins behind what is.
            let lacking = if dropped == 0 { gap } else { gap.max((kept + dropped) * BLOCK) };
            let first = if gap == 0 { kept * BLOCK } else { window.keep };
            if lacking == 0 || target <= first {
                return target;
            }
            target.max(lacking + window.size - window.keep - 1).min(self.len)
        };
        let mut length = target;
        loop {
            let groups = self.tables.iter().zip(&self.gaps).zip(policies);
            let next = groups.map(|group| held(group, length)).max().unwrap_or(length);
            // What suits one group may fall into the gap of another.
            if next == length || length == 0 {
                return length;
            }
            length = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvWindow, LayerKv};
    use lmx_tensor::kernels::attention::KvType;

    const FULL: LayerKv = LayerKv { kv_heads: 1, head_dim: 4, policy: Policy::Full };

    fn window(size: usize, keep: usize) -> LayerKv {
        let policy = Policy::Window(KvWindow::new(size, keep).unwrap());
        LayerKv { kv_heads: 1, head_dim: 4, policy }
    }

    fn push(store: &mut KvStore, id: SequenceId, tokens: usize) {
        store.reserve(id, tokens).unwrap();
        for layer in 0..store.spec().layers.len() {
            store.write(id, layer, &vec![1.0; tokens * 4], &vec![2.0; tokens * 4]).unwrap();
        }
        store.commit(id, tokens).unwrap();
    }

    #[test]
    fn a_window_holds_at_most_its_blocks_plus_one() {
        let mut store = KvStore::new(KvSpec::new(&[FULL, window(40, 0)], KvType::F16), usize::MAX);
        let id = store.add();
        for _ in 0..300 {
            push(&mut store, id, 1);
            let held = store.slabs(id, 1).unwrap().iter().flatten().count();
            assert!(held <= 40usize.div_ceil(BLOCK) + 1, "{held} blocks at {}", store.len(id));
        }
        assert_eq!(store.slabs(id, 0).unwrap().iter().flatten().count(), 300usize.div_ceil(BLOCK));
        assert_eq!(store.budget().used(), store.spec().bytes_at(300));
    }

    #[test]
    fn a_bounded_sequence_keeps_its_first_blocks() {
        let bound = KvWindow::new(100, 36).unwrap();
        let spec = KvSpec::new(&[FULL, window(40, 0)], KvType::F16).bounded(bound);
        assert_eq!(spec.groups[1].policy, window(40, 0).policy, "a layer's own window stays");
        let mut store = KvStore::new(spec, usize::MAX);
        let id = store.add();
        for _ in 0..400 {
            push(&mut store, id, 1);
            let slabs = store.slabs(id, 0).unwrap();
            let (len, held) = (store.len(id), slabs.iter().flatten().count());
            // The first 36 lie in two blocks, the last 64 in three if they begin within one.
            assert!(held <= 5, "{held} blocks at {len}");
            // All that the next query sees.
            for position in (0..36.min(len)).chain((len + 1).saturating_sub(64)..len) {
                assert!(slabs[position / BLOCK].is_some(), "position {position} at {len}");
            }
        }
        assert_eq!(store.budget().used(), store.spec().bytes_at(400));
        // The first 64 positions are held, those up to 320 were dropped.
        let layer = |target| store.can_trim_to(id, target);
        let reachable: Vec<usize> = (0..=400).filter(|&target| layer(target)).collect();
        assert!(!layer(64) && !layer(300), "the other layer holds 360 and later");
        assert_eq!((reachable[0], reachable[1], reachable[reachable.len() - 1]), (0, 391, 400));

        let mut store = KvStore::new(KvSpec::new(&[FULL], KvType::F16).bounded(bound), usize::MAX);
        let id = store.add();
        push(&mut store, id, 400);
        let reachable: Vec<usize> = (0..=400).filter(|&target| store.can_trim_to(id, target)).collect();
        assert_eq!(reachable, (0..=64).chain(383..=400).collect::<Vec<_>>());
        let error = store.trim(id, 100).unwrap_err();
        assert_eq!(error, KvError::Unreachable { target: 300, reachable: 383 });
        store.trim(id, 340).unwrap();
        assert_eq!(store.len(id), 60);
        push(&mut store, id, 1);
        assert_eq!(KvWindow::new(4, 4), Err(KvError::Window { size: 4, keep: 4 }));
    }

    #[test]
    fn trim_is_exact_or_names_the_nearest_position() {
        let mut store = KvStore::new(KvSpec::new(&[FULL, window(40, 0)], KvType::F32), usize::MAX);
        let id = store.add();
        push(&mut store, id, 190);
        store.trim(id, 10).unwrap();
        assert_eq!(store.len(id), 180);
        let error = store.trim(id, 100).unwrap_err();
        let KvError::Unreachable { target: 80, reachable } = error else { panic!("{error}") };
        assert!(store.can_trim_to(id, reachable) && !store.can_trim_to(id, reachable - 1));
        assert_eq!(store.len(id), 180, "a refused trim changes nothing");
        store.trim(id, 180 - reachable).unwrap();
        push(&mut store, id, 5);
        store.trim(id, reachable + 5).unwrap();
        assert_eq!(store.len(id), 0);
    }

    #[test]
    fn forks_share_until_one_writes() {
        let mut store = KvStore::new(KvSpec::new(&[FULL], KvType::F32), usize::MAX);
        let a = store.add();
        push(&mut store, a, 100);
        let before = store.budget().used();
        let b = store.fork(a).unwrap();
        assert_eq!(store.budget().used(), before);
        store.reserve(b, 1).unwrap();
        store.write(b, 0, &[9.0; 4], &[9.0; 4]).unwrap();
        assert_eq!(store.budget().used(), before + store.spec().groups[0].block_bytes());
        assert_ne!(store.slabs(a, 0).unwrap()[3], store.slabs(b, 0).unwrap()[3]);
        store.remove(a);
        store.remove(b);
        assert_eq!(store.budget().used(), 0);
    }

    #[test]
    fn the_budget_is_an_error_not_a_panic() {
        let spec = KvSpec::new(&[FULL], KvType::F32);
        let limit = 3 * spec.groups[0].block_bytes();
        let mut store = KvStore::new(spec, limit);
        let id = store.add();
        push(&mut store, id, 3 * BLOCK);
        assert!(matches!(store.reserve(id, 1), Err(KvError::OutOfMemory { .. })));
    }
}
