//! Attention: all levels, thread counts and ways of cutting a sequence give the definition's bits; the values are
//! those of a plain softmax attention in f64.
#![allow(clippy::unwrap_used, reason = "a test")]

mod random;

use half::{bf16, f16};
use lmx_kernels::Exec;
use lmx_kernels::attention::*;
use random::{Random, bits, execs, relative_error, same_everywhere};

/// One sequence: queries, keys and values for positions 0..len.
#[derive(Clone)]
struct Data {
    shape: AttentionShape,
    len: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Option<Vec<f32>>,
    slabs: Vec<Vec<u8>>,
}

impl Data {
    fn random(shape: AttentionShape, len: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let KvShape { ty, kv_heads, head_dim } = shape.kv;
        let narrow = |v: f32| match ty {
            KvType::F32 => v,
            KvType::F16 => f16::from_f32(v).to_f32(),
            KvType::Bf16 => bf16::from_f32(v).to_f32(),
        };
        let q = random.vector(len * shape.heads * head_dim, 3.0);
        let k: Vec<f32> = random.vector(len * kv_heads * head_dim, 2.0).into_iter().map(narrow).collect();
        let v: Vec<f32> = random.vector(len * kv_heads * head_dim, 1.0).into_iter().map(narrow).collect();
        // Slots that are never written hold NaN: reading one would show.
        let mut slabs = vec![vec![0xFF; shape.kv.bytes()]; len.div_ceil(BLOCK)];
        let width = kv_heads * head_dim;
        for (position, (k, v)) in k.chunks(width).zip(v.chunks(width)).enumerate() {
            write_kv(&shape.kv, &mut slabs[position / BLOCK], position % BLOCK, k, v);
        }
        Self { shape, len, q, k, v, sinks: None, slabs }
    }

    /// With a sink for each head, of the size of the scores.
    fn with_sinks(mut self) -> Self {
        self.sinks = Some(Random::new(self.len as u64).vector(self.shape.heads, 8.0));
        self
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.kv.head_dim
    }

    /// Whether a query at `position` sees position `p`.
    fn sees(&self, position: usize, p: usize) -> bool {
        let left = match self.shape.window {
            None => true,
            Some(Window::Last { size, keep }) => p < keep || p + size - keep > position,
            Some(Window::Chunk(size)) => p / size == position / size,
        };
        p <= position && left
    }

    /// The blocks that queries from `first` on may read; the others are dropped.
    fn blocks(&self, first: usize) -> Vec<Option<&[u8]>> {
        let needed = |block: usize| {
            let end = ((block + 1) * BLOCK).min(first + 1);
            match self.shape.window {
                None => true,
                Some(Window::Last { size, keep }) => block * BLOCK < keep || end + size - keep > first + 1,
                Some(Window::Chunk(size)) => end > first - first % size,
            }
        };
        self.slabs.iter().enumerate().map(|(i, slab)| needed(i).then_some(slab.as_slice())).collect()
    }

    /// The queries `first..first + count` in one call.
    fn run(&self, exec: &Exec, first: usize, count: usize) -> Vec<f32> {
        let width = self.width();
        let mut out = vec![9.0; count * width];
        let blocks = self.blocks(first);
        let sequence = Sequence { rows: 0..count, first_position: first, blocks: &blocks, quant: None };
        let q = &self.q[first * width..][..count * width];
        attention(exec, &self.shape, q, self.sinks.as_deref(), &[sequence], &mut out);
        out
    }

    /// Softmax attention in f64 by its formula.
    fn exact(&self) -> Vec<f64> {
        let KvShape { kv_heads, head_dim, .. } = self.shape.kv;
        let heads = self.shape.heads;
        let mut all = Vec::new();
        for position in 0..self.len {
            for head in 0..heads {
                let q = &self.q[(position * heads + head) * head_dim..][..head_dim];
                let kv = |data: &'_ [f32], p: usize, d: usize| {
                    f64::from(data[(p * kv_heads + head * kv_heads / heads) * head_dim + d])
                };
                let seen: Vec<usize> = (0..self.len).filter(|&p| self.sees(position, p)).collect();
                let scores: Vec<f64> = seen
                    .iter()
                    .map(|&p| {
                        let dot: f64 =
                            q.iter().enumerate().map(|(d, &q)| f64::from(q) * kv(&self.k, p, d)).sum();
                        let score = dot * f64::from(self.shape.scale);
                        self.shape
                            .softcap
                            .map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                    })
                    .collect();
                let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
                for d in 0..head_dim {
                    let value: f64 = seen.iter().zip(&weights).map(|(&p, w)| w * kv(&self.v, p, d)).sum();
                    all.push(value / sum);
                }
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

/// Shapes with every head grouping, odd dimensions, windows that keep first tokens or not, chunks, and softcaps.
fn cases() -> Vec<(AttentionShape, usize)> {
    let window = |size, keep| Some(Window::Last { size, keep });
    let chunk = |size| Some(Window::Chunk(size));
    let with = |base, window, softcap| AttentionShape { window, softcap, ..base };
    vec![
        (shape(KvType::F16, 9, 3, 64), 70),
        (shape(KvType::F32, 2, 2, 8), 33),
        (shape(KvType::Bf16, 4, 1, 16), 300),
        (with(shape(KvType::F32, 1, 1, 2), None, Some(2.0)), 65),
        (with(shape(KvType::F16, 4, 2, 80), window(20, 0), None), 100),
        (with(shape(KvType::F32, 3, 1, 64), window(1, 0), None), 40),
        (with(shape(KvType::Bf16, 4, 4, 6), window(50, 3), Some(5.0)), 290),
        (with(shape(KvType::F16, 7, 1, 96), window(40, 36), None), 130),
        (with(shape(KvType::F32, 8, 1, 128), window(300, 40), None), 340),
        (with(shape(KvType::Bf16, 4, 1, 256), window(512, 0), Some(50.0)), 45),
        (with(shape(KvType::F16, 6, 2, 32), chunk(1), None), 40),
        (with(shape(KvType::F32, 4, 2, 20), chunk(24), Some(5.0)), 130),
        (with(shape(KvType::Bf16, 5, 1, 64), chunk(96), None), 300),
        (with(shape(KvType::F16, 8, 2, 40), chunk(270), None), 600),
        (shape(KvType::F32, 14, 2, 32), 540),
        (shape(KvType::F16, 16, 1, 18), 50),
    ]
}

/// The data of all cases, without and with sinks.
fn data() -> Vec<Data> {
    let one = |(i, (shape, len))| {
        [Data::random(shape, len, i as u64), Data::random(shape, len, i as u64).with_sinks()]
    };
    cases().into_iter().enumerate().flat_map(one).collect()
}

#[test]
fn all_levels_give_the_same_bits_and_the_right_values() {
    for data in data() {
        let name = format!("{:?} {:?}", data.shape, data.sinks);
        let out = same_everywhere(&name, |exec| data.run(exec, 0, data.len));
        let error = relative_error(&out, &data.exact());
        assert!(error < 2e-6, "{name}: {error}");
    }
}

#[test]
fn chunks_do_not_change_a_bit() {
    for data in data() {
        let (shape, len, width) = (data.shape, data.len, data.width());
        for exec in execs().into_iter().filter(|e| e.isa.level() != lmx_kernels::isa::Level::Scalar) {
            let whole = bits(&data.run(&exec, 0, len));
            for chunk in [1, 7, 32, 50] {
                for first in (0..len).step_by(chunk) {
                    let count = chunk.min(len - first);
                    let part = bits(&data.run(&exec, first, count));
                    assert_eq!(
                        part,
                        whole[first * width..][..count * width],
                        "{shape:?} {exec:?} {first} {chunk}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_batch_does_not_change_a_bit() {
    let shape =
        AttentionShape { window: Some(Window::Last { size: 64, keep: 5 }), ..shape(KvType::F16, 6, 2, 40) };
    let mut data: Vec<Data> =
        [1, 300, 40, 95].iter().map(|&len| Data::random(shape, len, len as u64)).collect();
    let sinks = Random::new(5).vector(6, 4.0);
    for data in &mut data {
        data.sinks = Some(sinks.clone());
    }
    // The last `count` queries of each, in one call, with a gap of one row that must stay as it is.
    let counts = [1, 1, 9, 33];
    let width = data[0].width();
    for exec in execs() {
        let blocks: Vec<_> = data.iter().zip(counts).map(|(d, count)| d.blocks(d.len - count)).collect();
        let (mut q, mut sequences) = (Vec::new(), Vec::new());
        for ((data, blocks), count) in data.iter().zip(&blocks).zip(counts) {
            let row = q.len() / width;
            q.extend(&data.q[(data.len - count) * width..]);
            let first_position = data.len - count;
            sequences.push(Sequence { rows: row..row + count, first_position, blocks, quant: None });
        }
        q.extend(vec![1.0; width]);
        let mut out = vec![9.0; q.len()];
        attention(&exec, &shape, &q, Some(&sinks), &sequences, &mut out);
        let mut expected = Vec::new();
        for (data, count) in data.iter().zip(counts) {
            expected.extend(data.run(&execs()[0], data.len - count, count));
        }
        expected.extend(vec![9.0; width]);
        assert_eq!(bits(&out), bits(&expected), "{exec:?}");
    }
}

#[test]
fn a_query_with_nan_gives_nan_and_spares_the_others() {
    let mut data = Data::random(shape(KvType::F16, 3, 1, 64), 50, 1);
    let clean = data.run(&execs()[0], 0, 50);
    let width = data.width();
    data.q[20 * width + 64 + 5] = f32::NAN;
    let out = same_everywhere("NaN", |exec| data.run(exec, 0, 50));
    for (i, (&got, &clean)) in out.iter().zip(&clean).enumerate() {
        if (20 * width + 64..20 * width + 128).contains(&i) {
            assert!(got.is_nan(), "{i}");
        } else {
            assert_eq!(got.to_bits(), clean.to_bits(), "{i}");
        }
    }
}

#[test]
fn extreme_scores_agree_on_all_levels() {
    for factor in [1e4, 1e20, 3e38] {
        let mut data = Data::random(shape(KvType::F32, 4, 2, 24), 80, 3);
        for q in &mut data.q {
            *q *= factor;
        }
        let out = same_everywhere("extreme", |exec| data.run(exec, 0, 80));
        if factor == 1e4 {
            assert!(relative_error(&out, &data.exact()) < 1e-3);
        }
    }
}

#[test]
fn keys_and_values_are_read_as_they_were_written() {
    for (ty, head_dim) in [(KvType::F32, 3), (KvType::F16, 64), (KvType::Bf16, 130)] {
        let data = Data::random(shape(ty, 2, 2, head_dim), 40, 5);
        let (kv, width) = (data.shape.kv, 2 * head_dim);
        for position in 0..40 {
            let (mut k, mut v) = (vec![0.0; width], vec![0.0; width]);
            read_kv(&kv, &data.slabs[position / BLOCK], position % BLOCK, &mut k, &mut v);
            assert_eq!(bits(&k), bits(&data.k[position * width..][..width]));
            assert_eq!(bits(&v), bits(&data.v[position * width..][..width]));
        }
    }
}

#[test]
fn extreme_sinks_take_all_or_nothing() {
    let window = Some(Window::Last { size: 40, keep: 3 });
    for window in [None, window, Some(Window::Chunk(24))] {
        let plain = Data::random(AttentionShape { window, ..shape(KvType::F16, 4, 2, 24) }, 300, 4);
        let without = plain.run(&execs()[0], 0, 300);
        let run = |sink: f32| {
            let data = Data { sinks: Some(vec![sink; 4]), ..plain.clone() };
            let out = same_everywhere(&format!("{window:?} {sink}"), |exec| data.run(exec, 0, 300));
            (relative_error(&out, &data.exact()), out)
        };
        // Greater than every score, and still so that something is left for the values.
        for sink in [20.0, 60.0, -20.0] {
            let (error, _) = run(sink);
            assert!(error < 2e-5, "{window:?} {sink}: {error}");
        }
        for sink in [-1e4, -3e38, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(bits(&run(sink).1), bits(&without), "{window:?} {sink}");
        }
        for sink in [1e4, 3e38, f32::MAX, f32::INFINITY] {
            assert!(run(sink).1.iter().all(|&out| out == 0.0), "{window:?} {sink}");
        }
        assert!(run(f32::NAN).1.iter().all(|out| out.is_nan()), "{window:?}");
    }
}

#[test]
fn each_head_has_its_own_sink() {
    let plain = Data::random(shape(KvType::F32, 6, 2, 16), 300, 6);
    let (without, width) = (plain.run(&execs()[0], 0, 300), plain.width());
    for head in 0..6 {
        let mut sinks = vec![f32::NEG_INFINITY; 6];
        sinks[head] = f32::INFINITY;
        let data = Data { sinks: Some(sinks), ..plain.clone() };
        let out = same_everywhere("one head", |exec| data.run(exec, 0, 300));
        for (i, (&out, &without)) in out.iter().zip(&without).enumerate() {
            let wanted = if i % width / 16 == head { 0.0 } else { without };
            assert_eq!(out, wanted, "head {head}, element {i}");
        }
    }
}
