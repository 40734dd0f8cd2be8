//! Attention over KV blocks, and how keys and values lie in a block.
//!
//! A softmax runs over each span of [`SPAN`] absolute positions; the spans' results are merged in ascending order. So the result of a query depends on its own position and on what it
//! sees, never on how the queries were chunked or batched or on the number of threads. See docs/decisions/0002.

mod blocks;
mod codes;
mod dequantize;
mod kv;
mod quantized;
mod scalar;
mod score;
mod state;
mod tile;
mod visible;
mod weigh;
mod weight;

pub use codes::{KvCodes, read_codes, write_codes};
pub use kv::{KvShape, KvType, read_kv, write_kv};
pub use quantized::{KvQuant, quantize_slab, write_quantized};
pub use visible::Window;

use crate::disjoint::Disjoint;
use crate::{Exec, scratch};
use blocks::AHEAD;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use tile::{Attend, Goal, Merge, Tile};
use visible::Visible;

/// Tokens of a KV block.
pub const BLOCK: usize = 32;

/// Positions over which one softmax runs; a multiple of [`BLOCK`].
pub const SPAN: usize = 256;

/// What all sequences of a call share.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv.kv_heads`; query head h reads key-value head h * kv_heads / heads.
    pub heads: usize,
    /// How keys and values are stored.
    pub kv: KvShape,
    /// What a dot product of a query and a key is multiplied with.
    pub scale: f32,
    /// Scores become cap * tanh(score / cap).
    pub softcap: Option<f32>,
    /// Which positions a query sees; None: all up to its own.
    pub window: Option<Window>,
}

/// One sequence of the batch.
#[derive(Clone, Debug)]
pub struct Sequence<'a> {
    /// Its rows of the queries and the output.
    pub rows: Range<usize>,
    /// The absolute position of its first row.
    pub first_position: usize,
    /// `blocks[i]` holds the positions `i * BLOCK..(i + 1) * BLOCK` of this layer; None where dropped.
    /// Slots that no query sees are never read as numbers, so they may hold anything.
    pub blocks: &'a [Option<&'a [u8]>],
    /// How all of them are quantized; None: they hold floats.
    pub quant: Option<KvQuant>,
}

/// out = softmax(scale * q K^T) V for each row and head; `q` and `out` are `[rows][heads][head_dim]`.
///
/// A query at position p sees 0..=p, or what the window leaves of it. A NaN in what a query sees gives NaN.
///
/// `sinks` has a logit for each head that takes part in the maximum and the sum of its softmaxes and has no value:
/// the weight of score s is exp(s - m) / (sum of exp(s - m) + exp(sink - m)), as `modeling_gpt_oss.py` of
/// transformers has it. Neither the scale nor the cap is for it.
///
/// # Panics
/// If a length does not fit its shape, or a block that some query sees is missing.
pub fn attention(
    exec: &Exec,
    shape: &AttentionShape,
    q: &[f32],
    sinks: Option<&[f32]>,
    sequences: &[Sequence<'_>],
    out: &mut [f32],
) {
    check(shape, q, sequences, out);
    assert!(sinks.is_none_or(|sinks| sinks.len() == shape.heads), "sinks of {} heads", shape.heads);
    let tiles = tiles(shape, q, sinks, sequences);
    let spans: usize = tiles.iter().map(|tile| tile.spans().count()).sum();
    let work: usize = tiles.iter().map(Tile::work).sum();
    let serial = exec.pool.threads() == 1 || work < PARALLEL_MIN;
    // A tile that is much of the whole work (a long sequence that decodes) is shared out by its spans.
    let most = if serial { spans } else { spans.div_ceil(4 * exec.pool.threads()) };
    let (mut items, mut splits, mut parts_len) = (Vec::with_capacity(spans), Vec::new(), 0);
    for tile in &tiles {
        let spans = tile.spans().count();
        if spans <= most {
            items.push(Item { tile, part: None });
            continue;
        }
        let start = parts_len;
        for span in tile.spans() {
            let at = parts_len;
            parts_len += tile.state_floats();
            items.push(Item { tile, part: Some((span, at..parts_len, splits.len())) });
        }
        splits.push(Split { range: start..parts_len, left: AtomicUsize::new(spans) });
    }
    let mut parts = vec![0.0; parts_len];
    let (out, parts) = (Disjoint::new(out), Disjoint::new(&mut parts));
    let run = |item: usize| items[item].run(exec, &splits, &parts, &out);
    if serial {
        return (0..items.len()).for_each(run);
    }
    exec.pool.for_each(items.len(), &run);
}

/// Multiplications below which a call runs on the calling thread: some microseconds of work.
const PARALLEL_MIN: usize = 1 << 16;

/// The tiles of a call, the longest of each sequence first.
fn tiles<'a>(
    shape: &'a AttentionShape,
    q: &'a [f32],
    sinks: Option<&'a [f32]>,
    sequences: &'a [Sequence<'_>],
) -> Vec<Tile<'a>> {
    let step = tile::rows(shape);
    let mut tiles = Vec::new();
    for &Sequence { ref rows, first_position, blocks, quant } in sequences {
        for start in rows.clone().step_by(step).rev() {
            let (position, rows) = (first_position + start - rows.start, start..rows.end.min(start + step));
            for kv_head in 0..shape.kv.kv_heads {
                let (rows, following) = (rows.clone(), [None; AHEAD]);
                tiles.push(Tile { shape, q, sinks, rows, position, kv_head, blocks, quant, following });
            }
        }
    }
    for index in 1..tiles.len() {
        tiles[index - 1].following = tiles[index].first_keys();
    }
    tiles
}

/// What one thread does without a break: a tile, or one span of it.
struct Item<'a> {
    tile: &'a Tile<'a>,
    /// The span, where in the parts its result goes, and the number of the tile's split.
    part: Option<(usize, Range<usize>, usize)>,
}

/// A tile shared out by its spans.
struct Split {
    /// Where the results of its spans are in the parts.
    range: Range<usize>,
    /// Spans not read yet. Who reads the last one merges them all, in the order that it always is.
    left: AtomicUsize,
}

impl Item<'_> {
    fn run(&self, exec: &Exec, splits: &[Split], parts: &Disjoint<'_, f32>, out: &Disjoint<'_, f32>) {
        let tile = self.tile;
        let attend = |goal| {
            scratch::with_scratch(tile.memory(), |memory| exec.isa.run(Attend { tile, memory, goal }));
        };
        let Some((span, range, split)) = &self.part else { return attend(Goal::Output(out)) };
        // SAFETY: each item has a range of its own, and the merge waits for all items of the tile.
        attend(Goal::Span(*span, unsafe { parts.part(range.clone()) }));
        let split = &splits[*split];
        if split.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: the parts of a tile are its own, and all its spans have been read.
            let parts = unsafe { parts.part(split.range.clone()) };
            exec.isa.run(Merge { tile, parts, out });
        }
    }
}

fn check(shape: &AttentionShape, q: &[f32], sequences: &[Sequence<'_>], out: &[f32]) {
    let KvShape { kv_heads, head_dim, .. } = shape.kv;
    assert!(kv_heads > 0 && head_dim > 0, "an empty shape {:?}", shape.kv);
    assert!(shape.heads.is_multiple_of(kv_heads), "{} heads over {kv_heads}", shape.heads);
    assert!(shape.window.is_none_or(Window::is_sound), "a window that hides the query: {:?}", shape.window);
    assert_eq!(q.len(), out.len(), "length of the output");
    let row = shape.heads * head_dim;
    for sequence in sequences {
        let bytes = shape.kv.slab_bytes(sequence.quant);
        assert!(
            sequence.quant.is_none_or(|q| q.fits(head_dim)),
            "{head_dim} dimensions in {:?}",
            sequence.quant
        );
        assert!(sequence.rows.end * row <= q.len(), "rows {:?} of {} elements", sequence.rows, q.len());
        if sequence.rows.is_empty() {
            continue;
        }
        let last = sequence.first_position + sequence.rows.len() - 1;
        for (index, block) in sequence.blocks.iter().enumerate().take(last / BLOCK + 1) {
            assert!(block.is_none_or(|b| b.len() == bytes), "block {index} has another size than {bytes}");
        }
        let first = Visible::new(shape.window, sequence.first_position);
        for index in (0..first.keep.div_ceil(BLOCK)).chain(first.recent / BLOCK..last / BLOCK + 1) {
            let block = sequence.blocks.get(index).copied().flatten();
            assert!(block.is_some(), "block {index} is missing for position {last}");
        }
    }
}
