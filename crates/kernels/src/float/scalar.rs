//! The definition of the float matmul.

use super::{FloatMatrix, widen};
use crate::disjoint::Disjoint;
use crate::isa::Body;
use crate::vector::sum16;
use std::ops::Range;

/// The outputs `outputs` of every row.
pub(super) struct Outputs<'a> {
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
    pub(super) weight: FloatMatrix<'a>,
    pub(super) outputs: Range<usize>,
    /// `[rows][weight.rows]`; only the columns `outputs` are written here.
    pub(super) out: &'a Disjoint<'a, f32>,
}

impl Body for Outputs<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let FloatMatrix { rows: width, cols, .. } = self.weight;
        let mut w = vec![0.0; cols];
        for output in self.outputs {
            widen::row(&self.weight, output, &mut w);
            for row in 0..self.rows {
                let at = row * width + output;
                // SAFETY: each output of each row belongs to one thread.
                let out = unsafe { self.out.part(at..at + 1) };
                out[0] = dot(&self.x[row * cols..][..cols], &w);
            }
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
