//! The thread pool of the kernels: a barrier whose workers spin for a moment, then park.
//!
//! A decode step of a small model has some 200 parallel regions; a general-purpose pool costs 5 to 14 µs for
//! each, this one about half a microsecond. The caller is worker 0. Regions never nest: a region started inside
//! a region of the same pool, or while another thread runs one, is run by its caller alone.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Spins before a waiting worker parks: about 50 µs, longer than the serial gaps within a decode step.
const SPINS: u32 = 20_000;

type Job = *const (dyn Fn(usize) + Sync);

#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    epoch: Line<AtomicUsize>,
    done: Line<AtomicUsize>,
    parked: Line<AtomicUsize>,
    panicked: AtomicBool,
    stop: AtomicBool,
    busy: AtomicBool,
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: `job` is written only by the thread that holds `busy`, before the epoch's release increment, and read
// only by workers after they acquire that increment and before they release `done`.
unsafe impl Sync for Shared {}
// SAFETY: the raw job pointer is only dereferenced while its region's caller waits in `run`.
unsafe impl Send for Shared {}

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
        let shared = Arc::new(Shared {
            epoch: Line(AtomicUsize::new(0)),
            done: Line(AtomicUsize::new(0)),
            parked: Line(AtomicUsize::new(0)),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        });
        let workers = (1..threads.max(1))
            .map_while(|id| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new().name(format!("lmx-{id}")).spawn(move || work(&shared, id)).ok()
            })
            .collect();
        Self { shared, workers }
    }

    /// The number of threads, the caller's included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(worker)` once for each worker `0..threads`, worker 0 on the calling thread, and waits for all.
    ///
    /// # Panics
    /// If `f` panicked in any worker.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || self.shared.busy.swap(true, Ordering::Acquire) {
            for worker in 0..self.threads() {
                f(worker);
            }
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; this function does not return before all workers are done.
        let job: Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync), Job>(f) };
        shared.done.0.store(0, Ordering::Relaxed);
        // SAFETY: `busy` is held, and no worker reads the job before the epoch moves.
        unsafe { *shared.job.get() = Some(job) };
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        if shared.parked.0.load(Ordering::SeqCst) > 0 {
            for worker in &self.workers {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        while shared.done.0.load(Ordering::Acquire) != self.workers.len() {
            std::hint::spin_loop();
        }
        let other = shared.panicked.swap(false, Ordering::Relaxed);
        shared.busy.store(false, Ordering::Release);
        match own {
            Err(payload) => resume_unwind(payload),
            Ok(()) if other => resume_unwind(Box::new("a worker of the kernel pool panicked")),
            Ok(()) => {}
        }
    }

    /// Runs `f` on disjoint ranges that cover `0..count`, one range a worker (none where it would be empty),
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
        self.run(&|worker| {
            let first = chunks * worker / threads * step;
            let last = (chunks * (worker + 1) / threads * step).min(count);
            if first < last {
                f(first..last);
            }
        });
    }

    /// Runs `f(item)` for each of `0..count`, items handed out one at a time to whichever thread is free.
    pub fn for_each(&self, count: usize, f: &(dyn Fn(usize) + Sync)) {
        if count <= 1 || self.workers.is_empty() {
            for item in 0..count {
                f(item);
            }
            return;
        }
        let next = AtomicUsize::new(0);
        self.run(&|_| {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= count {
                    return;
                }
                f(item);
            }
        });
    }
}

fn work(shared: &Shared, id: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.0.load(Ordering::Acquire) == seen {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            shared.parked.0.fetch_add(1, Ordering::SeqCst);
            // The epoch is looked at again after `parked` is published, so that a wake-up cannot be missed.
            if shared.epoch.0.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
            shared.parked.0.fetch_sub(1, Ordering::SeqCst);
        }
        seen += 1;
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the epoch's increment was acquired, so the job of this region is in place.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: the caller of `run` keeps the closure alive until `done` reaches the number of workers.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(id) }));
            if result.is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.done.0.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
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
    use super::Pool;
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
    fn parked_workers_wake_up() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let sum = AtomicUsize::new(0);
            pool.run(&|worker| {
                sum.fetch_add(worker + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(&|worker| assert!(worker == 0, "worker 1 fails"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(&|_| {
            sum.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 2);
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
