//! Root-mean-square normalisation.

use super::math::sum16;
use crate::Exec;
use crate::disjoint::Disjoint;
use crate::simd::Kernel;

/// Elements below which a call runs on the calling thread.
const PARALLEL_MIN: usize = 1 << 14;

/// out = x / sqrt(mean(x^2) + eps) * (offset + weight) for each row of `weight.len()` elements.
///
/// `offset` is 0, or 1 for the models (Gemma) that store the weight minus one. A row may also be one head, for
/// the norms of queries and keys. The squares are exact and summed in f64, in 16 lanes.
///
/// # Panics
/// If `weight` is empty, or `x` is not whole rows, or `out` has another length than `x`.
pub fn rms_norm(exec: &Exec, x: &[f32], weight: &[f32], eps: f32, offset: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width), "{} elements in rows of {width}", x.len());
    assert_eq!(x.len(), out.len(), "length of the output");
    if x.len() < PARALLEL_MIN {
        return exec.isa.run(RmsNorm { x, weight, eps, offset, out });
    }
    let count = out.len();
    let shared = Disjoint::new(out);
    exec.pool.for_ranges(count, width, &|range| {
        // SAFETY: the ranges of one region are disjoint.
        let out = unsafe { shared.part(range.clone()) };
        exec.isa.run(RmsNorm { x: &x[range], weight, eps, offset, out });
    });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    offset: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let mean = sum_of_squares(x) / width as f64;
            let scale = (1.0 / (mean + f64::from(self.eps)).sqrt()) as f32;
            for ((out, &x), &weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = x * scale * (self.offset + weight);
            }
        }
    }
}

/// Lane j sums elements j, j + 16, …; then the 16 lanes in `sum16`'s order.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 16];
    let (whole, tail) = x.as_chunks::<16>();
    for chunk in whole {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = f64::from(v).mul_add(f64::from(v), *lane);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(tail) {
        *lane = f64::from(v).mul_add(f64::from(v), *lane);
    }
    sum16(&lanes)
}
