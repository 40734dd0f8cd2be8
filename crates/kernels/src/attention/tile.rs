//! What one thread computes at a time: some rows of a sequence, all query heads of one key-value head.

use super::blocks::{AHEAD, Blocks};
use super::state::State;
use super::visible::Visible;
use super::{AttentionShape, BLOCK, KvQuant, SPAN, scalar};
use crate::disjoint::Disjoint;
use crate::simd::{Kernel, Simd};
use std::ops::Range;

/// Queries of a tile, where one row has fewer: enough to share a block's keys and values, few enough for their
/// state to stay in the caches.
pub(super) const QUERIES: usize = 48;

/// Some rows of a sequence, and the query heads of one key-value head. Query i is head i mod `group` of row
/// i / `group`.
#[derive(Clone)]
pub(super) struct Tile<'a> {
    pub(super) shape: &'a AttentionShape,
    /// `[rows of the call][heads][head_dim]`.
    pub(super) q: &'a [f32],
    /// `[heads]`: logits that take part in the softmaxes without a value.
    pub(super) sinks: Option<&'a [f32]>,
    pub(super) rows: Range<usize>,
    /// The absolute position of the first row.
    pub(super) position: usize,
    pub(super) kv_head: usize,
    pub(super) blocks: &'a [Option<&'a [u8]>],
    /// How the blocks are quantized, if they are.
    pub(super) quant: Option<KvQuant>,
    /// What is read after the last span, by the tile that follows on this one.
    pub(super) following: [Option<&'a [u8]>; AHEAD],
}

/// Rows of a tile, at most `QUERIES`.
pub(super) fn rows(shape: &AttentionShape) -> usize {
    (QUERIES / (shape.heads / shape.kv.kv_heads)).max(1)
}

impl<'a> Tile<'a> {
    /// The keys that are read first.
    pub(super) fn first_keys(&self) -> [Option<&'a [u8]>; AHEAD] {
        let visible = self.visible(0);
        let first = if visible.keep > 0 { 0 } else { visible.recent / BLOCK };
        std::array::from_fn(|i| Some(self.keys((*self.blocks.get(first + i)?)?)))
    }
}

impl Tile<'_> {
    #[inline(always)]
    pub(super) fn group(&self) -> usize {
        self.shape.heads / self.shape.kv.kv_heads
    }

    #[inline(always)]
    pub(super) fn queries(&self) -> usize {
        self.rows.len() * self.group()
    }

    /// The head's dimensions padded to whole lanes.
    #[inline(always)]
    pub(super) fn width(&self) -> usize {
        self.shape.kv.head_dim.next_multiple_of(16)
    }

    /// Multiplications for the scores, nearly.
    pub(super) fn work(&self) -> usize {
        let last = self.visible(self.rows.len() - 1);
        let seen = last.keep + last.end - self.visible(0).recent.max(last.keep);
        self.queries() * seen * self.shape.kv.head_dim
    }

    /// Floats of the state of the tile's queries.
    pub(super) fn state_floats(&self) -> usize {
        State::floats(self.queries(), self.width())
    }

    /// Floats of memory that [`Attend`] needs.
    pub(super) fn memory(&self) -> usize {
        2 * self.state_floats() + Blocks::floats(self)
    }

    /// What the queries of row `row` of the tile see.
    #[inline(always)]
    pub(super) fn visible(&self, row: usize) -> Visible {
        Visible::new(self.shape.window, self.position + row)
    }

    /// The spans of which some row sees something, in ascending order.
    pub(super) fn spans(&self) -> Spans {
        let last = self.visible(self.rows.len() - 1);
        let kept = last.keep.div_ceil(SPAN);
        let recent = (self.visible(0).recent / SPAN).max(kept);
        Spans(0..kept, recent..last.end.div_ceil(SPAN))
    }

    /// The keys of the tile's head in a block.
    #[inline(always)]
    pub(super) fn keys<'s>(&self, slab: &'s [u8]) -> &'s [u8] {
        self.shape.kv.keys(slab, self.kv_head, self.quant)
    }

    /// The values of the tile's head in a block.
    #[inline(always)]
    pub(super) fn values<'s>(&self, slab: &'s [u8]) -> &'s [u8] {
        self.shape.kv.values(slab, self.kv_head, self.quant)
    }

    /// The head of query `index`.
    #[inline(always)]
    fn head(&self, index: usize) -> usize {
        self.kv_head * self.group() + index % self.group()
    }

    /// Where query `index` begins in `q` and in the output.
    #[inline(always)]
    pub(super) fn offset(&self, index: usize) -> usize {
        let row = self.rows.start + index / self.group();
        (row * self.shape.heads + self.head(index)) * self.shape.kv.head_dim
    }

    /// The query `index` `[head_dim]`.
    #[inline(always)]
    pub(super) fn query(&self, index: usize) -> &[f32] {
        &self.q[self.offset(index)..][..self.shape.kv.head_dim]
    }

    /// Takes `part`, the result of `span`, into `total`, the results of the spans before.
    #[inline(always)]
    fn take(&self, total: &mut State<'_>, part: &State<'_>, span: usize) {
        for index in 0..self.queries() {
            let visible = self.visible(index / self.group());
            if !visible.any(span * SPAN..(span + 1) * SPAN) {
                continue;
            }
            if span == visible.first() / SPAN {
                total.copy(part, index);
            } else {
                total.merge(part, index);
            }
        }
    }

    #[inline(always)]
    fn finish(&self, total: &State<'_>, out: &Disjoint<'_, f32>) {
        for index in 0..self.queries() {
            let (at, sink) = (self.offset(index), self.sinks.map(|sinks| sinks[self.head(index)]));
            // SAFETY: the queries of a tile belong to it alone.
            total.finish(index, sink, unsafe { out.part(at..at + self.shape.kv.head_dim) });
        }
    }
}

/// Spans in ascending order: those of the tokens that a window keeps, then those of the window.
#[derive(Clone)]
pub(super) struct Spans(Range<usize>, Range<usize>);

impl Spans {
    fn one(span: usize) -> Self {
        Self(0..0, span..span + 1)
    }
}

impl Iterator for Spans {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.0.next().or_else(|| self.1.next())
    }
}

/// How the positions of a span, as each query of a tile sees them, get into a state.
trait ReadSpan {
    fn read(&mut self, tile: &Tile<'_>, part: &mut State<'_>, span: usize);
}

/// By the definition.
struct Scalar;

impl ReadSpan for Scalar {
    #[inline(always)]
    fn read(&mut self, tile: &Tile<'_>, part: &mut State<'_>, span: usize) {
        part.clear();
        for index in 0..tile.queries() {
            let visible = tile.visible(index / tile.group());
            let Tile { shape, kv_head, blocks, quant, .. } = *tile;
            let q = tile.query(index);
            scalar::Query { shape, q, kv_head, visible, blocks, quant, index }.span(part, span);
        }
    }
}

impl<S: Simd> ReadSpan for (S, Blocks<'_>) {
    #[inline(always)]
    fn read(&mut self, tile: &Tile<'_>, part: &mut State<'_>, span: usize) {
        self.1.span(self.0, tile, part, span);
    }
}

/// Attention of a tile.
pub(super) struct Attend<'a> {
    pub(super) tile: &'a Tile<'a>,
    /// `Tile::memory` floats.
    pub(super) memory: &'a mut [f32],
    pub(super) goal: Goal<'a>,
}

/// What [`Attend`] computes.
pub(super) enum Goal<'a> {
    /// The output.
    Output(&'a Disjoint<'a, f32>),
    /// The result of one span, `Tile::state_floats` floats, for [`Merge`].
    Span(usize, &'a mut [f32]),
}

impl Attend<'_> {
    #[inline(always)]
    fn run(tile: &Tile<'_>, mut memory: &mut [f32], goal: Goal<'_>, mut reader: impl ReadSpan) {
        let (queries, width) = (tile.queries(), tile.width());
        // One loop for both goals: the body of `read` is large.
        let (spans, mut part, out) = match goal {
            Goal::Output(out) => (tile.spans(), State::cut(&mut memory, queries, width), Some(out)),
            Goal::Span(span, mut part) => (Spans::one(span), State::cut(&mut part, queries, width), None),
        };
        let mut total = State::cut(&mut memory, queries, width);
        for span in spans {
            reader.read(tile, &mut part, span);
            if out.is_some() {
                tile.take(&mut total, &part, span);
            }
        }
        if let Some(out) = out {
            tile.finish(&total, out);
        }
    }
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        Self::run(self.tile, self.memory, self.goal, Scalar);
    }

    #[inline(always)]
    fn simd<S: Simd>(self, simd: S) {
        let mut memory = self.memory;
        let blocks = Blocks::cut(&mut memory, self.tile);
        Self::run(self.tile, memory, self.goal, (simd, blocks));
    }
}

/// The output of a tile from the results of its spans, one after the other.
pub(super) struct Merge<'a> {
    pub(super) tile: &'a Tile<'a>,
    pub(super) parts: &'a mut [f32],
    pub(super) out: &'a Disjoint<'a, f32>,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { tile, mut parts, out } = self;
        let (queries, width) = (tile.queries(), tile.width());
        // The first span's state becomes the total: every query that did not see it copies its own first one.
        let mut spans = tile.spans();
        spans.next();
        let mut total = State::cut(&mut parts, queries, width);
        for span in spans {
            tile.take(&mut total, &State::cut(&mut parts, queries, width), span);
        }
        tile.finish(&total, out);
    }
}
