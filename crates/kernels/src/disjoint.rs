//! A mutable slice that the threads of one parallel region write at once, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// A `&mut [T]` that can be shared by threads which write disjoint parts of it.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, whose contract makes the parts of different threads disjoint.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// The address of element `index`, for prefetching only.
    pub(crate) fn address(&self, index: usize) -> *const T {
        self.start.wrapping_add(index)
    }

    /// The part `range` of the slice.
    ///
    /// # Safety
    /// While the returned slice lives no other part that overlaps `range` may exist.
    #[allow(clippy::mut_from_ref, reason = "the contract of this function makes the result unique")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: in bounds as just checked, and unique by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
