//! Prefixes in a folder outlive the engine, under every policy, bit for bit; what is damaged, foreign or too much
//! changes nothing but how much is run again.

use crate::common::golden_cases::Case;
use crate::common::logits::reply;
use crate::common::text_data;
use crate::common::tiny::tokenizer;
use lmx::cache::{KvQuantization, KvWindow, PrefixCacheOptions, PrefixDirOptions, PrefixDirWarning};
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{Engine, EngineOptions};
use lmx::models::Decoder;
use lmx::prompt_cache::Identity;
use lmx::text::EosSet;
use lmx::{Device, Isa};
use lmx_tensor::kernels::attention::KvType;
use std::fs;
use std::path::{Path, PathBuf};

/// A model whose heads are whole groups.
const QUANTIZED: &str = "qwen3-no-window-f32";

/// A model, and what is said to be its identity.
fn engine(case: &str, options: EngineOptions) -> (Engine, Identity) {
    let disk = Case::read(case).on_disk();
    let checkpoint = Checkpoint::open(&disk.path, &OpenOptions::default()).unwrap();
    let device = Device::cpu(Isa::best(), 1);
    let model = Decoder::load(&checkpoint, checkpoint.describe().unwrap(), &device, &mut |_, _| {}).unwrap();
    let folder = text_data::golden().join("byte_level");
    if Path::new(&disk.path).is_dir() {
        fs::copy(folder.join("tokenizer.json"), Path::new(&disk.path).join("tokenizer.json")).unwrap();
    }
    let identity = Identity::of(&checkpoint, None).unwrap();
    (Engine::new(Box::new(model), tokenizer(), EosSet::default(), options).unwrap(), identity)
}

/// An engine that has just begun, over a folder.
fn restarted(case: &str, options: EngineOptions, dir: &PrefixDirOptions) -> Engine {
    let (mut engine, identity) = engine(case, options);
    engine.keep_prefixes_in(dir.clone(), &identity).unwrap();
    engine
}

fn options(window: Option<KvWindow>, quantization: Option<KvQuantization>) -> EngineOptions {
    // As the program does it.
    let prefixes = PrefixCacheOptions { keep_unseen: window.is_none(), ..PrefixCacheOptions::default() };
    EngineOptions {
        kv_window: window,
        kv_quantization: quantization,
        kv_type: KvType::F16,
        prefix_cache: Some(prefixes),
        ..EngineOptions::default()
    }
}

fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % 61
    };
    (0..count).map(|_| next()).collect()
}

fn window(size: usize, keep: usize) -> Option<KvWindow> {
    Some(KvWindow::new(size, keep).unwrap())
}

fn files(dir: &PrefixDirOptions) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(&dir.dir).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

fn bytes(dir: &PrefixDirOptions) -> u64 {
    files(dir).iter().map(|file| fs::metadata(file).unwrap().len()).sum()
}

/// Full; mixed; windows only; quantized weights; chunks; recurrent, beside full layers and within them; bounded;
/// quantized from the start and from a later position on.
fn kinds() -> Vec<(&'static str, EngineOptions)> {
    let quantized = |start| Some(KvQuantization::new(4, 32, start).unwrap());
    let mut kinds: Vec<_> =
        ["llama-f32", "gemma3-f32", "mistral-f32", "llama-q4", "llama4-f32", "lfm2-f32", "baichuan-m1-f32"]
            .into_iter()
            .map(|case| (case, options(None, None)))
            .collect();
    kinds.push(("llama-f32", options(window(40, 4), None)));
    kinds.push(("gemma3-f32", options(window(50, 4), None)));
    for start in [0, 100, 5000] {
        kinds.push((QUANTIZED, options(None, quantized(start))));
    }
    kinds
}

#[test]
fn a_restart_goes_on_where_a_text_ended_and_where_it_is_parted_from() {
    for (case, options) in kinds() {
        let folder = tempfile::tempdir().unwrap();
        let dir = PrefixDirOptions::new(folder.path().join("made/here"));
        let mut cold = engine(case, EngineOptions { prefix_cache: None, ..options }).0;
        let stateful = !cold.kv().spec().states.is_empty();
        let most = cold.model().context_length() - 40;
        let (first, tail) = (tokens(3, most.min(if stateful { 600 } else { 203 })), tokens(4, 9));
        let mut before = restarted(case, options, &dir);
        let (said, held) = reply(&mut before, &first, 6);
        assert_eq!(held, 0);
        drop(before);
        // The last token of a reply is never run.
        let whole = [first.as_slice(), &said.tokens[..5]].concat();
        let bounded = options.kv_window.is_some();
        let splits = [whole.len(), 170, 64, 33].map(|split| split.min(whole.len()));
        for split in splits {
            let prompt = [&whole[..split], &tail].concat();
            let mut warm = restarted(case, options, &dir);
            let expected = reply(&mut cold, &prompt, 5).0;
            let (got, held) = reply(&mut warm, &prompt, 5);
            assert_eq!(got, expected, "{case}: {split} tokens in common, {held} held: {options:?}");
            let reachable = match split {
                _ if stateful => split / 256 * 256,
                _ if split == whole.len() => split,
                _ if bounded => 0,
                // Up to where quantization begins only floats count, and there are none.
                _ if options
                    .kv_quantization
                    .is_some_and(|how| split < how.start() && how.start() < whole.len()) =>
                {
                    0
                }
                _ => split / 32 * 32,
            };
            assert!(held >= reachable, "{case}: {held} of {split}: {options:?}");
            let stats = warm.prefix_stats();
            assert_eq!((stats.dir_hits, stats.dir_tokens), (u64::from(held > 0), held as u64), "{case}");
            assert_eq!(warm.kv().budget().used(), stats.bytes(), "{case}");
            assert!(warm.take_prefix_warnings().is_empty());
            // From now on it is in memory.
            assert_eq!(reply(&mut warm, &prompt, 5).0, expected, "{case}");
            assert_eq!(warm.prefix_stats().dir_hits, u64::from(held > 0), "{case}");
        }
    }
}

#[test]
fn what_is_of_another_model_or_form_is_not_found() {
    let folder = tempfile::tempdir().unwrap();
    let dir = PrefixDirOptions::new(folder.path());
    let prompt = tokens(5, 100);
    let plain = options(None, None);
    let held = |case: &str, options: EngineOptions| reply(&mut restarted(case, options, &dir), &prompt, 2).1;
    let codes = |bits, start| EngineOptions {
        kv_quantization: Some(KvQuantization::new(bits, 32, start).unwrap()),
        ..plain
    };
    let forms = [
        ("llama-f32", plain),
        ("llama-f32", EngineOptions { kv_type: KvType::F32, ..plain }),
        ("llama-f32", EngineOptions { kv_type: KvType::Bf16, ..plain }),
        ("llama-f32", EngineOptions { kv_window: window(40, 4), ..plain }),
        ("llama-f32", EngineOptions { kv_window: window(41, 4), ..plain }),
        ("llama-q4", plain),
        (QUANTIZED, codes(4, 0)),
        (QUANTIZED, codes(8, 0)),
        (QUANTIZED, codes(4, 1)),
        (QUANTIZED, codes(4, 500)),
    ];
    for (case, options) in forms {
        assert_eq!(held(case, options), 0, "{case} {options:?}");
    }
    for (case, options) in forms {
        assert!(held(case, options) >= 64, "{case} {options:?}");
    }
}

#[test]
fn damaged_files_are_dropped_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let dir = PrefixDirOptions::new(folder.path());
    let plain = options(None, None);
    let prompt = tokens(6, 50);
    let expected = reply(&mut restarted("llama-f32", plain, &dir), &prompt, 2).0;
    let notes = folder.path().join("notes.txt");
    fs::write(&notes, "not ours").unwrap();
    let stored: Vec<_> = files(&dir)
        .into_iter()
        .filter(|file| *file != notes)
        .map(|f| (f.clone(), fs::read(f).unwrap()))
        .collect();
    assert_eq!(stored.len(), 2, "a block, and the tokens after it");
    let longer = [prompt.as_slice(), &[1, 2]].concat();
    let (mut warm, identity) = engine("llama-f32", plain);
    let cold = reply(&mut warm, &longer, 2).0;
    let mut check = |damaged: &[u8], file: &Path| {
        fs::write(file, damaged).unwrap();
        warm.clear_prefixes();
        warm.keep_prefixes_in(dir.clone(), &identity).unwrap();
        let (got, held) = reply(&mut warm, &longer, 2);
        assert_eq!(got, cold);
        let warnings = warm.take_prefix_warnings();
        let [PrefixDirWarning::Damaged { file: named, .. }] = &warnings[..] else { panic!("{warnings:?}") };
        assert_eq!(named, file);
        // All is there again but a tail, which lay behind another.
        for (file, whole) in &stored {
            fs::write(file, whole).unwrap();
        }
        held
    };
    for (file, whole) in &stored {
        for at in 0..whole.len() {
            // A kilobyte of values is like the next.
            if at > 300 && at + 300 < whole.len() && at % 97 > 0 {
                continue;
            }
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            assert!(check(&damaged, file) <= 32);
            if at % 3 == 0 {
                assert!(check(&whole[..at], file) <= 32);
            }
        }
        assert!(check(&[whole.as_slice(), &[0]].concat(), file) <= 32);
        assert!(check(&vec![0; whole.len()], file) <= 32);
    }
    let (got, held) = reply(&mut restarted("llama-f32", plain, &dir), &prompt, 2);
    assert_eq!((got, held), (expected, 49));
    assert_eq!(fs::read_to_string(&notes).unwrap(), "not ours");
}

#[test]
fn the_last_used_stays_within_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let plain = options(None, None);
    let all = PrefixDirOptions::new(folder.path());
    let texts: Vec<_> = (0..4).map(|seed| tokens(20 + seed, 64)).collect();
    let held = |dir: &PrefixDirOptions, text: &[u32]| {
        let (mut engine, identity) = engine("llama-f32", plain);
        engine.keep_prefixes_in(dir.clone(), &identity).unwrap();
        reply(&mut engine, text, 1).1
    };
    held(&all, &texts[0]);
    let one = bytes(&all);
    let three = PrefixDirOptions { bytes_max: 3 * one, ..all.clone() };
    held(&three, &texts[1]);
    held(&three, &texts[2]);
    // Use refreshes, in another process too: the second is now the oldest.
    assert_eq!(held(&three, &texts[0]), 63);
    held(&three, &texts[3]);
    assert_eq!(bytes(&three), 3 * one);
    assert_eq!(held(&three, &texts[0]), 63);
    assert_eq!(held(&three, &texts[2]), 63);
    assert_eq!(held(&three, &texts[3]), 63);
    // Its end goes before its beginning.
    held(&three, &tokens(30, 32));
    assert_eq!(bytes(&three), 3 * one);
    assert_eq!(held(&three, &texts[0]), 32);
    // What is larger than all of it is not stored, and drops nothing.
    let before = bytes(&all);
    let little = PrefixDirOptions { bytes_max: one / 2, ..all.clone() };
    held(&little, &tokens(31, 64));
    assert_eq!(bytes(&all), before);
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error_at_the_start_and_a_warning_later() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let (mut engine, identity) = engine("llama-f32", options(None, None));
    let error = engine.keep_prefixes_in(PrefixDirOptions::new(&file), &identity).unwrap_err();
    assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
    let dir = PrefixDirOptions::new(folder.path().join("x"));
    engine.keep_prefixes_in(dir.clone(), &identity).unwrap();
    // It goes while requests run.
    fs::remove_dir_all(&dir.dir).unwrap();
    reply(&mut engine, &tokens(1, 70), 2);
    let warnings = engine.take_prefix_warnings();
    assert!(matches!(&warnings[..], [PrefixDirWarning::Unwritable { .. }]), "{warnings:?}");
    assert_eq!(reply(&mut engine, &tokens(1, 70), 2).1, 69, "memory goes on");
    reply(&mut engine, &tokens(2, 70), 2);
    assert!(engine.take_prefix_warnings().is_empty(), "once");
}

#[test]
fn engines_share_a_folder_and_memory_that_is_short() {
    let folder = tempfile::tempdir().unwrap();
    let dir = PrefixDirOptions::new(folder.path());
    let plain = options(None, None);
    let (mut a, mut b) = (restarted("gemma3-f32", plain, &dir), restarted("gemma3-f32", plain, &dir));
    let prompt = tokens(40, 150);
    let expected = reply(&mut a, &prompt, 3).0;
    let (got, held) = reply(&mut b, &prompt, 3);
    assert_eq!((got, held), (expected.clone(), 149));
    // A prefix cache that is too small for it finds nothing, and the reply is the same.
    let block = a.kv().spec().bytes_at(32);
    let small = PrefixCacheOptions { bytes_max: 2 * block, ..PrefixCacheOptions::default() };
    let mut small = restarted("gemma3-f32", EngineOptions { prefix_cache: Some(small), ..plain }, &dir);
    let (got, held) = reply(&mut small, &prompt, 3);
    assert_eq!((got, held), (expected.clone(), 0));
    // So does memory that holds the sequence only just.
    let tight = EngineOptions { kv_memory: 5 * block, ..plain };
    let mut tight = restarted("gemma3-f32", tight, &dir);
    for seed in 50..53 {
        reply(&mut tight, &tokens(seed, 150), 3);
        assert_eq!(reply(&mut tight, &prompt, 3).0, expected);
        assert!(tight.kv().budget().used() <= 5 * block);
    }
}
