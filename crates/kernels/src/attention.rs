//! Attention over KV blocks, and how keys and values lie in a block.
//!
//! The softmax runs online, block by block at absolute positions, within spans of [`SPAN`] positions whose
//! results are merged in ascending order. So the result of a query depends on its own position and on what it
//! sees, never on how the queries were chunked or batched or on the number of threads. See docs/decisions/0002.

mod kv;
mod scalar;
mod visible;

pub use kv::{KvShape, KvType, write_kv};
pub use visible::Window;

use crate::Exec;
use crate::disjoint::Disjoint;
use std::ops::Range;
use visible::Visible;

/// Tokens of a KV block.
pub const BLOCK: usize = 32;

/// Positions over which one online softmax runs; a multiple of [`BLOCK`].
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
}

/// out = softmax(scale * q K^T) V for each row and head; `q` and `out` are `[rows][heads][head_dim]`.
///
/// A query at position p sees 0..=p, or what the window leaves of it. A NaN in what a query sees gives NaN.
///
/// # Panics
/// If a length does not fit its shape, or a block that some query sees is missing.
pub fn attention(
    exec: &Exec,
    shape: &AttentionShape,
    q: &[f32],
    sequences: &[Sequence<'_>],
    out: &mut [f32],
) {
    check(shape, q, sequences, out);
    let (heads, head_dim) = (shape.heads, shape.kv.head_dim);
    let out = Disjoint::new(out);
    for sequence in sequences {
        exec.pool.for_each(sequence.rows.len() * heads, &|item| {
            let (row, head) = (item / heads, item % heads);
            let at = ((sequence.rows.start + row) * heads + head) * head_dim;
            // SAFETY: each row and head is one item.
            let out = unsafe { out.part(at..at + head_dim) };
            let position = sequence.first_position + row;
            let q = &q[at..at + head_dim];
            exec.isa.run(scalar::Query { shape, q, head, position, blocks: sequence.blocks, out });
        });
    }
}

fn check(shape: &AttentionShape, q: &[f32], sequences: &[Sequence<'_>], out: &[f32]) {
    let KvShape { kv_heads, head_dim, .. } = shape.kv;
    assert!(kv_heads > 0 && head_dim > 0, "an empty shape {:?}", shape.kv);
    assert!(shape.heads.is_multiple_of(kv_heads), "{} heads over {kv_heads}", shape.heads);
    assert!(
        shape.window.is_none_or(|w| w.keep < w.size),
        "a window that hides the query: {:?}",
        shape.window
    );
    assert_eq!(q.len(), out.len(), "length of the output");
    let row = shape.heads * head_dim;
    let bytes = shape.kv.bytes();
    for sequence in sequences {
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
