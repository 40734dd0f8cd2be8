//! The definition of attention: one query of one head, in plain Rust.

use super::visible::Visible;
use super::{AttentionShape, BLOCK, KvType, SPAN};
use crate::simd::Kernel;
use crate::vector::{exp, softcapped, sum16};
use half::{bf16, f16};

/// One row and head of a call.
pub(super) struct Query<'a> {
    pub(super) shape: &'a AttentionShape,
    /// `[head_dim]`.
    pub(super) q: &'a [f32],
    pub(super) head: usize,
    pub(super) position: usize,
    pub(super) blocks: &'a [Option<&'a [u8]>],
    /// `[head_dim]`.
    pub(super) out: &'a mut [f32],
}

/// An unfinished softmax: the greatest score so far, and, relative to exp(max), the sum of the weights (token t
/// of a block in lane t mod 16) and of the weighted values.
struct Partial {
    max: f32,
    sums: [f32; 16],
    values: Vec<f32>,
}

impl Kernel for Query<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let visible = Visible::new(self.shape.window, self.position);
        let mut total: Option<Partial> = None;
        for span in 0..=self.position / SPAN {
            if !visible.any(span * SPAN..(span + 1) * SPAN) {
                continue;
            }
            let mut partial = Partial {
                max: f32::NEG_INFINITY,
                sums: [0.0; 16],
                values: vec![0.0; self.shape.kv.head_dim],
            };
            for block in span * SPAN / BLOCK..(span + 1) * SPAN / BLOCK {
                let mask = visible.mask(block);
                if let (Some(&Some(slab)), 1..) = (self.blocks.get(block), mask) {
                    self.update(&mut partial, slab, mask);
                }
            }
            total = Some(match total {
                None => partial,
                Some(total) => merge(total, &partial),
            });
        }
        if let Some(total) = total {
            let sum = sum16(&total.sums);
            for (out, value) in self.out.iter_mut().zip(&total.values) {
                *out = value / sum;
            }
        }
    }
}

impl Query<'_> {
    /// Takes the tokens of `mask` in a block into `partial`.
    #[inline(always)]
    fn update(&self, partial: &mut Partial, slab: &[u8], mask: u32) {
        let AttentionShape { heads, kv, .. } = *self.shape;
        let kv_head = self.head / (heads / kv.kv_heads);
        let (keys, values) = (kv.keys(slab, kv_head), kv.values(slab, kv_head));
        let mut weights = [f32::NEG_INFINITY; BLOCK];
        let mut max = partial.max;
        for t in (0..BLOCK).filter(|t| mask >> t & 1 == 1) {
            let mut dot = 0.0;
            for (d, &q) in self.q.iter().enumerate() {
                dot = q.mul_add(element(keys, kv.ty, d * BLOCK + t), dot);
            }
            let score = dot * self.shape.scale;
            weights[t] = self.shape.softcap.map_or(score, |cap| softcapped(score, cap));
            max = if weights[t] > max { weights[t] } else { max };
        }
        let rescale = exp(partial.max - max);
        partial.max = max;
        for weight in &mut weights {
            *weight = exp(*weight - max);
        }
        for (lane, sum) in partial.sums.iter_mut().enumerate() {
            *sum = sum.mul_add(rescale, weights[lane] + weights[lane + 16]);
        }
        for (d, value) in partial.values.iter_mut().enumerate() {
            *value *= rescale;
            for t in (0..BLOCK).filter(|t| mask >> t & 1 == 1) {
                *value = weights[t].mul_add(element(values, kv.ty, t * kv.head_dim + d), *value);
            }
        }
    }
}

#[inline(always)]
fn merge(mut total: Partial, next: &Partial) -> Partial {
    let max = if total.max > next.max { total.max } else { next.max };
    let (old, new) = (exp(total.max - max), exp(next.max - max));
    total.max = max;
    for (sum, &next) in total.sums.iter_mut().zip(&next.sums) {
        *sum = next.mul_add(new, *sum * old);
    }
    for (value, &next) in total.values.iter_mut().zip(&next.values) {
        *value = next.mul_add(new, *value * old);
    }
    total
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
