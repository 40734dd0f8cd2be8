//! Dot products of queries and keys: tokens in lanes, the dimensions in ascending order.

use super::{BLOCK, SPAN};
use crate::simd::{Element, Simd};
use std::ops::Range;

/// The queries of a tile.
pub(super) struct Queries<'a> {
    /// `[head_dim][count]`.
    pub(super) data: &'a [f32],
    pub(super) count: usize,
    /// What the dot products are multiplied with.
    pub(super) factor: f32,
}

/// The keys of one block.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    /// `[head_dim][BLOCK]` elements of some type.
    pub(super) data: *const u8,
    /// The block's first token within the span.
    pub(super) start: usize,
    /// As many bytes to ask for, since they are read next.
    pub(super) next: Option<*const u8>,
}

/// How many of `left` queries to take at once: as many as the registers hold, in nearly equal shares.
#[inline(always)]
pub(super) fn share<S: Simd>(left: usize) -> usize {
    left.div_ceil(left.div_ceil(most::<S>()))
}

/// The most queries that the registers hold.
#[inline(always)]
pub(super) fn most<S: Simd>() -> usize {
    if S::WIDE { 6 } else { 3 }
}

/// Puts the scaled dot products of `range` of the queries with one or two blocks of keys into `out`
/// `[queries][SPAN]`.
///
/// # Safety
/// The keys are readable: `[head_dim][BLOCK]` elements `E` each.
#[inline(always)]
pub(super) unsafe fn score<S: Simd, E: Element>(
    simd: S,
    queries: &Queries<'_>,
    range: Range<usize>,
    keys: &[Keys],
    out: &mut [f32],
) {
    assert!(range.end <= queries.count && range.end * SPAN <= out.len(), "queries of a tile");
    assert!(keys.iter().all(|k| k.start + BLOCK <= SPAN), "blocks of a span");
    let mut query = range.start;
    while query < range.end {
        let count = share::<S>(range.end - query);
        // SAFETY: `count` queries from `query` on are within the slices, as just checked; the keys are readable.
        unsafe {
            match count {
                1 => rows::<S, E, 1>(simd, queries, query, keys, out),
                2 => rows::<S, E, 2>(simd, queries, query, keys, out),
                3 => rows::<S, E, 3>(simd, queries, query, keys, out),
                4 => rows::<S, E, 4>(simd, queries, query, keys, out),
                5 => rows::<S, E, 5>(simd, queries, query, keys, out),
                _ => rows::<S, E, 6>(simd, queries, query, keys, out),
            }
        }
        query += count;
    }
}

/// N queries, all blocks: two at once where the registers hold their sums.
///
/// # Safety
/// The slices hold N queries from `query` on, and the keys are readable.
#[inline(always)]
unsafe fn rows<S: Simd, E: Element, const N: usize>(
    simd: S,
    queries: &Queries<'_>,
    query: usize,
    keys: &[Keys],
    out: &mut [f32],
) {
    // SAFETY: by this function's contract.
    unsafe {
        match keys {
            &[a, b] if S::WIDE => tile::<S, E, N, 2>(simd, queries, query, [a, b], out),
            keys => {
                for &keys in keys {
                    tile::<S, E, N, 1>(simd, queries, query, [keys], out);
                }
            }
        }
    }
}

/// N queries, B blocks.
///
/// # Safety
/// As for `rows`.
#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const N: usize, const B: usize>(
    simd: S,
    queries: &Queries<'_>,
    query: usize,
    keys: [Keys; B],
    out: &mut [f32],
) {
    let mut sums = [[[simd.splat(0.0); 2]; B]; N];
    let row_bytes = BLOCK * size_of::<E>();
    // SAFETY: all offsets below are within the slices and the keys by this function's contract.
    unsafe {
        let mut q = queries.data.as_ptr().add(query);
        for d in 0..queries.data.len() / queries.count {
            let mut row = [[simd.splat(0.0); 2]; B];
            for (row, keys) in row.iter_mut().zip(&keys) {
                let at = keys.data.cast::<E>().add(d * BLOCK);
                *row = [E::load(simd, at), E::load(simd, at.add(16))];
                if let Some(next) = keys.next {
                    for line in (0..row_bytes).step_by(64) {
                        simd.prefetch(next.wrapping_add(d * row_bytes + line));
                    }
                }
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let q = simd.splat(*q.add(i));
                for (sum, &key) in sums.as_flattened_mut().iter_mut().zip(row.as_flattened()) {
                    *sum = simd.fma(q, key, *sum);
                }
            }
            q = q.add(queries.count);
        }
        let factor = simd.splat(queries.factor);
        for (i, sums) in sums.iter().enumerate() {
            for (sums, keys) in sums.iter().zip(&keys) {
                let at = out.as_mut_ptr().add((query + i) * SPAN + keys.start);
                simd.store(at, simd.mul(sums[0], factor));
                simd.store(at.add(16), simd.mul(sums[1], factor));
            }
        }
    }
}
