//! Where tensors live and ops run. Today that is the CPU: kernels of one ISA on one pool of threads, and a store
//! of buffers that steps reuse.

use lmx_kernels::{Exec, Isa};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A cheap handle on a device; clones share threads and buffers.
#[derive(Clone, Debug)]
pub struct Device(Arc<Cpu>);

#[derive(Debug)]
struct Cpu {
    exec: Exec,
    /// Buffers of dropped tensors, for the next ones: a fresh large allocation would cost a page fault every
    /// 4 KiB of each activation of each step.
    spare: Mutex<Vec<Vec<f32>>>,
}

/// More spare buffers than a forward pass has tensors alive at once are not kept.
const SPARE_MAX: usize = 32;

impl Device {
    /// The CPU, with `threads` threads (0 is taken as 1) running kernels of `isa`.
    #[must_use]
    pub fn cpu(isa: Isa, threads: usize) -> Self {
        Self(Arc::new(Cpu { exec: Exec::new(isa, threads), spare: Mutex::new(Vec::new()) }))
    }

    /// How this device runs kernels.
    #[must_use]
    pub fn exec(&self) -> &Exec {
        &self.0.exec
    }

    /// Bytes per second that the device's threads read from memory: a figure for each pass over a buffer of `bytes`, which
    /// is allocated and written first. There is one pass at least, and no further one after `time`.
    #[must_use]
    pub fn read_bandwidth(&self, bytes: usize, time: Duration) -> Vec<f64> {
        lmx_kernels::read_bandwidth(self.exec(), bytes, time)
    }

    /// A buffer of `len` values, whose content is whatever an earlier tensor left.
    pub(crate) fn take(&self, len: usize) -> Vec<f32> {
        let mut spare = self.0.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |b: &Vec<f32>| b.capacity() >= len && b.capacity() / 4 <= len;
        let best = (0..spare.len()).filter(|&i| fits(&spare[i])).min_by_key(|&i| spare[i].capacity());
        let mut buffer = best.map(|i| spare.swap_remove(i)).unwrap_or_default();
        drop(spare);
        buffer.resize(len, 0.0);
        buffer
    }

    pub(crate) fn give(&self, buffer: Vec<f32>) {
        let mut spare = self.0.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_MAX {
            spare.push(buffer);
        }
    }
}
