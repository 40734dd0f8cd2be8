//! Unfinished softmaxes, and how a tile's memory is cut.

use super::weight::weight;
use crate::simd::Simd;
use crate::vector::sum16;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Unfinished softmaxes of some queries: for each the greatest score so far (in units of log2) and, relative to
/// 2^max, the sum of the weights (token t of a span in lane t mod 16) and the sum of the weighted values.
pub(super) struct State<'a> {
    /// `[queries]`, then padding to whole lanes.
    pub(super) max: &'a mut [f32],
    /// `[queries][16]`.
    pub(super) sums: &'a mut [f32],
    /// `[queries][width]`, `width` being the head's dimensions padded to whole lanes.
    pub(super) values: &'a mut [f32],
    pub(super) width: usize,
}

impl<'a> State<'a> {
    /// Floats of the state of `queries` queries.
    pub(super) fn floats(queries: usize, width: usize) -> usize {
        queries.next_multiple_of(16) + queries * (16 + width)
    }

    /// Takes the state's memory from the front of `memory`, whatever it holds.
    #[inline(always)]
    pub(super) fn cut(memory: &mut &'a mut [f32], queries: usize, width: usize) -> Self {
        Self {
            max: cut(memory, queries.next_multiple_of(16)),
            sums: cut(memory, queries * 16),
            values: cut(memory, queries * width),
            width,
        }
    }

    /// Nothing seen yet.
    #[inline(always)]
    pub(super) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
        self.values.fill(0.0);
    }

    /// Query `query` takes over what `next` has seen, after which it had seen nothing.
    #[inline(always)]
    pub(super) fn copy(&mut self, next: &State<'_>, query: usize) {
        self.max[query] = next.max[query];
        self.sums[lanes(query)].copy_from_slice(&next.sums[lanes(query)]);
        let values = self.values_of(query);
        self.values[values.clone()].copy_from_slice(&next.values[values]);
    }

    /// Query `query` takes in what `next` has seen, positions that come after its own.
    #[inline(always)]
    pub(super) fn merge(&mut self, next: &State<'_>, query: usize) {
        let (old, new) = (self.max[query], next.max[query]);
        let max = if old > new { old } else { new };
        let (old, new) = (weight(old - max), weight(new - max));
        self.max[query] = max;
        for (sum, &next) in self.sums[lanes(query)].iter_mut().zip(&next.sums[lanes(query)]) {
            *sum = next.mul_add(new, *sum * old);
        }
        let values = self.values_of(query);
        for (value, &next) in self.values[values.clone()].iter_mut().zip(&next.values[values]) {
            *value = next.mul_add(new, *value * old);
        }
    }

    /// The values of query `query` over the sum of their weights, to which that of `sink` belongs, a logit.
    ///
    /// The sink comes last, once all spans are merged, so that it counts once and no span needs to know of it.
    #[inline(always)]
    pub(super) fn finish(&self, query: usize, sink: Option<f32>, out: &mut [f32]) {
        let mut sums = [0.0; 16];
        sums.copy_from_slice(&self.sums[lanes(query)]);
        let sum = sum16(&sums);
        let values = &self.values[self.values_of(query)];
        let Some(sink) = sink else {
            for (out, value) in out.iter_mut().zip(values) {
                *out = value / sum;
            }
            return;
        };
        // In units of log2 and finite, since infinity less infinity is no weight; NaN stays.
        let (sink, max) = ((sink * LOG2_E).clamp(f32::MIN, f32::MAX), self.max[query]);
        let most = if max > sink { max } else { sink };
        let (seen, sink) = (weight(max - most), weight(sink - most));
        let sum = sum.mul_add(seen, sink);
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * seen / sum;
        }
    }

    #[inline(always)]
    pub(super) fn values_of(&self, query: usize) -> Range<usize> {
        query * self.width..(query + 1) * self.width
    }
}

/// The lanes of query `query`.
#[inline(always)]
pub(super) fn lanes(query: usize) -> Range<usize> {
    query * 16..(query + 1) * 16
}

/// Takes `len` floats from the front of `memory`.
#[inline(always)]
pub(super) fn cut<'a>(memory: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (front, rest) = std::mem::take(memory).split_at_mut(len);
    *memory = rest;
    front
}

/// The 16 lanes of `slice` from `at` on.
#[inline(always)]
pub(super) fn load<S: Simd>(simd: S, slice: &[f32], at: usize) -> S::V {
    // SAFETY: the slice was checked to hold them.
    unsafe { simd.load(slice[at..at + 16].as_ptr()) }
}

/// Writes the 16 lanes of `slice` from `at` on.
#[inline(always)]
pub(super) fn store<S: Simd>(simd: S, slice: &mut [f32], at: usize, v: S::V) {
    // SAFETY: the slice was checked to hold them.
    unsafe { simd.store(slice[at..at + 16].as_mut_ptr(), v) }
}
