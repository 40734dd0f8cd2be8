//! The definition of attention within a span: one query of one head, in plain Rust. A head's sink belongs to no span:
//! `State::finish` takes it in.

use super::state::{State, lanes};
use super::visible::Visible;
use super::weight::{capped, factor, weight};
use super::{AttentionShape, BLOCK, KvQuant, SPAN};

/// One query of one head, and where in a state it stands.
pub(super) struct Query<'a> {
    pub(super) shape: &'a AttentionShape,
    /// `[head_dim]`.
    pub(super) q: &'a [f32],
    pub(super) kv_head: usize,
    pub(super) visible: Visible,
    pub(super) blocks: &'a [Option<&'a [u8]>],
    pub(super) quant: Option<KvQuant>,
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
            let keys = kv.keys(slab, self.kv_head, self.quant);
            let mut dot = 0.0;
            for (d, &q) in self.q.iter().enumerate() {
                let key = match self.quant {
                    None => kv.ty.element(keys, d * BLOCK + t % BLOCK),
                    Some(quant) => quant.key(kv, keys, d, t % BLOCK),
                };
                dot = q.mul_add(key, dot);
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
            let values = kv.values(slab, self.kv_head, self.quant);
            for (d, sum) in sums.iter_mut().enumerate() {
                let value = match self.quant {
                    None => kv.ty.element(values, t % BLOCK * kv.head_dim + d),
                    Some(quant) => quant.value(kv, values, d, t % BLOCK),
                };
                *sum = weights[t].mul_add(value, *sum);
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
