//! Kernels over one row of logits.

use super::math::{exp, sum16};
use crate::Exec;
use crate::simd::Kernel;

/// The index of the greatest element, the lowest one on ties; None for an empty row or one that holds a NaN.
#[must_use]
pub fn argmax(exec: &Exec, row: &[f32]) -> Option<usize> {
    let Extreme { max, has_nan } = exec.isa.run(FindMax(row));
    if has_nan {
        return None;
    }
    row.iter().position(|&v| v == max)
}

/// ln(sum(exp(row))), in f64. NaN if the row holds a NaN or +infinity, or nothing but -infinity.
#[must_use]
pub fn log_sum_exp(exec: &Exec, row: &[f32]) -> f64 {
    let (max, log_sum) = exec.isa.run(LogSum(row));
    f64::from(max) + log_sum
}

/// out = row - log_sum_exp(row). All NaN where [`log_sum_exp`] is NaN.
///
/// # Panics
/// If the lengths differ.
pub fn log_softmax(exec: &Exec, row: &[f32], out: &mut [f32]) {
    assert_eq!(row.len(), out.len(), "length of the output");
    let (max, log_sum) = exec.isa.run(LogSum(row));
    exec.isa.run(Subtract { row, max, log_sum, out });
}

struct Extreme {
    max: f32,
    has_nan: bool,
}

struct FindMax<'a>(&'a [f32]);

impl Kernel for FindMax<'_> {
    type Output = Extreme;

    #[inline(always)]
    fn scalar(self) -> Extreme {
        let mut lanes = [f32::NEG_INFINITY; 16];
        let mut nans = [0_u32; 16];
        let (whole, tail) = self.0.as_chunks::<16>();
        for chunk in whole {
            for ((lane, nan), &v) in lanes.iter_mut().zip(&mut nans).zip(chunk) {
                *lane = if v > *lane { v } else { *lane };
                *nan |= u32::from(v.is_nan());
            }
        }
        let mut has_nan = nans.contains(&1);
        let mut max = f32::NEG_INFINITY;
        for &v in lanes.iter().chain(tail) {
            max = if v > max { v } else { max };
            has_nan |= v.is_nan();
        }
        Extreme { max, has_nan }
    }
}

/// The maximum, and ln(sum(exp(row - maximum))).
struct LogSum<'a>(&'a [f32]);

impl Kernel for LogSum<'_> {
    type Output = (f32, f64);

    #[inline(always)]
    fn scalar(self) -> (f32, f64) {
        let max = FindMax(self.0).scalar().max;
        let mut lanes = [0.0_f64; 16];
        let (whole, tail) = self.0.as_chunks::<16>();
        for chunk in whole {
            for (lane, &v) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(exp(v - max));
            }
        }
        for (lane, &v) in lanes.iter_mut().zip(tail) {
            *lane += f64::from(exp(v - max));
        }
        (max, sum16(&lanes).ln())
    }
}

struct Subtract<'a> {
    row: &'a [f32],
    max: f32,
    log_sum: f64,
    out: &'a mut [f32],
}

impl Kernel for Subtract<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for (out, &v) in self.out.iter_mut().zip(self.row) {
            *out = (f64::from(v - self.max) - self.log_sum) as f32;
        }
    }
}
