//! Blocks and the budget that they are counted against.

use lmx_tensor::kernels::AlignedBytes;
pub use lmx_tensor::kernels::attention::BLOCK;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes of living blocks against a limit.
#[derive(Debug)]
pub struct BlockBudget {
    used: AtomicUsize,
    limit: usize,
}

impl BlockBudget {
    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), limit })
    }

    /// Bytes of the blocks that are alive.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
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
}

impl Block {
    /// A zeroed block of `bytes`, or `None` if the budget does not allow it.
    pub(super) fn new(bytes: usize, budget: &Arc<BlockBudget>) -> Option<Self> {
        let reserved = Reserved::new(bytes, budget)?;
        Some(Self { data: AlignedBytes::zeroed(bytes), reserved })
    }

    /// A copy, counted like any other block.
    pub(super) fn copy(&self) -> Option<Self> {
        let mut copy = Self::new(self.data.len(), &self.reserved.budget)?;
        copy.data.copy_from_slice(&self.data);
        Some(copy)
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.data.len()
    }

    /// The slab of the group's layer `layer`, `bytes` long.
    pub(super) fn slab(&self, layer: usize, bytes: usize) -> &[u8] {
        &self.data[layer * bytes..(layer + 1) * bytes]
    }

    pub(super) fn slab_mut(&mut self, layer: usize, bytes: usize) -> &mut [u8] {
        &mut self.data[layer * bytes..(layer + 1) * bytes]
    }
}
