//! Working memory that each thread keeps from call to call.

use crate::AlignedBytes;
use std::cell::Cell;

thread_local! {
    static KEPT: Cell<Option<AlignedBytes>> = const { Cell::new(None) };
}

/// Runs `f` with `len` floats of unspecified values, aligned to 64 bytes.
///
/// Kernels ask for bounded amounts (their tiles), so what a thread keeps is small.
pub(crate) fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let bytes = len * size_of::<f32>();
    // Taken out while in use: a nested call finds nothing and allocates its own.
    let mut memory = match KEPT.take() {
        Some(memory) if memory.len() >= bytes => memory,
        _ => AlignedBytes::zeroed(bytes),
    };
    // SAFETY: the bytes are initialised, 64-aligned, and any bits are a valid f32.
    let floats = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<f32>(), len) };
    let result = f(floats);
    KEPT.set(Some(memory));
    result
}
