//! Prompt caches as values and as files: what continues from one is what continues from a cold start, and mlx-lm reads
//! what lmx writes and the reverse (tests/gen/prompt_cache_golden.py).

use crate::common::golden_cases::Case;
use crate::common::text_data;
use crate::common::tiny::{engine, model};
use lmx::cache::{BLOCK, BlockBudget, KvError, KvQuantization, KvSpec, KvWindow};
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{Engine, EngineOptions, Pooling, Request};
use lmx::models::{Decoder, Model, kv_spec};
use lmx::prompt_cache::{
    Identity, Notes, PromptCache, PromptCacheFile, PromptCacheOptions, make_prompt_cache,
};
use lmx_tensor::RowAdapters;
use lmx_tensor::files::{Bytes, SafetensorsFile};
use lmx_tensor::kernels::attention::KvType;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/prompt_cache").join(file)
}

fn expected() -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden("expected.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn window(bound: &Value) -> Option<KvWindow> {
    let bound: Option<(usize, usize)> = serde_json::from_value(bound.clone()).unwrap();
    bound.map(|(size, keep)| KvWindow::new(size, keep).unwrap())
}

/// Logits after each of `tokens`, as bits.
fn logits(model: &Decoder, cache: &mut PromptCache, tokens: &[u32]) -> Vec<Vec<u32>> {
    let hidden = cache.extend(model, tokens).unwrap();
    let head = model.head(&hidden, &(0..tokens.len()).collect::<Vec<_>>(), &RowAdapters::default()).unwrap();
    head.data().chunks(head.cols()).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Full; windows and full layers; bounded, with kept positions.
fn policies() -> [(&'static str, Option<KvWindow>); 4] {
    let window = |size, keep| Some(KvWindow::new(size, keep).unwrap());
    [("llama-f32", None), ("gemma3-f32", None), ("llama-f32", window(40, 4)), ("gemma3-q4", window(70, 33))]
}

fn spec(model: &Decoder, options: &PromptCacheOptions) -> KvSpec {
    let spec = kv_spec(model, options.kv_type);
    options.window.into_iter().fold(spec, KvSpec::bounded)
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i * i * 7 % 61).collect()
}

#[test]
fn trims_forks_and_files_continue_as_cold() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let text = tokens(160);
    for (number, (case, window)) in policies().into_iter().enumerate() {
        let model = model(case, 1);
        let kv_type = [KvType::F32, KvType::F16, KvType::Bf16][number % 3];
        let options = PromptCacheOptions { window, kv_type, ..PromptCacheOptions::default() };
        let whole = logits(&model, &mut make_prompt_cache(&model, &options).unwrap(), &text);
        for length in [1, 4, 5, 31, 32, 33, 40, 41, 70, 100, 128, 150] {
            let mut cache = make_prompt_cache(&model, &options).unwrap();
            logits(&model, &mut cache, &text[..length]);
            let mut fork = cache.fork().unwrap();
            let notes = Notes { model: case.to_owned(), ..Notes::default() };
            cache.save(&path, &notes).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let file = PromptCacheFile::open(&path).unwrap();
            assert_eq!((file.notes(), file.tokens()), (&notes, Some(&text[..length])));
            let budget = BlockBudget::new(usize::MAX);
            let mut loaded = file.load(&spec(&model, &options), &budget).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes, "a file is not changed");
            assert_eq!(loaded.len(), length);
            // What can be trimmed goes on as if it had never been longer.
            for back in [1, 2, 7, 30, length] {
                for cache in [&cache, &loaded] {
                    let mut short = cache.fork().unwrap();
                    if !short.can_trim(back) {
                        assert!(matches!(short.trim(back), Err(KvError::Unreachable { .. })));
                        assert_eq!(short.len(), length);
                    } else {
                        short.trim(back).unwrap();
                        assert_eq!(short.tokens().unwrap(), &text[..length - back]);
                        let got = logits(&model, &mut short, &text[length - back..]);
                        assert!(
                            got == whole[length - back..],
                            "{case} {window:?}: {back} back from {length}"
                        );
                    }
                }
            }
            // As it is held in blocks of 32, so it is written: what could be trimmed still can.
            assert!((0..=length).all(|n| !loaded.can_trim(n) || cache.can_trim(n)));
            assert!(loaded.can_trim(1) || !cache.can_trim(1), "{case} {window:?} {length}");
            for cache in [&mut cache, &mut fork, &mut loaded] {
                assert!(
                    logits(&model, cache, &text[length..]) == whole[length..],
                    "{case} {window:?} {length}"
                );
            }
            // A saved copy of the loaded one is the file again.
            file.load(&spec(&model, &options), &budget).unwrap().save(&path, &notes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }
}

#[test]
fn a_fork_shares_all_but_the_block_that_is_written() {
    let model = model("llama-f32", 1);
    let mut cache = make_prompt_cache(&model, &PromptCacheOptions::default()).unwrap();
    logits(&model, &mut cache, &tokens(200));
    let before = cache.memory_used();
    assert_eq!((before, cache.bytes()), (cache.spec().bytes_at(200), before));
    let mut fork = cache.fork().unwrap();
    assert_eq!(cache.memory_used(), before);
    logits(&model, &mut fork, &[1]);
    assert_eq!(cache.memory_used(), before + cache.spec().bytes_at(1));
    drop(cache);
    assert_eq!(fork.memory_used(), before);
    let census = "201 tokens, 0.03 MB\n2 x full (2 x 16 f16): 7 blocks, 0.03 MB";
    let bytes = fork.bytes();
    assert_eq!(fork.to_string().replace(&format!("{:.2}", bytes as f64 / 1e6), "0.03"), census);
    // Copies and growth are refused where the memory ends; what is held stays.
    let memory = before;
    let mut small =
        make_prompt_cache(&model, &PromptCacheOptions { memory, ..PromptCacheOptions::default() }).unwrap();
    logits(&model, &mut small, &tokens(200));
    let mut fork = small.fork().unwrap();
    assert!(fork.extend(&model, &[1]).is_err());
    assert_eq!((fork.len(), small.len()), (200, 200));
}

#[test]
fn mlx_lm_and_lmx_read_each_others_files() {
    let expected = expected();
    let (prompt, tail) = (ids(&expected["prompt"]), ids(&expected["tail"]));
    for (case, of) in expected["cases"].as_object().unwrap() {
        let (name, window) = (of["model"].as_str().unwrap(), window(&of["bound"]));
        let bits: Option<usize> = serde_json::from_value(of["bits"].clone()).unwrap();
        let quantization = bits.map(|bits| KvQuantization::new(bits, 32, 0).unwrap());
        let mut engine = engine(
            name,
            1,
            EngineOptions {
                kv_window: window,
                kv_type: KvType::F32,
                kv_quantization: quantization,
                ..EngineOptions::default()
            },
        );
        let path = golden(&format!("lmx-{case}.safetensors"));
        let mut cache = engine.prompt_cache(&[], None).unwrap();
        // One at a time, as mlx-lm did.
        prompt.iter().for_each(|&token| drop(cache.extend(engine.model(), &[token]).unwrap()));
        let notes = Notes { model: name.to_owned(), messages: None, ..Notes::default() };
        if !path.exists() {
            cache.save(&path, &notes).unwrap();
            panic!("{} is new: run tests/gen/prompt_cache_golden.py", path.display());
        }
        let dir = tempfile::tempdir().unwrap();
        cache.save(&dir.path().join("again"), &notes).unwrap();
        let again = std::fs::read(dir.path().join("again")).unwrap();
        assert!(again == std::fs::read(&path).unwrap(), "{case}: the file is no longer what lmx writes");
        for by in ["mlx", "lmx"] {
            let file = PromptCacheFile::open(&golden(&format!("{by}-{case}.safetensors"))).unwrap();
            assert_eq!((file.kv_type(), file.notes().model.as_str()), (KvType::F32, name));
            assert_eq!(file.bound(&engine.model().layer_kv()), window);
            assert_eq!(file.quantization(), quantization);
            let cache = engine.load_prompt_cache(&file, None).unwrap();
            let known = cache.tokens().is_some();
            assert_eq!((known, cache.len()), (by == "lmx", prompt.len()));
            if !known {
                // Of a part of the prompt there is no mean.
                let cache = Some(cache.fork().unwrap());
                let pooled =
                    Request { cache, embedding: Some(Pooling::Mean), ..Request::new(tail.clone(), 0) };
                let error = engine.submit(pooled).unwrap_err().to_string();
                assert!(error.starts_with("embedding must be Last"), "{error}");
            }
            let new = if known { [prompt.as_slice(), &tail].concat() } else { tail.clone() };
            let request = Request { cache: Some(cache), ignore_eos: true, ..Request::new(new, 20) };
            let events: Vec<_> = engine.generate(request).unwrap().map(Result::unwrap).collect();
            let stats = &events.last().unwrap().stats;
            assert_eq!((stats.prompt_tokens, stats.cached_tokens), (prompt.len() + tail.len(), prompt.len()));
            let got: Vec<u32> = events.iter().filter_map(|event| event.token).collect();
            assert_eq!(got, ids(&of[by]), "{case} by {by}");
        }
    }
}

#[test]
fn a_request_goes_on_from_what_its_prompt_has_in_common() {
    let text = tokens(150);
    let other = [&text[..100], &[7, 7, 7]].concat();
    for (case, window) in policies() {
        let mut engine = engine(case, 1, EngineOptions { kv_window: window, ..EngineOptions::default() });
        let mut cache = engine.prompt_cache(&text, None).unwrap();
        cache.extend(engine.model(), &text).unwrap();
        let longer = [text.as_slice(), &[1, 2]].concat();
        let windows = engine.kv().spec().groups.iter().any(|group| group.policy.window().is_some());
        // All; the last token again; a part, which windows have dropped.
        for (prompt, held) in [(&longer, 150), (&text, 149), (&other, if windows { 0 } else { 100 })] {
            let run = |engine: &mut Engine, cache: Option<PromptCache>| {
                let request = Request { cache, ignore_eos: true, ..Request::new(prompt.clone(), 5) };
                let events: Vec<_> = engine.generate(request).unwrap().map(Result::unwrap).collect();
                let tokens: Vec<_> = events.iter().map(|e| (e.token, e.logprob.to_bits())).collect();
                (tokens, events[0].stats.cached_tokens)
            };
            let warm = run(&mut engine, Some(cache.fork().unwrap()));
            let cold = run(&mut engine, None);
            assert_eq!((warm.0, warm.1), (cold.0, held), "{case} {window:?}");
        }
        // Of another form.
        let options = PromptCacheOptions { kv_type: KvType::F32, ..PromptCacheOptions::default() };
        let foreign = make_prompt_cache(engine.model(), &options).unwrap();
        let request = Request { cache: Some(foreign), ..Request::new(vec![1], 1) };
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(error.contains("f32") && error.contains("f16"), "{error}");
        drop(cache);
        assert_eq!(engine.kv().budget().used(), 0);
    }
}

/// The file with one change to its header.
pub(super) fn changed(path: &Path, change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + length..]].concat()
}

#[test]
fn damaged_and_foreign_files_are_refused_by_field() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change, &str); 12] = [
        ("mlx-plain", |h| h["__metadata__"]["1.1"] = json!("os.system"), "class of layer 1"),
        ("mlx-plain", |h| h["__metadata__"]["1.0"] = json!("QuantizedKVCache"), "0.0.0"),
        ("mlx-plain", |h| h["__metadata__"]["1.0"] = json!("RotatingKVCache"), "0.3"),
        ("mlx-plain", |h| drop(h["__metadata__"].as_object_mut().unwrap().remove("1.0")), "entry \"1.0\""),
        ("mlx-plain", |h| h["__metadata__"]["2.1.1"] = json!("string"), "scalar"),
        ("mlx-plain", |h| drop(h["__metadata__"].as_object_mut().unwrap().remove("2.1.1")), "2.1.1"),
        ("mlx-plain", |h| h["__metadata__"]["3.0"] = json!("x"), "3.0"),
        ("mlx-plain", |h| h["0.0"]["shape"] = json!([2, 1, 256, 16]), "tensor \"0.0\""),
        ("mlx-rotating", |h| h["__metadata__"]["1.0"] = json!("KVCache"), "offset \"0.2\""),
        ("lmx-plain", |h| h["__metadata__"]["0.lmx_token_ids"] = json!("1 2"), "lmx_token_ids"),
        ("lmx-plain", |h| h["__metadata__"]["0.lmx_messages"] = json!("[]"), "lmx_messages"),
        ("lmx-plain", |h| h["__metadata__"]["0.lmx_config"] = json!("12"), "lmx_version"),
    ];
    for (file, change, says) in cases {
        let bytes = Bytes::from(changed(&golden(&format!("{file}.safetensors")), change));
        let error = PromptCacheFile::parse(Path::new("some.file"), &bytes).unwrap_err().to_string();
        assert!(error.starts_with("some.file: ") && error.contains(says), "{error}");
    }
    // Cut short at every length that is not all of it.
    let bytes = std::fs::read(golden("lmx-mixed.safetensors")).unwrap();
    for length in (0..bytes.len()).step_by(97) {
        let cut = Bytes::from(bytes[..length].to_vec());
        assert!(PromptCacheFile::parse(Path::new("cut"), &cut).is_err(), "{length}");
    }
}

#[test]
fn a_file_fits_only_what_it_was_made_for() {
    let (llama, gemma) = (model("llama-f32", 1), model("gemma3-f32", 1));
    let options = |kv_type, window| PromptCacheOptions { kv_type, window, ..PromptCacheOptions::default() };
    let bound = |size, keep| Some(KvWindow::new(size, keep).unwrap());
    let f32 = KvType::F32;
    let cases = [
        ("mlx-plain", &llama, options(KvType::F16, None), "F16"),
        ("mlx-plain", &llama, options(f32, bound(40, 4)), "window of 40 with the first 4"),
        ("mlx-rotating", &llama, options(f32, None), "full"),
        ("mlx-rotating", &llama, options(f32, bound(41, 4)), "window of 41"),
        ("mlx-plain", &gemma, options(f32, None), "32]"),
    ];
    for (file, model, options, says) in cases {
        let file = PromptCacheFile::open(&golden(&format!("{file}.safetensors"))).unwrap();
        let error = file.load(&spec(model, &options), &BlockBudget::new(usize::MAX)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let file = PromptCacheFile::open(&golden("mlx-plain.safetensors")).unwrap();
    let spec = spec(&llama, &options(f32, None));
    let error = file.load(&spec, &BlockBudget::new(spec.bytes_at(BLOCK))).unwrap_err().to_string();
    assert!(error.contains("budget"), "{error}");
}

#[test]
fn identities_differ_where_the_models_do() {
    let case = Case::read("llama-f32");
    let folder = case.folder();
    for entry in std::fs::read_dir(text_data::golden().join("byte_level")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let identity = |template| {
        let checkpoint = Checkpoint::open(folder.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
        Identity::of(&checkpoint, template).unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let own = identity(Some("a template"));
    let model = model("llama-f32", 1);
    let mut cache = make_prompt_cache(&model, &PromptCacheOptions::default()).unwrap();
    cache.extend(&model, &[1, 2, 3]).unwrap();
    let messages = vec![json!({"role": "user", "content": "hello"})];
    let notes = Notes { identity: Some(own.clone()), messages: Some(messages), ..Notes::default() };
    cache.save(&path, &notes).unwrap();
    let file = PromptCacheFile::open(&path).unwrap();
    assert_eq!(file.notes(), &notes);
    file.check_identity(&own).unwrap();
    let refused = |here: &Identity, says: &str| {
        let error = file.check_identity(here).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(&identity(Some("another template")), "template");
    refused(&identity(None), "none");
    // One value of one tensor.
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    refused(&identity(Some("a template")), "weights");
    bytes[last] ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    file.check_identity(&identity(Some("a template"))).unwrap();
    for (name, says) in [("tokenizer.json", "tokenizer"), ("config.json", "config.json")] {
        let path = folder.path().join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        value["something"] = json!(1);
        std::fs::write(&path, value.to_string()).unwrap();
        refused(&identity(Some("a template")), says);
        std::fs::write(&path, text).unwrap();
    }
    // mlx-lm's entries are those of mlx-lm.
    let metadata = SafetensorsFile::open(&path).unwrap().metadata().clone();
    assert!(metadata.keys().filter_map(|key| key.strip_prefix("0.")).all(|key| !key.contains('.')));
}
