//! The definition of attention within a span: one query of one head, in plain Rust.

use super::state::{State, lanes};
use super::visible::Visible;
use super::{AttentionShape, BLOCK, KvType, SPAN};
use crate::vector::{exp, softcapped};
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
    /// Takes the positions of a span that the query sees into `state`, which has seen nothing yet.
    #[inline(always)]
    pub(super) fn span(&self, state: &mut State<'_>, span: usize) {
        for block in span * SPAN / BLOCK..(span + 1) * SPAN / BLOCK {
            let mask = self.visible.mask(block);
            if let (Some(&Some(slab)), 1..) = (self.blocks.get(block), mask) {
                self.block(state, slab, mask);
            }
        }
    }

    #[inline(always)]
    fn block(&self, state: &mut State<'_>, slab: &[u8], mask: u32) {
        let AttentionShape { kv, scale, softcap, .. } = *self.shape;
        let (keys, values) = (kv.keys(slab, self.kv_head), kv.values(slab, self.kv_head));
        let tokens = || (0..BLOCK).filter(|t| mask >> t & 1 == 1);
        let mut weights = [f32::NEG_INFINITY; BLOCK];
        let old = state.max[self.index];
        let mut max = old;
        for t in tokens() {
            let mut dot = 0.0;
            for (d, &q) in self.q.iter().enumerate() {
                dot = q.mul_add(element(keys, kv.ty, d * BLOCK + t), dot);
            }
            let score = dot * scale;
            weights[t] = softcap.map_or(score, |cap| softcapped(score, cap));
            max = if weights[t] > max { weights[t] } else { max };
        }
        let rescale = exp(old - max);
        state.max[self.index] = max;
        for weight in &mut weights {
            *weight = exp(*weight - max);
        }
        for (lane, sum) in state.sums[lanes(self.index)].iter_mut().enumerate() {
            *sum = sum.mul_add(rescale, weights[lane] + weights[lane + 16]);
        }
        let range = state.values_of(self.index);
        for (d, value) in state.values[range].iter_mut().enumerate().take(kv.head_dim) {
            *value *= rescale;
            for t in tokens() {
                *value = weights[t].mul_add(element(values, kv.ty, t * kv.head_dim + d), *value);
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
