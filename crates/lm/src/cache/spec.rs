//! What a model keeps per layer: shapes and policies.

use super::{BLOCK, KvError, KvQuantError, KvQuantization, StateSlot, state};
use lmx_tensor::kernels::attention::{KvQuant, KvShape, KvType, Window};
use std::num::NonZeroUsize;
use std::ops::Range;

/// Which positions a layer's queries may see, hence which blocks must be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Every earlier position.
    Full,
    /// The first and the last ones.
    Window(KvWindow),
    /// Those of the query's own chunk of so many positions, counted from the sequence's start.
    Chunk(NonZeroUsize),
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
            Policy::Window(KvWindow { size, keep }) => Some(Window::Last { size, keep }),
            Policy::Chunk(size) => Some(Window::Chunk(size.get())),
        }
    }

    /// The first positions of a sequence, which are never dropped.
    pub(super) fn kept(self) -> usize {
        match self {
            Policy::Window(KvWindow { keep, .. }) => keep,
            Policy::Full | Policy::Chunk(_) => 0,
        }
    }

    /// The first position at or after `target` whose query sees nothing between the kept ones and `start`.
    pub(super) fn first_beyond(self, start: usize, target: usize) -> usize {
        match self {
            Policy::Full => target,
            Policy::Window(KvWindow { size, keep }) => target.max(start + size - keep - 1),
            Policy::Chunk(size) if target - target % size >= start => target,
            Policy::Chunk(size) => start.next_multiple_of(size.get()),
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
            Policy::Chunk(size) => 0..(len - len % size) / BLOCK,
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
    /// Shape of one layer's keys and values in a block of floats.
    pub shape: KvShape,
    /// What the queries of these layers see.
    pub policy: Policy,
    /// Number of layers in the group.
    pub layers: usize,
}

impl LayerGroup {
    /// Bytes of one layer's keys and values in one block, floats or quantized.
    #[must_use]
    pub fn slab_bytes(&self, quant: Option<KvQuant>) -> usize {
        self.shape.slab_bytes(quant)
    }

    /// Bytes of one block: all layers' slabs.
    #[must_use]
    pub fn block_bytes(&self, quant: Option<KvQuant>) -> usize {
        self.slab_bytes(quant) * self.layers
    }
}

/// The groups of a model's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// The groups, in order of first appearance.
    pub groups: Vec<LayerGroup>,
    /// For each layer that has keys and values: its group, and its place among the group's layers.
    pub layers: Vec<(usize, usize)>,
    /// The slots of recurrent state, in the order of their layers.
    pub states: Vec<StateSlot>,
    /// From where on, and how, all of them are quantized.
    pub quantization: Option<KvQuantization>,
}

impl KvSpec {
    /// Groups `layers` (first to last, those without keys and values left out), stored as `ty`.
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
        Self { groups, layers: places, states: Vec::new(), quantization: None }
    }

    /// The same layers, and these slots of recurrent state.
    #[must_use]
    pub fn with_states(mut self, states: Vec<StateSlot>) -> Self {
        self.states = states;
        self
    }

    /// Where slot `slot` lies among the floats of a state.
    pub(super) fn slot_range(&self, slot: usize) -> Range<usize> {
        let start = self.states.iter().take(slot).map(|s| s.floats).sum();
        start..start + self.states.get(slot).map_or(0, |s| s.floats)
    }

    /// Floats of the recurrent state at one position; 0 if the model has none.
    pub(super) fn state_floats(&self) -> usize {
        self.states.iter().map(|s| s.floats).sum()
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

    /// The same layers, quantized as `how` says.
    ///
    /// # Errors
    /// [`KvQuantError::HeadDim`] if a layer's heads are not whole groups.
    pub fn quantized(mut self, how: KvQuantization) -> Result<Self, KvQuantError> {
        let layer = |&(group, _): &(usize, usize)| {
            let LayerGroup { shape, policy, .. } = self.groups[group];
            LayerKv { kv_heads: shape.kv_heads, head_dim: shape.head_dim, policy }
        };
        how.check(&self.layers.iter().map(layer).collect::<Vec<_>>())?;
        self.quantization = Some(how);
        Ok(self)
    }

    /// How a sequence of `tokens` is quantized at rest: until a token behind the start is run it holds floats.
    pub(super) fn quant_at(&self, tokens: usize) -> Option<KvQuant> {
        self.quantization.filter(|how| tokens > how.start()).map(KvQuantization::quant)
    }

    /// Bytes that one more token takes in all full-attention layers (windows stop growing), quantized if the spec says
    /// so and the start is passed.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let full = self.groups.iter().filter(|g| g.policy == Policy::Full);
        full.map(|g| g.block_bytes(self.quant_at(usize::MAX))).sum::<usize>() / BLOCK
    }

    /// Bytes that one sequence of `tokens` holds at rest, over all groups, and its states.
    #[must_use]
    pub fn bytes_at(&self, tokens: usize) -> usize {
        let held = |g: &LayerGroup| tokens.div_ceil(BLOCK) - g.policy.unseen_blocks(tokens).len();
        let states = match self.state_floats() * size_of::<f32>() {
            0 => 0,
            bytes => bytes * state::points(0, tokens).count(),
        };
        let blocks = self.groups.iter().map(|g| g.block_bytes(self.quant_at(tokens)) * held(g));
        blocks.sum::<usize>() + states
    }

    /// The most that one sequence has held at rest when it has come to `tokens`: that may have been the floats before
    /// they were quantized.
    #[must_use]
    pub fn peak_bytes(&self, tokens: usize) -> usize {
        let floats = self.quantization.map_or(tokens, |how| tokens.min(how.start()));
        self.bytes_at(tokens).max(self.bytes_at(floats))
    }
}
