//! Prints the speed of the float, attention and vector kernels: best of several runs.
//!
//! `cargo run --release -p lmx-kernels --example speed -- [matmul|decode|attention|vector] [threads] [level] [type]`
#![allow(clippy::unwrap_used, reason = "a tool for developers")]

use half::f16;
use lmx_kernels::attention::{
    AttentionShape, BLOCK, KvQuant, KvShape, KvType, Sequence, attention, write_kv, write_quantized,
};
use lmx_kernels::float::{FloatMatrix, FloatProduct, FloatType, SCALE_GROUP, matmul};
use lmx_kernels::isa::Level;
use lmx_kernels::{AlignedBytes, Exec, Isa, vector};
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let what = args.first().map_or("all", String::as_str);
    let threads = args.get(1).map_or(2, |t| t.parse().unwrap());
    let level = args.get(2).map(|name| Level::ALL.into_iter().find(|l| l.name() == name).unwrap());
    let isa = level.map_or(Isa::best(), |level| Isa::new(level).unwrap());
    let exec = Exec::new(isa, threads);
    println!("{isa}, {threads} threads");
    fma_peak(&exec);
    for (name, run) in
        [("decode", decode as fn(&Exec)), ("matmul", prefill), ("attention", attend), ("vector", row_wise)]
    {
        if what == "all" || what == name {
            run(&exec);
        }
    }
}

/// How long each figure is measured: LMX_SPEED_SECONDS, or 0.3.
fn seconds() -> f64 {
    std::env::var("LMX_SPEED_SECONDS").map_or(0.3, |s| s.parse().unwrap())
}

/// The shortest of many runs, in seconds: of the processor's time with one thread, so that other programs disturb
/// it less, else of the clock's.
fn best(exec: &Exec, mut f: impl FnMut()) -> f64 {
    let now = if exec.pool.threads() == 1 { thread_seconds } else { clock_seconds };
    f();
    let (start, mut shortest) = (Instant::now(), f64::MAX);
    while start.elapsed().as_secs_f64() < seconds() {
        let begin = now();
        f();
        shortest = shortest.min(now() - begin);
    }
    shortest
}

fn clock_seconds() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `time` only.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// What the kernels compete with: fma on independent sums in registers, as the machine is at this moment.
fn fma_peak(exec: &Exec) {
    const STEPS: usize = 100_000;
    let time = best(exec, || {
        exec.pool.run(&|_| {
            std::hint::black_box(fma_steps(exec.isa, STEPS));
        });
    });
    println!("fma peak {:.0} GFLOP/s", (STEPS * 24 * 16 * 2 * exec.pool.threads()) as f64 / time / 1e9);
}

/// 24 sums of 16 lanes, `steps` times.
fn fma_steps(isa: Isa, steps: usize) -> f32 {
    #[target_feature(enable = "avx512f")]
    fn avx512(steps: usize) -> f32 {
        use std::arch::x86_64::*;
        let mut sums = [_mm512_set1_ps(1.0); 24];
        let x = std::hint::black_box(_mm512_set1_ps(0.5));
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, *sum, x);
            }
        }
        sums.into_iter().map(|sum| _mm512_cvtss_f32(sum)).sum()
    }
    if isa.level() < Level::Avx512 {
        return 0.0;
    }
    // SAFETY: the level was checked.
    unsafe { avx512(steps) }
}

fn noise(len: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Memory of a matrix, filled so that no element is NaN or subnormal.
fn weight_bytes(len: usize) -> AlignedBytes {
    let mut bytes = AlignedBytes::zeroed(len);
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = 0x31 + (i * 7 % 11) as u8;
    }
    bytes
}

/// The types whose name the fourth argument contains; all of them without one.
fn types() -> impl Iterator<Item = FloatType> {
    let wanted = std::env::args().nth(4).unwrap_or_default();
    [FloatType::F32, FloatType::F16, FloatType::Bf16, FloatType::E4m3]
        .into_iter()
        .filter(move |ty| format!("{ty:?}").contains(&wanted))
}

/// Weights read from memory once: GB/s beside a plain read.
fn decode(exec: &Exec) {
    let memory = weight_bytes(1 << 30);
    let read = |bytes: &[u8]| {
        let words = bytes.as_chunks::<64>().0;
        exec.pool.for_ranges(words.len(), 1, &|range| {
            let mut sums = [0_u64; 8];
            for line in &words[range] {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum ^= u64::from_le_bytes(*word);
                }
            }
            std::hint::black_box(sums);
        });
    };
    println!(
        "decode        GB/s: plain read of 1 GiB {:.1}",
        (1 << 30) as f64 / best(exec, || read(&memory)) / 1e9
    );
    let scales = vec![120_u8; (1 << 30) / SCALE_GROUP];
    for ty in types() {
        for cols in [576, 4096] {
            let mut line = format!("  {ty:?} x {cols}:");
            for (name, bytes) in [("1 GiB", 1 << 30), ("16 MiB", 16 << 20), ("1 MiB", 1 << 20)] {
                let rows = bytes / cols / ty.bytes();
                let scales = if ty == FloatType::E4m3 { &scales[..rows * cols / SCALE_GROUP] } else { &[] };
                let data = &memory[..rows * cols * ty.bytes()];
                let weight = FloatMatrix { data, ty, scales, rows, cols };
                for m in [1, 4] {
                    let (x, mut out) = (noise(m * cols), vec![0.0; m * rows]);
                    let time =
                        best(exec, || matmul(exec, &x, m, &mut [FloatProduct { weight, out: &mut out }]));
                    line +=
                        &format!("  {name} M={m} {:5.1}", (data.len() + scales.len()) as f64 / time / 1e9);
                }
            }
            println!("{line}");
        }
    }
}

/// Many rows: GFLOP/s.
fn prefill(exec: &Exec) {
    println!("matmul      GFLOP/s");
    for ty in types() {
        for (rows, cols) in [(576, 576), (1536, 576), (576, 1536), (4096, 4096)] {
            let bytes = weight_bytes(rows * cols * ty.bytes());
            let groups = if ty == FloatType::E4m3 { rows * cols / SCALE_GROUP } else { 0 };
            let scales = vec![120; groups];
            let weight = FloatMatrix { data: &bytes, ty, scales: &scales, rows, cols };
            let mut line = format!("  {ty:?} {rows} x {cols}:");
            for m in [8, 16, 64, 128, 256, 512] {
                let (x, mut out) = (noise(m * cols), vec![0.0; m * rows]);
                let time = best(exec, || matmul(exec, &x, m, &mut [FloatProduct { weight, out: &mut out }]));
                line += &format!("  M={m} {:5.0}", 2.0 * (m * rows * cols) as f64 / time / 1e9);
            }
            println!("{line}");
        }
    }
}

/// Query heads, key-value heads and dimensions: LMX_SPEED_HEADS as 9,3,64, or some of real models.
fn shapes() -> Vec<(usize, usize, usize)> {
    let Ok(heads) = std::env::var("LMX_SPEED_HEADS") else {
        return vec![(9, 3, 64), (4, 1, 256), (32, 32, 128), (32, 8, 128)];
    };
    let numbers: Vec<usize> = heads.split(',').map(|n| n.parse().unwrap()).collect();
    vec![(numbers[0], numbers[1], numbers[2])]
}

fn name(quant: Option<KvQuant>) -> String {
    quant.map_or(String::new(), |quant| format!("{} bits of {}", quant.bits(), quant.group()))
}

fn attend(exec: &Exec) {
    println!("attention");
    for (heads, kv_heads, head_dim) in shapes() {
        let wanted = std::env::args().nth(4).unwrap_or_default();
        let floats = [KvType::F16, KvType::Bf16, KvType::F32].map(|ty| (ty, None));
        let group = KvQuant::GROUPS[..2].iter().rfind(|&&group| head_dim % group == 0);
        let quants = [8, 6, 5, 4, 3, 2].map(|bits| (KvType::F16, group.and_then(|&g| KvQuant::new(bits, g))));
        let stored = floats.into_iter().chain(quants.into_iter().filter(|(_, quant)| quant.is_some()));
        for (ty, quant) in stored.filter(|stored| format!("{stored:?}").contains(&wanted)) {
            let kv = KvShape { ty, kv_heads, head_dim };
            let shape = AttentionShape {
                heads,
                kv,
                scale: (head_dim as f32).powf(-0.5),
                softcap: None,
                window: None,
            };
            let mut line = format!("  {heads}/{kv_heads} heads of {head_dim}, {ty:?} {}:", name(quant));
            for (context, rows) in [(512, 1), (4096, 1), (512, 512), (4096, 512)] {
                let slab_bytes = kv.slab_bytes(quant);
                let bytes = slab_bytes * context / BLOCK;
                // As in a model: a block holds all layers, and a step that decodes comes back to one after all others.
                let layers = if rows == 1 { ((128 << 20) / bytes).clamp(1, 30) } else { 1 };
                let mut slabs = Vec::new();
                for _ in 0..context / BLOCK {
                    let mut slab = AlignedBytes::zeroed(slab_bytes * layers);
                    for (i, layer) in slab.chunks_exact_mut(slab_bytes).enumerate() {
                        let row = noise(kv_heads * head_dim + i);
                        for slot in 0..BLOCK {
                            match quant {
                                None => write_kv(&kv, layer, slot, &row[i..], &row[i..]),
                                Some(quant) => write_quantized(&kv, quant, layer, slot, &row[i..], &row[i..]),
                            }
                        }
                    }
                    slabs.push(slab);
                }
                let blocks = |layer: usize| -> Vec<Option<&[u8]>> {
                    slabs.iter().map(|slab| slab.chunks_exact(slab_bytes).nth(layer)).collect()
                };
                let blocks: Vec<_> = (0..layers).map(blocks).collect();
                let q = noise(rows * heads * head_dim);
                let mut out = vec![0.0; q.len()];
                let first_position = context - rows;
                let all = best(exec, || {
                    for blocks in &blocks {
                        let sequence = [Sequence { rows: 0..rows, first_position, blocks, quant }];
                        attention(exec, &shape, &q, None, &sequence, &mut out);
                    }
                });
                let time = all / layers as f64;
                line += &if rows == 1 {
                    format!("  1 at {context} {:.1} us {:.1} GB/s", time * 1e6, bytes as f64 / time / 1e9)
                } else {
                    let pairs = rows * (first_position + 1) + rows * (rows - 1) / 2;
                    let flops = 4 * pairs * heads * head_dim;
                    format!(
                        "  {rows} of {context} {:.2} ms {:.0} GFLOP/s",
                        time * 1e3,
                        flops as f64 / time / 1e9
                    )
                };
            }
            println!("{line}");
        }
    }
}

fn row_wise(exec: &Exec) {
    println!("vector           us: 1 row, 512 rows");
    let both = |name: &str, f: &mut dyn FnMut(usize)| {
        println!("  {name:24} {:8.2} {:8.0}", best(exec, || f(1)) * 1e6, best(exec, || f(512)) * 1e6);
    };
    let (a, b, mut out) = (noise(512 * 1536), noise(512 * 1536), vec![0.0; 512 * 1536]);
    both("rms_norm 576", &mut |r| {
        vector::rms_norm(exec, &a[..r * 576], &b[..576], 1e-5, 0.0, &mut out[..r * 576])
    });
    both("add 576", &mut |r| vector::add(exec, &a[..r * 576], &b[..r * 576], &mut out[..r * 576]));
    both("swiglu 1536", &mut |r| vector::swiglu(exec, &a[..r * 1536], &b[..r * 1536], &mut out[..r * 1536]));
    both("geglu_tanh 1536", &mut |r| {
        vector::geglu_tanh(exec, &a[..r * 1536], &b[..r * 1536], &mut out[..r * 1536])
    });
    let (cos, sin): (Vec<f32>, Vec<f32>) = a[..512 * 32].iter().map(|a| (a.cos(), a.sin())).unzip();
    out.copy_from_slice(&a);
    for traditional in [false, true] {
        let name = if traditional { "rope 9x64 traditional" } else { "rope 9x64" };
        both(name, &mut |r| {
            vector::rope(exec, &mut out[..r * 576], 9, 64, 64, traditional, &cos[..r * 32], &sin[..r * 32]);
        });
    }
    let (row, mut out) = (noise(49_152), vec![0.0; 49_152]);
    let one = |name: &str, f: &mut dyn FnMut()| println!("  {name:24} {:8.2}", best(exec, f) * 1e6);
    one("argmax 49152", &mut || {
        std::hint::black_box(vector::argmax(exec, &row));
    });
    one("log_softmax 49152", &mut || vector::log_softmax(exec, &row, &mut out));
    one("softcap 49152", &mut || vector::softcap(exec, &mut out, 30.0));
    let kv = KvShape { ty: KvType::F16, kv_heads: 3, head_dim: 64 };
    let mut slab = vec![0; kv.bytes()];
    one("write_kv 3x64 f16", &mut || write_kv(&kv, &mut slab, 5, &row[..192], &row[..192]));
    for bits in [8, 4, 3] {
        let quant = KvQuant::new(bits, 64).unwrap();
        let mut slab = vec![0; quant.slab_bytes(&kv)];
        one(&format!("write_quantized 3x64 {bits} bits"), &mut || {
            write_quantized(&kv, quant, &mut slab, 5, &row[..192], &row[..192]);
        });
    }
    std::hint::black_box(f16::from_f32(out[0]));
}
