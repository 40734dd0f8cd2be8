//! The sum of weighted values: dimensions in lanes, tokens in ascending order.

use super::BLOCK;
use crate::simd::Simd;
use std::ops::Range;

/// Some tokens of a block.
pub(super) struct Work<'a> {
    /// `[tokens][width]`.
    pub(super) values: &'a [f32],
    /// `[queries][BLOCK]`, of the whole block.
    pub(super) weights: &'a [f32],
    /// The first of the tokens.
    pub(super) start: usize,
    /// For each query what its sums are multiplied with first.
    pub(super) rescale: Option<&'a [f32]>,
}

/// How many of `left` queries to take at once: as many as the registers hold, in nearly equal shares.
#[inline(always)]
pub(super) fn share<S: Simd>(left: usize) -> usize {
    left.div_ceil(left.div_ceil(if S::WIDE { 6 } else { 3 }))
}

/// Adds to `sums` `[queries][width]` of each of `queries` its weights times the values.
#[inline(always)]
pub(super) fn weigh<S: Simd>(
    simd: S,
    work: &Work<'_>,
    queries: Range<usize>,
    sums: &mut [f32],
    width: usize,
) {
    assert!(
        work.weights.len() >= queries.end * BLOCK && sums.len() >= queries.end * width,
        "queries of a tile"
    );
    assert!(work.start + work.values.len() / width <= BLOCK, "tokens of a block");
    assert!(work.rescale.is_none_or(|r| r.len() >= queries.end), "factors of a tile");
    let mut query = queries.start;
    while query < queries.end {
        let count = share::<S>(queries.end - query);
        // SAFETY: `count` queries from `query` on are within the slices, as just checked.
        unsafe {
            match count {
                1 => rows::<S, 1>(simd, work, query, sums, width),
                2 => rows::<S, 2>(simd, work, query, sums, width),
                3 => rows::<S, 3>(simd, work, query, sums, width),
                4 => rows::<S, 4>(simd, work, query, sums, width),
                5 => rows::<S, 5>(simd, work, query, sums, width),
                _ => rows::<S, 6>(simd, work, query, sums, width),
            }
        }
        query += count;
    }
}

/// N queries, all dimensions.
///
/// # Safety
/// The slices hold N queries from `query` on; `width` is a multiple of 16.
#[inline(always)]
unsafe fn rows<S: Simd, const N: usize>(
    simd: S,
    work: &Work<'_>,
    query: usize,
    sums: &mut [f32],
    width: usize,
) {
    let mut d = 0;
    while d < width {
        // SAFETY: by this function's contract; the dimensions from `d` on are within the width.
        unsafe {
            match (S::WIDE, (width - d) / 16) {
                (true, 4..) => {
                    tile::<S, N, 4>(simd, work, query, sums, width, d);
                    d += 64;
                }
                (false, 2..) => {
                    tile::<S, N, 2>(simd, work, query, sums, width, d);
                    d += 32;
                }
                _ => {
                    tile::<S, N, 1>(simd, work, query, sums, width, d);
                    d += 16;
                }
            }
        }
    }
}

/// N queries, C vectors of dimensions from `d` on.
///
/// # Safety
/// The slices hold N queries from `query` on, and `d + C * 16 <= width`.
#[inline(always)]
unsafe fn tile<S: Simd, const N: usize, const C: usize>(
    simd: S,
    work: &Work<'_>,
    query: usize,
    sums: &mut [f32],
    width: usize,
    d: usize,
) {
    let mut totals = [[simd.splat(0.0); C]; N];
    // SAFETY: all offsets below are within the slices by this function's contract.
    unsafe {
        let at = sums.as_mut_ptr().add(query * width + d);
        for (i, totals) in totals.iter_mut().enumerate() {
            let rescale = simd.splat(work.rescale.map_or(1.0, |r| *r.get_unchecked(query + i)));
            for (c, total) in totals.iter_mut().enumerate() {
                *total = simd.mul(simd.load(at.add(i * width + c * 16)), rescale);
            }
        }
        let weights = work.weights.as_ptr().add(query * BLOCK + work.start);
        let mut values = work.values.as_ptr().add(d);
        for t in 0..work.values.len() / width {
            let mut row = [simd.splat(0.0); C];
            for (c, value) in row.iter_mut().enumerate() {
                *value = simd.load(values.add(c * 16));
            }
            for (i, totals) in totals.iter_mut().enumerate() {
                let weight = simd.splat(*weights.add(i * BLOCK + t));
                for (total, &value) in totals.iter_mut().zip(&row) {
                    *total = simd.fma(weight, value, *total);
                }
            }
            values = values.add(width);
        }
        for (i, totals) in totals.iter().enumerate() {
            for (c, &total) in totals.iter().enumerate() {
                simd.store(at.add(i * width + c * 16), total);
            }
        }
    }
}
