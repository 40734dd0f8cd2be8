//! The store against a naive model of it: every sequence a list of numbers. Random appends, trims, forks and removals,
//! under every policy and with recurrent state; what a next query may see and the state must always be there, and
//! what cannot be had must be refused.

use lmx::cache::{BLOCK, KvError, KvSpec, KvStore, KvWindow, LayerKv, Policy, SequenceId, StateSlot};
use lmx_tensor::kernels::attention::KvType;
use lmx_tensor::kernels::{Exec, Isa};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A head of one dimension: a block's slab is its tokens' keys and then their values, as f32.
fn layer(policy: Policy) -> LayerKv {
    LayerKv { kv_heads: 1, head_dim: 1, policy }
}

fn policies() -> impl Strategy<Value = Vec<Policy>> {
    let window = (1..120usize, 0..60usize)
        .prop_map(|(last, keep)| Policy::Window(KvWindow::new(last + keep, keep).unwrap()));
    let chunk = (1..150usize).prop_map(|size| Policy::Chunk(size.try_into().unwrap()));
    prop::collection::vec(prop_oneof![Just(Policy::Full), window, chunk], 0..4)
}

#[derive(Clone, Debug)]
enum Move {
    Append(usize, usize),
    /// Back by so many tokens.
    Trim(usize, usize),
    Fork(usize),
    Remove(usize),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let any = 0..4usize;
    let one = prop_oneof![
        4 => (any.clone(), 1..40usize).prop_map(|(s, n)| Move::Append(s, n)),
        1 => (any.clone(), 200..600usize).prop_map(|(s, n)| Move::Append(s, n)),
        3 => (any.clone(), 0..40usize).prop_map(|(s, n)| Move::Trim(s, n)),
        1 => (any.clone(), 0..700usize).prop_map(|(s, n)| Move::Trim(s, n)),
        2 => any.clone().prop_map(Move::Fork),
        1 => any.prop_map(Move::Remove),
    ];
    prop::collection::vec(one, 1..16)
}

/// A state that depends on every token and on their order, in whole numbers that f32 holds.
fn state_of(history: &[f32]) -> f32 {
    history.iter().fold(1.0, |state, value| (state * 3.0 + value) % 65_521.0)
}

/// What the cache must hold.
struct Naive {
    id: SequenceId,
    history: Vec<f32>,
}

struct World {
    kv: KvStore,
    exec: Exec,
    sequences: Vec<Naive>,
    stateful: bool,
    /// No two tokens have the same number.
    next: f32,
}

impl World {
    fn append(&mut self, index: usize, count: usize) {
        let Some(naive) = self.sequences.get_mut(index) else {
            let id = self.kv.add();
            return self.sequences.push(Naive { id, history: Vec::new() });
        };
        let start = naive.history.len();
        naive.history.extend((0..count).map(|i| self.next + i as f32));
        self.next = (self.next + count as f32) % 60_000.0;
        self.kv.reserve(naive.id, count).unwrap();
        let values: Vec<f32> = naive.history[start..].iter().map(|key| -key).collect();
        for layer in 0..self.kv.spec().layers.len() {
            self.kv
                .write(&self.exec, layer, &[(naive.id, 0..count)], &naive.history[start..], &values)
                .unwrap();
        }
        for point in self.kv.state_points(naive.id).unwrap() {
            let state = state_of(&naive.history[..point]);
            self.kv.write_state(naive.id, 0, point, &[state]).unwrap();
            self.kv.write_state(naive.id, 1, point, &[-state, point as f32]).unwrap();
        }
        self.kv.commit(naive.id, count).unwrap();
    }

    fn trim(&mut self, index: usize, count: usize) {
        let Some(naive) = self.sequences.get_mut(index) else { return };
        let len = naive.history.len();
        let target = len.saturating_sub(count);
        let resume = self.kv.resume_point(naive.id, target);
        assert!(resume <= target && self.kv.can_trim_to(naive.id, resume));
        match self.kv.trim(naive.id, len - target) {
            Ok(()) => assert_eq!(resume, target),
            Err(KvError::Unreachable { target: refused, reachable }) => {
                assert!(refused == target && resume < target);
                assert_eq!(self.kv.len(naive.id), len, "a refused trim changes nothing");
                assert!(self.kv.can_trim_to(naive.id, reachable));
                assert_eq!(reachable < target, self.stateful);
                self.kv.trim(naive.id, len - resume).unwrap();
            }
            Err(error) => unreachable!("{error}"),
        }
        naive.history.truncate(resume);
        assert!(self.kv.trim(naive.id, resume + 1).is_err(), "more than there is");
    }

    /// Everything that the next token of each sequence would read.
    fn check(&self) {
        for Naive { id, history } in &self.sequences {
            let len = history.len();
            assert_eq!(self.kv.len(*id), len);
            for layer in 0..self.kv.spec().layers.len() {
                let policy = self.kv.spec().groups[self.kv.spec().layers[layer].0].policy;
                let slabs = self.kv.slabs(*id, layer).unwrap();
                for position in (0..len).filter(|&position| sees(policy, len, position)) {
                    let slab = slabs[position / BLOCK].unwrap();
                    let at = |token: usize| f32::from_le_bytes(*slab[token * 4..].first_chunk().unwrap());
                    let held = (at(position % BLOCK), at(BLOCK + position % BLOCK));
                    assert_eq!(
                        held,
                        (history[position], -history[position]),
                        "{policy:?} {position} of {len}"
                    );
                }
            }
            if self.stateful {
                let state = state_of(history);
                let wanted = (len > 0).then_some([state, -state, len as f32]);
                let held = self.kv.state(*id, 0).unwrap().map(|first| {
                    let second = self.kv.state(*id, 1).unwrap().unwrap();
                    [first[0], second[0], second[1]]
                });
                assert_eq!(held, wanted, "state at {len}");
                assert!(
                    self.kv.states_held(*id).unwrap().into_iter().all(|p| self.kv.resume_point(*id, p) <= p)
                );
            }
        }
        // Blocks that several sequences share count once.
        let spec = self.kv.spec();
        let blocks: BTreeMap<*const u8, usize> = (0..spec.layers.len())
            .filter(|&layer| spec.layers[layer].1 == 0)
            .flat_map(|layer| self.sequences.iter().map(move |naive| (layer, naive.id)))
            .flat_map(|(layer, id)| {
                let bytes = spec.groups[spec.layers[layer].0].block_bytes(None);
                let slabs = self.kv.slabs(id, layer).unwrap();
                slabs.into_iter().flatten().map(move |slab| (slab.as_ptr(), bytes)).collect::<Vec<_>>()
            })
            .collect();
        let recounted: usize = blocks.values().sum();
        match self.stateful {
            false => assert_eq!(self.kv.budget().used(), recounted),
            true => assert!(self.kv.budget().used() >= recounted),
        }
    }
}

/// Whether a query at `query` sees `position` before it.
fn sees(policy: Policy, query: usize, position: usize) -> bool {
    match policy {
        Policy::Full => true,
        Policy::Window(w) => position < w.keep() || position + w.size() - w.keep() > query,
        Policy::Chunk(size) => position / size == query / size,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn the_store_holds_what_a_list_would(policies in policies(), stateful in any::<bool>(), moves in moves()) {
        let layers: Vec<LayerKv> = policies.into_iter().map(layer).collect();
        let slots = [StateSlot { layer: 0, name: "a", floats: 1 }, StateSlot { layer: 1, name: "b", floats: 2 }];
        let slots = if stateful { slots.to_vec() } else { Vec::new() };
        let kv = KvStore::new(KvSpec::new(&layers, KvType::F32).with_states(slots), usize::MAX);
        let mut world = World { kv, exec: Exec::new(Isa::best(), 2), sequences: Vec::new(), stateful, next: 1.0 };
        world.append(0, 0);
        for step in moves {
            match step {
                Move::Append(index, count) => world.append(index, count),
                Move::Trim(index, count) => world.trim(index, count),
                Move::Fork(index) => {
                    if let Some(Naive { id, history }) = world.sequences.get(index) {
                        let fork = Naive { id: world.kv.fork(*id).unwrap(), history: history.clone() };
                        world.sequences.push(fork);
                    }
                }
                Move::Remove(index) => {
                    if index < world.sequences.len() {
                        let gone = world.sequences.swap_remove(index);
                        world.kv.remove(gone.id);
                    }
                }
            }
            world.check();
        }
        for Naive { id, .. } in std::mem::take(&mut world.sequences) {
            world.kv.remove(id);
        }
        assert_eq!(world.kv.budget().used(), 0, "all is free again");
    }
}
