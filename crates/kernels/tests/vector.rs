//! The row-wise kernels: all levels and thread counts give the definition's bits, and the definition is accurate.
#![allow(clippy::unwrap_used, reason = "a test")]

mod random;

use lmx_kernels::vector::*;
use lmx_kernels::{Exec, Isa};
use random::{Random, relative_error, same_everywhere};

/// Lengths around the lane and cache-line borders, and one above the threshold for threads.
const LENGTHS: [usize; 12] = [0, 1, 2, 7, 15, 16, 17, 33, 64, 100, 576, 40_003];

/// Values at the edges of the number range.
const EDGES: [f32; 18] = [
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-45,
    88.72,
    88.73,
    89.0,
    -87.33,
    -87.34,
    -104.0,
    -1e30,
    1e30,
];

fn with_edges(mut x: Vec<f32>) -> Vec<f32> {
    for (x, edge) in x.iter_mut().skip(3).step_by(5).zip(EDGES) {
        *x = edge;
    }
    x
}

#[test]
fn elementwise_kernels_agree_on_all_levels() {
    for len in LENGTHS {
        let mut random = Random::new(len as u64);
        let (a, b) = (with_edges(random.vector(len, 20.0)), random.vector(len, 3.0));
        let run = |f: fn(&Exec, &[f32], &[f32], &mut [f32])| {
            let (a, b) = (&a, &b);
            move |exec: &Exec| {
                let mut out = vec![9.0; a.len()];
                f(exec, a, b, &mut out);
                out
            }
        };
        same_everywhere("swiglu", run(swiglu));
        same_everywhere("geglu_tanh", run(geglu_tanh));
        for (alpha, limit) in [(1.702, 7.0), (0.5, 1.5)] {
            let clamped = same_everywhere("clamped_swiglu", |exec| {
                let mut out = vec![9.0; len];
                clamped_swiglu(exec, &a, &b, alpha, limit, &mut out);
                out
            });
            for ((&out, &gate), &up) in clamped.iter().zip(&a).zip(&b) {
                let (gate, up) = (f64::from(gate), f64::from(up));
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                // `min` and `max` would drop a NaN.
                let gate = if gate > limit { limit } else { gate };
                let exact = (up.clamp(-limit, limit) + 1.0) * gate / (1.0 + (-alpha * gate).exp());
                let near = (f64::from(out) - exact).abs() <= 1e-6 * exact.abs().max(1.0);
                assert!(near || (exact.is_nan() && out.is_nan()), "{gate} {up}: {out} {exact}");
            }
        }
        let sums = same_everywhere("add", run(add));
        assert!(sums.iter().zip(a.iter().zip(&b)).all(|(s, (a, b))| s.is_nan() || *s == a + b));
        let products = same_everywhere("multiply", run(multiply));
        assert!(products.iter().zip(a.iter().zip(&b)).all(|(p, (a, b))| p.is_nan() || *p == a * b));
        same_everywhere("scale", |exec| {
            let mut x = a.clone();
            scale(exec, &mut x, 0.3);
            x
        });
        same_everywhere("softcap", |exec| {
            let mut x = a.clone();
            softcap(exec, &mut x, 30.0);
            x
        });
    }
}

/// The distance between `value` and `exact` in units of the last place of `exact`.
fn ulps(value: f32, exact: f64) -> f64 {
    let next = f32::from_bits((exact.abs() as f32).to_bits() + 1);
    (f64::from(value) - exact).abs() / (f64::from(next) - f64::from(exact.abs() as f32))
}

#[test]
fn the_elementary_functions_are_accurate() {
    let mut worst = [0.0_f64; 4];
    for i in -400_000..400_000 {
        let x = i as f32 * 2e-4 + 1e-6;
        worst[0] = worst[0].max(ulps(exp(x), f64::from(x).exp()));
        let x = i as f32 * 5e-5 + 1e-7;
        let wide = f64::from(x);
        worst[1] = worst[1].max(ulps(tanh(x), wide.tanh()));
        worst[2] = worst[2].max(ulps(silu(x), wide / (1.0 + (-wide).exp())));
        let x = x / 5.0;
        let wide = f64::from(x);
        let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
        let gelu = 0.5 * wide * (1.0 + u.tanh());
        worst[3] = worst[3].max((f64::from(gelu_tanh(x)) - gelu).abs() / gelu.abs().max(1e-3));
    }
    println!("exp {:.2} tanh {:.2} silu {:.2} ulp, gelu {:.1e}", worst[0], worst[1], worst[2], worst[3]);
    assert!(worst[0] < 1.5 && worst[1] < 3.0 && worst[2] < 4.0 && worst[3] < 2e-6, "{worst:?}");
}

#[test]
fn the_elementary_functions_keep_to_their_limits() {
    assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
    assert_eq!(exp(-88.0).to_bits(), 0);
    assert_eq!(exp(-3e38).to_bits(), 0);
    assert!(exp(-87.33) > 0.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(88.73), f32::INFINITY);
    assert!(exp(88.72).is_finite());
    assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
    assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    assert_eq!(tanh(-0.0).to_bits(), (-0.0_f32).to_bits());
    assert_eq!((silu(-1e30), silu(1e30)), (0.0, 1e30));
    assert_eq!((gelu_tanh(-1e9), gelu_tanh(1e9)), (0.0, 1e9));
}

#[test]
fn rms_norm_is_exact_to_1e_6_and_the_same_everywhere() {
    for (rows, width) in [(0, 3), (1, 1), (1, 576), (3, 64), (2, 80), (5, 17), (40, 1152), (1, 20_000)] {
        let mut random = Random::new(width as u64);
        let mut x = random.vector(rows * width, 2.0);
        if let Some(outlier) = x.get_mut(1) {
            *outlier = 3000.0;
        }
        let weight = random.vector(width, 1.0);
        for offset in [0.0, 1.0] {
            let out = same_everywhere("rms_norm", |exec| {
                let mut out = vec![9.0; x.len()];
                rms_norm(exec, &x, &weight, 1e-5, offset, &mut out);
                out
            });
            for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
                for ((&x, &out), &w) in x.iter().zip(out).zip(&weight) {
                    let exact = f64::from(x) / (mean + 1e-5).sqrt() * f64::from(offset + w);
                    assert!((f64::from(out) - exact).abs() <= 1e-6 * exact.abs().max(1e-3), "{out} {exact}");
                }
            }
        }
    }
}

#[test]
fn rope_rotates_the_right_pairs() {
    for (rows, heads, head_dim, rotated) in
        [(1, 1, 2, 2), (1, 9, 64, 64), (3, 2, 80, 20), (2, 3, 16, 0), (5, 1, 6, 4), (70, 4, 128, 64)]
    {
        let half = rotated / 2;
        let mut random = Random::new((rows * head_dim) as u64);
        let x = random.vector(rows * heads * head_dim, 3.0);
        let angles = random.vector(rows * half, 3.0);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        for traditional in [false, true] {
            let got = same_everywhere("rope", |exec| {
                let mut x = x.clone();
                rope(exec, &mut x, heads, head_dim, rotated, traditional, &cos, &sin);
                x
            });
            let mut exact: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
            for (head, values) in exact.chunks_mut(head_dim).enumerate() {
                for i in 0..half {
                    let (a, b) = if traditional { (2 * i, 2 * i + 1) } else { (i, i + half) };
                    let angle = head / heads * half + i;
                    let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                    (values[a], values[b]) = (values[a] * c - values[b] * s, values[b] * c + values[a] * s);
                }
            }
            assert!(relative_error(&got, &exact) < 2e-7, "{rows} {heads} {head_dim} {rotated} {traditional}");
            for (got, x) in got.chunks(head_dim).zip(x.chunks(head_dim)) {
                assert_eq!(got[rotated..], x[rotated..]);
            }
        }
    }
}

#[test]
fn argmax_takes_the_lowest_index_and_reports_nan() {
    for exec in random::execs() {
        for len in LENGTHS {
            let mut x = Random::new(len as u64).vector(len, 5.0);
            assert_eq!(argmax(&exec, &x).is_none(), len == 0);
            for at in [len / 3, len / 2, len.saturating_sub(1)].into_iter().filter(|&at| at < len) {
                let mut y = x.clone();
                y[at] = 6.0;
                y[len - 1] = 6.0;
                assert_eq!(argmax(&exec, &y), Some(at));
                y[at] = f32::NAN;
                assert_eq!(argmax(&exec, &y), None);
            }
            x.fill(f32::NEG_INFINITY);
            assert_eq!(argmax(&exec, &x), (len > 0).then_some(0));
            x.fill(-0.0);
            if len > 1 {
                x[1] = 0.0;
                assert_eq!(argmax(&exec, &x), Some(0));
            }
        }
    }
}

#[test]
fn log_softmax_is_accurate_and_the_same_everywhere() {
    for len in LENGTHS.into_iter().filter(|&len| len > 0) {
        let mut x = Random::new(len as u64).vector(len, 30.0);
        x[len / 2] = f32::NEG_INFINITY;
        x[0] = 12.0;
        let got = same_everywhere("log_softmax", |exec| {
            let mut out = vec![9.0; len];
            log_softmax(exec, &x, &mut out);
            out
        });
        let sum: f64 = x.iter().map(|&v| f64::from(v).exp()).sum();
        let exec = Exec::new(Isa::best(), 1);
        assert!((log_sum_exp(&exec, &x) - sum.ln()).abs() < 1e-6);
        for (&got, &x) in got.iter().zip(&x) {
            let exact = f64::from(x) - sum.ln();
            assert!(f64::from(got) == exact || (f64::from(got) - exact).abs() < 4e-6, "{got} {exact}");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut y = x.clone();
            y[len - 1] = bad;
            let got = same_everywhere("log_softmax", |exec| {
                let mut out = vec![9.0; len];
                log_softmax(exec, &y, &mut out);
                out
            });
            assert!(got.iter().all(|v| v.is_nan()), "{bad} among {len}");
        }
    }
}

#[test]
fn convolutions_are_the_same_everywhere_and_however_the_rows_are_cut() {
    for (width, taps, rows) in [(1, 1, 5), (7, 2, 4), (64, 3, 9), (33, 4, 1), (130, 3, 140)] {
        let mut random = Random::new((width * taps) as u64);
        let (x, bias) = (random.vector(rows * width, 2.0), random.vector(width, 1.0));
        let (weight, history) = (random.vector(taps * width, 1.0), random.vector((taps - 1) * width, 2.0));
        let whole = same_everywhere("causal_conv", |exec| {
            let mut out = vec![9.0; x.len()];
            causal_conv(exec, &x, &history, &weight, &bias, &mut out);
            out
        });
        let input: Vec<f32> = history.iter().chain(&x).copied().collect();
        let exact = |i: usize| {
            let (row, c) = (i / width, i % width);
            let taps =
                (0..taps).map(|t| f64::from(weight[t * width + c]) * f64::from(input[(row + t) * width + c]));
            f64::from(bias[c]) + taps.sum::<f64>()
        };
        let exact: Vec<f64> = (0..x.len()).map(exact).collect();
        assert!(relative_error(&whole, &exact) < 1e-6, "{width} {taps} {rows}");
        let exec = Exec::new(Isa::best(), 1);
        for row in 0..rows {
            let (at, mut out) = (row * width, vec![9.0; width]);
            causal_conv(
                &exec,
                &x[at..at + width],
                &input[at..][..(taps - 1) * width],
                &weight,
                &bias,
                &mut out,
            );
            assert_eq!(out, whole[at..at + width], "row {row}");
        }
    }
}
