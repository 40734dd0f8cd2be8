//! The tree against what a recount and a list of everything that was stored say.

use super::*;
use crate::cache::block::BlockBudget;
use crate::cache::{KvSpec, KvStore, KvWindow, LayerKv, Policy, SequenceId};
use lmx_tensor::kernels::attention::KvType;
use lmx_tensor::kernels::{Exec, Isa};
use proptest::prelude::*;

fn layer(policy: Policy) -> LayerKv {
    LayerKv { kv_heads: 1, head_dim: 2, policy }
}

/// A full layer, a window, and a window with kept positions; of all shapes that differ in blocks held.
fn spec() -> KvSpec {
    let window = |size, keep| Policy::Window(KvWindow::new(size, keep).unwrap());
    KvSpec::new(&[layer(Policy::Full), layer(window(40, 0)), layer(window(70, 33))], KvType::F32)
}

/// What stands at a position depends on all tokens up to it, as keys and values do.
fn values(tokens: &[u32]) -> Vec<f32> {
    let mut state = 1_u32;
    let next = |&token: &u32| {
        state = state.wrapping_mul(31).wrapping_add(token + 7) % 65_521;
        state as f32
    };
    tokens.iter().map(next).collect()
}

/// A sequence of a store, with its tokens.
struct Running {
    id: SequenceId,
    tokens: Vec<u32>,
}

impl Running {
    fn entry(&self) -> PrefixTokens<'_> {
        PrefixTokens { root: 0, tokens: &self.tokens, system: 32, prompt: 96 }
    }
}

fn append(store: &mut KvStore, running: &mut Running, tokens: &[u32]) -> bool {
    if store.reserve(running.id, tokens.len()).is_err() {
        return false;
    }
    running.tokens.extend(tokens);
    let first = running.tokens.len() - tokens.len();
    let rows: Vec<f32> = values(&running.tokens)[first..].iter().flat_map(|&v| [v, -v]).collect();
    let exec = Exec::new(Isa::best(), 1);
    for layer in 0..store.spec().layers.len() {
        store.write(&exec, layer, &[(running.id, 0..tokens.len())], &rows, &rows).unwrap();
    }
    store.commit_prefix(running.id, tokens.len(), &running.entry()).unwrap();
    true
}

/// Every position that the next query sees has the value that its tokens give it.
fn check_sequence(store: &KvStore, running: &Running) {
    let expected = values(&running.tokens);
    let len = store.len(running.id);
    assert_eq!(len, expected.len());
    for (layer, group) in store.spec().groups.iter().enumerate() {
        let slabs = store.slabs(running.id, layer).unwrap();
        let unseen = group.policy.unseen_blocks(len);
        for position in (0..len).filter(|position| !unseen.contains(&(position / BLOCK))) {
            let slab = slabs[position / BLOCK].unwrap();
            // The keys are [head_dim][BLOCK].
            let at = position % BLOCK * 4;
            let found = f32::from_le_bytes(slab[at..at + 4].try_into().unwrap());
            assert_eq!(found, expected[position], "position {position} of layer {layer}");
        }
    }
}

/// Counts everything again, and checks the tree's order.
fn check_tree(cache: &PrefixCache) {
    let mut kinds = [KindStats::default(); 3];
    for (id, segment) in cache.segments.iter().enumerate() {
        let Some(segment) = segment else {
            assert!(cache.free.contains(&id));
            continue;
        };
        kinds[segment.kind as usize].segments += 1;
        let blocks = segment.groups.iter().flatten().flatten();
        kinds[segment.kind as usize].bytes += blocks.map(|block| block.bytes()).sum::<usize>();
        kinds[segment.kind as usize].bytes +=
            segment.states.iter().flatten().map(|s| s.bytes()).sum::<usize>();
        assert_eq!(segment.states.len(), segment.tokens.len().div_ceil(BLOCK));
        assert!(!segment.tokens.is_empty());
        assert!(segment.children.is_empty() || segment.tokens.len().is_multiple_of(BLOCK));
        for group in &segment.groups {
            assert_eq!(group.len(), segment.tokens.len().div_ceil(BLOCK));
        }
        for (i, &child) in segment.children.iter().enumerate() {
            let first = cache.get(child).unwrap();
            assert_eq!(first.parent, Some(id));
            for &other in &segment.children[i + 1..] {
                let other = cache.get(other).unwrap();
                assert!(!common(first.block(0), other.block(0)).1, "one block begins like another");
            }
        }
    }
    assert_eq!(cache.stats.kinds, kinds);
    assert!(cache.stats.segments() <= cache.options.segments_max);
    assert!(cache.stats.bytes() <= cache.options.bytes_max);
}

#[derive(Clone, Debug)]
enum Move {
    /// Begin with what is stored of a text, and append the rest of it.
    Start(u32, usize),
    Append(usize, usize, u32),
    Trim(usize, usize),
    Fork(usize),
    Leave(usize),
}

/// Texts agree up to a point that depends on the two.
fn text(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| if i < 20 + salt % 5 * 30 { i % 7 } else { i * (salt + 3) % 11 }).collect()
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        4 => (0..12_u32, 1..260_usize).prop_map(|(salt, len)| Move::Start(salt, len)),
        4 => (0..4_usize, 1..60_usize, 0..4_u32).prop_map(|(s, n, salt)| Move::Append(s, n, salt)),
        2 => (0..4_usize, 0..70_usize).prop_map(|(s, n)| Move::Trim(s, n)),
        1 => (0..4_usize).prop_map(Move::Fork),
        3 => (0..4_usize).prop_map(Move::Leave),
    ];
    prop::collection::vec(one, 1..40)
}

fn check(schedule: &[Move], options: PrefixCacheOptions, memory: usize) {
    let mut store = KvStore::new(spec(), memory).with_prefixes(options);
    let mut running: Vec<Running> = Vec::new();
    for step in schedule {
        match *step {
            Move::Start(salt, len) if running.len() < 4 => {
                let tokens = text(salt, len);
                let peeked = store.stored_prefix(0, &tokens, len - 1);
                let (id, held) = store.add_prefix(0, &tokens, len - 1).unwrap_or_else(|| (store.add(), 0));
                assert_eq!((held, store.len(id)), (peeked, held));
                let mut new = Running { id, tokens: tokens[..held].to_vec() };
                check_sequence(&store, &new);
                if append(&mut store, &mut new, &tokens[held..]) {
                    running.push(new);
                } else {
                    store.remove(id);
                }
            }
            Move::Append(s, count, salt) if s < running.len() => {
                let tokens = text(salt, count);
                append(&mut store, &mut running[s], &tokens);
            }
            Move::Trim(s, count) if s < running.len() => {
                let count = count.min(running[s].tokens.len());
                if store.trim(running[s].id, count).is_ok() {
                    let len = running[s].tokens.len() - count;
                    running[s].tokens.truncate(len);
                }
            }
            Move::Fork(s) if s < running.len() && running.len() < 4 => {
                let id = store.fork(running[s].id).unwrap();
                let tokens = running[s].tokens.clone();
                running.push(Running { id, tokens });
            }
            Move::Leave(s) if s < running.len() => {
                let gone = running.swap_remove(s);
                store.leave_prefix(gone.id, &gone.entry());
            }
            _ => {}
        }
        check_tree(store.prefixes.as_ref().unwrap());
        running.iter().for_each(|sequence| check_sequence(&store, sequence));
        assert!(store.budget().used() <= memory);
    }
    for gone in running {
        store.remove(gone.id);
    }
    assert_eq!(store.budget().used(), store.prefix_stats().bytes(), "nobody else holds blocks");
    store.clear_prefixes();
    assert_eq!(store.budget().used(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn random_schedules_hold_what_they_say(
        schedule in moves(),
        segments_max in prop_oneof![Just(usize::MAX), 1..6_usize],
        blocks in prop_oneof![Just(usize::MAX), 3..60_usize],
        memory in prop_oneof![Just(usize::MAX), 20..60_usize],
        keep_unseen in any::<bool>(),
    ) {
        let bytes = spec().groups[0].block_bytes(None);
        let bytes_max = blocks.saturating_mul(bytes);
        let options = PrefixCacheOptions { segments_max, bytes_max, keep_unseen };
        check(&schedule, options, memory.saturating_mul(bytes));
    }
}

/// A full layer only: its blocks.
fn blocks(budget: &Arc<BlockBudget>, count: usize) -> Tables {
    vec![(0..count).map(|_| Block::new(256, budget).map(Arc::new)).collect()]
}

fn full() -> Vec<LayerGroup> {
    KvSpec::new(&[layer(Policy::Full)], KvType::F32).groups
}

fn store(cache: &mut PrefixCache, entry: &PrefixTokens<'_>, tables: &Tables) {
    cache.insert(entry, Holding { tables, states: &Vec::new() }, false);
}

/// The kind follows from `system` and `prompt`.
fn entry(tokens: &[u32], system: usize, prompt: usize) -> PrefixTokens<'_> {
    PrefixTokens { root: 0, tokens, system, prompt }
}

#[test]
fn the_last_used_goes_last_and_leaves_go_first() {
    let budget = BlockBudget::new(usize::MAX);
    let options = PrefixCacheOptions { segments_max: 3, ..PrefixCacheOptions::default() };
    let mut cache = PrefixCache::new(options);
    let texts: Vec<Vec<u32>> = (0..4).map(|i| vec![i; 64]).collect();
    for text in &texts[..3] {
        store(&mut cache, &entry(text, 0, 64), &blocks(&budget, 2));
    }
    // Use refreshes: the second is now the oldest.
    let found = cache.find(0, &texts[0], 64, &full(), false);
    assert_eq!(found.as_ref().unwrap().len, 64);
    cache.touch(found.as_ref());
    store(&mut cache, &entry(&texts[3], 0, 64), &blocks(&budget, 2));
    let held = |cache: &PrefixCache| -> Vec<bool> {
        texts.iter().map(|text| cache.find(0, text, 64, &full(), false).is_some()).collect()
    };
    assert_eq!(held(&cache), [true, false, true, true]);
    // A branch: the common part is a segment of its own, older than both, and yet stays.
    let branch: Vec<u32> = [vec![3; 32], vec![9; 32]].concat();
    store(&mut cache, &entry(&branch, 0, 64), &blocks(&budget, 2));
    assert_eq!(held(&cache), [false, false, false, true]);
    assert_eq!(cache.find(0, &branch, 64, &full(), false).unwrap().len, 64);
    assert_eq!(cache.stats().evictions, 3);
}

#[test]
fn the_assistant_goes_before_the_user_and_the_system() {
    let budget = BlockBudget::new(usize::MAX);
    let mut cache = PrefixCache::new(PrefixCacheOptions { segments_max: 4, ..PrefixCacheOptions::default() });
    let text = |salt: u32| -> Vec<u32> { (0..96).map(|i| if i < 32 { 1 } else { salt + i / 32 }).collect() };
    store(&mut cache, &entry(&text(10), 32, 64), &blocks(&budget, 3));
    let counts = |cache: &PrefixCache| cache.stats().kinds.map(|kind| kind.segments);
    assert_eq!(counts(&cache), [1, 1, 1]);
    store(&mut cache, &entry(&text(20), 32, 64), &blocks(&budget, 3));
    // The older reply went.
    assert_eq!(counts(&cache), [1, 2, 1]);
    store(&mut cache, &entry(&text(30), 32, 64), &blocks(&budget, 3));
    // Replies are fewer than prompts: the oldest prompt without one goes, then the older reply.
    assert_eq!(counts(&cache), [1, 2, 1]);
    assert_eq!(cache.find(0, &text(10), 96, &full(), false).unwrap().len, 32);
}

#[test]
fn an_entry_that_is_too_large_is_not_stored_and_drops_nothing() {
    let budget = BlockBudget::new(usize::MAX);
    let options = PrefixCacheOptions { bytes_max: 3 * 256, ..PrefixCacheOptions::default() };
    let mut cache = PrefixCache::new(options);
    store(&mut cache, &entry(&[1; 64], 0, 64), &blocks(&budget, 2));
    store(&mut cache, &entry(&[2; 128], 0, 128), &blocks(&budget, 4));
    assert!(cache.find(0, &[2; 128], 128, &full(), false).is_none());
    assert_eq!((cache.stats().bytes(), cache.stats().evictions), (512, 0));
    // Another root is another tree.
    assert!(cache.find(1, &[1; 64], 64, &full(), false).is_none());
    assert_eq!(cache.find(0, &[1; 40], 39, &full(), false).unwrap().len, 39);
}
