//! The thread pool of the kernels: workers that spin for a moment between regions, then park.
//!
//! A decode step of a small model has some 200 parallel regions; a general-purpose pool costs 5 to 14 µs for
//! each, this one about half a microsecond. A region hands out its shares to whichever thread comes first, so a
//! worker that the system does not let run holds up nobody: the caller takes its share. Regions never nest: a
//! region started inside a region of the same pool, or while another thread runs one, is run by its caller alone.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Spins (of some 20 ns) before a waiting worker parks: longer than the serial gaps within a decode step.
const SPINS: u32 = 5_000;
/// Spins before the caller of a region lets other threads run while it waits for the last share.
const SPINS_BEFORE_YIELD: u32 = 500;
/// The most pieces of memory that can be announced.
const AHEAD_PARTS: usize = 3;
/// The most that a worker reads ahead, in bytes: a part of its second-level cache.
const AHEAD_MAX: usize = 512 << 10;
/// The most threads of a pool.
const THREADS_MAX: usize = 1 << 15;

type Job = *const (dyn Fn(usize) + Sync);

#[repr(align(128))]
struct Line<T>(T);

/// What a region has to hand out, in one word: its number (32 bits), its shares (16), the next share (16).
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ticket(u64);

impl Ticket {
    fn new(region: u32, shares: usize, next: usize) -> Self {
        Self(u64::from(region) << 32 | (shares as u64) << 16 | next as u64)
    }

    fn region(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn shares(self) -> usize {
        (self.0 >> 16 & 0xFFFF) as usize
    }

    fn next(self) -> usize {
        (self.0 & 0xFFFF) as usize
    }
}

/// The items of a region that are left to one share, in one word: the first (32 bits) and the end (32).
struct Queue(AtomicU64);

impl Queue {
    fn set(&self, items: Range<usize>) {
        self.0.store((items.start as u64) << 32 | items.end as u64, Ordering::Relaxed);
    }

    /// Takes the first item or, for a thread whose own queue is empty, the last.
    fn take(&self, last: bool) -> Option<usize> {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let (first, end) = (now >> 32, now & 0xFFFF_FFFF);
            if first >= end {
                return None;
            }
            let (item, left) = if last { (end - 1, now - 1) } else { (first, now + (1 << 32)) };
            match self.0.compare_exchange_weak(now, left, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(item as usize),
                Err(changed) => now = changed,
            }
        }
    }
}

/// Memory that a region to come will read, for [`Pool::read_ahead`]; a race spoils no more than a hint.
#[derive(Default)]
struct Ahead {
    /// Counts the calls.
    number: AtomicUsize,
    /// Start and length.
    parts: [(AtomicUsize, AtomicUsize); AHEAD_PARTS],
}

/// One worker's reading of an [`Ahead`].
#[derive(Default)]
struct Reader {
    number: usize,
    parts: [Range<usize>; AHEAD_PARTS],
}

impl Reader {
    /// Fetches some of what worker `id` of `threads` has to read, if anything is left.
    fn step(&mut self, ahead: &Ahead, id: usize, threads: usize) {
        const LINE: usize = 64;
        const LINES: usize = 8;
        let number = ahead.number.load(Ordering::Acquire);
        if number != self.number {
            *self = Self { number, parts: ahead.stretch(id, threads) };
        }
        let Some(part) = self.parts.iter_mut().find(|part| part.start < part.end) else { return };
        for _ in 0..LINES {
            fetch(part.start);
            part.start += LINE;
        }
    }
}

/// Asks for the cache line at `address`, into the second cache.
fn fetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: part of the baseline; a fetch of any address at all has no effect but on the caches.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(address)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

impl Ahead {
    /// The stretch of worker `id` of `threads`, as [`Pool::for_each`] deals it out, as far as the cache has room.
    fn stretch(&self, id: usize, threads: usize) -> [Range<usize>; AHEAD_PARTS] {
        let parts = self.parts.each_ref().map(|(start, len)| {
            let start = start.load(Ordering::Relaxed);
            start..start.saturating_add(len.load(Ordering::Relaxed))
        });
        let total: usize = parts.iter().map(Range::len).sum();
        let mut skip = total / threads * id;
        let mut left = (total / threads).min(AHEAD_MAX);
        parts.map(|part| {
            let first = skip.min(part.len());
            skip -= first;
            let len = left.min(part.len() - first);
            left -= len;
            part.start + first..part.start + first + len
        })
    }
}

struct Shared {
    ticket: Line<AtomicU64>,
    ahead: Line<Ahead>,
    /// One for each share; written only by the thread that holds `busy`, between regions.
    queues: Vec<Line<Queue>>,
    /// Shares of the current region that workers have finished.
    done: Line<AtomicUsize>,
    parked: Line<AtomicUsize>,
    panicked: AtomicBool,
    stop: AtomicBool,
    busy: AtomicBool,
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: `job` is written only by the thread that holds `busy`, while no share is handed out, before the ticket
// is released; it is read only by threads that acquired the ticket by taking a share of that region.
unsafe impl Sync for Shared {}
// SAFETY: the raw job pointer is only dereferenced while its region's caller waits in `run`.
unsafe impl Send for Shared {}

impl Shared {
    /// Takes the next share of the current region, if one is left.
    fn take(&self) -> Option<usize> {
        let mut ticket = Ticket(self.ticket.0.load(Ordering::SeqCst));
        while ticket.next() < ticket.shares() {
            let taken = Ticket::new(ticket.region(), ticket.shares(), ticket.next() + 1);
            match self.ticket.0.compare_exchange(ticket.0, taken.0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(ticket.next()),
                Err(now) => ticket = Ticket(now),
            }
        }
        None
    }
}

/// A fixed set of threads that run one function together.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads in all, the caller's included; 0 is taken as 1. If the system refuses a
    /// thread the pool is that much smaller.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = threads.clamp(1, THREADS_MAX);
        let shared = Arc::new(Shared {
            ticket: Line(AtomicU64::new(0)),
            ahead: Line(Ahead::default()),
            queues: (0..threads).map(|_| Line(Queue(AtomicU64::new(0)))).collect(),
            done: Line(AtomicUsize::new(0)),
            parked: Line(AtomicUsize::new(0)),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        });
        let workers = (1..threads)
            .map_while(|id| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("lmx-{id}"))
                    .spawn(move || work(&shared, id, threads))
                    .ok()
            })
            .collect();
        Self { shared, workers }
    }

    /// The number of threads, the caller's included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(share)` once for each share `0..threads` and waits for all. No two shares are run by one thread
    /// at the same time; which thread runs which is open, but for share 0, which the caller runs.
    ///
    /// # Panics
    /// If `f` panicked in any share.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if !self.enter() {
            return (0..self.threads()).for_each(f);
        }
        self.region(f);
    }

    /// Takes the pool for a region; false if there are no workers, or another region runs.
    fn enter(&self) -> bool {
        !self.workers.is_empty() && !self.shared.busy.swap(true, Ordering::Acquire)
    }

    /// [`Pool::run`] after a successful [`Pool::enter`], which it undoes.
    fn region(&self, f: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; this function does not return before all shares are done.
        let job: Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync), Job>(f) };
        shared.done.0.store(0, Ordering::Relaxed);
        // SAFETY: `busy` is held, and the last region has no share left, so nobody reads the job.
        unsafe { *shared.job.get() = Some(job) };
        let region = Ticket(shared.ticket.0.load(Ordering::Relaxed)).region().wrapping_add(1);
        shared.ticket.0.store(Ticket::new(region, self.threads(), 1).0, Ordering::SeqCst);
        if shared.parked.0.load(Ordering::SeqCst) > 0 {
            for worker in &self.workers {
                worker.thread().unpark();
            }
        }
        let mut own = catch_unwind(AssertUnwindSafe(|| f(0)));
        let mut finished = 1;
        while let Some(share) = shared.take() {
            own = own.and(catch_unwind(AssertUnwindSafe(|| f(share))));
            finished += 1;
        }
        let mut spins = 0;
        while shared.done.0.load(Ordering::Acquire) + finished != self.threads() {
            spins += 1;
            if spins % SPINS_BEFORE_YIELD == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let other = shared.panicked.swap(false, Ordering::Relaxed);
        shared.busy.store(false, Ordering::Release);
        match own {
            Err(payload) => resume_unwind(payload),
            Ok(()) if other => resume_unwind(Box::new("a worker of the kernel pool panicked")),
            Ok(()) => {}
        }
    }

    /// Says what a region to come will read. Workers that wait for it fetch the beginning of what
    /// [`Pool::for_each`] will give them into their caches, so that memory does not rest while the caller works
    /// alone. More than three parts are not looked at.
    pub fn read_ahead(&self, parts: &[&[u8]]) {
        let ahead = &self.shared.ahead.0;
        for (i, (start, len)) in ahead.parts.iter().enumerate() {
            let part = parts.get(i).copied().unwrap_or_default();
            start.store(part.as_ptr().addr(), Ordering::Relaxed);
            len.store(part.len(), Ordering::Relaxed);
        }
        ahead.number.fetch_add(1, Ordering::Release);
    }

    /// Runs `f` on disjoint ranges that cover `0..count`, one range a share (none where it would be empty),
    /// cut at multiples of `step`. The split depends on the number of threads: use it only where each item's
    /// result does not depend on its neighbours.
    pub fn for_ranges(&self, count: usize, step: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
        let step = step.max(1);
        let (chunks, threads) = (count.div_ceil(step), self.threads());
        if chunks <= 1 || threads == 1 {
            if count > 0 {
                f(0..count);
            }
            return;
        }
        self.run(&|share| {
            let first = chunks * share / threads * step;
            let last = (chunks * (share + 1) / threads * step).min(count);
            if first < last {
                f(first..last);
            }
        });
    }

    /// Runs `f(item)` for each of `0..count`. Each share works upwards through a stretch of its own, so that what
    /// it reads follows on what it read before, and then helps the others from their ends.
    pub fn for_each(&self, count: usize, f: &(dyn Fn(usize) + Sync)) {
        if count <= 1 || count > u32::MAX as usize || !self.enter() {
            return (0..count).for_each(f);
        }
        let (threads, queues) = (self.threads(), &self.shared.queues);
        for (share, queue) in queues.iter().enumerate().take(threads) {
            queue.0.set(count * share / threads..count * (share + 1) / threads);
        }
        self.region(&|share| {
            for helped in 0..threads {
                let queue = &queues[(share + helped) % threads].0;
                while let Some(item) = queue.take(helped > 0) {
                    f(item);
                }
            }
        });
    }
}

fn work(shared: &Shared, id: usize, threads: usize) {
    let mut spins = 0;
    let mut reader = Reader::default();
    while !shared.stop.load(Ordering::SeqCst) {
        if let Some(share) = shared.take() {
            // SAFETY: the ticket was acquired, and its region lasts until this share is done: the job is in place.
            if let Some(job) = unsafe { *shared.job.get() } {
                // SAFETY: the caller of `run` keeps the closure alive until all shares are done.
                let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(share) }));
                if result.is_err() {
                    shared.panicked.store(true, Ordering::Relaxed);
                }
            }
            shared.done.0.fetch_add(1, Ordering::Release);
            spins = 0;
            continue;
        }
        spins += 1;
        if spins < SPINS {
            reader.step(&shared.ahead.0, id, threads);
            std::hint::spin_loop();
            continue;
        }
        shared.parked.0.fetch_add(1, Ordering::SeqCst);
        // Looked at again after `parked` is published, so that a wake-up cannot be missed.
        let ticket = Ticket(shared.ticket.0.load(Ordering::SeqCst));
        if ticket.next() >= ticket.shares() && !shared.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        shared.parked.0.fetch_sub(1, Ordering::SeqCst);
        spins = 0;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of jobs, so joining cannot fail in a way that matters here.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

#[cfg(test)]
mod tests {
    use super::{AHEAD_MAX, Ahead, Pool};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_item_runs_exactly_once() {
        for threads in [0, 1, 2, 3] {
            let pool = Pool::new(threads);
            for count in [0, 1, 2, 7, 100] {
                let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(count, &|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                pool.for_ranges(count, 3, &|range| {
                    for i in range {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 2), "{threads} threads, {count}");
            }
        }
    }

    #[test]
    fn a_share_that_is_done_helps_the_others() {
        let pool = Pool::new(2);
        let (items, slow) = (100, AtomicUsize::new(0));
        let start = std::time::Instant::now();
        let helped = AtomicUsize::new(0);
        pool.for_each(items, &|item| {
            if item == 0 {
                // Share 0 stays here until the other one has done all the rest.
                while helped.load(Ordering::Relaxed) < items - 1 && start.elapsed().as_secs() < 60 {
                    std::thread::yield_now();
                }
                slow.fetch_add(1, Ordering::Relaxed);
            } else {
                helped.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!((slow.into_inner(), helped.into_inner()), (1, items - 1));
        assert!(start.elapsed().as_secs() < 60, "nobody helped");
    }

    #[test]
    fn workers_read_ahead_what_they_will_be_given() {
        let ahead = Ahead::default();
        let set = |lens: [usize; 3]| {
            for ((start, len), (i, value)) in ahead.parts.iter().zip(lens.into_iter().enumerate()) {
                start.store(i << 30, Ordering::Relaxed);
                len.store(value, Ordering::Relaxed);
            }
        };
        set([1000, 200, 600]);
        assert_eq!(ahead.stretch(1, 2), [900..1000, (1 << 30)..(1 << 30) + 200, (2 << 30)..(2 << 30) + 600]);
        assert_eq!(ahead.stretch(1, 3)[0], 600..1000);
        set([4 * AHEAD_MAX, 0, 0]);
        assert_eq!(ahead.stretch(1, 2)[0], 2 * AHEAD_MAX..3 * AHEAD_MAX);
        set([0, 0, 0]);
        assert!(ahead.stretch(1, 2).iter().all(std::ops::Range::is_empty));

        // The announced memory may be gone by the time it is read.
        let pool = Pool::new(2);
        for len in [0, 1, 100_000] {
            pool.read_ahead(&[&vec![0; len], &[], &[]]);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn parked_workers_wake_up() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let sum = AtomicUsize::new(0);
            pool.run(&|share| {
                sum.fetch_add(share + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(&|share| assert!(share == 0, "share 1 fails"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(&|_| {
            sum.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn more_threads_than_cores_lose_no_share() {
        let pool = Pool::new(5);
        let total = AtomicUsize::new(0);
        for region in 1..2000 {
            pool.run(&|share| {
                total.fetch_add(region * (share + 1), Ordering::Relaxed);
            });
            assert_eq!(total.swap(0, Ordering::Relaxed), region * 15);
        }
    }

    #[test]
    fn a_nested_region_runs_on_its_caller() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.run(&|_| {
            pool.run(&|_| {
                sum.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.load(Ordering::Relaxed), 4);
    }
}
