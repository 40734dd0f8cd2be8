//! Memory whose start suits SIMD loads.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const ALIGN: usize = 64;
/// From this length on bytes are mapped.
const MAPPED_MIN: usize = 4 << 20;

/// Zeroed bytes aligned to 64.
///
/// Large ones are mapped afresh with huge pages asked for: weights that a decode step streams through would
/// otherwise cost a page walk every 4 KiB. Their pages come into being where they are first written.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
}

impl AlignedBytes {
    /// `len` zero bytes.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        let start = if Self::is_mapped(len) {
            map(len)
        } else {
            // SAFETY: the layout has a size of at least 1.
            unsafe { alloc_zeroed(layout) }
        };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, len }
    }

    fn is_mapped(len: usize) -> bool {
        cfg!(target_os = "linux") && len >= MAPPED_MIN
    }

    fn layout(len: usize) -> Layout {
        // A length beyond isize::MAX cannot be asked for: callers bound it by checked file or pool sizes.
        match Layout::from_size_align(len.max(1), ALIGN) {
            Ok(layout) => layout,
            Err(_) => handle_alloc_error(Layout::new::<u8>()),
        }
    }
}

/// Fresh zero pages; null if the system has none.
#[cfg(target_os = "linux")]
fn map(len: usize) -> *mut u8 {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new private mapping at an address of the system's choice touches no memory in use.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return std::ptr::null_mut();
    }
    // SAFETY: the range was just mapped; the advice changes no content, a refusal is harmless.
    unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
    start.cast()
}

#[cfg(not(target_os = "linux"))]
fn map(_: usize) -> *mut u8 {
    std::ptr::null_mut()
}

impl Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` initialised bytes while `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if Self::is_mapped(self.len) {
            #[cfg(target_os = "linux")]
            // SAFETY: mapped in `zeroed` with this same length.
            unsafe {
                libc::munmap(self.start.as_ptr().cast(), self.len);
            }
            return;
        }
        // SAFETY: allocated in `zeroed` with this same layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.len)) }
    }
}

// SAFETY: plain owned bytes.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access is read-only.
unsafe impl Sync for AlignedBytes {}

impl std::fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBytes({} bytes)", self.len)
    }
}
