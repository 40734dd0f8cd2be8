//! Memory whose start suits SIMD loads.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

const ALIGN: usize = 64;
/// What the system's allocator aligns to anyway. Only then does it give zero bytes as the kernel maps them, untouched;
/// else it writes the zeros, and takes all page faults on the calling thread.
const HEAP_ALIGN: usize = 16;
/// From this length on bytes are mapped.
const MAPPED_MIN: usize = 4 << 20;
/// Size of a huge page. Where a length is a multiple of it, Linux (from 6.7 on) also maps at a multiple.
const HUGE: usize = 2 << 20;
/// Length of an arena's regions. Pages that nothing is written to cost no memory.
const REGION: usize = 128 << 20;

/// Zeroed bytes aligned to 64.
///
/// Large ones are mapped afresh with huge pages asked for: weights that a decode step streams through would
/// otherwise cost a page walk every 4 KiB. Their pages come into being where they are first written.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    source: Source,
}

/// What bytes are a part of.
enum Source {
    /// An allocation that begins here.
    Heap(NonNull<u8>),
    /// Held until the last part is dropped.
    Region { _region: Arc<Region> },
}

impl AlignedBytes {
    /// `len` zero bytes.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        if cfg!(target_os = "linux") && len >= MAPPED_MIN {
            let region = Region::new(len);
            return Self { start: region.start, len, source: Source::Region { _region: Arc::new(region) } };
        }
        let layout = layout(len);
        // SAFETY: the layout has a size of at least 1.
        let heap = unsafe { alloc_zeroed(layout) };
        let Some(heap) = NonNull::new(heap) else { handle_alloc_error(layout) };
        // SAFETY: the layout has room for `len` bytes from each of the first `ALIGN` on.
        let start = unsafe { heap.add(heap.addr().get().wrapping_neg() % ALIGN) };
        Self { start, len, source: Source::Heap(heap) }
    }
}

/// Of an allocation that has `len` bytes behind an aligned place.
fn layout(len: usize) -> Layout {
    // A length beyond isize::MAX cannot be asked for: callers bound it by checked file or pool sizes.
    match Layout::from_size_align(len.saturating_add(ALIGN), HEAP_ALIGN) {
        Ok(layout) => layout,
        Err(_) => handle_alloc_error(Layout::new::<u8>()),
    }
}

/// Gives out bytes that stay as long as each other, such as the weights of a model, side by side, so that those of
/// small matrices lie in huge pages too. A region is unmapped when nothing of it is left.
#[derive(Debug, Default)]
pub struct Arena {
    /// The region that is being given out, and how much of it has been.
    open: Mutex<Option<(Arc<Region>, usize)>>,
}

impl Arena {
    /// `len` zero bytes aligned to 64.
    #[must_use]
    pub fn zeroed(&self, len: usize) -> AlignedBytes {
        if !cfg!(target_os = "linux") {
            return AlignedBytes::zeroed(len);
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, used) = match open.take() {
            Some((region, used)) if len <= region.len - used => (region, used),
            _ => (Arc::new(Region::new(len.max(REGION))), 0),
        };
        // SAFETY: `used` is at most the region's length.
        let start = unsafe { region.start.add(used) };
        let next = (used + len).next_multiple_of(ALIGN).min(region.len);
        *open = Some((Arc::clone(&region), next));
        AlignedBytes { start, len, source: Source::Region { _region: region } }
    }
}

/// Fresh zero pages.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is only lent in disjoint parts, each to one owner.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

#[cfg(target_os = "linux")]
impl Region {
    fn new(len: usize) -> Self {
        let whole = len.next_multiple_of(HUGE);
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new private mapping at an address of the system's choice touches no memory in use.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), whole, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            handle_alloc_error(layout(len));
        }
        let Some(pages) = NonNull::new(start.cast()) else { handle_alloc_error(layout(len)) };
        // SAFETY: the range was just mapped; the advice changes no content, a refusal is harmless.
        unsafe { libc::madvise(start, whole, libc::MADV_HUGEPAGE) };
        Self { start: pages, len: whole }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and all who had a part of it are gone.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Region {
    fn new(len: usize) -> Self {
        handle_alloc_error(layout(len))
    }
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
        if let Source::Heap(heap) = self.source {
            // SAFETY: allocated in `zeroed` with this same layout.
            unsafe { std::alloc::dealloc(heap.as_ptr(), layout(self.len)) }
        }
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

#[cfg(test)]
mod tests {
    use super::{ALIGN, AlignedBytes, Arena, MAPPED_MIN, REGION};

    #[test]
    fn bytes_are_zero_and_aligned_whatever_their_number() {
        for len in [0, 1, 63, 64, 65, 5000, 737_280, MAPPED_MIN, MAPPED_MIN + 1] {
            for mark in [1, 2] {
                let mut bytes = AlignedBytes::zeroed(len);
                assert_eq!((bytes.len(), bytes.as_ptr().align_offset(ALIGN)), (len, 0));
                assert!(bytes.iter().all(|byte| *byte == 0), "{len}, a second time");
                bytes.fill(mark);
            }
        }
    }

    #[test]
    fn an_arena_gives_out_zeros_side_by_side() {
        let arena = Arena::default();
        let lens = [1, 0, 100, REGION / 2, REGION / 2, REGION + 1, 64];
        let mut parts: Vec<AlignedBytes> = lens.iter().map(|len| arena.zeroed(*len)).collect();
        for (mark, (part, len)) in (1..).zip(parts.iter_mut().zip(lens)) {
            assert_eq!((part.len(), part.as_ptr().align_offset(ALIGN)), (len, 0));
            if let [first, .., last] = &mut part[..] {
                assert_eq!((*first, *last), (0, 0), "not written by another part");
                (*first, *last) = (mark, mark);
            }
        }
        parts.swap_remove(1);
        drop(arena);
        assert_eq!((parts[2].first(), parts[2].last()), (Some(&3), Some(&3)), "outlives the arena");
    }
}
