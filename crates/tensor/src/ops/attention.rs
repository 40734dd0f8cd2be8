//! Attention over KV blocks.

use super::OpError;
use crate::Tensor;
use lmx_kernels::attention::{self as kernel, AttentionShape, BLOCK, Sequence};

/// Attention of each row of `q` (`[rows][heads][head_dim]`) over its sequence's blocks; `sinks` has a logit for each
/// head that takes part in its softmaxes without a value.
///
/// # Errors
/// [`OpError`] if the width of `q`, the number of sinks, a sequence's rows, its number of blocks or their format does
/// not fit.
pub fn attention(
    shape: &AttentionShape,
    q: &Tensor,
    sinks: Option<&[f32]>,
    sequences: &[Sequence<'_>],
) -> Result<Tensor, OpError> {
    let width = shape.heads * shape.kv.head_dim;
    OpError::unless(q.cols() == width && shape.heads.is_multiple_of(shape.kv.kv_heads), "attention", || {
        format!("q of width {} for {} heads over {:?}", q.cols(), shape.heads, shape.kv)
    })?;
    let count = sinks.map_or(shape.heads, <[f32]>::len);
    OpError::unless(count == shape.heads, "attention", || {
        format!("{count} sinks for {} heads", shape.heads)
    })?;
    for s in sequences {
        let fits = s.rows.start <= s.rows.end
            && s.rows.end <= q.rows()
            && s.blocks.len() * BLOCK >= s.first_position + s.rows.len()
            && s.quant.is_none_or(|quant| quant.fits(shape.kv.head_dim))
            && s.blocks.iter().flatten().all(|b| b.len() == shape.kv.slab_bytes(s.quant));
        OpError::unless(fits, "attention", || {
            let (rows, blocks) = (&s.rows, s.blocks.len());
            format!("rows {rows:?} of {} at position {} in {blocks} blocks", q.rows(), s.first_position)
        })?;
    }
    let mut out = Tensor::undefined(q.device(), q.rows(), q.cols());
    kernel::attention(q.device().exec(), shape, q.data(), sinks, sequences, out.data_mut());
    Ok(out)
}
