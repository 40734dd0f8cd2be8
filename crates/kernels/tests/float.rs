//! The float matmul: all levels, thread counts and row counts give the definition's bits; the values are right.
#![allow(clippy::unwrap_used, reason = "a test")]

mod random;

use half::{bf16, f16};
use lmx_kernels::float::*;
use random::{Random, bits, same_everywhere};

const TYPES: [FloatType; 4] = [FloatType::F32, FloatType::F16, FloatType::Bf16, FloatType::E4m3];

struct Weights {
    /// One byte more than the matrix, so that a start of any alignment can be lent.
    data: Vec<u8>,
    scales: Vec<u8>,
    ty: FloatType,
    rows: usize,
    cols: usize,
}

impl Weights {
    fn random(ty: FloatType, rows: usize, cols: usize) -> Self {
        let mut random = Random::new((rows * 31 + cols) as u64);
        let mut data = vec![0];
        for _ in 0..rows * cols {
            let v = random.unit();
            match ty {
                FloatType::F32 => data.extend(v.to_le_bytes()),
                FloatType::F16 => data.extend(f16::from_f32(v).to_le_bytes()),
                FloatType::Bf16 => data.extend(bf16::from_f32(v).to_le_bytes()),
                FloatType::E4m3 => data.push((random.next() % 255) as u8 & !1),
            }
        }
        let groups = if ty == FloatType::E4m3 { rows * cols / SCALE_GROUP } else { 0 };
        let scales = (0..groups).map(|_| 110 + (random.next() % 9) as u8).collect();
        Self { data, scales, ty, rows, cols }
    }

    fn matrix(&self) -> FloatMatrix<'_> {
        FloatMatrix {
            data: &self.data[1..],
            ty: self.ty,
            scales: &self.scales,
            rows: self.rows,
            cols: self.cols,
        }
    }

    fn wide(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.rows * self.cols];
        for (row, out) in all.chunks_mut(self.cols).enumerate() {
            widen_row(&self.matrix(), row, out);
        }
        all
    }
}

fn shapes(ty: FloatType) -> impl Iterator<Item = (usize, usize, usize)> {
    let all = [
        (1, 1, 1),
        (1, 5, 16),
        (2, 3, 17),
        (3, 9, 31),
        (1, 40, 64),
        (4, 7, 96),
        (5, 33, 100),
        (7, 12, 576),
        (13, 50, 160),
        (16, 24, 32),
        (31, 19, 45),
        (64, 70, 128),
        // More columns than one range of a panel.
        (8, 30, 2080),
        (7, 5, 1100),
    ];
    all.into_iter().filter(move |&(_, _, cols)| ty != FloatType::E4m3 || cols % SCALE_GROUP == 0)
}

#[test]
fn all_levels_give_the_same_bits_and_the_right_values() {
    for ty in TYPES {
        for (rows, outputs, cols) in shapes(ty) {
            let weights = Weights::random(ty, outputs, cols);
            let x = Random::new(rows as u64).vector(rows * cols, 2.0);
            let out = same_everywhere(&format!("{ty:?} {rows}x{outputs}x{cols}"), |exec| {
                let mut out = vec![9.0; rows * outputs];
                matmul(exec, &x, rows, &mut [FloatProduct { weight: weights.matrix(), out: &mut out }]);
                out
            });
            let wide = weights.wide();
            for (i, &out) in out.iter().enumerate() {
                let (x, w) = (&x[i / outputs * cols..][..cols], &wide[i % outputs * cols..][..cols]);
                let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                let (exact, size) = (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>());
                assert!((f64::from(out) - exact).abs() <= 1e-6 * size, "{ty:?} {out} {exact}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    for ty in TYPES {
        let (rows, outputs, cols) = (37, 29, 160);
        let weights = [Weights::random(ty, outputs, cols), Weights::random(ty, 11, cols)];
        let x = Random::new(5).vector(rows * cols, 2.0);
        for exec in random::execs() {
            let run = |x: &[f32], rows: usize| {
                let (mut a, mut b) = (vec![9.0; rows * outputs], vec![9.0; rows * 11]);
                let mut products = [
                    FloatProduct { weight: weights[0].matrix(), out: &mut a },
                    FloatProduct { weight: weights[1].matrix(), out: &mut b },
                ];
                matmul(&exec, x, rows, &mut products);
                (bits(&a), bits(&b))
            };
            let (a, b) = run(&x, rows);
            for (first, count) in [(0, 1), (5, 2), (7, 3), (10, 6), (11, 7), (12, 13), (36, 1)] {
                let (part_a, part_b) = run(&x[first * cols..][..count * cols], count);
                assert_eq!(
                    part_a,
                    a[first * outputs..][..count * outputs],
                    "{ty:?} {exec:?} {first} {count}"
                );
                assert_eq!(part_b, b[first * 11..][..count * 11], "{ty:?} {exec:?} {first} {count}");
            }
        }
    }
}

#[test]
fn numbers_at_the_edges_agree_on_all_levels() {
    let edges = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1e-38,
        3e38,
        -3e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        65504.0,
        6e-8,
    ];
    for ty in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        for (rows, outputs, cols) in [(1, 24, 20), (8, 24, 33)] {
            let mut random = Random::new(cols as u64);
            let mut weights = Weights::random(ty, outputs, cols);
            let bytes = ty.bytes();
            for _ in 0..outputs / 3 {
                let edge = edges[random.next() as usize % edges.len()];
                let at = 1 + random.next() as usize % (outputs * cols) * bytes;
                let encoded = match ty {
                    FloatType::F32 => edge.to_le_bytes().to_vec(),
                    FloatType::F16 => f16::from_f32(edge).to_le_bytes().to_vec(),
                    _ => bf16::from_f32(edge).to_le_bytes().to_vec(),
                };
                weights.data[at..at + bytes].copy_from_slice(&encoded);
            }
            let mut x = random.vector(rows * cols, 1.0);
            x[3] = -0.0;
            x[rows * cols - 1] = 1e-45;
            same_everywhere(&format!("{ty:?}"), |exec| {
                let mut out = vec![9.0; rows * outputs];
                matmul(exec, &x, rows, &mut [FloatProduct { weight: weights.matrix(), out: &mut out }]);
                out
            });
        }
    }
}

#[test]
fn every_fp8_code_and_scale_means_what_the_format_says() {
    let codes: Vec<u8> = (0..=255).collect();
    for scale in [0, 1, 100, 127, 200, 246, 247, 254, 255] {
        let scales = [scale; 8];
        let matrix = FloatMatrix { data: &codes, ty: FloatType::E4m3, scales: &scales, rows: 1, cols: 256 };
        let mut wide = vec![0.0; 256];
        widen_row(&matrix, 0, &mut wide);
        for (&code, &got) in codes.iter().zip(&wide) {
            let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let size = if exponent == 0 {
                fraction / 512.0
            } else {
                (1.0 + fraction / 8.0) * 2_f64.powi(exponent - 7)
            };
            let exact = size * 2_f64.powi(i32::from(scale) - 127) * if code & 128 == 0 { 1.0 } else { -1.0 };
            if code & 127 == 127 || scale == 255 {
                assert!(got.is_nan(), "{code} {scale}");
            } else {
                assert_eq!(got.to_bits(), (exact as f32).to_bits(), "{code} {scale}");
            }
        }
        // One output per code, each the code alone: the matmul's own conversion.
        let mut data = vec![0; 256 * 32];
        for (row, &code) in codes.iter().enumerate() {
            data[row * 32 + row % 32] = code;
        }
        let scales = vec![scale; 256];
        let weight = FloatMatrix { data: &data, ty: FloatType::E4m3, scales: &scales, rows: 256, cols: 32 };
        for rows in [1, 3, 20] {
            same_everywhere("fp8", |exec| {
                let mut out = vec![9.0; rows * 256];
                matmul(exec, &vec![1.0; rows * 32], rows, &mut [FloatProduct { weight, out: &mut out }]);
                out
            });
        }
    }
}
