//! Prompt caches that are quantized: what is saved and loaded goes on as what was not, bit for bit; what a file says is
//! held against what is asked for; damage is named. prompt_cache.rs reads and writes mlx-lm's files.

use super::prompt_cache::changed;
use crate::common::golden_cases::Case;
use crate::common::tiny::{model, model_of, tokenizer};
use lmx::KvType;
use lmx::cache::{BlockBudget, KvQuantization, KvSpec, KvWindow, PrefixCacheOptions};
use lmx::engine::{Engine, EngineOptions, Request};
use lmx::models::{Decoder, Model, kv_spec};
use lmx::prompt_cache::{
    Notes, PromptCache, PromptCacheError, PromptCacheFile, PromptCacheOptions, check_savable,
    make_prompt_cache,
};
use lmx::text::EosSet;
use lmx_tensor::RowAdapters;
use lmx_tensor::files::{Bytes, SafetensorsFile};
use lmx_tensor::kernels::attention::KvQuant;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/prompt_cache").join(file)
}

/// Logits after each of `tokens`, as bits.
fn logits(model: &Decoder, cache: &mut PromptCache, tokens: &[u32]) -> Vec<Vec<u32>> {
    let hidden = cache.extend(model, tokens).unwrap();
    let head = model.head(&hidden, &(0..tokens.len()).collect::<Vec<_>>(), &RowAdapters::default()).unwrap();
    head.data().chunks(head.cols()).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i * i * 7 % 61).collect()
}

fn options(kv_type: KvType, quantization: Option<KvQuantization>) -> PromptCacheOptions {
    PromptCacheOptions { kv_type, quantization, ..PromptCacheOptions::default() }
}

fn spec(model: &Decoder, options: &PromptCacheOptions) -> KvSpec {
    let spec = kv_spec(model, options.kv_type);
    options.quantization.into_iter().fold(spec, |spec, how| spec.quantized(how).unwrap())
}

fn how(bits: usize, group: usize, start: usize) -> KvQuantization {
    KvQuantization::new(bits, group, start).unwrap()
}

#[test]
fn saved_and_loaded_goes_on_as_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let text = tokens(110);
    let model = model_of(&Case::read("qwen3-no-window-f32").with_head_dim(128), 1);
    let forms = KvQuant::BITS.into_iter().flat_map(|bits| KvQuant::GROUPS.map(|group| (bits, group)));
    for (number, (bits, group)) in forms.enumerate() {
        let kv_type = [KvType::F32, KvType::F16, KvType::Bf16][number % 3];
        for start in [0, 45] {
            let options = options(kv_type, Some(how(bits, group, start)));
            let spec = spec(&model, &options);
            let name = format!("{kv_type:?}, {}", how(bits, group, start));
            let whole = logits(&model, &mut make_prompt_cache(&model, &options).unwrap(), &text);
            for length in [1, 32, 45, 46, 70, 96] {
                let mut cache = make_prompt_cache(&model, &options).unwrap();
                assert!(logits(&model, &mut cache, &text[..length]) == whole[..length], "{name}: {length}");
                cache.save(&path, &Notes::default()).unwrap();
                let bytes = std::fs::read(&path).unwrap();
                let file = PromptCacheFile::open(&path).unwrap();
                // What has not come to the start is floats.
                assert_eq!(file.quantization(), options.quantization.filter(|_| length > start), "{name}");
                let budget = BlockBudget::new(usize::MAX);
                let mut loaded = file.load(&spec, &budget).unwrap();
                assert_eq!((loaded.len(), budget.used()), (length, spec.bytes_at(length)), "{name}");
                loaded.save(&path, &Notes::default()).unwrap();
                assert!(std::fs::read(&path).unwrap() == bytes, "{name}: saved again");
                for back in 1..=length {
                    assert_eq!(loaded.can_trim(back), cache.can_trim(back), "{name}: {back} of {length}");
                }
                if length > 60 {
                    let mut short = loaded.fork().unwrap();
                    short.trim(9).unwrap();
                    let got = logits(&model, &mut short, &text[length - 9..]);
                    assert!(got == whole[length - 9..], "{name}: 9 back from {length}");
                }
                let got = logits(&model, &mut loaded, &text[length..]);
                assert!(got == whole[length..], "{name}: {length}");
            }
        }
    }
}

#[test]
fn codes_are_mlx_lms() {
    for bits in [4, 5, 8] {
        let open =
            |by: &str| SafetensorsFile::open(&golden(&format!("{by}-bits{bits}.safetensors"))).unwrap();
        let (theirs, ours) = (open("mlx"), open("lmx"));
        let names: Vec<&str> = theirs.names().collect();
        assert_eq!(names, ours.names().collect::<Vec<_>>());
        for name in names {
            let (theirs, ours) = (theirs.tensor(name).unwrap(), ours.tensor(name).unwrap());
            assert_eq!(theirs.dtype(), ours.dtype(), "{name}");
            let &[1, heads, entries, width] = ours.shape() else {
                assert_eq!((theirs.shape(), &theirs.data()[..]), (ours.shape(), &ours.data()[..]), "{name}");
                continue;
            };
            let room = theirs.shape()[2];
            assert_eq!((theirs.shape(), entries), (&[1, heads, room, width][..], 70), "{name}");
            let rows = |data: &[u8], entries: usize| -> Vec<u8> {
                let head = data.chunks(entries * width * 4);
                head.flat_map(|head| head[..70 * width * 4].to_vec()).collect()
            };
            let (theirs, ours) = (rows(theirs.data(), room), rows(ours.data(), entries));
            if name.ends_with(".0") {
                // Sums of another order may put a number on the other side of the border between two codes.
                let other = theirs.iter().zip(&ours).filter(|(a, b)| a != b).count();
                assert!(other * 100 < ours.len(), "{name}: {other} of {} bytes", ours.len());
                continue;
            }
            for (a, b) in theirs.as_chunks().0.iter().zip(ours.as_chunks().0) {
                let (a, b) = (f32::from_le_bytes(*a), f32::from_le_bytes(*b));
                assert!((a - b).abs() <= 1e-3 * a.abs().max(1e-3), "{name}: {a} {b}");
            }
        }
    }
}

#[test]
fn a_file_fits_only_how_it_was_made() {
    let model = model("llama-traditional-f32", 1);
    let file = PromptCacheFile::open(&golden("lmx-bits4.safetensors")).unwrap();
    let load = |quantization| {
        file.load(&spec(&model, &options(KvType::F32, quantization)), &BlockBudget::new(usize::MAX))
    };
    assert_eq!(load(Some(how(4, 32, 0))).unwrap().len(), 70);
    for (other, says) in [
        (None, "floats"),
        (Some(how(8, 32, 0)), "8 bits in groups of 32"),
        (Some(how(4, 32, 5)), "from position 5 on"),
    ] {
        let error = load(other).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("4 bits in groups of 32 from position 0 on"), "{error}");
        assert!(error.contains(says), "{error}");
    }
    // Windows are not in such files.
    let window = KvWindow::new(40, 4).unwrap();
    let bounded = spec(&model, &options(KvType::F32, Some(how(4, 32, 0)))).bounded(window);
    let error = file.load(&bounded, &BlockBudget::new(usize::MAX)).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("full") && error.contains("window of 40"), "{error}");
}

#[test]
fn windows_chunks_and_states_are_refused_when_saving() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    for (case, says) in [
        ("gemma3-f32", "quantized keys and values in a window"),
        ("llama4-f32", "chunks"),
        ("lfm2-f32", "state"),
    ] {
        let model = model(case, 1);
        let quantization = (case == "gemma3-f32").then(|| how(4, 32, 40));
        let options = options(KvType::F16, quantization);
        let error = check_savable(&spec(&model, &options)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        let mut cache = make_prompt_cache(&model, &options).unwrap();
        cache.extend(&model, &tokens(41)).unwrap();
        let error = cache.save(&path, &Notes::default()).unwrap_err();
        assert!(matches!(error, PromptCacheError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(says) && !path.exists(), "{error}");
        if quantization.is_some() {
            // Until the start it is floats.
            let mut cache = make_prompt_cache(&model, &options).unwrap();
            cache.extend(&model, &tokens(40)).unwrap();
            cache.save(&path, &Notes::default()).unwrap();
            std::fs::remove_file(&path).unwrap();
        }
    }
    // Heads of 16 dimensions.
    let error = make_prompt_cache(&model("llama-f32", 1), &options(KvType::F16, Some(how(4, 32, 0))));
    assert!(error.unwrap_err().to_string().contains("layer 0 has heads of 16"));
}

#[test]
fn floats_that_passed_the_start_are_kept_from_other_requests() {
    let model = model("llama-traditional-f32", 1);
    let prompt = tokens(80);
    let mut floats = make_prompt_cache(&model, &options(KvType::F16, None)).unwrap();
    floats.extend(&model, &prompt).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    floats.save(&path, &Notes::default()).unwrap();
    let engine_options = EngineOptions {
        kv_quantization: Some(how(2, 32, 40)),
        prefix_cache: Some(PrefixCacheOptions::default()),
        ..EngineOptions::default()
    };
    let model = Box::new(model);
    let mut engine = Engine::new(model, tokenizer(), EosSet::default(), engine_options).unwrap();
    let run = |engine: &mut Engine, cache: Option<PromptCache>| -> Vec<u32> {
        let request = Request { cache, ignore_eos: true, ..Request::new(prompt.clone(), 5) };
        engine.generate(request).unwrap().map(|event| event.unwrap().logprob.to_bits()).collect()
    };
    let cold = run(&mut engine, None);
    engine.clear_prefixes();
    let cache = engine.load_prompt_cache(&PromptCacheFile::open(&path).unwrap(), None).unwrap();
    assert_ne!(run(&mut engine, Some(cache)), cold, "the prompt was run over floats");
    assert_eq!(run(&mut engine, None), cold, "what other requests find is their own");
}

/// The file with another number.
fn with_number(path: &Path, name: &str, number: i32) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let at = 8 + length + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    bytes
}

#[test]
fn damaged_files_are_refused_by_entry() {
    let path = golden("lmx-bits4.safetensors");
    let refused = |bytes: Vec<u8>, says: &[&str]| {
        let error =
            PromptCacheFile::parse(Path::new("some.file"), &Bytes::from(bytes)).unwrap_err().to_string();
        assert!(error.starts_with("some.file: ") && says.iter().all(|says| error.contains(says)), "{error}");
    };
    for (name, number, says) in [
        ("0.4", 7, &["bits \"0.4\"", "7", "2, 3, 4, 5, 6 or 8"][..]),
        ("0.4", 8, &["shape", "\"0.0.0\"", "8 words"]),
        ("1.4", -1, &["\"1.4\"", "-1"]),
        ("0.3", 16, &["group size \"0.3\"", "16", "32, 64 or 128"]),
        ("0.3", 64, &["shape", "\"0.0.0\"", "64"]),
        ("0.2", 71, &["offset \"0.2\"", "71", "70"]),
        ("1.2", 69, &["offset \"1.2\"", "69", "70"]),
    ] {
        refused(with_number(&path, name, number), says);
    }
    type Change = fn(&mut Value);
    let cases: [(Change, &[&str]); 13] = [
        (|h| h["0.0.0"]["dtype"] = json!("I32"), &["\"0.0.0\"", "I32", "U32"]),
        (|h| h["0.1.0"]["dtype"] = json!("F32"), &["\"0.1.0\"", "F32", "U32"]),
        (|h| h["0.0.1"]["dtype"] = json!("I32"), &["\"0.0.1\"", "I32", "F32, F16 or BF16"]),
        (|h| h["0.0.2"]["dtype"] = json!("U32"), &["\"0.0.2\"", "U32"]),
        (|h| h["0.0.0"]["shape"] = json!([1, 1, 140, 4]), &["\"0.0.1\""]),
        (|h| h["0.1.2"]["shape"] = json!([1, 1, 140, 1]), &["\"0.1.2\""]),
        (|h| h["0.0.1"]["shape"] = json!([140]), &["\"0.0.1\""]),
        (|h| h["1.1.3"] = h.as_object_mut().unwrap().remove("1.1.2").unwrap(), &["1.1.2"]),
        (|h| h["__metadata__"]["1.1"] = json!("KVCache"), &["1.0"]),
        (|h| h["__metadata__"]["1.1"] = json!("QuantizedCache"), &["class of layer 1", "QuantizedKVCache"]),
        (
            |h| h["__metadata__"]["0.lmx_quantized_kv_start"] = json!("71"),
            &["lmx_quantized_kv_start", "71", "70"],
        ),
        (|h| h["__metadata__"]["0.lmx_quantized_kv_start"] = json!("-1"), &["lmx_quantized_kv_start", "-1"]),
        (|h| drop(h["__metadata__"].as_object_mut().unwrap().remove("2.3.1")), &["2.3.1"]),
    ];
    for (change, says) in cases {
        refused(changed(&path, change), says);
    }
    let start: Change = |h| h["__metadata__"]["0.lmx_quantized_kv_start"] = json!("3");
    refused(changed(&golden("lmx-plain.safetensors"), start), &["lmx_quantized_kv_start", "no layer"]);
    // Cut short at every length that is not all of it.
    let bytes = std::fs::read(&path).unwrap();
    for length in (0..bytes.len()).step_by(89) {
        let cut = Bytes::from(bytes[..length].to_vec());
        assert!(PromptCacheFile::parse(Path::new("cut"), &cut).is_err(), "{length}");
    }
}
