//! Blocks and the budget that they are counted against.

use super::LayerGroup;
use lmx_tensor::kernels::AlignedBytes;
pub use lmx_tensor::kernels::attention::BLOCK;
use lmx_tensor::kernels::attention::{KvQuant, quantize_slab};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Counts the bytes of living blocks against a limit.
#[derive(Debug)]
pub struct BlockBudget {
    used: AtomicUsize,
    blocks: AtomicUsize,
    limit: usize,
}

impl BlockBudget {
    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), blocks: AtomicUsize::new(0), limit })
    }

    /// Bytes of the blocks that are alive, and of recurrent states.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// How many blocks are alive.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// The most bytes that may be alive at once.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }
}

/// A share of a budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    bytes: usize,
    budget: Arc<BlockBudget>,
}

impl Reserved {
    /// `bytes` of the budget, or `None` if it does not have them.
    pub(super) fn new(bytes: usize, budget: &Arc<BlockBudget>) -> Option<Self> {
        let within = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= budget.limit);
        budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).ok()?;
        Some(Self { bytes, budget: Arc::clone(budget) })
    }

    /// Gives all but `bytes` back.
    fn shrink(&mut self, bytes: usize) {
        self.budget.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The keys and values of [`BLOCK`] consecutive positions in all layers of a group.
#[derive(Debug)]
pub(super) struct Block {
    data: AlignedBytes,
    reserved: Reserved,
    /// What a sequence that shared this block of floats has made of it, as long as another holds that.
    quantized: Mutex<Weak<Block>>,
}

impl Drop for Block {
    fn drop(&mut self) {
        self.reserved.budget.blocks.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Block {
    /// A zeroed block of `bytes`, or `None` if the budget does not allow it.
    pub(super) fn new(bytes: usize, budget: &Arc<BlockBudget>) -> Option<Self> {
        let reserved = Reserved::new(bytes, budget)?;
        budget.blocks.fetch_add(1, Ordering::Relaxed);
        Some(Self { data: AlignedBytes::zeroed(bytes), reserved, quantized: Mutex::default() })
    }

    /// A block of what another one held; `None` if the budget does not allow it.
    pub(super) fn of(bytes: &[u8], budget: &Arc<BlockBudget>) -> Option<Self> {
        let mut block = Self::new(bytes.len(), budget)?;
        block.data.copy_from_slice(bytes);
        Some(block)
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.data.len()
    }

    /// All that it holds.
    pub(super) fn data(&self) -> &[u8] {
        &self.data
    }

    /// A copy, counted like any other block.
    pub(super) fn copy(&self) -> Option<Self> {
        Self::of(&self.data, &self.reserved.budget)
    }

    /// The block of codes that another sequence has made of this one.
    pub(super) fn known_quantized(&self) -> Option<Arc<Self>> {
        self.quantized.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Turns the first `filled` tokens of a block of floats into codes, and gives the rest of its memory back. Both
    /// are there for a moment, but at rest it never takes more than it did.
    pub(super) fn quantize(&mut self, group: &LayerGroup, quant: KvQuant, filled: usize) {
        let mut data = AlignedBytes::zeroed(group.block_bytes(Some(quant)));
        quantize_slabs(group, quant, &self.data, filled, &mut data);
        self.reserved.shrink(data.len());
        self.data = data;
    }

    /// A block of the codes of the first `filled` tokens of a block of floats, or `None` if the budget does not
    /// allow it.
    pub(super) fn quantized_beside(
        &self,
        group: &LayerGroup,
        quant: KvQuant,
        filled: usize,
    ) -> Option<Arc<Self>> {
        let mut block = Self::new(group.block_bytes(Some(quant)), &self.reserved.budget)?;
        quantize_slabs(group, quant, &self.data, filled, &mut block.data);
        let block = Arc::new(block);
        // One that is not full will be written to by one sequence alone.
        if filled == BLOCK {
            *self.quantized.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&block);
        }
        Some(block)
    }

    /// The slab of the group's layer `layer`, `bytes` long.
    pub(super) fn slab(&self, layer: usize, bytes: usize) -> &[u8] {
        &self.data[layer * bytes..(layer + 1) * bytes]
    }

    pub(super) fn slab_mut(&mut self, layer: usize, bytes: usize) -> &mut [u8] {
        // What others made of it is no longer true.
        *self.quantized.get_mut().unwrap_or_else(PoisonError::into_inner) = Weak::new();
        &mut self.data[layer * bytes..(layer + 1) * bytes]
    }
}

/// All layers of a block.
fn quantize_slabs(group: &LayerGroup, quant: KvQuant, from: &[u8], filled: usize, to: &mut [u8]) {
    let slabs = to.chunks_exact_mut(quant.slab_bytes(&group.shape));
    for (from, to) in from.chunks_exact(group.shape.bytes()).zip(slabs) {
        quantize_slab(&group.shape, quant, from, filled, to);
    }
}
