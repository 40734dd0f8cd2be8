//! A prompt that begins like an earlier one gets what it would get from a cold engine, bit for bit, under every
//! policy; and the cache holds what it says.

use crate::common::logits::reply;
use crate::common::tiny::engine;
use lmx::cache::{KvWindow, PrefixCacheOptions, SNAPSHOT};
use lmx::engine::{EngineOptions, Request};
use lmx_tensor::kernels::attention::KvType;

const BLOCK: usize = lmx::cache::BLOCK;

fn warm_options(window: Option<KvWindow>) -> EngineOptions {
    EngineOptions {
        kv_window: window,
        kv_type: KvType::F16,
        prefix_cache: Some(PrefixCacheOptions::default()),
        ..EngineOptions::default()
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(61) as u32).collect()
    }
}

/// A stored prompt and a new one: a repeat, a part of it, one token, more of it, or one that parts from it.
fn pair(random: &mut Random, longest: usize) -> (Vec<u32>, Vec<u32>) {
    let length = 1 + random.below(longest);
    let stored = random.tokens(length);
    let at = random.below(length) + 1;
    let tail = random.tokens(1 + length % 40);
    let new = match random.below(5) {
        0 => stored.clone(),
        1 => stored[..at].to_vec(),
        2 => stored[..1].to_vec(),
        3 => [stored.as_slice(), &tail].concat(),
        _ => [&stored[..at], &tail].concat(),
    };
    (stored, new)
}

fn window(size: usize, keep: usize) -> Option<KvWindow> {
    Some(KvWindow::new(size, keep).unwrap())
}

/// Full; window and full layers; windows only; bounded, within a block and beyond one; quantized weights; chunks;
/// recurrent state, beside full layers and within them; sinks.
fn policies() -> [(&'static str, Option<KvWindow>); 11] {
    [
        ("llama-f32", None),
        ("gemma3-f32", None),
        ("gemma3-q4", window(50, 4)),
        ("mistral-f32", None),
        ("llama-f32", window(70, 33)),
        ("llama-f32", window(40, 4)),
        ("llama-q4", window(24, 0)),
        ("llama4-f32", None),
        ("lfm2-f32", None),
        ("baichuan-m1-f32", None),
        ("gpt-oss-f32", None),
    ]
}

#[test]
fn warm_is_cold_for_random_pairs_of_prompts() {
    for (case, window) in policies() {
        let mut cold = engine(case, 1, EngineOptions { prefix_cache: None, ..warm_options(window) });
        let mut warm = engine(case, 1, warm_options(window));
        let mut random = Random(11);
        let mut reused = 0;
        let stateful = !warm.kv().spec().states.is_empty();
        let longest = if stateful { warm.model().context_length().min(750) - 50 } else { 200 };
        for number in 0..60 {
            let (stored, new) = pair(&mut random, longest);
            reply(&mut warm, &stored, random.below(4));
            let (got, held) = reply(&mut warm, &new, 4);
            let (expected, nothing) = reply(&mut cold, &new, 4);
            assert_eq!(got, expected, "{case} {window:?}: pair {number}, {held} of {} held", new.len());
            let shared = stored.iter().zip(&new).take_while(|(a, b)| a == b).count();
            // Every position of it was run just now, and all that windows dropped was stored; states where there are
            // snapshots.
            let reachable = shared.min(new.len() - 1);
            let reachable = if stateful { reachable / SNAPSHOT * SNAPSHOT } else { reachable };
            assert!(held >= reachable && held < new.len(), "pair {number}: {held} of {shared}");
            assert_eq!(nothing, 0);
            reused += held;
        }
        let stats = warm.prefix_stats();
        assert_eq!(stats.bytes(), warm.kv().budget().used());
        // Of the prompts that can be as long as a snapshot is far.
        let hits = if !stateful {
            60
        } else if longest > 2 * SNAPSHOT {
            10
        } else {
            0
        };
        assert!(stats.hits >= hits && stats.tokens_reused >= reused as u64, "{case}: {stats:?}");
    }
}

#[test]
fn every_split_of_a_prompt_continues_as_cold() {
    for (case, window) in [("gemma3-f32", None), ("llama-f32", window(40, 4))] {
        let mut cold = engine(case, 1, EngineOptions { prefix_cache: None, ..warm_options(window) });
        let (first, tail) = (Random(3).tokens(150), Random(4).tokens(9));
        for split in (1..150).step_by(7) {
            let mut warm = engine(case, 1, warm_options(window));
            reply(&mut warm, &first, 2);
            let new = [&first[..split], &tail].concat();
            let expected = reply(&mut cold, &new, 3).0;
            // The second time its own blocks are there.
            for _ in 0..2 {
                let (got, held) = reply(&mut warm, &new, 3);
                assert_eq!(got, expected, "{case}, split at {split}");
                assert!(held >= split);
            }
        }
    }
}

#[test]
fn shorter_prompts_and_their_first_token_are_found() {
    let mut engine = engine("llama-f32", 1, warm_options(None));
    let prompt = Random(9).tokens(200);
    reply(&mut engine, &prompt, 1);
    let cases = [(50, 0, 49), (1, 0, 0), (50, 1, 50), (200, 0, 199), (32, 1, 32), (33, 0, 32)];
    for (first, more, expected) in cases {
        let new = [&prompt[..first], &Random(10).tokens(more)].concat();
        assert_eq!(reply(&mut engine, &new, 2).1, expected, "{first} + {more}");
    }
}

#[test]
fn the_bytes_stay_within_the_limits_and_a_hit_costs_what_it_appends() {
    let block = engine("gemma3-f32", 1, warm_options(None)).kv().spec().bytes_at(BLOCK);
    let limit = 20 * block;
    for (bytes_max, kv_memory) in [(limit, usize::MAX), (usize::MAX, limit)] {
        let prefix_cache = Some(PrefixCacheOptions { bytes_max, ..PrefixCacheOptions::default() });
        let mut engine =
            engine("gemma3-f32", 1, EngineOptions { prefix_cache, kv_memory, ..warm_options(None) });
        let mut random = Random(5);
        for _ in 0..200 {
            let length = 1 + random.below(150);
            reply(&mut engine, &random.tokens(length), 2);
            assert!(engine.prefix_stats().bytes() <= limit);
            assert_eq!(engine.kv().budget().used(), engine.prefix_stats().bytes());
        }
        let favourite = random.tokens(150);
        reply(&mut engine, &favourite, 1);
        let before = engine.prefix_stats();
        for _ in 0..200 {
            assert_eq!(reply(&mut engine, &favourite, 1).1, 149);
        }
        let after = engine.prefix_stats();
        assert!(after.evictions > 100);
        assert_eq!((after.kinds, after.hits), (before.kinds, before.hits + 200), "nothing was added");
    }
}

#[test]
fn segments_are_counted_and_prompts_that_run_push_prefixes_out() {
    let options = PrefixCacheOptions { segments_max: 3, ..PrefixCacheOptions::default() };
    let mut small =
        engine("llama-f32", 1, EngineOptions { prefix_cache: Some(options), ..warm_options(None) });
    let mut random = Random(6);
    for _ in 0..30 {
        reply(&mut small, &random.tokens(70), 2);
        assert!(small.prefix_stats().segments() <= 3);
    }
    // Six blocks in all: each prompt needs five, and its end one more.
    let block = small.kv().spec().bytes_at(BLOCK);
    let mut tight = engine("llama-f32", 1, EngineOptions { kv_memory: 6 * block, ..warm_options(None) });
    for _ in 0..5 {
        reply(&mut tight, &random.tokens(159), 20);
        assert!(tight.kv().budget().used() <= 6 * block);
    }
}

#[test]
fn what_changes_the_values_is_part_of_the_key() {
    // The rope's factors depend on whether prompt and reply exceed the original context.
    let mut cold = engine("phi3-longrope-f32", 1, EngineOptions { prefix_cache: None, ..warm_options(None) });
    let original = cold.model().original_context().unwrap();
    let mut warm = engine("phi3-longrope-f32", 1, warm_options(None));
    let prompt = Random(8).tokens(original - 4);
    for (max_tokens, held) in [(2, 0), (8, 0), (2, prompt.len() - 1), (8, prompt.len() - 1)] {
        let got = reply(&mut warm, &prompt, max_tokens);
        assert_eq!(got, (reply(&mut cold, &prompt, max_tokens).0, held), "{max_tokens} tokens");
    }
    assert!(warm.cached_tokens(&prompt, None) >= prompt.len());
}

#[test]
fn the_parts_of_a_prompt_have_kinds() {
    let mut engine = engine("llama-f32", 1, warm_options(None));
    let request = Request { system_tokens: 64, ..Request::new(Random(2).tokens(128), 65) };
    assert_eq!(engine.generate(request).unwrap().count(), 65);
    let blocks = engine.prefix_stats().kinds.map(|kind| kind.bytes / engine.kv().spec().bytes_at(BLOCK));
    assert_eq!(blocks, [2, 2, 2]);
}

#[test]
fn a_bounded_conversation_stays_within_its_bound() {
    let window = window(40, 4);
    let limits = PrefixCacheOptions { keep_unseen: false, ..PrefixCacheOptions::default() };
    let mut cold = engine("llama-f32", 1, EngineOptions { prefix_cache: None, ..warm_options(window) });
    let options = EngineOptions { prefix_cache: Some(limits), ..warm_options(window) };
    let mut warm = engine("llama-f32", 1, options);
    let (mut random, mut text) = (Random(12), Vec::new());
    for turn in 0..9 {
        let before = text.len();
        text.extend(random.tokens(20));
        let (got, held) = reply(&mut warm, &text, 5);
        assert_eq!(got, reply(&mut cold, &text, 5).0, "turn {turn}");
        // The last token of a reply is never run.
        assert_eq!(held, before.saturating_sub(1), "turn {turn}");
        text.extend(&got.tokens);
        // The first block, the last 36 positions, and where those begin within a block.
        assert!(warm.kv().budget().used() <= 4 * warm.kv().spec().bytes_at(BLOCK), "turn {turn}");
    }
    // Elsewhere than at the end only the kept first block can be gone on from.
    assert_eq!(reply(&mut warm, &text[..150], 1).1, BLOCK);
}
