//! The definition of the float matmul.

use super::{FloatMatrix, widen};
use crate::disjoint::Disjoint;
use crate::vector::sum16;
use std::ops::Range;

/// Writes the columns `range` of `out` `[rows][weight.rows]`, which no other thread touches.
#[inline(always)]
pub(super) fn outputs(
    x: &[f32],
    rows: usize,
    weight: &FloatMatrix<'_>,
    range: Range<usize>,
    out: &Disjoint<'_, f32>,
) {
    let cols = weight.cols;
    let mut w = vec![0.0; cols];
    for output in range {
        widen::row(weight, output, &mut w);
        for row in 0..rows {
            let at = row * weight.rows + output;
            // SAFETY: each output of each row belongs to one thread.
            let out = unsafe { out.part(at..at + 1) };
            out[0] = dot(&x[row * cols..][..cols], &w);
        }
    }
}

#[inline(always)]
fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let ((x, x_tail), (w, w_tail)) = (x.as_chunks::<16>(), w.as_chunks::<16>());
    for (x, w) in x.iter().zip(w) {
        step(&mut lanes, x, w);
    }
    if !x_tail.is_empty() {
        step(&mut lanes, &padded(x_tail), &padded(w_tail));
    }
    sum16(&lanes)
}

#[inline(always)]
fn step(lanes: &mut [f32; 16], x: &[f32; 16], w: &[f32; 16]) {
    for ((lane, &x), &w) in lanes.iter_mut().zip(x).zip(w) {
        *lane = x.mul_add(w, *lane);
    }
}

#[inline(always)]
fn padded(tail: &[f32]) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    lanes[..tail.len()].copy_from_slice(tail);
    lanes
}
