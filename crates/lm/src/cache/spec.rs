//! What a model keeps per layer: shapes and policies.

use lmx_tensor::kernels::attention::{KvShape, KvType};

/// Which positions a layer's queries may see, hence which blocks must be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Every earlier position.
    Full,
    /// The last `size` positions, the query's own included.
    Window {
        /// Positions seen, at least 1.
        size: usize,
    },
}

impl Policy {
    /// How many of a sequence's first blocks no query at position `len` or later sees.
    #[must_use]
    pub(super) fn unseen_blocks(self, len: usize) -> usize {
        match self {
            Policy::Full => 0,
            Policy::Window { size } => (len + 1).saturating_sub(size) / super::BLOCK,
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
#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
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

    /// Bytes that one more token takes in all full-attention layers (windows stop growing).
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let full = self.groups.iter().filter(|g| g.policy == Policy::Full);
        full.map(LayerGroup::block_bytes).sum::<usize>() / super::BLOCK
    }

    /// Bytes that one sequence of `tokens` holds at rest, over all groups.
    #[must_use]
    pub fn bytes_at(&self, tokens: usize) -> usize {
        let held = |g: &LayerGroup| tokens.div_ceil(super::BLOCK) - g.policy.unseen_blocks(tokens);
        self.groups.iter().map(|g| g.block_bytes() * held(g)).sum()
    }
}
