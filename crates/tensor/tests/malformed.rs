//! Files cut at every byte and ten thousand mutations of each format: every one is accepted or refused within a
//! second and 64 MB, none panics, and the two safetensors readers agree on them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is a failed test")]

mod build;
#[path = "../../../fuzz/entry/files.rs"]
mod untrusted;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmx_tensor::files::{Bytes, FileError};
use safetensors::SafeTensors;

const MUTATIONS: usize = 10_000;
const MEMORY_MAX: usize = 64 << 20;
const TIME_MAX: Duration = Duration::from_secs(1);

/// Counts the bytes in use, and the most since [`measured`] last looked.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let in_use = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(in_use, Ordering::Relaxed);
        // SAFETY: the caller's promise about the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise about pointer and layout.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tests take turns, so that each sees its own memory.
static TURN: Mutex<()> = Mutex::new(());

/// Runs one case and checks its time and memory.
fn measured<T>(case: usize, run: impl FnOnce() -> T) -> T {
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let start = Instant::now();
    let result = run();
    assert!(start.elapsed() < TIME_MAX, "case {case} took {:?}", start.elapsed());
    let taken = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    assert!(taken < MEMORY_MAX, "case {case} took {taken} bytes");
    result
}

/// A small generator of numbers: the high half of a linear congruence.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 32) as usize) % limit.max(1)
    }
}

/// Numbers that lengths, counts and offsets go wrong at.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    9,
    31,
    255,
    65_537,
    1 << 31,
    u32::MAX as u64,
    1 << 40,
    1 << 60,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// One to three changes of any kind.
fn mutate(valid: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..=numbers.below(3) {
        let at = numbers.below(bytes.len());
        let length = numbers.below(40).min(bytes.len() - at);
        let edge = EDGES[numbers.below(EDGES.len())];
        match numbers.below(9) {
            0 => bytes[at] = numbers.below(256) as u8,
            1 => bytes[at] ^= 1 << numbers.below(8),
            2 => overwrite(&mut bytes, at, &edge.to_le_bytes()),
            3 => overwrite(&mut bytes, at, &(edge as u32).to_le_bytes()),
            4 => bytes.truncate(at),
            5 => drop(bytes.drain(at..at + length)),
            6 => {
                let copy = bytes[at..at + length].to_vec();
                let to = numbers.below(bytes.len());
                bytes.splice(to..to, copy);
            }
            7 => {
                let copy = bytes[at..at + length].to_vec();
                let to = numbers.below(bytes.len());
                overwrite(&mut bytes, to, &copy);
            }
            _ => change_digits(&mut bytes, at, edge),
        }
        if bytes.is_empty() {
            return bytes;
        }
    }
    bytes
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    bytes[at..].iter_mut().zip(with).for_each(|(byte, with)| *byte = *with);
}

/// Replaces the next number written in digits, and mends the length of a safetensors header.
fn change_digits(bytes: &mut Vec<u8>, at: usize, edge: u64) {
    let Some(start) = (at..bytes.len()).find(|&i| bytes[i].is_ascii_digit()) else { return };
    let end = (start..bytes.len()).find(|&i| !bytes[i].is_ascii_digit()).unwrap_or(bytes.len());
    let length = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let text = edge.to_string();
    let grown = length.wrapping_add(text.len() as u64).wrapping_sub((end - start) as u64);
    bytes.splice(start..end, text.into_bytes());
    if start > 8 {
        overwrite(bytes, 0, &grown.to_le_bytes());
    }
}

/// The other reader's opinion. It takes a tensor that occurs twice for one, and limits less.
fn agrees_with_reference(
    bytes: &[u8],
    ours: &Result<lmx_tensor::files::SafetensorsFile, FileError>,
    case: usize,
) {
    match (SafeTensors::deserialize(bytes), ours) {
        (Ok(reference), Ok(ours)) => {
            let mut names = reference.names();
            names.sort_unstable();
            assert_eq!(names, ours.names().collect::<Vec<_>>(), "case {case}");
            for (name, view) in reference.tensors() {
                let tensor = ours.tensor(&name).unwrap();
                assert_eq!((view.shape(), view.data()), (tensor.shape(), &tensor.data()[..]), "case {case}");
            }
        }
        (Ok(_), Err(error)) => {
            let stricter = [
                "occurs twice",
                "number of dimensions",
                "a tensor name has",
                "more bytes than can be counted",
            ];
            let message = error.to_string();
            assert!(stricter.iter().any(|part| message.contains(part)), "case {case}: only we say {message}");
        }
        (Err(error), Ok(_)) => unreachable!("case {case}: only the reference refuses: {error}"),
        (Err(_), Err(_)) => {}
    }
}

#[test]
fn mutated_safetensors_files() {
    let _turn = TURN.lock();
    let valid = build::valid_safetensors();
    let mut numbers = Numbers(1);
    let mut accepted = 0;
    for case in 0..MUTATIONS {
        let bytes = Bytes::from(mutate(&valid, &mut numbers));
        let result = measured(case, || untrusted::safetensors(&bytes));
        accepted += usize::from(result.is_ok());
        agrees_with_reference(&bytes, &result, case);
        if let Err(error) = result {
            assert_eq!(error.to_string().lines().count(), 1, "case {case}: {error}");
        }
    }
    // Changes of the data section alone are no error; were all accepted or all refused, nothing would be tested.
    assert!((MUTATIONS / 20..MUTATIONS / 2).contains(&accepted), "{accepted} accepted");
    assert!(untrusted::safetensors(&Bytes::from(valid)).is_ok());
}

#[test]
fn mutated_gguf_files() {
    let _turn = TURN.lock();
    let valid = build::Gguf::valid().bytes();
    let mut numbers = Numbers(2);
    let mut accepted = 0;
    for case in 0..MUTATIONS {
        let bytes = Bytes::from(mutate(&valid, &mut numbers));
        let result = measured(case, || untrusted::gguf(&bytes));
        accepted += usize::from(result.is_ok());
        if let Err(error) = result {
            assert_eq!(error.to_string().lines().count(), 1, "case {case}: {error}");
        }
    }
    assert!((MUTATIONS / 20..MUTATIONS / 2).contains(&accepted), "{accepted} accepted");
    assert!(untrusted::gguf(&Bytes::from(valid)).is_ok());
}

#[test]
fn files_cut_at_any_byte_are_refused() {
    let _turn = TURN.lock();
    let (safetensors, gguf) = (build::valid_safetensors(), build::Gguf::valid().bytes());
    for end in 0..safetensors.len() {
        let result = untrusted::safetensors(&Bytes::from(safetensors[..end].to_vec()));
        assert!(result.is_err(), "safetensors cut at byte {end}");
    }
    for end in 0..gguf.len() {
        let result = untrusted::gguf(&Bytes::from(gguf[..end].to_vec()));
        assert!(result.is_err(), "GGUF cut at byte {end}");
    }
}

/// The seeds of the fuzz targets, and what fuzzing found.
#[test]
fn fuzz_seeds_replay() {
    let _turn = TURN.lock();
    for (target, format) in [("safetensors", true), ("gguf", false)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
        let mut paths: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "no seeds in {}", folder.display());
        for (case, path) in paths.iter().enumerate() {
            let bytes = Bytes::from(std::fs::read(path).unwrap());
            let accepted = measured(case, || match format {
                true => untrusted::safetensors(&bytes).is_ok(),
                false => untrusted::gguf(&bytes).is_ok(),
            });
            let valid = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("valid"));
            assert!(accepted || !valid, "{} is refused", path.display());
        }
    }
}
