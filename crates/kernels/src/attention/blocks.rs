//! A span's blocks read for all queries of a tile at once, in 16 lanes; the bits are those of `scalar`.
//!
//! A block goes through four steps: its keys and values are widened to f32; the scores of all queries (tokens in
//! lanes); the softmax of each query; the values weighted (dimensions in lanes).

use super::kv::KvType;
use super::state::{State, cut, lanes, load, store};
use super::tile::{QUERIES, Tile};
use super::{BLOCK, SPAN, weigh};
use crate::simd::{self, Element, Simd};
use half::{bf16, f16};
use std::ops::Range;

/// The working memory of a tile.
pub(super) struct Blocks<'a> {
    /// `[head_dim][queries]`.
    queries: &'a mut [f32],
    /// `[queries][BLOCK]`: scores, then weights.
    weights: &'a mut [f32],
    /// What the state of each query is multiplied with when its greatest score grows, padded to whole lanes.
    rescale: &'a mut [f32],
    /// `[head_dim][BLOCK]`.
    keys: &'a mut [f32],
    /// `[BLOCK][width]`.
    values: &'a mut [f32],
}

impl<'a> Blocks<'a> {
    pub(super) fn floats(tile: &Tile<'_>) -> usize {
        let (queries, head_dim) = (tile.queries(), tile.shape.kv.head_dim);
        (head_dim * queries).next_multiple_of(16)
            + queries * BLOCK
            + queries.next_multiple_of(16)
            + (head_dim + tile.width()) * BLOCK
    }

    /// Takes the memory from the front of `memory` and puts the tile's queries in place.
    #[inline(always)]
    pub(super) fn cut(memory: &mut &'a mut [f32], tile: &Tile<'_>) -> Self {
        let (count, head_dim) = (tile.queries(), tile.shape.kv.head_dim);
        let queries = cut(memory, (head_dim * count).next_multiple_of(16));
        for index in 0..count {
            for (d, &q) in tile.query(index).iter().enumerate() {
                queries[d * count + index] = q;
            }
        }
        Self {
            queries,
            weights: cut(memory, count * BLOCK),
            rescale: cut(memory, count.next_multiple_of(16)),
            keys: cut(memory, head_dim * BLOCK),
            values: cut(memory, tile.width() * BLOCK),
        }
    }

    /// Puts the positions of `span`, as each query sees them, into `part`.
    #[inline(always)]
    pub(super) fn span<S: Simd>(&mut self, simd: S, tile: &Tile<'_>, part: &mut State<'_>, span: usize) {
        part.clear();
        for block in span * SPAN / BLOCK..(span + 1) * SPAN / BLOCK {
            let mut masks = [0; QUERIES];
            for (row, mask) in masks.iter_mut().enumerate().take(tile.rows.len()) {
                *mask = tile.visible(row).mask(block);
            }
            let masks = &masks[..tile.rows.len()];
            let (Some(first), Some(last)) =
                (masks.iter().position(|&m| m != 0), masks.iter().rposition(|&m| m != 0))
            else {
                continue;
            };
            let Some(&Some(slab)) = tile.blocks.get(block) else { continue };
            let next = tile.blocks.get(block + 1).copied().flatten();
            match tile.shape.kv.ty {
                KvType::F32 => self.widen::<S, f32>(simd, tile, slab, next),
                KvType::F16 => self.widen::<S, f16>(simd, tile, slab, next),
                KvType::Bf16 => self.widen::<S, bf16>(simd, tile, slab, next),
            }
            let seen = first * tile.group()..(last + 1) * tile.group();
            self.score(simd, tile, seen.clone());
            self.softmax(simd, tile, part, seen, masks);
            self.weigh(simd, tile, part, masks);
        }
    }

    /// Widens the keys and values of the tile's head, and asks for those of the next block.
    #[inline(always)]
    fn widen<S: Simd, E: Element>(&mut self, simd: S, tile: &Tile<'_>, slab: &[u8], next: Option<&[u8]>) {
        let (kv, head, width) = (&tile.shape.kv, tile.kv_head, tile.width());
        widen::<S, E>(simd, kv.keys(slab, head), BLOCK, self.keys, BLOCK, next.map(|n| kv.keys(n, head)));
        let next = next.map(|n| kv.values(n, head));
        widen::<S, E>(simd, kv.values(slab, head), kv.head_dim, self.values, width, next);
    }

    /// The scores of `queries`: for each token, the dimensions in ascending order.
    #[inline(always)]
    fn score<S: Simd>(&mut self, simd: S, tile: &Tile<'_>, queries: Range<usize>) {
        let all = tile.queries();
        let mut query = queries.start;
        while query < queries.end {
            let count = weigh::share::<S>(queries.end - query);
            let q = &self.queries[query..];
            let out = &mut self.weights[query * BLOCK..][..count * BLOCK];
            match count {
                1 => score::<S, 1>(simd, q, all, self.keys, out),
                2 => score::<S, 2>(simd, q, all, self.keys, out),
                3 => score::<S, 3>(simd, q, all, self.keys, out),
                4 => score::<S, 4>(simd, q, all, self.keys, out),
                5 => score::<S, 5>(simd, q, all, self.keys, out),
                _ => score::<S, 6>(simd, q, all, self.keys, out),
            }
            query += count;
        }
    }

    /// Turns scores into weights relative to the greatest score so far, and keeps the sums.
    #[inline(always)]
    fn softmax<S: Simd>(
        &mut self,
        simd: S,
        tile: &Tile<'_>,
        part: &mut State<'_>,
        queries: Range<usize>,
        masks: &[u32],
    ) {
        let scale = simd.splat(tile.shape.scale);
        let nothing = simd.splat(f32::NEG_INFINITY);
        for query in queries.clone() {
            let mut scores = [nothing; 2];
            let mask = masks[query / tile.group()];
            for (half, score) in scores.iter_mut().enumerate() {
                let at = query * BLOCK + half * 16;
                *score = simd.mul(load(simd, self.weights, at), scale);
                if let Some(cap) = tile.shape.softcap {
                    let cap = simd.splat(cap);
                    *score = simd.mul(cap, simd::tanh(simd, simd.div(*score, cap)));
                }
                *score = simd.select_bits((mask >> (half * 16)) as u16, *score, nothing);
                store(simd, self.weights, at, *score);
            }
            let greatest = simd.greatest(simd.max(scores[0], scores[1]));
            let old = part.max[query];
            let new = if greatest > old { greatest } else { old };
            part.max[query] = new;
            self.rescale[query] = old - new;
        }
        let first = queries.start / 16 * 16;
        for at in (first..queries.end).step_by(16) {
            store(simd, self.rescale, at, simd::exp(simd, load(simd, self.rescale, at)));
        }
        for query in queries {
            let max = simd.splat(part.max[query]);
            let mut weights = [max; 2];
            for (half, weight) in weights.iter_mut().enumerate() {
                let at = query * BLOCK + half * 16;
                *weight = simd::exp(simd, simd.sub(load(simd, self.weights, at), max));
                store(simd, self.weights, at, *weight);
            }
            let at = lanes(query).start;
            let rescale = simd.splat(self.rescale[query]);
            let sum = simd.fma(load(simd, part.sums, at), rescale, simd.add(weights[0], weights[1]));
            store(simd, part.sums, at, sum);
        }
    }

    /// Adds the weighted values, for rows that see the same tokens at once.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, simd: S, tile: &Tile<'_>, part: &mut State<'_>, masks: &[u32]) {
        let mut row = 0;
        while row < masks.len() {
            let mask = masks[row];
            let rows = masks[row..].iter().take_while(|&&m| m == mask).count();
            let queries = row * tile.group()..(row + rows) * tile.group();
            let (mut tokens, mut rescale) = (mask, true);
            // The seen tokens are one stretch, or two around those between the sinks and the window.
            while tokens != 0 {
                let start = tokens.trailing_zeros() as usize;
                let count = (tokens >> start).trailing_ones() as usize;
                tokens &= !(((1_u64 << (start + count)) - 1) as u32);
                let work = weigh::Work {
                    values: &self.values[start * part.width..(start + count) * part.width],
                    weights: self.weights,
                    start,
                    rescale: rescale.then_some(&*self.rescale),
                };
                weigh::weigh(simd, &work, queries.clone(), part.values, part.width);
                rescale = false;
            }
            row += rows;
        }
    }
}

/// Widens rows of `from_width` elements to rows of `to_width` floats, padded with zeros; asks for `next`.
#[inline(always)]
fn widen<S: Simd, E: Element>(
    simd: S,
    from: &[u8],
    from_width: usize,
    to: &mut [f32],
    to_width: usize,
    next: Option<&[u8]>,
) {
    let next = next.map_or(std::ptr::null(), <[u8]>::as_ptr);
    let start = from.as_ptr().cast::<E>();
    let whole = from_width / 16 * 16;
    for (row, to) in to.chunks_exact_mut(to_width).enumerate() {
        let at = row * from_width;
        for k in (0..whole).step_by(16) {
            simd.prefetch(next.wrapping_add((at + k) * size_of::<E>()));
            // SAFETY: `from` holds as many rows of `from_width` elements as `to` has rows.
            let wide = unsafe { E::load(simd, start.add(at + k)) };
            store(simd, to, k, wide);
        }
        if whole < from_width {
            // SAFETY: as above; the rest of a row.
            let wide = unsafe { simd::load_tail(simd, start.add(at + whole), from_width - whole) };
            store(simd, to, whole, wide);
        }
    }
}

/// The scores of N queries: `q` holds them from its front on, `stride` apart for each dimension.
#[inline(always)]
fn score<S: Simd, const N: usize>(simd: S, q: &[f32], stride: usize, keys: &[f32], out: &mut [f32]) {
    let mut sums = [[simd.splat(0.0); 2]; N];
    let rows = keys.as_chunks::<BLOCK>().0;
    assert!(rows.is_empty() || q.len() >= (rows.len() - 1) * stride + N, "queries of a tile");
    for (d, keys) in rows.iter().enumerate() {
        let keys = [load(simd, keys, 0), load(simd, keys, 16)];
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: within `q`, as just checked.
            let q = simd.splat(unsafe { *q.get_unchecked(d * stride + i) });
            for (sum, &key) in sums.iter_mut().zip(&keys) {
                *sum = simd.fma(q, key, *sum);
            }
        }
    }
    for (i, &sum) in sums.as_flattened().iter().enumerate() {
        store(simd, out, i * 16, sum);
    }
}
