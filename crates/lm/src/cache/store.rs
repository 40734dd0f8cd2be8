//! The store of all sequences' blocks.

use super::block::{BLOCK, Block, BlockBudget};
use super::disk::PrefixDir;
use super::error::KvError;
use super::prefix::{PrefixCache, Tables};
use super::quantize::{KvQuantization, quantize_blocks};
use super::spec::{KvSpec, Policy};
use super::state::States;
use lmx_tensor::kernels::attention::KvQuant;
use std::sync::Arc;

/// Names a sequence of a [`KvStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// One sequence's blocks.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Tokens held: positions `0..len` have been written (windows may have dropped early ones).
    pub(super) len: usize,
    /// How its blocks are quantized, all of them; `None` while they hold floats.
    pub(super) quant: Option<KvQuant>,
    /// For each group, its blocks by absolute block number; `None` where dropped.
    pub(super) tables: Tables,
    /// For each group, where what it has read from a file begins, its window's first positions aside; 0 if there
    /// is no such gap. Blocks that hold a position before it are not whole.
    pub(super) gaps: Vec<usize>,
    /// Its recurrent states, if the model has any.
    pub(super) states: States,
    /// Whether queries behind the start of quantization read floats, as in a file of floats: then it is not what a
    /// sequence of these tokens is otherwise.
    pub(super) late: bool,
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
    /// Where they outlive the store, if that is asked for; only with `prefixes`.
    pub(super) prefix_dir: Option<PrefixDir>,
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
        Self { spec, budget, sequences: Vec::new(), next_id: 0, prefixes: None, prefix_dir: None }
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

    /// How many more blocks the budget has room for if each group takes as many of them, quantized where long sequences are.
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        let (groups, quant) = (&self.spec.groups, self.spec.quant_at(usize::MAX));
        let of_each = groups.iter().map(|group| group.block_bytes(quant)).sum();
        let room = self.budget.limit().saturating_sub(self.budget.used());
        room.checked_div(of_each).unwrap_or(0).saturating_mul(groups.len())
    }

    /// Starts an empty sequence.
    pub fn add(&mut self) -> SequenceId {
        let groups = self.spec.groups.len();
        self.push(Sequence::new(0, None, vec![Vec::new(); groups], States::default()))
    }

    /// Takes a sequence in, under an id of its own.
    pub(super) fn push(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.push(Sequence { id, ..sequence });
        id
    }

    /// A second sequence with the same tokens; nothing is copied until one of the two writes.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn fork(&mut self, of: SequenceId) -> Result<SequenceId, KvError> {
        let copy = self.get(of)?.clone();
        Ok(self.push(copy))
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

    /// How many of `tokens` further tokens one step may run: none that reads floats together with one that reads
    /// quantized keys and values.
    #[must_use]
    pub fn step_limit(&self, id: SequenceId, tokens: usize) -> usize {
        let before = self.spec.quantization.and_then(|how| how.start().checked_sub(self.len(id)));
        before.filter(|&before| before > 0).map_or(tokens, |before| tokens.min(before))
    }

    /// How a sequence's keys and values are quantized; `None` while they are floats (or if it is unknown).
    #[must_use]
    pub fn quant(&self, id: SequenceId) -> Option<KvQuant> {
        self.get(id).ok().and_then(|s| s.quant)
    }

    /// Quantizes the sequence if `tokens` more begin at or behind the start.
    fn quantize(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        let Self { spec, budget, sequences, prefixes, .. } = self;
        let sequence = sequences.iter_mut().find(|s| s.id == id).ok_or(KvError::UnknownSequence)?;
        let Some(how) = spec.quantization else { return Ok(()) };
        let (len, start) = (sequence.len, how.start());
        if sequence.quant.is_some() || len + tokens <= start {
            return Ok(());
        }
        if len < start {
            return Err(KvError::PassesStart { len, tokens, start });
        }
        // Room that was reserved and not used would be taken for blocks of tokens.
        sequence.tables.iter_mut().for_each(|table| table.truncate(len.div_ceil(BLOCK)));
        if let Some(prefixes) = prefixes {
            // What they share stays as it is, and gets codes beside it.
            let blocks = sequence.tables.iter().zip(&spec.groups);
            let bytes = blocks
                .map(|(table, group)| table.iter().flatten().count() * group.block_bytes(Some(how.quant())));
            prefixes.make_room(budget, bytes.sum());
        }
        let refused = |needed| KvError::OutOfMemory { used: budget.used(), limit: budget.limit(), needed };
        quantize_blocks(&spec.groups, how.quant(), &mut sequence.tables, len, refused)?;
        sequence.quant = Some(how.quant());
        sequence.late = len > start;
        Ok(())
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence, KvError> {
        self.sequences.iter().find(|s| s.id == id).ok_or(KvError::UnknownSequence)
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, KvError> {
        self.sequences.iter_mut().find(|s| s.id == id).ok_or(KvError::UnknownSequence)
    }

    /// Makes room for `tokens` more tokens: afterwards the blocks of positions `len..len + tokens` exist and
    /// belong to this sequence alone, so that [`KvStore::write`] can fill them. Stored prefixes give way to it. A
    /// sequence that goes on from where keys and values are to be quantized is quantized first.
    ///
    /// # Errors
    /// [`KvError::OutOfMemory`]; what was allocated so far stays with the sequence. [`KvError::PassesStart`].
    pub fn reserve(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        self.quantize(id, tokens)?;
        self.make_room(id, tokens)?;
        let quant = self.quant(id);
        let groups: Vec<usize> = self.spec.groups.iter().map(|g| g.block_bytes(quant)).collect();
        let budget = Arc::clone(&self.budget);
        let floats = self.spec.state_floats();
        let sequence = self.get_mut(id)?;
        let first = sequence.len / BLOCK;
        let last = (sequence.len + tokens).div_ceil(BLOCK);
        for (table, &bytes) in sequence.tables.iter_mut().zip(&groups) {
            let out_of_memory = || out_of_memory(&budget, bytes);
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
        if floats > 0 && !sequence.states.reserve(floats, sequence.len, tokens, &budget) {
            return Err(out_of_memory(&budget, floats * size_of::<f32>()));
        }
        Ok(())
    }

    /// Gives back what was reserved and not committed.
    pub fn release_reserved(&mut self, id: SequenceId) {
        if let Ok(sequence) = self.get_mut(id) {
            let len = sequence.len;
            sequence.tables.iter_mut().for_each(|table| table.truncate(len.div_ceil(BLOCK)));
            sequence.states.truncate(len);
        }
    }

    /// The slabs of `layer`, by absolute block number, `None` where dropped.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn slabs(&self, id: SequenceId, layer: usize) -> Result<Vec<Option<&[u8]>>, KvError> {
        let (group, place) = self.spec.layers[layer];
        let bytes = self.spec.groups[group].slab_bytes(self.quant(id));
        let table = &self.get(id)?.tables[group];
        Ok(table.iter().map(|b| b.as_ref().map(|b| b.slab(place, bytes))).collect())
    }

    /// Counts `tokens` written tokens as held, and drops the blocks that no later query can see.
    ///
    /// # Errors
    /// [`KvError::PartialStep`] if there is recurrent state and the step was reserved for another number of tokens,
    /// [`KvError::UnknownSequence`].
    pub fn commit(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        self.advance(id, tokens)?;
        self.drop_unseen(id)
    }

    /// Counts `tokens` written tokens, and their states, as held.
    pub(super) fn advance(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        let stateful = !self.spec.states.is_empty();
        let sequence = self.get_mut(id)?;
        if stateful && tokens > 0 {
            sequence.states.commit(sequence.len + tokens)?;
        }
        sequence.len += tokens;
        Ok(())
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
    /// [`KvError::Unreachable`] if a window has dropped tokens that the shorter sequence would need, or its recurrent
    /// state is not held, [`KvError::Quantized`] if it would need floats (the sequence is left as it was),
    /// [`KvError::UnknownSequence`].
    pub fn trim(&mut self, id: SequenceId, tokens: usize) -> Result<(), KvError> {
        let start = start_of(&self.spec);
        let sequence = self.get(id)?;
        let target = sequence.len.checked_sub(tokens);
        let reachable = target.map_or(0, |target| sequence.reachable(&self.spec, target));
        match target {
            Some(target) if target == reachable => {
                let sequence = self.get_mut(id)?;
                for (table, gap) in sequence.tables.iter_mut().zip(&mut sequence.gaps) {
                    table.truncate(target.div_ceil(BLOCK));
                    // Below its gap a sequence is whole again.
                    *gap = if *gap > target { 0 } else { *gap };
                }
                sequence.states.truncate(target);
                sequence.len = target;
                // Nothing is held that is quantized.
                sequence.quant = sequence.quant.filter(|_| target > 0);
                sequence.late &= target > start;
                Ok(())
            }
            Some(target) if sequence.quant.is_some() && target < start => {
                Err(KvError::Quantized { target, start, reachable })
            }
            _ => Err(KvError::Unreachable { target: target.unwrap_or(0), reachable }),
        }
    }

    /// Whether the sequence can be trimmed to `target` tokens.
    #[must_use]
    pub fn can_trim_to(&self, id: SequenceId, target: usize) -> bool {
        self.get(id).is_ok_and(|s| target <= s.len && s.reachable(&self.spec, target) == target)
    }

    /// The greatest length of at most `target` to which the sequence can be trimmed; the tokens from there to
    /// `target` are to be run again. 0 if it is unknown.
    #[must_use]
    pub fn resume_point(&self, id: SequenceId, target: usize) -> usize {
        self.get(id).map_or(0, |s| s.resume_point(&self.spec, target.min(s.len)))
    }
}

/// Below it queries read floats.
fn start_of(spec: &KvSpec) -> usize {
    spec.quantization.map_or(0, KvQuantization::start)
}

fn out_of_memory(budget: &BlockBudget, needed: usize) -> KvError {
    KvError::OutOfMemory { used: budget.used(), limit: budget.limit(), needed }
}

impl Sequence {
    /// A sequence of `len` tokens that holds `tables` and `states`, without gaps; [`KvStore::push`] names it.
    pub(super) fn new(len: usize, quant: Option<KvQuant>, tables: Tables, states: States) -> Self {
        let gaps = vec![0; tables.len()];
        Self { id: SequenceId(0), len, quant, tables, gaps, states, late: false }
    }

    /// The nearest length from which it can go on with what is left of `target` tokens: its next query must find all
    /// it may see, as floats below the start of quantization, and its state must be held. At or after `target`, but with
    /// recurrent state at or before it.
    fn reachable(&self, spec: &KvSpec, target: usize) -> usize {
        if !spec.states.is_empty() {
            return self.resume_point(spec, target);
        }
        let target = if self.quant.is_some() && target > 0 { target.max(start_of(spec)) } else { target };
        let mut length = target;
        loop {
            let next = self.groups(spec).map(|group| group.held_from(length).min(self.len));
            let next = next.max().unwrap_or(length);
            // What suits one group may fall into the gap of another.
            if next == length || length == 0 {
                return length;
            }
            length = next;
        }
    }

    fn groups<'a>(&'a self, spec: &'a KvSpec) -> impl Iterator<Item = Group<'a>> {
        let groups = self.tables.iter().zip(&self.gaps).zip(&spec.groups);
        groups.map(|((table, &gap), group)| Group { table, gap, policy: group.policy })
    }

    /// As [`KvStore::resume_point`]. Starting over is always possible.
    fn resume_point(&self, spec: &KvSpec, target: usize) -> usize {
        let mut length = if self.quant.is_some() && target < start_of(spec) { 0 } else { target };
        loop {
            if !spec.states.is_empty() {
                length = self.states.positions().find(|&position| position <= length).unwrap_or(0);
            }
            let before = self.groups(spec).map(|group| match group.held_from(length) {
                held if held == length => length,
                _ if self.quant.is_some() && group.first() < start_of(spec) => 0,
                _ => group.first(),
            });
            // What suits one group may fall into the gap of another, or lack a state.
            match before.min().unwrap_or(length) {
                same if same == length => return length,
                earlier => length = earlier,
            }
        }
    }
}

/// What a sequence holds in one group of layers.
struct Group<'a> {
    table: &'a [Option<Arc<Block>>],
    gap: usize,
    policy: Policy,
}

impl Group<'_> {
    /// The first positions, from all of which it can go on.
    fn first(&self) -> usize {
        let kept = self.policy.kept();
        if self.gap == 0 { kept.next_multiple_of(BLOCK) } else { kept }
    }

    /// The nearest length at or after `length` whose next query finds all that it sees.
    fn held_from(&self, length: usize) -> usize {
        let kept = self.policy.kept().div_ceil(BLOCK);
        let dropped = self.table.iter().skip(kept).take_while(|block| block.is_none()).count();
        // Either nothing behind the length is lacking, or the query sees nothing of what is.
        let lacking = if dropped == 0 { self.gap } else { self.gap.max((kept + dropped) * BLOCK) };
        if lacking == 0 || length <= self.first() {
            length
        } else {
            self.policy.first_beyond(lacking, length)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvWindow, LayerKv};
    use lmx_tensor::kernels::attention::KvType;
    use lmx_tensor::kernels::{Exec, Isa};

    const FULL: LayerKv = LayerKv { kv_heads: 1, head_dim: 4, policy: Policy::Full };

    fn exec() -> Exec {
        Exec::new(Isa::best(), 1)
    }

    fn window(size: usize, keep: usize) -> LayerKv {
        let policy = Policy::Window(KvWindow::new(size, keep).unwrap());
        LayerKv { kv_heads: 1, head_dim: 4, policy }
    }

    fn push(store: &mut KvStore, id: SequenceId, tokens: usize) {
        store.reserve(id, tokens).unwrap();
        for layer in 0..store.spec().layers.len() {
            store
                .write(&exec(), layer, &[(id, 0..tokens)], &vec![1.0; tokens * 4], &vec![2.0; tokens * 4])
                .unwrap();
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
    fn chunks_that_have_ended_are_dropped() {
        let policy = Policy::Chunk(70.try_into().unwrap());
        let chunked = LayerKv { kv_heads: 1, head_dim: 4, policy };
        let mut store = KvStore::new(KvSpec::new(&[chunked], KvType::F32), usize::MAX);
        let id = store.add();
        for _ in 0..300 {
            push(&mut store, id, 1);
            let (len, slabs) = (store.len(id), store.slabs(id, 0).unwrap());
            // The next query sees its chunk, which may be about to begin.
            let start = len - len % 70;
            assert!((start..len).all(|position| slabs[position / BLOCK].is_some()), "at {len}");
            assert!(slabs[..start / BLOCK].iter().all(Option::is_none), "at {len}");
            assert_eq!(store.budget().used(), store.spec().bytes_at(len));
        }
        // 256 and later are held; the query at 280 is the first of its chunk.
        let reachable: Vec<usize> = (0..=300).filter(|&target| store.can_trim_to(id, target)).collect();
        assert_eq!(reachable, [0].into_iter().chain(280..=300).collect::<Vec<_>>());
        let error = store.trim(id, 50).unwrap_err();
        assert_eq!(error, KvError::Unreachable { target: 250, reachable: 280 });
        assert_eq!((store.resume_point(id, 250), store.resume_point(id, 290)), (0, 290));
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
        assert_eq!((store.budget().used(), store.budget().blocks()), (before, 100_usize.div_ceil(BLOCK)));
        store.reserve(b, 1).unwrap();
        store.write(&exec(), 0, &[(b, 0..1)], &[9.0; 4], &[9.0; 4]).unwrap();
        assert_eq!(store.budget().used(), before + store.spec().groups[0].block_bytes(None));
        assert_ne!(store.slabs(a, 0).unwrap()[3], store.slabs(b, 0).unwrap()[3]);
        assert_eq!(store.budget().blocks(), 100_usize.div_ceil(BLOCK) + 1);
        store.remove(a);
        assert_eq!(store.budget().blocks(), 100_usize.div_ceil(BLOCK));
        store.remove(b);
        assert_eq!((store.budget().used(), store.budget().blocks()), (0, 0));
    }

    #[test]
    fn the_budget_is_an_error_not_a_panic() {
        let spec = KvSpec::new(&[FULL], KvType::F32);
        let limit = 3 * spec.groups[0].block_bytes(None);
        let mut store = KvStore::new(spec, limit);
        let id = store.add();
        push(&mut store, id, BLOCK + 1);
        assert_eq!((store.budget().blocks(), store.free_blocks()), (2, 1));
        push(&mut store, id, 2 * BLOCK - 1);
        assert_eq!((store.budget().blocks(), store.free_blocks()), (3, 0));
        assert!(matches!(store.reserve(id, 1), Err(KvError::OutOfMemory { .. })));
    }
}
