//! Replays mutated files through a parser: each mutation must end within a second, in little memory and without a
//! panic. Integration tests of several crates include this module by path; a fuzz target's corpus is the seed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long one input may take.
const SECONDS_MAX: Duration = Duration::from_secs(1);
/// How much memory one input may take beyond what was there, in bytes.
const MEMORY_MAX: isize = 64 << 20;

/// Runs `parse`, which tells whether it accepted its input, on every file of `corpus` and on `mutations` mutations of
/// them, always the same ones.
///
/// # Panics
/// If an input panics, is too slow or takes too much memory; the input is then left in the system's folder for
/// temporary files, under a name that the message tells. Also if nearly all mutations are accepted, or nearly none: then
/// they test nothing.
pub(crate) fn replay(corpus: &Path, mutations: usize, parse: impl Fn(&[u8]) -> bool) {
    let mut files: Vec<_> = std::fs::read_dir(corpus)
        .unwrap_or_else(|error| panic!("{}: {error}", corpus.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", corpus.display());
    let seeds: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    for seed in &seeds {
        check(seed, &parse);
    }
    let (mut random, mut accepted) = (Random(0x6c6d78), 0);
    for number in 0..mutations {
        let mut input = seeds[number % seeds.len()].clone();
        for _ in 0..=random.below(4) {
            mutate(&mut input, &seeds, &mut random);
        }
        accepted += usize::from(check(&input, &parse));
    }
    let few = mutations / 100;
    assert!((few..=mutations - few).contains(&accepted), "{accepted} of {mutations} mutations were accepted");
}

fn check(input: &[u8], parse: &impl Fn(&[u8]) -> bool) -> bool {
    let keep = || {
        let path = std::env::temp_dir().join(format!("lmx-hostile-{}", std::process::id()));
        std::fs::write(&path, input).unwrap();
        path
    };
    let (start, before) = (Instant::now(), Memory::start());
    let result = catch_unwind(AssertUnwindSafe(|| parse(input)));
    let (time, memory) = (start.elapsed(), Memory::peak() - before);
    let accepted = result.unwrap_or_else(|panic| {
        eprintln!("{} holds an input that panics", keep().display());
        resume_unwind(panic)
    });
    assert!(time <= SECONDS_MAX, "{} takes {time:?}", keep().display());
    assert!(memory <= MEMORY_MAX, "{} takes {memory} bytes of memory", keep().display());
    accepted
}

/// Changes one thing about `input`.
fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len().max(1)).min(input.len());
    let end = (at + random.below(64)).min(input.len());
    match random.below(9) {
        0 => input.truncate(at),
        1 => drop(input.drain(at..end)),
        2 => {
            let copy = input[at..end].to_vec();
            input.splice(at..at, copy);
        }
        3 => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len().max(1)).min(other.len());
            let to = (from + random.below(256)).min(other.len());
            input.splice(at..at, other[from..to].iter().copied());
        }
        4 => overwrite(input, at, &INTEGERS[random.below(INTEGERS.len())].to_le_bytes()),
        5 => overwrite(input, at, &(INTEGERS[random.below(INTEGERS.len())] as u32).to_le_bytes()),
        6 => replace_value(input, at, WORDS[random.below(WORDS.len())]),
        7 => overwrite(input, at, &[random.next() as u8]),
        _ => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
    }
}

/// Numbers at the edges of what lengths, counts and offsets can be.
const INTEGERS: [u64; 12] = [
    0,
    1,
    0x7f,
    0xffff,
    1 << 20,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    1 << 40,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

/// Values that JSON and templates can hold.
const WORDS: [&str; 16] = [
    "0",
    "-1",
    "1e308",
    "1e-320",
    "4294967296",
    "2147483647",
    "99999999999999999999",
    "0.5",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[[[[[[[[[[[[[[[",
    "\"\u{feff}\\ud800\"",
    "{{ range(100000) }}",
];

fn overwrite(input: &mut [u8], at: usize, bytes: &[u8]) {
    for (to, from) in input.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}

/// Puts `word` in place of the number or word that is the next one at or after `at`.
fn replace_value(input: &mut Vec<u8>, at: usize, word: &str) {
    let part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'+' | b'_');
    let Some(start) = input.iter().skip(at).position(part).map(|offset| at + offset) else { return };
    let length = input.iter().skip(start).take_while(|byte| part(byte)).count();
    input.splice(start..start + length, word.bytes());
}

/// SplitMix64: the mutations are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Counts what this thread holds: tests run side by side in one process.
struct Memory;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

#[global_allocator]
static MEMORY: Memory = Memory;

impl Memory {
    /// Forgets the peak; what is held now.
    fn start() -> isize {
        PEAK.set(HELD.get());
        HELD.get()
    }

    fn peak() -> isize {
        PEAK.get()
    }

    fn count(bytes: isize) {
        // While a thread ends its locals may be gone; nothing measures then.
        let _ = HELD.try_with(|held| {
            held.set(held.get() + bytes);
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
        });
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        Self::count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new may exist at the same time.
        Self::count(size as isize);
        // SAFETY: the caller keeps the contract of `realloc`.
        let new = unsafe { System.realloc(pointer, layout, size) };
        Self::count(-(layout.size() as isize));
        new
    }
}
