//! The sum of weighted values: dimensions in lanes, tokens in ascending order.

use super::SPAN;
use super::score::share;
use crate::simd::{Element, Simd};
use std::ops::Range;

/// The values of consecutive tokens of a block.
#[derive(Clone, Copy)]
pub(super) struct Values {
    /// `[count][width]` elements of some type.
    pub(super) data: *const u8,
    /// The first of the tokens within the span.
    pub(super) start: usize,
    pub(super) count: usize,
    /// As many bytes to ask for, since they are read next.
    pub(super) next: Option<*const u8>,
}

/// Adds to `sums` `[queries][width]` of each of `queries` its weights, of `[queries][SPAN]`, times the values.
///
/// # Safety
/// The values are readable: `[count][width]` elements `E` each.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, E: Element>(
    simd: S,
    weights: &[f32],
    queries: Range<usize>,
    values: &[Values],
    sums: &mut [f32],
    width: usize,
) {
    assert!(queries.end * SPAN <= weights.len() && queries.end * width <= sums.len(), "queries of a tile");
    assert!(values.iter().all(|v| v.start + v.count <= SPAN), "tokens of a span");
    assert!(width.is_multiple_of(16), "whole lanes");
    let mut query = queries.start;
    while query < queries.end {
        let count = share::<S>(queries.end - query);
        // SAFETY: `count` queries from `query` on are within the slices, as just checked; the values are readable.
        unsafe {
            match count {
                1 => rows::<S, E, 1>(simd, weights, query, values, sums, width),
                2 => rows::<S, E, 2>(simd, weights, query, values, sums, width),
                3 => rows::<S, E, 3>(simd, weights, query, values, sums, width),
                4 => rows::<S, E, 4>(simd, weights, query, values, sums, width),
                5 => rows::<S, E, 5>(simd, weights, query, values, sums, width),
                _ => rows::<S, E, 6>(simd, weights, query, values, sums, width),
            }
        }
        query += count;
    }
}

/// N queries, all dimensions.
///
/// # Safety
/// The slices hold N queries from `query` on, the values are readable, and `width` is a multiple of 16.
#[inline(always)]
unsafe fn rows<S: Simd, E: Element, const N: usize>(
    simd: S,
    weights: &[f32],
    query: usize,
    values: &[Values],
    sums: &mut [f32],
    width: usize,
) {
    let (weights, sums) = (&weights[query * SPAN..], &mut sums[query * width..]);
    let mut d = 0;
    while d < width {
        // SAFETY: by this function's contract; the dimensions from `d` on are within the width.
        unsafe {
            match (S::WIDE, (width - d) / 16) {
                (true, 4..) => {
                    tile::<S, E, N, 4>(simd, weights, values, sums, width, d);
                    d += 64;
                }
                (false, 2..) => {
                    tile::<S, E, N, 2>(simd, weights, values, sums, width, d);
                    d += 32;
                }
                _ => {
                    tile::<S, E, N, 1>(simd, weights, values, sums, width, d);
                    d += 16;
                }
            }
        }
    }
}

/// The first N queries, C vectors of dimensions from `d` on.
///
/// # Safety
/// The slices hold N queries, the values are readable, and `d + C * 16 <= width`.
#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const N: usize, const C: usize>(
    simd: S,
    weights: &[f32],
    values: &[Values],
    sums: &mut [f32],
    width: usize,
    d: usize,
) {
    let mut totals = [[simd.splat(0.0); C]; N];
    // SAFETY: all offsets below are within the slices and the values by this function's contract.
    unsafe {
        let sums = sums.as_mut_ptr().add(d);
        for (i, totals) in totals.iter_mut().enumerate() {
            for (c, total) in totals.iter_mut().enumerate() {
                *total = simd.load(sums.add(i * width + c * 16));
            }
        }
        for values in values {
            let weights = weights.as_ptr().add(values.start);
            for t in 0..values.count {
                let at = t * width + d;
                let mut row = [simd.splat(0.0); C];
                for (c, value) in row.iter_mut().enumerate() {
                    *value = E::load(simd, values.data.cast::<E>().add(at + c * 16));
                }
                if let Some(next) = values.next {
                    for line in (0..C * 16 * size_of::<E>()).step_by(64) {
                        simd.prefetch(next.wrapping_add(at * size_of::<E>() + line));
                    }
                }
                for (i, totals) in totals.iter_mut().enumerate() {
                    let weight = simd.splat(*weights.add(i * SPAN + t));
                    for (total, &value) in totals.iter_mut().zip(&row) {
                        *total = simd.fma(weight, value, *total);
                    }
                }
            }
        }
        for (i, totals) in totals.iter().enumerate() {
            for (c, &total) in totals.iter().enumerate() {
                simd.store(sums.add(i * width + c * 16), total);
            }
        }
    }
}
