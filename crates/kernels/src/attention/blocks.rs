//! A span's blocks read for all queries of a tile at once, in 16 lanes; the bits are those of `scalar`.
//!
//! A span goes through three steps: the scores of all queries (tokens in lanes), two blocks of keys at a time; the
//! softmax of each query; the values weighted (dimensions in lanes). Where many queries share the keys and values
//! these are widened to f32 once, else the steps widen them as they load.

use super::dequantize::Packed;
use super::kv::KvType;
use super::score::{self, Keys, Queries, score};
use super::state::{State, cut, lanes, load, store};
use super::tile::{QUERIES, Tile};
use super::weigh::{Values, weigh};
use super::weight::{caps, factor, weights};
use super::{BLOCK, SPAN};
use crate::simd::{self, Element, Simd};
use half::{bf16, f16};
use std::ops::Range;

/// The most blocks of a span.
const BLOCKS: usize = SPAN / BLOCK;
/// How many blocks of keys or values ahead the next ones are asked for, and how many are widened at a time.
pub(super) const AHEAD: usize = 2;

/// The working memory of a tile.
pub(super) struct Blocks<'a> {
    /// `[head_dim][queries]`.
    queries: &'a mut [f32],
    /// `[queries][SPAN]`: scores, then weights.
    weights: &'a mut [f32],
    /// Widened keys `[AHEAD][head_dim][BLOCK]` or values `[AHEAD][BLOCK][width]`.
    wide: &'a mut [f32],
}

/// The blocks of a span that some row of a tile sees.
struct Seen<'a> {
    blocks: [Block<'a>; BLOCKS],
    count: usize,
    /// For each row and block which tokens the row sees.
    masks: [[u32; BLOCKS]; QUERIES],
}

#[derive(Clone, Copy)]
struct Block<'a> {
    /// The first token within the span.
    start: usize,
    /// Keys and values of the tile's head.
    keys: &'a [u8],
    values: &'a [u8],
}

impl<'a> Seen<'a> {
    #[inline(always)]
    fn new(tile: &Tile<'a>, span: usize) -> Self {
        let nothing = Block { start: 0, keys: &[], values: &[] };
        let mut seen = Self { blocks: [nothing; BLOCKS], count: 0, masks: [[0; BLOCKS]; QUERIES] };
        for index in 0..BLOCKS {
            let number = span * BLOCKS + index;
            let Some(&Some(slab)) = tile.blocks.get(number) else { continue };
            let mut any = 0;
            for row in 0..tile.rows.len() {
                let mask = tile.visible(row).mask(number);
                seen.masks[row][seen.count] = mask;
                any |= mask;
            }
            if any != 0 {
                let (keys, values) = (tile.keys(slab), tile.values(slab));
                seen.blocks[seen.count] = Block { start: index * BLOCK, keys, values };
                seen.count += 1;
            }
        }
        seen
    }

    /// The numbers of all blocks, `step` at a time.
    fn groups(&self, step: usize) -> impl Iterator<Item = Range<usize>> {
        let count = self.count;
        (0..count).step_by(step).map(move |start| start..count.min(start + step))
    }

    /// From the first row that sees some of `blocks` to the last one.
    fn rows(&self, tile: &Tile<'_>, blocks: Range<usize>) -> Range<usize> {
        let masks = &self.masks[..tile.rows.len()];
        let sees = |masks: &[u32; BLOCKS]| masks[blocks.clone()].iter().any(|&m| m != 0);
        let first = masks.iter().position(sees).unwrap_or(0);
        first..masks.iter().rposition(sees).map_or(first, |last| last + 1)
    }

    /// What to ask for while the keys of block `at` are read, or its values if `at` less the count of the blocks
    /// is its number: keys and values lie in many places, so the processor does not do it by itself.
    fn next(&self, tile: &Tile<'_>, span: usize, at: usize) -> Option<*const u8> {
        let at = at + AHEAD.min(self.count);
        let bytes = if at < self.count {
            self.blocks[at].keys
        } else if at < 2 * self.count {
            self.blocks[at - self.count].values
        } else {
            let index = at - 2 * self.count;
            match tile.blocks.get((span + 1) * BLOCKS + index).copied().flatten() {
                Some(slab) => tile.keys(slab),
                None => tile.following[index]?,
            }
        };
        Some(bytes.as_ptr())
    }
}

impl<'a> Blocks<'a> {
    pub(super) fn floats(tile: &Tile<'_>) -> usize {
        let queries = tile.queries();
        (tile.shape.kv.head_dim * queries).next_multiple_of(16) + queries * SPAN + Self::wide(tile)
    }

    fn wide(tile: &Tile<'_>) -> usize {
        AHEAD * BLOCK * tile.width()
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
        Self { queries, weights: cut(memory, count * SPAN), wide: cut(memory, Self::wide(tile)) }
    }

    /// Puts the positions of `span`, as each query sees them, into `part`.
    #[inline(always)]
    pub(super) fn span<S: Simd>(&mut self, simd: S, tile: &Tile<'_>, part: &mut State<'_>, span: usize) {
        part.clear();
        let seen = Seen::new(tile, span);
        self.score(simd, tile, &seen, span);
        for query in 0..tile.queries() {
            self.softmax(simd, tile, &seen, part, query);
        }
        self.weigh(simd, tile, &seen, part, span);
    }

    /// Whether keys and values are read where they lie: they are f32, or so few queries read them that widening
    /// them each time costs less than to store them widened. Quantized ones never are.
    #[inline(always)]
    fn direct<S: Simd>(tile: &Tile<'_>) -> bool {
        let few = tile.queries() <= 2 * score::most::<S>();
        tile.quant.is_none() && (few || tile.shape.kv.ty == KvType::F32)
    }

    /// How many blocks are widened at a time. What was quantized takes several times its space then, and where two
    /// wide heads would not stay in the nearest cache one is faster.
    #[inline(always)]
    fn at_once(tile: &Tile<'_>) -> usize {
        if tile.quant.is_some() && tile.width() > 128 { 1 } else { AHEAD }
    }

    /// As `direct`; but rows that are not whole lanes are widened in any case.
    #[inline(always)]
    fn direct_values<S: Simd>(tile: &Tile<'_>) -> bool {
        Self::direct::<S>(tile) && tile.width() == tile.shape.kv.head_dim
    }

    /// The scores of all queries that see something of a block.
    #[inline(always)]
    fn score<S: Simd>(&mut self, simd: S, tile: &Tile<'_>, seen: &Seen<'_>, span: usize) {
        let (head_dim, count) = (tile.shape.kv.head_dim, tile.queries());
        let data = &self.queries[..head_dim * count];
        let queries = Queries { data, count, factor: factor(tile.shape) };
        let (direct, ty) = (Self::direct::<S>(tile), tile.shape.kv.ty);
        for group in seen.groups(Self::at_once(tile)) {
            let mut keys = [Keys { data: std::ptr::null(), start: 0, next: None }; AHEAD];
            for ((i, keys), wide) in
                group.clone().zip(&mut keys).zip(self.wide.chunks_exact_mut(head_dim * BLOCK))
            {
                let (Block { start, keys: data, .. }, next) = (seen.blocks[i], seen.next(tile, span, i));
                *keys = Keys { data: data.as_ptr(), start, next };
                if !direct {
                    match tile.quant {
                        None => widen(simd, ty, data, BLOCK, wide, BLOCK, next),
                        Some(quant) => Packed { shape: &tile.shape.kv, quant, data, next }.keys(simd, wide),
                    }
                    *keys = Keys { data: wide.as_ptr().cast(), start, next: None };
                }
            }
            let (keys, rows) = (&keys[..group.len()], seen.rows(tile, group));
            let range = rows.start * tile.group()..rows.end * tile.group();
            // SAFETY: the keys of a block hold `[head_dim][BLOCK]` elements, widened or of the block's type.
            unsafe {
                match if direct { ty } else { KvType::F32 } {
                    KvType::F32 => score::<S, f32>(simd, &queries, range, keys, self.weights),
                    KvType::F16 => score::<S, f16>(simd, &queries, range, keys, self.weights),
                    KvType::Bf16 => score::<S, bf16>(simd, &queries, range, keys, self.weights),
                }
            }
        }
    }

    /// Turns the scores of a query into weights relative to the greatest one, and sums them up.
    #[inline(always)]
    fn softmax<S: Simd>(
        &mut self,
        simd: S,
        tile: &Tile<'_>,
        seen: &Seen<'_>,
        part: &mut State<'_>,
        query: usize,
    ) {
        let nothing = simd.splat(f32::NEG_INFINITY);
        let masks = &seen.masks[query / tile.group()][..seen.count];
        let scores = &mut self.weights[query * SPAN..][..SPAN];
        let mut max = [nothing; 2];
        for (block, &mask) in seen.blocks.iter().zip(masks) {
            for (half, max) in max.iter_mut().enumerate() {
                let at = block.start + half * 16;
                let mut score = load(simd, scores, at);
                if let Some(cap) = tile.shape.softcap {
                    score = caps(simd, score, cap);
                    store(simd, scores, at, score);
                }
                if mask != u32::MAX {
                    score = simd.select_bits((mask >> (half * 16)) as u16, score, nothing);
                    store(simd, scores, at, score);
                }
                *max = simd.max(score, *max);
            }
        }
        let max = simd.greatest(simd.max(max[0], max[1]));
        part.max[query] = max;
        let max = simd.splat(max);
        let mut sum = simd.splat(0.0);
        for (block, &mask) in seen.blocks.iter().zip(masks) {
            if mask == 0 {
                continue;
            }
            for at in [block.start, block.start + 16] {
                let weight = weights(simd, simd.sub(load(simd, scores, at), max));
                store(simd, scores, at, weight);
                sum = simd.add(sum, weight);
            }
        }
        store(simd, part.sums, lanes(query).start, sum);
    }

    /// Adds up the weighted values: of the whole span at once where they are read as they lie.
    #[inline(always)]
    fn weigh<S: Simd>(
        &mut self,
        simd: S,
        tile: &Tile<'_>,
        seen: &Seen<'_>,
        part: &mut State<'_>,
        span: usize,
    ) {
        let (ty, head_dim, width) = (tile.shape.kv.ty, tile.shape.kv.head_dim, tile.width());
        let direct = Self::direct_values::<S>(tile);
        for group in seen.groups(if direct { BLOCKS } else { Self::at_once(tile) }) {
            let mut values = [Values { data: std::ptr::null(), start: 0, count: BLOCK, next: None }; BLOCKS];
            let mut wide = self.wide.chunks_exact_mut(width * BLOCK);
            for (i, values) in group.clone().zip(&mut values) {
                let (Block { start, values: data, .. }, next) =
                    (seen.blocks[i], seen.next(tile, span, seen.count + i));
                *values = Values { data: data.as_ptr(), start, count: BLOCK, next };
                if let (false, Some(wide)) = (direct, wide.next()) {
                    match tile.quant {
                        None => widen(simd, ty, data, head_dim, wide, width, next),
                        // Whole groups are whole lanes: the width is the head's.
                        Some(quant) => Packed { shape: &tile.shape.kv, quant, data, next }.values(simd, wide),
                    }
                    *values = Values { data: wide.as_ptr().cast(), start, count: BLOCK, next: None };
                }
            }
            self.weigh_rows(simd, tile, seen, part, group, &values);
        }
    }

    /// Adds up the weighted values of some blocks for rows that see the same tokens at once.
    #[inline(always)]
    fn weigh_rows<S: Simd>(
        &self,
        simd: S,
        tile: &Tile<'_>,
        seen: &Seen<'_>,
        part: &mut State<'_>,
        blocks: Range<usize>,
        values: &[Values],
    ) {
        let ty = if Self::direct_values::<S>(tile) { tile.shape.kv.ty } else { KvType::F32 };
        let (width, weights) = (part.width, &*self.weights);
        let masks = &seen.masks[..tile.rows.len()];
        let mut row = 0;
        while row < masks.len() {
            let mask = &masks[row][blocks.clone()];
            let rows = masks[row..].iter().take_while(|m| &m[blocks.clone()] == mask).count();
            let queries = row * tile.group()..(row + rows) * tile.group();
            row += rows;
            let mut parts = Stretches::default();
            for (values, &mask) in values.iter().zip(mask) {
                parts.add(values, mask, width * ty.bytes());
            }
            let values = &parts.values[..parts.count];
            // SAFETY: the values of a block hold `[BLOCK][width]` elements `ty`, and the parts are parts of them.
            unsafe {
                match ty {
                    KvType::F32 => weigh::<S, f32>(simd, weights, queries, values, part.values, width),
                    KvType::F16 => weigh::<S, f16>(simd, weights, queries, values, part.values, width),
                    KvType::Bf16 => weigh::<S, bf16>(simd, weights, queries, values, part.values, width),
                }
            }
        }
    }
}

/// The seen tokens of a span's blocks. Those of a block are one stretch, or two around those between the kept
/// tokens and the window.
struct Stretches {
    values: [Values; 2 * BLOCKS],
    count: usize,
}

impl Default for Stretches {
    #[inline(always)]
    fn default() -> Self {
        let nothing = Values { data: std::ptr::null(), start: 0, count: 0, next: None };
        Self { values: [nothing; 2 * BLOCKS], count: 0 }
    }
}

impl Stretches {
    /// Adds the tokens of a block that `mask` names; each has `bytes` bytes.
    #[inline(always)]
    fn add(&mut self, block: &Values, mut mask: u32, bytes: usize) {
        while mask != 0 {
            let first = mask.trailing_zeros() as usize;
            let count = (mask >> first).trailing_ones() as usize;
            mask &= !(((1_u64 << (first + count)) - 1) as u32);
            self.values[self.count] = Values {
                data: block.data.wrapping_add(first * bytes),
                start: block.start + first,
                count,
                next: block.next.map(|next| next.wrapping_add(first * bytes)),
            };
            self.count += 1;
        }
    }
}

/// Widens rows of `from_width` elements to rows of `to_width` floats, padded with zeros; asks for as many bytes
/// from `next` on.
#[inline(always)]
fn widen<S: Simd>(
    simd: S,
    ty: KvType,
    from: &[u8],
    from_width: usize,
    to: &mut [f32],
    to_width: usize,
    next: Option<*const u8>,
) {
    match ty {
        KvType::F32 => widen_from::<S, f32>(simd, from, from_width, to, to_width, next),
        KvType::F16 => widen_from::<S, f16>(simd, from, from_width, to, to_width, next),
        KvType::Bf16 => widen_from::<S, bf16>(simd, from, from_width, to, to_width, next),
    }
}

#[inline(always)]
fn widen_from<S: Simd, E: Element>(
    simd: S,
    from: &[u8],
    from_width: usize,
    to: &mut [f32],
    to_width: usize,
    next: Option<*const u8>,
) {
    let start = from.as_ptr().cast::<E>();
    let whole = from_width / 16 * 16;
    for (row, to) in to.chunks_exact_mut(to_width).enumerate() {
        let at = row * from_width;
        for k in (0..whole).step_by(16) {
            if let Some(next) = next {
                simd.prefetch(next.wrapping_add((at + k) * size_of::<E>()));
            }
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
