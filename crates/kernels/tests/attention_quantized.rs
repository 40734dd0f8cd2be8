//! Attention over quantized keys and values: every number of bits, group and window, against softmax attention in f64
//! over what a plain reading of mlx's rule makes of the keys and values; all levels, thread counts, chunks and batches
//! give the same bits.
#![allow(clippy::unwrap_used, reason = "a test")]

mod random;

use half::{bf16, f16};
use lmx_kernels::Exec;
use lmx_kernels::attention::*;
use random::{Random, bits, execs, relative_error, same_everywhere};

fn narrow(ty: KvType, v: f32) -> f32 {
    match ty {
        KvType::F32 => v,
        KvType::F16 => f16::from_f32(v).to_f32(),
        KvType::Bf16 => bf16::from_f32(v).to_f32(),
    }
}

/// mlx's rule for one group: what the stored codes, scale and bias stand for.
fn through_codes(ty: KvType, bits: usize, values: &[f32]) -> Vec<f64> {
    let values: Vec<f32> = values.iter().map(|&v| narrow(ty, v)).collect();
    let most = ((1 << bits) - 1) as f32;
    let low = values.iter().copied().fold(f32::MAX, f32::min);
    let high = values.iter().copied().fold(f32::MIN, f32::max);
    let size = ((high - low) / most).max(1e-7);
    let (mut scale, edge) = if low.abs() > high.abs() { (size, low) } else { (-size, high) };
    let mut bias = 0.0;
    let steps = (edge / scale).round_ties_even();
    if steps != 0.0 {
        scale = edge / steps;
        bias = edge;
    }
    let code = |v: f32| ((v - bias) / scale).round_ties_even().clamp(0.0, most);
    let stored = |code: f32| f64::from(code) * f64::from(narrow(ty, scale)) + f64::from(narrow(ty, bias));
    values.iter().map(|&v| stored(code(v))).collect()
}

/// One sequence: queries, keys and values for positions 0..len.
struct Data {
    shape: AttentionShape,
    quant: KvQuant,
    len: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Option<Vec<f32>>,
    slabs: Vec<Vec<u8>>,
}

impl Data {
    fn random(shape: AttentionShape, quant: KvQuant, len: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let KvShape { kv_heads, head_dim, .. } = shape.kv;
        let width = kv_heads * head_dim;
        let q = random.vector(len * shape.heads * head_dim, 3.0);
        let (k, v) = (random.vector(len * width, 2.0), random.vector(len * width, 1.0));
        // Slots that are never written hold NaN: reading one would show.
        let mut slabs = vec![vec![0xFF; quant.slab_bytes(&shape.kv)]; len.div_ceil(BLOCK)];
        for (position, (k, v)) in k.chunks(width).zip(v.chunks(width)).enumerate() {
            write_quantized(&shape.kv, quant, &mut slabs[position / BLOCK], position % BLOCK, k, v);
        }
        Self { shape, quant, len, q, k, v, sinks: None, slabs }
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.kv.head_dim
    }

    fn sees(&self, position: usize, p: usize) -> bool {
        p <= position
            && match self.shape.window {
                None => true,
                Some(Window::Last { size, keep }) => p < keep || p + size - keep > position,
                Some(Window::Chunk(size)) => p / size == position / size,
            }
    }

    fn blocks(&self) -> Vec<Option<&[u8]>> {
        self.slabs.iter().map(|slab| Some(slab.as_slice())).collect()
    }

    /// The queries `first..first + count` in one call.
    fn run(&self, exec: &Exec, first: usize, count: usize) -> Vec<f32> {
        let width = self.width();
        let mut out = vec![9.0; count * width];
        let blocks = self.blocks();
        let sequence =
            Sequence { rows: 0..count, first_position: first, blocks: &blocks, quant: Some(self.quant) };
        let q = &self.q[first * width..][..count * width];
        attention(exec, &self.shape, q, self.sinks.as_deref(), &[sequence], &mut out);
        out
    }

    fn exact(&self) -> Vec<f64> {
        let KvShape { ty, kv_heads, head_dim } = self.shape.kv;
        let stored = |data: &[f32]| -> Vec<f64> {
            data.chunks(self.quant.group()).flat_map(|g| through_codes(ty, self.quant.bits(), g)).collect()
        };
        let (k, v) = (stored(&self.k), stored(&self.v));
        let mut all = Vec::new();
        for (index, q) in self.q.chunks(head_dim).enumerate() {
            let (position, head) = (index / self.shape.heads, index % self.shape.heads);
            let row = |p: usize| (p * kv_heads + head * kv_heads / self.shape.heads) * head_dim;
            let seen: Vec<usize> = (0..self.len).filter(|&p| self.sees(position, p)).collect();
            let score = |&p: &usize| -> f64 {
                let dot: f64 = q.iter().zip(&k[row(p)..]).map(|(&q, k)| f64::from(q) * k).sum();
                dot * f64::from(self.shape.scale)
            };
            let scores: Vec<f64> = seen.iter().map(score).collect();
            let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
            for d in 0..head_dim {
                let value: f64 = seen.iter().zip(&weights).map(|(&p, w)| w * v[row(p) + d]).sum();
                all.push(value / sum);
            }
        }
        all
    }
}

fn shape(ty: KvType, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        heads,
        kv: KvShape { ty, kv_heads, head_dim },
        scale: (head_dim as f32).powf(-0.5),
        softcap: None,
        window: None,
    }
}

/// Every number of bits with every group and every kind of window; the float types, head groupings, and sinks or none
/// in turn.
fn cases() -> Vec<Data> {
    let windows = [
        None,
        Some(Window::Last { size: 30, keep: 0 }),
        Some(Window::Last { size: 40, keep: 33 }),
        Some(Window::Chunk(44)),
    ];
    let mut cases = Vec::new();
    for bits in KvQuant::BITS {
        for group in KvQuant::GROUPS {
            let quant = KvQuant::new(bits, group).unwrap();
            for window in windows {
                let i = cases.len();
                let ty = [KvType::F16, KvType::F32, KvType::Bf16, KvType::F16][i % 4];
                let (heads, kv_heads) = [(3, 1), (2, 2), (8, 1), (4, 2)][i / 3 % 4];
                // One group or several in a head; beyond one span now and then.
                let head_dim = if i % 2 == 0 { group } else { (2 * group).max(96) / group * group };
                let len = if i % 7 == 0 { 270 } else { 75 };
                let shape = AttentionShape { window, ..shape(ty, heads, kv_heads, head_dim) };
                let mut data = Data::random(shape, quant, len, i as u64);
                // Each kind of window has both, and both lengths have.
                if i / 4 % 2 == 0 {
                    data.sinks = Some(Random::new(i as u64).vector(heads, 8.0));
                }
                cases.push(data);
            }
        }
    }
    cases
}

#[test]
fn all_levels_give_the_same_bits_and_the_right_values() {
    for data in cases() {
        let name = format!("{:?} {:?}", data.quant, data.shape);
        let out = same_everywhere(&name, |exec| data.run(exec, 0, data.len));
        let error = relative_error(&out, &data.exact());
        assert!(error < 3e-6, "{name}: {error}");
    }
}

#[test]
fn chunks_do_not_change_a_bit() {
    for data in cases() {
        let width = data.width();
        for exec in execs().into_iter().filter(|e| e.isa.level() != lmx_kernels::isa::Level::Scalar) {
            let whole = bits(&data.run(&exec, 0, data.len));
            for chunk in [1, 7, 32] {
                for first in (0..data.len).step_by(chunk) {
                    let count = chunk.min(data.len - first);
                    let part = bits(&data.run(&exec, first, count));
                    assert_eq!(part, whole[first * width..][..count * width], "{:?} {exec:?}", data.shape);
                }
            }
        }
    }
}

#[test]
fn a_batch_of_both_kinds_does_not_change_a_bit() {
    let shape =
        AttentionShape { window: Some(Window::Last { size: 64, keep: 5 }), ..shape(KvType::F16, 6, 2, 64) };
    let quants = [(8, 64), (4, 32)].map(|(bits, group)| KvQuant::new(bits, group).unwrap());
    let data = [Data::random(shape, quants[0], 300, 1), Data::random(shape, quants[1], 95, 2)];
    // The third sequence is that of the second's floats.
    let width = shape.kv.kv_heads * shape.kv.head_dim;
    let mut slabs = vec![vec![0; shape.kv.bytes()]; 3];
    for (position, (k, v)) in data[1].k.chunks(width).zip(data[1].v.chunks(width)).enumerate() {
        write_kv(&shape.kv, &mut slabs[position / BLOCK], position % BLOCK, k, v);
    }
    let floats: Vec<_> = slabs.iter().map(|slab| Some(slab.as_slice())).collect();
    let blocks = [data[0].blocks(), data[1].blocks()];
    let row = data[0].width();
    let q = [&data[0].q[299 * row..], &data[1].q[90 * row..], &data[1].q[90 * row..]].concat();
    let sequences = [
        Sequence { rows: 0..1, first_position: 299, blocks: &blocks[0], quant: Some(quants[0]) },
        Sequence { rows: 1..6, first_position: 90, blocks: &blocks[1], quant: Some(quants[1]) },
        Sequence { rows: 6..11, first_position: 90, blocks: &floats, quant: None },
    ];
    let sinks = Random::new(3).vector(6, 4.0);
    let alone = same_everywhere("alone", |exec| {
        let mut out = vec![0.0; q.len()];
        for sequence in &sequences {
            attention(exec, &shape, &q, Some(&sinks), std::slice::from_ref(sequence), &mut out);
        }
        out
    });
    let together = same_everywhere("together", |exec| {
        let mut out = vec![0.0; q.len()];
        attention(exec, &shape, &q, Some(&sinks), &sequences, &mut out);
        out
    });
    assert_eq!(bits(&together), bits(&alone));
    assert_ne!(bits(&together[row..6 * row]), bits(&together[6 * row..]));
}

#[test]
fn a_slab_of_floats_becomes_what_was_written_quantized() {
    for ty in [KvType::F32, KvType::F16, KvType::Bf16] {
        let shape = KvShape { ty, kv_heads: 2, head_dim: 128 };
        let (k, v) = (Random::new(1).vector(20 * 256, 2.0), Random::new(2).vector(20 * 256, 2.0));
        for bits in KvQuant::BITS {
            let quant = KvQuant::new(bits, 64).unwrap();
            let mut floats = vec![0xFF; shape.bytes()];
            let (mut written, mut converted) =
                (vec![0; quant.slab_bytes(&shape)], vec![0; quant.slab_bytes(&shape)]);
            for (slot, (k, v)) in k.chunks(256).zip(v.chunks(256)).enumerate() {
                write_kv(&shape, &mut floats, slot, k, v);
                write_quantized(&shape, quant, &mut written, slot, k, v);
            }
            quantize_slab(&shape, quant, &floats, 20, &mut converted);
            assert!(converted == written, "{ty:?} {bits}");
        }
    }
}

#[test]
fn a_key_with_nan_gives_nan_to_those_who_see_it() {
    let quant = KvQuant::new(4, 32).unwrap();
    let mut data = Data::random(shape(KvType::F16, 2, 1, 64), quant, 50, 1);
    let mut k = data.k[20 * 64..21 * 64].to_vec();
    k[40] = f32::NAN;
    write_quantized(&data.shape.kv, quant, &mut data.slabs[0], 20, &k, &data.v[20 * 64..21 * 64]);
    let out = same_everywhere("NaN", |exec| data.run(exec, 0, 50));
    for (i, value) in out.iter().enumerate() {
        assert_eq!(value.is_nan(), i >= 20 * 128, "{i}");
    }
}
