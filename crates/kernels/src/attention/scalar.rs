//! The definition of attention within a span: one query of one head, in plain Rust.

use super::state::{State, lanes};
use super::visible::Visible;
use super::weight::{capped, factor, weight};
use super::{AttentionShape, BLOCK, KvType, SPAN};
use half::{bf16, f16};

/// One query of one head, and where in a state it stands.
pub(super) struct Query<'a> {
    pub(super) shape: &'a AttentionShape,
    /// `[head_dim]`.
    pub(super) q: &'a [f32],
    pub(super) kv_head: usize,
    pub(super) visible: Visible,
    pub(super) blocks: &'a [Option<&'a [u8]>],
    pub(super) index: usize,
}

impl Query<'_> {
    /// The softmax over the positions of `span` that the query sees, in `state`, which is cleared.
    #[inline(always)]
    pub(super) fn span(&self, state: &mut State<'_>, span: usize) {
        let kv = &self.shape.kv;
        let factor = factor(self.shape);
        let mut weights = [0.0; SPAN];
        let mut max = f32::NEG_INFINITY;
        self.each_token(span, |t, slab| {
            let keys = kv.keys(slab, self.kv_head);
            let mut dot = 0.0;
            for (d, &q) in self.q.iter().enumerate() {
                dot = q.mul_add(element(keys, kv.ty, d * BLOCK + t % BLOCK), dot);
            }
            let score = capped(self.shape, dot * factor);
            weights[t] = score;
            max = if score > max { score } else { max };
        });
        state.max[self.index] = max;
        let sums = &mut state.sums[lanes(self.index)];
        self.each_token(span, |t, _| {
            weights[t] = weight(weights[t] - max);
            sums[t % 16] += weights[t];
        });
        let range = state.values_of(self.index);
        let sums = &mut state.values[range][..kv.head_dim];
        self.each_token(span, |t, slab| {
            let values = kv.values(slab, self.kv_head);
            for (d, sum) in sums.iter_mut().enumerate() {
                *sum = weights[t].mul_add(element(values, kv.ty, t % BLOCK * kv.head_dim + d), *sum);
            }
        });
    }

    /// Calls `f` for each token of `span` that the query sees, in ascending order, with its place in the span and
    /// its block's slab.
    #[inline(always)]
    fn each_token(&self, span: usize, mut f: impl FnMut(usize, &[u8])) {
        for index in 0..SPAN / BLOCK {
            let block = span * (SPAN / BLOCK) + index;
            let Some(&Some(slab)) = self.blocks.get(block) else { continue };
            let mask = self.visible.mask(block);
            for t in (0..BLOCK).filter(|t| mask >> t & 1 == 1) {
                f(index * BLOCK + t, slab);
            }
        }
    }
}

#[inline(always)]
fn element(data: &[u8], ty: KvType, index: usize) -> f32 {
    let wide = |n: usize| &data[index * n..][..n];
    match ty {
        KvType::F32 => f32::from_le_bytes(wide(4).try_into().unwrap_or_default()),
        KvType::F16 => f16::from_le_bytes(wide(2).try_into().unwrap_or_default()).to_f32(),
        KvType::Bf16 => bf16::from_le_bytes(wide(2).try_into().unwrap_or_default()).to_f32(),
    }
}
