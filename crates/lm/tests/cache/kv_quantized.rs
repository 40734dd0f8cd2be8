//! Quantized keys and values: their codes are mlx's; under every policy, cut in every way, attention over the cache is
//! that over the numbers which the codes stand for; logits are those of mlx-lm's quantized cache; forks, trims and the
//! memory that is held. tests/gen/kv_quantized.py wrote the data.

use crate::common::tiny::model;
use lmx::cache::{
    BLOCK, KvError, KvQuantError, KvQuantization, KvSpec, KvStore, KvWindow, LayerKv, Policy, SequenceId,
};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::attention::{
    AttentionShape, KvQuant, KvShape, KvType, Sequence, attention, write_quantized,
};
use lmx_tensor::kernels::{Exec, Isa};
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Golden {
    quantized: Vec<Quantized>,
    logits: Vec<Logits>,
}

/// What `mx.quantize` made of four rows; bytes in hexadecimal.
#[derive(Deserialize)]
struct Quantized {
    #[serde(rename = "type")]
    ty: String,
    bits: usize,
    group: usize,
    codes: String,
    scales: String,
    biases: String,
}

#[derive(Deserialize)]
struct Logits {
    model: String,
    bits: usize,
    group: usize,
    start: usize,
    tokens: Vec<u32>,
    /// By position.
    logits: BTreeMap<usize, Vec<f32>>,
}

fn golden() -> Golden {
    let file = crate::common::golden_cases::golden_folder().join("../kv/quantized.json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

const TYPES: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Bf16];

/// The generator's rows.
fn numbers(row: usize) -> Vec<f32> {
    let (center, size) = [(0.0, 1.0), (2.0, 0.5), (-3.0, 1.0), (0.0, 2f64.powi(-20))][row];
    let code = |i: u64| ((i * 2_654_435_761 + row as u64 * 40_503) % (1 << 32) / (1 << 19)) as f64 - 4096.0;
    (1..=128).map(|i| (center + size * code(i) / 4096.0) as f32).collect()
}

#[test]
fn codes_scales_and_biases_are_mlxs() {
    const WIDTH: usize = 128;
    for case in golden().quantized {
        let ty = TYPES.into_iter().find(|ty| format!("{ty:?}") == case.ty).unwrap();
        let (bits, groups) = (case.bits, WIDTH / case.group);
        let name = format!("{ty:?}, {bits} bits in groups of {}", case.group);
        let shape = KvShape { ty, kv_heads: 1, head_dim: WIDTH };
        let quant = KvQuant::new(bits, case.group).unwrap();
        let mut slab = vec![0; quant.slab_bytes(&shape)];
        for row in 0..4 {
            write_quantized(&shape, quant, &mut slab, row, &numbers(row), &numbers(row));
        }
        let bytes = |hex: &str| -> Vec<u8> {
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
        };
        let codes = bytes(&case.codes);
        let (keys, values) = slab.split_at(slab.len() / 2);
        assert_eq!(values[..codes.len()], codes, "{name}: values");
        // Bit streams: a row of mlx is one token, a row of the keys one dimension.
        let bit = |stream: &[u8], index: usize| stream[index / 8] >> (index % 8) & 1;
        for (row, d) in (0..4).flat_map(|row| (0..WIDTH).map(move |d| (row, d))) {
            let wanted = (0..bits).map(|b| bit(&codes, (row * WIDTH + d) * bits + b));
            assert!((0..bits).map(|b| bit(keys, (d * BLOCK + row) * bits + b)).eq(wanted), "{name}: keys");
        }
        for half in [keys, values] {
            let (_, factors) = half.split_at(BLOCK * WIDTH * bits / 8);
            let (scales, biases) = factors.split_at(factors.len() / 2);
            for (factors, wanted) in [(scales, bytes(&case.scales)), (biases, bytes(&case.biases))] {
                let factors: Vec<&[u8]> = factors.chunks(ty.bytes()).collect();
                for (i, wanted) in wanted.chunks(ty.bytes()).enumerate() {
                    assert_eq!(factors[i % groups * BLOCK + i / groups], wanted, "{name}: factor {i}");
                }
            }
        }
    }
}

/// What a group of numbers is read as, by a plain reading of mlx's rule, everything being stored in f32.
fn through_codes(bits: usize, values: &[f32]) -> Vec<f64> {
    let most = ((1 << bits) - 1) as f32;
    let low = values.iter().copied().fold(f32::MAX, f32::min);
    let high = values.iter().copied().fold(f32::MIN, f32::max);
    let size = ((high - low) / most).max(1e-7);
    let (mut scale, edge) = if low.abs() > high.abs() { (size, low) } else { (-size, high) };
    let mut bias = 0.0;
    let steps = (edge / scale).round_ties_even();
    if steps != 0.0 {
        (scale, bias) = (edge / steps, edge);
    }
    let code = |v: f32| ((v - bias) / scale).round_ties_even().clamp(0.0, most);
    values.iter().map(|&v| f64::from(code(v)) * f64::from(scale) + f64::from(bias)).collect()
}

/// One layer with one key-value head and two query heads; queries, keys and values of every position.
struct Layer {
    kv: LayerKv,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Layer {
    fn new(policy: Policy, head_dim: usize, len: usize) -> Self {
        let number = |i: usize, salt: usize| ((i * i * 31 + i * 7 + salt) % 1009) as f32 / 504.0 - 1.0;
        let numbers = |count, salt| (0..count).map(|i| number(i, salt)).collect();
        let width = len * head_dim;
        let (q, k, v) = (numbers(2 * width, 1), numbers(width, 2), numbers(width, 3));
        Self { kv: LayerKv { kv_heads: 1, head_dim, policy }, q, k, v }
    }

    /// The outputs of all positions through a cache, at most `chunk` positions at a time.
    fn through_cache(&self, how: KvQuantization, chunk: usize) -> Vec<f32> {
        let width = self.kv.head_dim;
        let spec = KvSpec::new(&[self.kv], KvType::F32).quantized(how).unwrap();
        let mut store = KvStore::new(spec, usize::MAX);
        let id = store.add();
        let (exec, mut out) = (Exec::new(Isa::best(), 2), Vec::new());
        let len = self.k.len() / width;
        let shape = AttentionShape {
            heads: 2,
            kv: store.spec().groups[0].shape,
            scale: 0.3,
            softcap: None,
            window: self.kv.policy.window(),
        };
        while store.len(id) < len {
            let first = store.len(id);
            let count = store.step_limit(id, chunk.min(len - first));
            assert!(first >= how.start() || first + count <= how.start());
            store.reserve(id, count).unwrap();
            store.write(&exec, 0, &[(id, first..first + count)], &self.k, &self.v).unwrap();
            let mut step = vec![0.0; count * 2 * width];
            let blocks = store.slabs(id, 0).unwrap();
            let sequence =
                Sequence { rows: 0..count, first_position: first, blocks: &blocks, quant: store.quant(id) };
            attention(
                &exec,
                &shape,
                &self.q[2 * first * width..2 * (first + count) * width],
                None,
                &[sequence],
                &mut step,
            );
            out.extend(step);
            store.commit(id, count).unwrap();
            assert_eq!(store.budget().used(), store.spec().bytes_at(store.len(id)));
        }
        out
    }

    /// The same in f64 from the whole history and an explicit mask.
    fn exact(&self, how: KvQuantization) -> Vec<f64> {
        let width = self.kv.head_dim;
        let read = |data: &[f32]| -> [Vec<f64>; 2] {
            let codes = data.chunks(how.group()).flat_map(|group| through_codes(how.bits(), group));
            [data.iter().map(|&v| f64::from(v)).collect(), codes.collect()]
        };
        let (k, v) = (read(&self.k), read(&self.v));
        let sees = |position: usize, p: usize| {
            p <= position
                && match self.kv.policy {
                    Policy::Full => true,
                    Policy::Window(w) => p < w.keep() || p + w.size() - w.keep() > position,
                    Policy::Chunk(size) => p / size == position / size,
                }
        };
        let mut all = Vec::new();
        for (index, q) in self.q.chunks(width).enumerate() {
            let position = index / 2;
            let which = usize::from(position >= how.start());
            let seen: Vec<usize> = (0..=position).filter(|&p| sees(position, p)).collect();
            let dot = |&p: &usize| -> f64 {
                q.iter().zip(&k[which][p * width..]).map(|(&q, k)| f64::from(q) * k).sum()
            };
            let weights: Vec<f64> = seen.iter().map(|p| (dot(p) * f64::from(0.3_f32)).exp()).collect();
            let sum: f64 = weights.iter().sum();
            all.extend((0..width).map(|d| {
                let value = |(&p, w): (&usize, &f64)| w * v[which][p * width + d];
                seen.iter().zip(&weights).map(value).sum::<f64>() / sum
            }));
        }
        all
    }
}

#[test]
fn every_policy_reads_what_its_codes_stand_for() {
    let window = |size, keep| Policy::Window(KvWindow::new(size, keep).unwrap());
    let chunks = Policy::Chunk(44.try_into().unwrap());
    let windows = [(window(40, 0), 40), (window(24, 5), 24), (window(70, 36), 70)];
    for (policy, size) in [(Policy::Full, 40), (chunks, 44)].into_iter().chain(windows) {
        let len = 3 * size;
        for (bits, group) in KvQuant::BITS.into_iter().flat_map(|b| KvQuant::GROUPS.map(|g| (b, g))) {
            let layer = Layer::new(policy, if group == 32 { 96 } else { 128 }, len);
            for start in [0, 1, size + 5, len] {
                let how = KvQuantization::new(bits, group, start).unwrap();
                let whole = layer.through_cache(how, len);
                let exact = layer.exact(how);
                let largest = exact.iter().fold(0.0_f64, |a, b| a.max(b.abs()));
                for (i, (&got, wanted)) in whole.iter().zip(&exact).enumerate() {
                    let error = (f64::from(got) - wanted).abs() / largest;
                    assert!(error < 1e-5, "{policy:?} {how:?}, element {i}: {error}");
                }
                for chunk in [1, 7, size - 1, size, size + 1] {
                    assert!(layer.through_cache(how, chunk) == whole, "{policy:?} {how:?} by {chunk}");
                }
            }
        }
    }
}

/// The logits of `tokens`, run after what the sequence holds.
fn advance(decoder: &Decoder, kv: &mut KvStore, id: SequenceId, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut rest = tokens;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(kv.step_limit(id, rest.len()));
        let mut step = StepInputs::default();
        step.push(id, kv.len(id), piece, false);
        kv.reserve(id, piece.len()).unwrap();
        let hidden = decoder.hidden(&step, kv).unwrap();
        kv.commit(id, piece.len()).unwrap();
        let all: Vec<usize> = (0..piece.len()).collect();
        let head = decoder.head(&hidden, &all, &RowAdapters::default()).unwrap();
        rows.extend(all.iter().map(|row| head.row(*row).unwrap().to_vec()));
        rest = after;
    }
    rows
}

fn store(decoder: &Decoder, how: KvQuantization) -> KvStore {
    KvStore::new(kv_spec(decoder, KvType::F32).quantized(how).unwrap(), usize::MAX)
}

#[test]
fn logits_are_those_of_mlx_lms_quantized_cache() {
    let mut worst = 0.0_f32;
    for case in golden().logits {
        let decoder = model(&case.model, 1);
        let how = KvQuantization::new(case.bits, case.group, case.start).unwrap();
        let mut kv = store(&decoder, how);
        let id = kv.add();
        let rows = advance(&decoder, &mut kv, id, &case.tokens);
        for (&position, wanted) in &case.logits {
            let largest = wanted.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            for (got, wanted) in rows[position].iter().zip(wanted) {
                let error = (got - wanted).abs() / largest;
                assert!(error < LOGITS, "{} {how:?} at {position}: {error}", case.model);
                worst = worst.max(error);
            }
        }
    }
    println!("largest difference {worst:.1e}");
}

/// Sums of another order may put a number on the other side of the border between two codes.
const LOGITS: f32 = 1e-4;

fn tokens(len: usize) -> Vec<u32> {
    (0..len).map(|position| (position * 29 % 61) as u32).collect()
}

#[test]
fn trims_return_to_floats_or_say_where_they_can() {
    let decoder = model("gemma3-f32", 1);
    let how = KvQuantization::new(4, 32, 50).unwrap();
    let tokens = tokens(90);
    let mut kv = store(&decoder, how);
    let id = kv.add();
    let whole = advance(&decoder, &mut kv, id, &tokens);
    // Windows of 8 let it go back within a block at most.
    for length in [89, 75, 71] {
        kv.trim(id, 90 - length).unwrap();
        assert!(advance(&decoder, &mut kv, id, &tokens[length..]) == whole[length..], "after {length}");
    }
    let error = kv.trim(id, 90 - 49).unwrap_err();
    let KvError::Quantized { target: 49, start: 50, reachable } = error else { panic!("{error}") };
    assert!(reachable >= 50 && kv.can_trim_to(id, reachable) && !kv.can_trim_to(id, 49));
    assert_eq!((kv.len(id), kv.quant(id)), (90, Some(how.quant())), "a refused trim changes nothing");
    kv.trim(id, 90).unwrap();
    assert_eq!((kv.len(id), kv.quant(id)), (0, None));
    assert!(advance(&decoder, &mut kv, id, &tokens) == whole, "after starting over");

    // As long as nothing behind the start was run, all is there as floats.
    let mut kv = store(&decoder, how);
    let id = kv.add();
    advance(&decoder, &mut kv, id, &tokens[..50]);
    assert_eq!(kv.quant(id), None);
    kv.trim(id, 3).unwrap();
    assert!(advance(&decoder, &mut kv, id, &tokens[47..]) == whole[47..]);
    let error = kv.reserve(id, 1).and_then(|()| kv.trim(id, 41)).unwrap_err();
    assert!(error.to_string().contains("from position 50 on"), "{error}");

    let mut kv = store(&decoder, how);
    let id = kv.add();
    let error = kv.reserve(id, 51).unwrap_err();
    assert_eq!(error, KvError::PassesStart { len: 0, tokens: 51, start: 50 });
    assert_eq!(kv.step_limit(id, 51), 50);
}

#[test]
fn forks_keep_their_floats_and_share_what_was_quantized() {
    let decoder = model("qwen3-no-window-f32", 1);
    let how = KvQuantization::new(8, 32, 100).unwrap();
    let tokens = tokens(130);
    let mut alone = store(&decoder, how);
    let id = alone.add();
    let whole = advance(&decoder, &mut alone, id, &tokens);
    let mut kv = store(&decoder, how);
    let a = kv.add();
    advance(&decoder, &mut kv, a, &tokens[..100]);
    let (b, c) = (kv.fork(a).unwrap(), kv.fork(a).unwrap());
    let (float, coded) = {
        let group = &kv.spec().groups[0];
        (group.block_bytes(None), group.block_bytes(Some(how.quant())))
    };
    assert_eq!(kv.budget().used(), 4 * float);
    assert!(advance(&decoder, &mut kv, a, &tokens[100..]) == whole[100..]);
    assert_eq!(kv.budget().used(), 4 * float + 5 * coded, "the others hold floats");
    assert!(advance(&decoder, &mut kv, b, &tokens[100..]) == whole[100..]);
    assert_eq!(kv.budget().used(), 4 * float + (5 + 2) * coded, "full blocks are shared");
    // The third goes back to before the start and on from there; its full blocks are those of the others again.
    kv.trim(c, 3).unwrap();
    assert!(advance(&decoder, &mut kv, c, &tokens[97..]) == whole[97..]);
    assert_eq!(kv.budget().used(), (3 + 3 * 2) * coded);
    // A quantized fork: the partial last block is copied when one of them writes.
    let d = kv.fork(c).unwrap();
    kv.trim(d, 30).unwrap();
    assert!(advance(&decoder, &mut kv, d, &tokens[100..]) == whole[100..]);
    for id in [a, b, c, d] {
        kv.remove(id);
    }
    assert_eq!(kv.budget().used(), 0);
}

#[test]
fn a_block_of_floats_that_was_written_to_is_quantized_again() {
    let decoder = model("qwen3-no-window-f32", 1);
    let how = KvQuantization::new(8, 32, 70).unwrap();
    let (tokens, mut others) = (tokens(90), tokens(90));
    others[40..].reverse();
    let mut alone = store(&decoder, how);
    let id = alone.add();
    let whole = advance(&decoder, &mut alone, id, &others);
    let mut kv = store(&decoder, how);
    let a = kv.add();
    advance(&decoder, &mut kv, a, &tokens[..70]);
    let b = kv.fork(a).unwrap();
    advance(&decoder, &mut kv, a, &tokens[70..]);
    // The second block, of which the first sequence holds codes, gets other tokens.
    kv.trim(b, 30).unwrap();
    advance(&decoder, &mut kv, b, &others[40..70]);
    let c = kv.fork(b).unwrap();
    assert!(advance(&decoder, &mut kv, b, &others[70..]) == whole[70..]);
    assert!(advance(&decoder, &mut kv, c, &others[70..]) == whole[70..]);
}

#[test]
fn a_spent_budget_leaves_a_sequence_of_floats() {
    let layer = LayerKv { kv_heads: 1, head_dim: 32, policy: Policy::Full };
    let how = KvQuantization::new(4, 32, 64).unwrap();
    let spec = KvSpec::new(&[layer], KvType::F16).quantized(how).unwrap();
    let block = spec.groups[0].block_bytes(None);
    let mut kv = KvStore::new(spec, 2 * block);
    let a = kv.add();
    kv.reserve(a, 64).unwrap();
    kv.write(&Exec::new(Isa::best(), 1), 0, &[(a, 0..64)], &[1.0; 64 * 32], &[2.0; 64 * 32]).unwrap();
    kv.commit(a, 64).unwrap();
    let b = kv.fork(a).unwrap();
    assert!(matches!(kv.reserve(a, 1), Err(KvError::OutOfMemory { .. })));
    assert_eq!((kv.quant(a), kv.budget().used()), (None, 2 * block));
    kv.remove(b);
    kv.reserve(a, 1).unwrap();
    assert_eq!((kv.quant(a), kv.len(a)), (Some(how.quant()), 64));
}

/// The most bytes that blocks take while 200 tokens are run, `chunk` at a time.
fn peak(layers: &[LayerKv], ty: KvType, how: Option<KvQuantization>, chunk: usize) -> usize {
    let spec = KvSpec::new(layers, ty);
    let spec = match how {
        Some(how) => spec.quantized(how).unwrap(),
        None => spec,
    };
    let mut kv = KvStore::new(spec, usize::MAX);
    let (id, mut peak) = (kv.add(), 0);
    while kv.len(id) < 200 {
        let count = kv.step_limit(id, chunk.min(200 - kv.len(id)));
        kv.reserve(id, count).unwrap();
        peak = peak.max(kv.budget().used());
        kv.commit(id, count).unwrap();
    }
    let forecast = kv.spec().peak_bytes(200);
    assert!(forecast <= peak, "{forecast} {peak}");
    peak
}

#[test]
fn the_peak_is_never_above_that_of_floats() {
    let layer = |policy| LayerKv { kv_heads: 2, head_dim: 128, policy };
    let window = Policy::Window(KvWindow::new(40, 4).unwrap());
    for layers in [vec![layer(Policy::Full)], vec![layer(Policy::Full), layer(window)], vec![layer(window)]] {
        for (bits, group) in KvQuant::BITS.into_iter().flat_map(|b| KvQuant::GROUPS.map(|g| (b, g))) {
            for (ty, chunk) in TYPES.into_iter().flat_map(|ty| [1, 7, 32, 33, 90, 200].map(|c| (ty, c))) {
                let floats = peak(&layers, ty, None, chunk);
                for start in [0, 31, 64, 150, 199, 200] {
                    let how = KvQuantization::new(bits, group, start).unwrap();
                    let quantized = peak(&layers, ty, Some(how), chunk);
                    assert!(quantized <= floats, "{how:?} {ty:?} by {chunk}: {quantized} above {floats}");
                    assert!(start > 0 || quantized < floats, "{how:?} {ty:?} by {chunk}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    assert_eq!(KvQuantization::new(7, 64, 0), Err(KvQuantError::Bits { bits: 7 }));
    assert_eq!(KvQuantization::new(8, 48, 0), Err(KvQuantError::Group { group: 48 }));
    let layer = |head_dim| LayerKv { kv_heads: 1, head_dim, policy: Policy::Full };
    let how = KvQuantization::new(8, 64, 0).unwrap();
    let error = KvSpec::new(&[layer(128), layer(96)], KvType::F16).quantized(how).unwrap_err();
    assert_eq!(error, KvQuantError::HeadDim { layer: 1, head_dim: 96, group: 64 });
    assert!(
        error.to_string().ends_with("layer 1 has heads of 96 dimensions, which take groups of 32"),
        "{error}"
    );
    let error = how.check(&[layer(80)]).unwrap_err().to_string();
    assert!(error.ends_with("which take no groups at all"), "{error}");
}
