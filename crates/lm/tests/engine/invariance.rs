//! Promise 2: what a sequence gets does not depend, by one bit, on the batch, the chunks, the threads, or on rewinds
//! and forks of its cache, be it of floats or quantized from some position on. Random schedules of tiny models of every family, against each sequence run alone, one
//! token at a time, on one thread.

use crate::common::golden_cases::Case;
use lmx::cache::{KvQuantization, KvStore, SequenceId};
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx::{Device, Isa};
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::attention::KvType;
use proptest::prelude::*;

const SEQUENCES: usize = 3;

fn load(case: &str, isa: Isa, threads: usize) -> Decoder {
    let disk = Case::read(case).on_disk();
    let checkpoint = Checkpoint::open(&disk.path, &OpenOptions::default()).unwrap();
    let config = checkpoint.describe().unwrap();
    Decoder::load(&checkpoint, config, &Device::cpu(isa, threads), &mut |_, _| {}).unwrap()
}

/// Runs the rows of one step and returns the logits of each, by row.
fn run(model: &Decoder, kv: &mut KvStore, parts: &[(SequenceId, &[u32])]) -> Vec<Vec<u32>> {
    let mut step = StepInputs::default();
    for &(id, tokens) in parts {
        step.push(id, kv.len(id), tokens, false);
        kv.reserve(id, tokens.len()).unwrap();
    }
    let hidden = model.hidden(&step, kv).unwrap();
    for &(id, tokens) in parts {
        kv.commit(id, tokens.len()).unwrap();
    }
    let rows: Vec<usize> = (0..step.tokens.len()).collect();
    let logits = model.head(&hidden, &rows, &RowAdapters::default()).unwrap();
    logits.data().chunks_exact(logits.cols()).map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}

/// How keys and values are stored.
type Storage = (KvType, Option<KvQuantization>);

fn store(model: &Decoder, (ty, quantization): Storage) -> KvStore {
    let spec = kv_spec(model, ty);
    let spec = match quantization {
        Some(how) => spec.quantized(how).unwrap(),
        None => spec,
    };
    KvStore::new(spec, usize::MAX)
}

/// The logits of each position of a sequence that runs alone, one token at a time.
fn alone(model: &Decoder, storage: Storage, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut kv = store(model, storage);
    let id = kv.add();
    tokens.iter().flat_map(|&token| run(model, &mut kv, &[(id, &[token])])).collect()
}

/// What a schedule does next, to which sequence.
#[derive(Clone, Debug)]
enum Move {
    /// Advance every sequence whose count is not 0, together, by that many tokens.
    Step([usize; SEQUENCES]),
    /// Take back up to this many tokens.
    Trim(usize, usize),
    /// Go on with a fork, and let the original run ahead into nothing.
    Fork(usize),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        6 => prop::array::uniform3(0..40usize).prop_map(Move::Step),
        2 => prop::array::uniform3(0..2usize).prop_map(Move::Step),
        2 => (0..SEQUENCES, 0..30usize).prop_map(|(s, n)| Move::Trim(s, n)),
        1 => (0..SEQUENCES).prop_map(Move::Fork),
    ];
    prop::collection::vec(one, 1..14)
}

fn check(case: &str, storage: Storage, lengths: [usize; SEQUENCES], schedule: &[Move], isa: Isa) {
    let (reference, model) = (load(case, Isa::best(), 1), load(case, isa, 2));
    let vocab = model.vocab();
    let tokens: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|s| (0..lengths[s]).map(|i| ((i * i * 7 + i * 3 + s * 11 + 1) % vocab) as u32).collect())
        .collect();
    let expected: Vec<_> = tokens.iter().map(|t| alone(&reference, storage, t)).collect();
    let mut kv = store(&model, storage);
    let mut ids: Vec<SequenceId> = (0..SEQUENCES).map(|_| kv.add()).collect();
    // What is left over after the schedule runs to the end, up to the position from which on it is quantized first.
    let rest = [Move::Step([usize::MAX; SEQUENCES]), Move::Step([usize::MAX; SEQUENCES])];
    for step in schedule.iter().chain(&rest) {
        match *step {
            Move::Step(counts) => {
                let parts: Vec<(usize, &[u32])> = (0..SEQUENCES)
                    .map(|s| {
                        let held = kv.len(ids[s]);
                        let count = kv.step_limit(ids[s], counts[s].min(lengths[s] - held));
                        (s, &tokens[s][held..held + count])
                    })
                    .filter(|(_, tokens)| !tokens.is_empty())
                    .collect();
                let starts: Vec<usize> = parts.iter().map(|&(s, _)| kv.len(ids[s])).collect();
                if parts.is_empty() {
                    continue;
                }
                let batch: Vec<_> = parts.iter().map(|&(s, tokens)| (ids[s], tokens)).collect();
                let mut rows = run(&model, &mut kv, &batch).into_iter();
                for (&(s, part), start) in parts.iter().zip(starts) {
                    for (position, expected) in expected[s].iter().enumerate().skip(start).take(part.len()) {
                        let row = rows.next().unwrap();
                        assert_eq!(row, *expected, "{case}: sequence {s}, position {position}, {schedule:?}");
                    }
                }
            }
            Move::Trim(s, n) => {
                let n = n.min(kv.len(ids[s]));
                let target = kv.len(ids[s]) - n;
                if kv.can_trim_to(ids[s], target) {
                    kv.trim(ids[s], n).unwrap();
                } else {
                    assert!(kv.trim(ids[s], n).is_err());
                    // What lies between is run again.
                    let resume = kv.resume_point(ids[s], target);
                    kv.trim(ids[s], kv.len(ids[s]) - resume).unwrap();
                }
            }
            Move::Fork(s) => {
                let fork = kv.fork(ids[s]).unwrap();
                let ahead = kv.step_limit(ids[s], 3);
                run(&model, &mut kv, &[(ids[s], &[1, 2, 3][..ahead])]);
                kv.remove(ids[s]);
                ids[s] = fork;
            }
        }
    }
}

/// One case per arithmetic: dense and quantized weights, full, windowed and chunked attention, soft caps, sinks,
/// experts, convolutions, GGUF.
const CASES: [&str; 16] = [
    "llama-f32",
    "llama-q4",
    "gemma2-q8",
    "gemma3-f32",
    "gemma3-q4",
    "phi3-q4",
    "llama4-f32",
    "llama4-q4",
    "llama4-top2-f32",
    "lfm2-bias-f32",
    "lfm2-q4",
    "baichuan-m1-f32",
    "baichuan-m1-q8",
    "gpt-oss-clamped-f32",
    "gpt-oss-q4",
    "gguf-llama-k-quants",
];

/// Those of them whose heads are whole groups.
const WIDE_CASES: [&str; 5] = ["gemma2-q8", "gemma3-f32", "gemma3-q4", "gpt-oss-clamped-f32", "gpt-oss-q4"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn random_schedules_change_no_bit(
        lengths in prop::array::uniform3(1..90usize),
        schedule in moves(),
        ty in prop_oneof![Just(KvType::F32), Just(KvType::F16), Just(KvType::Bf16)],
    ) {
        for case in CASES {
            check(case, (ty, None), lengths, &schedule, Isa::best());
        }
    }

    #[test]
    fn random_schedules_change_no_bit_of_quantized_caches(
        lengths in prop::array::uniform3(1..90usize),
        schedule in moves(),
        ty in prop_oneof![Just(KvType::F32), Just(KvType::F16), Just(KvType::Bf16)],
        bits in prop_oneof![Just(2), Just(3), Just(4), Just(5), Just(6), Just(8)],
        start in 0..70usize,
    ) {
        let how = KvQuantization::new(bits, 32, start).unwrap();
        for case in WIDE_CASES {
            check(case, (ty, Some(how)), lengths, &schedule, Isa::best());
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let schedule = [Move::Step([33, 1, 20]), Move::Trim(0, 5), Move::Step([1, 1, 1]), Move::Fork(2)];
    for isa in Isa::all() {
        for case in CASES {
            check(case, (KvType::F16, None), [70, 5, 41], &schedule, isa);
        }
        for (bits, case) in [3, 4, 8, 2, 6].into_iter().zip(WIDE_CASES) {
            let how = KvQuantization::new(bits, 32, 20).unwrap();
            check(case, (KvType::F16, Some(how)), [70, 5, 41], &schedule, isa);
        }
    }
}
