//! Speed of the quantized matmul: decode in GB/s of packed weights beside a plain read of as many bytes, prefill in
//! GFLOP/s. Each figure is the best of some interleaved rounds.
//!
//! ```text
//! cargo bench -p lmx-kernels --bench quant -- [decode|prefill] [FORMAT] [scalar|avx2|avx512|amx] [THREADS] [600MB] [4096x4096] [x128]
//! ```
#![allow(clippy::unwrap_used, reason = "a bench")]

use lmx_kernels::isa::Level;
use lmx_kernels::quant::{Codes, Format, Product, QuantMatrix, RowBuf, ScaleType, Scales, matmul};
use lmx_kernels::{Exec, Isa};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 7;

fn formats() -> Vec<(&'static str, Format)> {
    let uint = |bits, zero| Codes::Uint { bits, zero };
    let symmetric = Scales::Symmetric(ScaleType::F16);
    let affine = Scales::Affine(ScaleType::F16);
    let mlx = Scales::Affine(ScaleType::Bf16);
    let of = |codes, group, scales| Format { codes, group, scales };
    vec![
        ("q4_0", of(uint(4, 8), 32, symmetric)),
        ("q4_1", of(uint(4, 0), 32, affine)),
        ("q5_0", of(uint(5, 16), 32, symmetric)),
        ("q8_0", of(uint(8, 128), 32, symmetric)),
        ("q2_k", of(uint(2, 0), 16, Scales::SuperAffine)),
        ("q3_k", of(uint(3, 4), 16, Scales::SuperSymmetric)),
        ("q4_k", of(uint(4, 0), 32, Scales::SuperAffine)),
        ("q5_k", of(uint(5, 0), 32, Scales::SuperAffine)),
        ("q6_k", of(uint(6, 32), 16, Scales::SuperSymmetric)),
        ("mlx3", of(uint(3, 0), 64, mlx)),
        ("mlx4", of(uint(4, 0), 64, mlx)),
        ("mlx6", of(uint(6, 0), 64, mlx)),
        ("mlx8", of(uint(8, 0), 64, mlx)),
        ("mlx4g32", of(uint(4, 0), 32, mlx)),
        ("mlx4g128", of(uint(4, 0), 128, mlx)),
        ("mxfp4", of(Codes::E2m1, 32, Scales::E8m0)),
        ("nvfp4", of(Codes::E2m1, 16, Scales::E4m3 { global: 1.0 })),
    ]
}

fn pack(exec: &Exec, rows: usize, cols: usize, format: Format) -> QuantMatrix {
    QuantMatrix::pack(exec, rows, cols, format, &|row, buf: &mut RowBuf| {
        for (i, code) in buf.codes.iter_mut().enumerate() {
            *code = ((i * 37 + row * 11) >> 2) as u8;
        }
        // Bytes that are small numbers in every scale type.
        buf.scales.fill(0x21);
        buf.biases.fill(0xa1);
        buf.sub_scales.fill(if matches!(format.scales, Scales::SuperAffine) { 33 } else { 100 });
        buf.sub_mins.fill(21);
    })
    .unwrap()
}

fn seconds(mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// A plain read of `data` on the pool's threads.
fn read(exec: &Exec, data: &[u64]) -> f64 {
    seconds(|| {
        exec.pool.for_ranges(data.len(), 512, &|range| {
            let mut sums = [0u64; 32];
            for chunk in data[range].chunks_exact(32) {
                for (sum, v) in sums.iter_mut().zip(chunk) {
                    *sum = sum.wrapping_add(*v);
                }
            }
            black_box(sums);
        });
    })
}

fn decode(exec: &Exec, name: &str, format: Format, megabytes: usize) {
    let (cols, bytes) = (4096, megabytes << 20);
    let probe = pack(exec, 16, cols, format).bytes();
    let rows = bytes / probe * 16;
    let mut weight = pack(exec, 16, cols, format);
    let packing = seconds(|| weight = pack(exec, rows, cols, format));
    let plain = vec![1u64; bytes / 8];
    let mut line = String::new();
    let mut reading = f64::MAX;
    for batch in [1, 2, 4, 8, 16] {
        let x: Vec<f32> = (0..batch * cols).map(|i| (i % 13) as f32 - 6.0).collect();
        let mut out = vec![0.0; batch * rows];
        let mut best = f64::MAX;
        for _ in 0..ROUNDS * 600 / megabytes {
            reading = reading.min(read(exec, &plain) / (plain.len() * 8) as f64);
        }
        for _ in 0..ROUNDS * 600 / megabytes {
            let time = seconds(|| matmul(exec, &x, batch, &mut [Product { weight: &weight, out: &mut out }]));
            best = best.min(time / weight.bytes() as f64);
        }
        line += &format!("  {:5.1}", 1e-9 / best);
    }
    let bits = weight.bytes() as f64 * 8.0 / (rows * cols) as f64;
    let packed = (rows * cols) as f64 * 1e-9 / packing;
    println!(
        "decode {name:9} {bits:5.2} bit  packed at {packed:4.2} Gweight/s  read {:5.1}  rows 1 2 4 8 16: {line} GB/s",
        1e-9 / reading
    );
}

fn prefill(exec: &Exec, name: &str, format: Format, shapes: &[(usize, usize)], tokens: &[usize]) {
    for &(rows, cols) in shapes {
        let weight = pack(exec, rows, cols, format);
        let mut line = String::new();
        for &batch in tokens {
            let x: Vec<f32> = (0..batch * cols).map(|i| (i % 13) as f32 - 6.0).collect();
            let mut out = vec![0.0; batch * rows];
            let start = Instant::now();
            let mut best = f64::MAX;
            while start.elapsed().as_secs_f64() < 0.4 {
                let mut products = [Product { weight: &weight, out: &mut out }];
                best = best.min(seconds(|| matmul(exec, &x, batch, &mut products)));
            }
            line += &format!(" {:5.0}", 2e-9 * (rows * cols * batch) as f64 / best);
        }
        println!("prefill {name:9} {rows:5} x {cols:5}  tokens {tokens:?}: {line} GFLOP/s");
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let given = |name: &str| args.iter().any(|a| a == name);
    let level = Level::ALL.into_iter().find(|l| given(l.name()));
    let isa = level.map_or_else(Isa::best, |level| Isa::new(level).unwrap());
    let threads: Vec<usize> = args.iter().filter_map(|a| a.parse().ok()).collect();
    // Larger than any cache, unless told.
    let megabytes = args.iter().find_map(|a| a.strip_suffix("MB")?.parse().ok()).unwrap_or(600);
    let tokens: Vec<usize> = args.iter().filter_map(|a| a.strip_prefix('x')?.parse().ok()).collect();
    let tokens = if tokens.is_empty() { vec![4, 8, 16, 32, 128, 512] } else { tokens };
    let shape = |arg: &String| {
        let (rows, cols) = arg.split_once('x')?;
        Some((rows.parse().ok()?, cols.parse().ok()?))
    };
    let shapes: Vec<(usize, usize)> = args.iter().filter_map(shape).collect();
    let all = vec![(4096, 4096), (2048, 2048), (2048, 8192), (8192, 2048), (576, 1536)];
    let shapes = if shapes.is_empty() { all } else { shapes };
    let named = formats().iter().any(|(name, _)| given(name));
    let both = !given("decode") && !given("prefill");
    for &threads in if threads.is_empty() { &[1, 2][..] } else { &threads } {
        let exec = Exec::new(isa, threads);
        println!("{isa}, {threads} threads");
        for (name, format) in formats().into_iter().filter(|(name, _)| !named || given(name)) {
            if both || given("decode") {
                decode(&exec, name, format, megabytes);
            }
            if both || given("prefill") {
                prefill(&exec, name, format, &shapes, &tokens);
            }
        }
    }
}
