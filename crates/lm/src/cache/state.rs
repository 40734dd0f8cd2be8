//! Recurrent state: what a layer carries from token to token that is not keys and values of each position.
//!
//! A sequence's state is the content of all slots after its last token, in one block of f32. It cannot be taken
//! back token by token, so snapshots of it stay: at multiples of [`SNAPSHOT`] positions, dense near the end of the
//! sequence and ever sparser before it. Which ones follows from the length alone, however the sequence was fed:
//! going back by n tokens finds one that is at most n + [`SNAPSHOT`] tokens earlier, and a sequence of l tokens
//! holds about 2 log2(l / [`SNAPSHOT`]) + 3. A state is never written again, so forks share theirs.

use super::block::{BLOCK, BlockBudget, Reserved};
use super::error::KvError;
use super::store::{KvStore, SequenceId};
use std::sync::Arc;

/// Distance of the positions at which snapshots are taken; a multiple of [`BLOCK`].
pub const SNAPSHOT: usize = 256;

/// A named part of a layer's recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateSlot {
    /// The layer of the model.
    pub layer: usize,
    /// What it holds, as the layer calls it: `conv`, `last_k`, …
    pub name: &'static str,
    /// Number of f32 that it takes.
    pub floats: usize,
}

/// The multiples of [`SNAPSHOT`] in `after + 1..=len` whose states a sequence of `len` tokens holds: those of which
/// there are no more than four, of the same power of two, between them and the end. Then `len` itself.
pub(super) fn points(after: usize, len: usize) -> impl Iterator<Item = usize> {
    let kept = move |position: &usize| {
        let step = SNAPSHOT << (position / SNAPSHOT).trailing_zeros();
        len - position < 4 * step
    };
    let first = (after / SNAPSHOT + 1) * SNAPSHOT;
    (first..len).step_by(SNAPSHOT).filter(kept).chain((after < len).then_some(len))
}

/// The state at one position: all slots, one after the other.
#[derive(Debug)]
pub(super) struct State {
    values: Vec<f32>,
    /// Counts the values while they live.
    _reserved: Reserved,
}

impl State {
    /// A state of what another one held, little-endian; `None` if the budget does not allow it.
    pub(super) fn of(bytes: &[u8], budget: &Arc<BlockBudget>) -> Option<Self> {
        let reserved = Reserved::new(bytes.len(), budget)?;
        let (words, _) = bytes.as_chunks::<4>();
        Some(Self {
            values: words.iter().map(|&word| f32::from_le_bytes(word)).collect(),
            _reserved: reserved,
        })
    }

    /// All slots.
    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.values.len() * size_of::<f32>()
    }
}

/// The states of one sequence, each with the number of tokens after which it is, ascending.
#[derive(Clone, Debug, Default)]
pub(super) struct States {
    /// Snapshots, and last the state at the sequence's length. Empty at length 0, where every slot is zero.
    held: Vec<(usize, Arc<State>)>,
    /// What the step in progress must leave.
    pending: Vec<(usize, Arc<State>)>,
}

impl States {
    /// Makes room for the states that a sequence of `len` tokens needs when it has `tokens` more; false if the
    /// budget does not hold them.
    pub(super) fn reserve(
        &mut self,
        floats: usize,
        len: usize,
        tokens: usize,
        budget: &Arc<BlockBudget>,
    ) -> bool {
        self.pending.clear();
        for position in points(len, len + tokens) {
            let Some(reserved) = Reserved::new(floats * size_of::<f32>(), budget) else { return false };
            let state = State { values: vec![0.0; floats], _reserved: reserved };
            self.pending.push((position, Arc::new(state)));
        }
        true
    }

    /// Takes the pending states over, for a sequence of `len` tokens.
    ///
    /// # Errors
    /// [`KvError::PartialStep`] if they end elsewhere.
    pub(super) fn commit(&mut self, len: usize) -> Result<(), KvError> {
        let reserved = self.pending.last().map_or(0, |(position, _)| *position);
        if reserved != len {
            return Err(KvError::PartialStep { reserved, committed: len });
        }
        self.held.append(&mut self.pending);
        let mut kept = points(0, len).peekable();
        self.held.retain(|(position, _)| {
            while kept.next_if(|kept| kept < position).is_some() {}
            kept.peek() == Some(position)
        });
        Ok(())
    }

    /// Forgets the states after `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        self.pending.clear();
        self.held.retain(|(position, _)| *position <= len);
    }

    /// Those of a sequence of `len` tokens that begins with what others left: `stored` has the states after whole
    /// blocks, by block, among them the one after the last.
    pub(super) fn taken_over(len: usize, stored: &[Option<Arc<State>>]) -> Self {
        let after = |position: usize| stored.get((position / BLOCK).checked_sub(1)?)?.clone();
        let held = points(0, len).filter_map(|position| Some((position, after(position)?))).collect();
        Self { held, pending: Vec::new() }
    }

    /// The snapshots, by the block that they are after.
    pub(super) fn by_block(&self) -> Vec<Option<Arc<State>>> {
        let mut blocks = Vec::new();
        for (position, state) in self.held.iter().filter(|(position, _)| position.is_multiple_of(SNAPSHOT)) {
            blocks.resize(position / BLOCK - 1, None);
            blocks.push(Some(Arc::clone(state)));
        }
        blocks
    }

    /// The positions that have a state, descending, with 0.
    pub(super) fn positions(&self) -> impl Iterator<Item = usize> {
        self.held.iter().rev().map(|(position, _)| *position).chain([0])
    }
}

impl KvStore {
    /// The content of slot `slot` after the sequence's last token; `None` at length 0, where it is all zero.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn state(&self, id: SequenceId, slot: usize) -> Result<Option<&[f32]>, KvError> {
        let range = self.spec().slot_range(slot);
        let last = self.get(id)?.states.held.last();
        Ok(last.and_then(|(_, state)| state.values.get(range)))
    }

    /// The positions, as numbers of tokens, whose states the reserved step must leave by
    /// [`KvStore::write_state`], ascending; the last is the step's end.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn state_points(&self, id: SequenceId) -> Result<Vec<usize>, KvError> {
        Ok(self.get(id)?.states.pending.iter().map(|(position, _)| *position).collect())
    }

    /// Stores the content of slot `slot` after `position` tokens, which is one of [`KvStore::state_points`]. It
    /// counts from the commit on.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn write_state(
        &mut self,
        id: SequenceId,
        slot: usize,
        position: usize,
        values: &[f32],
    ) -> Result<(), KvError> {
        let range = self.spec().slot_range(slot);
        let pending = self.get_mut(id)?.states.pending.iter_mut().find(|(at, _)| *at == position);
        // A fork that was made after `reserve` would share the state; engines fork between steps.
        let slot = pending.and_then(|(_, state)| Arc::get_mut(state)?.values.get_mut(range));
        debug_assert!(slot.as_ref().is_some_and(|slot| slot.len() == values.len()), "state at {position}");
        if let Some(slot) = slot {
            slot.copy_from_slice(values);
        }
        Ok(())
    }

    /// The positions, as numbers of tokens, at which the sequence's recurrent state is held, ascending and without
    /// 0, which every sequence can return to. Empty for models without recurrent state.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn states_held(&self, id: SequenceId) -> Result<Vec<usize>, KvError> {
        Ok(self.get(id)?.states.held.iter().map(|(position, _)| *position).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvSpec, LayerKv, Policy};
    use lmx_tensor::kernels::attention::KvType;
    use lmx_tensor::kernels::{Exec, Isa};

    const SLOTS: [StateSlot; 2] =
        [StateSlot { layer: 0, name: "a", floats: 3 }, StateSlot { layer: 2, name: "b", floats: 1 }];

    fn exec() -> Exec {
        Exec::new(Isa::best(), 1)
    }

    fn store(limit: usize) -> KvStore {
        let full = LayerKv { kv_heads: 1, head_dim: 4, policy: Policy::Full };
        KvStore::new(KvSpec::new(&[full], KvType::F32).with_states(SLOTS.to_vec()), limit)
    }

    /// A step whose state at position p is p in every slot.
    fn push(store: &mut KvStore, id: SequenceId, tokens: usize) {
        store.reserve(id, tokens).unwrap();
        store.write(&exec(), 0, &[(id, 0..tokens)], &vec![1.0; tokens * 4], &vec![2.0; tokens * 4]).unwrap();
        for point in store.state_points(id).unwrap() {
            for (slot, StateSlot { floats, .. }) in SLOTS.iter().enumerate() {
                store.write_state(id, slot, point, &vec![point as f32; *floats]).unwrap();
            }
        }
        store.commit(id, tokens).unwrap();
    }

    #[test]
    fn what_is_held_follows_from_the_length_alone() {
        let lengths = [1, 31, 255, 256, 257, 1024, 5000, 40_000];
        for chunk in [1, 100, 256, 700, 9000] {
            let mut store = store(usize::MAX);
            let id = store.add();
            for (i, &length) in lengths.iter().enumerate() {
                let before = if i == 0 { 0 } else { lengths[i - 1] };
                for start in (before..length).step_by(chunk) {
                    push(&mut store, id, chunk.min(length - start));
                }
                let held = store.states_held(id).unwrap();
                assert_eq!(held, points(0, length).collect::<Vec<_>>(), "{chunk} {length}");
                assert_eq!(store.state(id, 1).unwrap(), Some(&[length as f32][..]));
                assert_eq!(store.budget().used(), store.spec().bytes_at(length), "{chunk} {length}");
                if chunk == 1 && length > 1000 {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_rewind_replays_at_most_what_it_took_back() {
        for len in [300, 5000, 40_000] {
            let held: Vec<usize> = points(0, len).collect();
            assert!(held.len() <= 2 * (len / SNAPSHOT).ilog2() as usize + 4, "{len}: {held:?}");
            for target in 0..len {
                let from = held.iter().copied().filter(|&p| p <= target).max().unwrap_or(0);
                assert!(target - from <= len - target + SNAPSHOT, "{len} to {target} from {from}");
            }
        }
    }

    #[test]
    fn trims_reach_snapshots_and_name_the_nearest() {
        let mut store = store(usize::MAX);
        let id = store.add();
        push(&mut store, id, 700);
        assert_eq!(store.states_held(id).unwrap(), [256, 512, 700]);
        let fork = store.fork(id).unwrap();
        let used = store.budget().used();
        assert_eq!(used, store.spec().bytes_at(700), "a fork shares its states");
        let error = store.trim(id, 100).unwrap_err();
        assert_eq!(error, KvError::Unreachable { target: 600, reachable: 512 });
        assert_eq!((store.len(id), store.resume_point(id, 600)), (700, 512));
        assert!(store.can_trim_to(id, 512) && !store.can_trim_to(id, 511));
        store.trim(id, 188).unwrap();
        assert_eq!(store.state(id, 0).unwrap(), Some(&[512.0; 3][..]));
        push(&mut store, id, 1);
        assert_eq!(store.state(id, 0).unwrap(), Some(&[513.0; 3][..]));
        assert_eq!(store.state(fork, 0).unwrap(), Some(&[700.0; 3][..]));
        store.trim(id, 513).unwrap();
        assert_eq!(store.state(id, 0).unwrap(), None);
        store.remove(id);
        store.remove(fork);
        assert_eq!(store.budget().used(), 0);
    }

    #[test]
    fn windows_and_states_must_both_reach() {
        let window = Policy::of_layer(Some(300));
        let layer = LayerKv { kv_heads: 1, head_dim: 4, policy: window };
        let spec = KvSpec::new(&[layer], KvType::F32).with_states(SLOTS.to_vec());
        let mut store = KvStore::new(spec, usize::MAX);
        let id = store.add();
        push(&mut store, id, 1100);
        assert_eq!(store.states_held(id).unwrap(), [256, 512, 768, 1024, 1100]);
        // Positions below 800 were dropped, so that a query at 1024 lacks some of what it sees.
        assert_eq!(store.resume_point(id, 1090), 0);
        assert_eq!(store.trim(id, 10), Err(KvError::Unreachable { target: 1090, reachable: 0 }));
        push(&mut store, id, 0);
        assert_eq!(store.len(id), 1100);
    }

    #[test]
    fn budgets_and_partial_steps_are_errors() {
        let mut small = store(0);
        let limit = small.spec().groups[0].block_bytes(None) + 15;
        small = store(limit);
        let id = small.add();
        assert!(matches!(small.reserve(id, 1), Err(KvError::OutOfMemory { needed: 16, .. })));
        let mut store = store(usize::MAX);
        let id = store.add();
        store.reserve(id, BLOCK).unwrap();
        assert_eq!(store.commit(id, 3), Err(KvError::PartialStep { reserved: BLOCK, committed: 3 }));
        assert_eq!(store.len(id), 0);
    }
}
