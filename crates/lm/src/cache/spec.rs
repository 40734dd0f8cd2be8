//! What a model keeps per layer: shapes and policies.

use super::{BLOCK, KvError};
use lmx_tensor::kernels::attention::{KvShape, KvType, Window};
use std::ops::Range;

/// Which positions a layer's queries may see, hence which blocks must be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Every earlier position.
    Full,
    /// The first and the last ones.
    Window(KvWindow),
}

/// The positions below `keep` and the last `size - keep`, the query's own included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvWindow {
    size: usize,
    keep: usize,
}

impl KvWindow {
    /// A window over `size` positions in all, `keep` of which are the first of the sequence.
    ///
    /// # Errors
    /// [`KvError::Window`] if `keep` leaves no room for the query's own position.
    pub fn new(size: usize, keep: usize) -> Result<Self, KvError> {
        if keep < size { Ok(Self { size, keep }) } else { Err(KvError::Window { size, keep }) }
    }

    /// Positions seen in all, at least 1.
    #[must_use]
    pub fn size(self) -> usize {
        self.size
    }

    /// The first positions of a sequence, which are always seen; fewer than `size`.
    #[must_use]
    pub fn keep(self) -> usize {
        self.keep
    }
}

impl Policy {
    /// The policy of a layer that sees the last `size` positions; every one if it has no such window.
    #[must_use]
    pub fn of_layer(size: Option<usize>) -> Self {
        // A model's window was checked to be at least 1 when its configuration was read.
        size.map_or(Policy::Full, |size| Policy::Window(KvWindow { size: size.max(1), keep: 0 }))
    }

    /// What queries see, as the kernels take it.
    #[must_use]
    pub fn window(self) -> Option<Window> {
        match self {
            Policy::Full => None,
            Policy::Window(KvWindow { size, keep }) => Some(Window { size, keep }),
        }
    }

    /// The blocks of a sequence that no query at position `len` or later sees.
    #[must_use]
    pub(super) fn unseen_blocks(self, len: usize) -> Range<usize> {
        match self {
            Policy::Full => 0..0,
            Policy::Window(KvWindow { size, keep }) => {
                let (kept, recent) = (keep.div_ceil(BLOCK), (len + 1).saturating_sub(size - keep) / BLOCK);
                if kept < recent { kept..recent } else { 0..0 }
            }
        }
    }
}

/// What one layer stores for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerKv {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// What its queries see.
    pub policy: Policy,
}

/// Layers with the same shape and policy; their slabs share blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroup {
    /// Shape of one layer's keys and values in a block.
    pub shape: KvShape,
    /// What the queries of these layers see.
    pub policy: Policy,
    /// Number of layers in the group.
    pub layers: usize,
}

impl LayerGroup {
    /// Bytes of one block: all layers' slabs.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.shape.bytes() * self.layers
    }
}

/// The groups of a model's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// The groups, in order of first appearance.
    pub groups: Vec<LayerGroup>,
    /// For each layer of the model: its group, and its place among the group's layers.
    pub layers: Vec<(usize, usize)>,
}

impl KvSpec {
    /// Groups `layers` (first to last), stored as `ty`.
    #[must_use]
    pub fn new(layers: &[LayerKv], ty: KvType) -> Self {
        let mut kinds: Vec<LayerKv> = Vec::new();
        let mut groups: Vec<LayerGroup> = Vec::new();
        let mut places = Vec::with_capacity(layers.len());
        for &layer in layers {
            let group = kinds.iter().position(|&k| k == layer).unwrap_or_else(|| {
                kinds.push(layer);
                let shape = KvShape { ty, kv_heads: layer.kv_heads, head_dim: layer.head_dim };
                groups.push(LayerGroup { shape, policy: layer.policy, layers: 0 });
                groups.len() - 1
            });
            places.push((group, groups[group].layers));
            groups[group].layers += 1;
        }
        Self { groups, layers: places }
    }

    /// The same layers, but each that would see every position sees what `window` leaves of them.
    #[must_use]
    pub fn bounded(mut self, window: KvWindow) -> Self {
        for group in &mut self.groups {
            if group.policy == Policy::Full {
                group.policy = Policy::Window(window);
            }
        }
        self
    }

    /// Bytes that one more token takes in all full-attention layers (windows stop growing).
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let full = self.groups.iter().filter(|g| g.policy == Policy::Full);
        full.map(LayerGroup::block_bytes).sum::<usize>() / BLOCK
    }

    /// Bytes that one sequence of `tokens` holds at rest, over all groups.
    #[must_use]
    pub fn bytes_at(&self, tokens: usize) -> usize {
        let held = |g: &LayerGroup| tokens.div_ceil(BLOCK) - g.policy.unseen_blocks(tokens).len();
        self.groups.iter().map(|g| g.block_bytes() * held(g)).sum()
    }
}
