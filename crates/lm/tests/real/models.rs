//! The two real models against mlx-lm and llama.cpp, and against themselves: batched, chunked, threaded.

use crate::common::logits::LogitsLog;
use lmx::cache::{KvQuantization, KvStore};
use lmx::engine::{Engine, EngineOptions, Request, Update};
use lmx::models::{StepInputs, kv_spec};
use lmx::{Device, Isa, LoadOptions, Loaded};
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::attention::KvType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn model(name: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let models = std::env::var_os("LMX_TEST_MODELS").map_or(workspace.join("models"), PathBuf::from);
    let path = models.join(name);
    assert!(path.exists(), "{} is missing: run scripts/test, which fetches it", path.display());
    path
}

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/real").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn load(name: &str, threads: usize) -> Loaded {
    let options = LoadOptions::new(Device::cpu(Isa::best(), threads));
    lmx::load(model(name).to_str().unwrap(), &options).unwrap()
}

fn engine(loaded: Loaded, kv_type: KvType, prefill_step_size: usize) -> Engine {
    let options = EngineOptions { prefill_step_size, kv_type, ..EngineOptions::default() };
    Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Greedy tokens equal mlx-lm's with everything in f32. A first difference where mlx-lm's best two logits are less
/// than 1e-3 apart is a tie; at most two prompts of the ten may end in one.
fn equals_mlx_lm(folder: &str, file: &str) {
    let mut engine = engine(load(folder, 2), KvType::F32, 512);
    let mut ties = 0;
    let golden = golden(file);
    for case in golden["greedy"].as_array().unwrap() {
        let expected = ids(&case["tokens"]);
        let mut request = Request::new(ids(&case["prompt"]), expected.len());
        request.ignore_eos = true;
        let tokens: Vec<u32> =
            engine.generate(request).unwrap().map(|event| event.unwrap().token.unwrap()).collect();
        let Some(at) = (0..expected.len()).find(|&i| tokens[i] != expected[i]) else { continue };
        let gap = case["gaps"][at].as_f64().unwrap();
        println!("{folder}: prompt {:?}… differs at token {at}, gap {gap}", &case["prompt"][0]);
        assert!(gap < 1e-3, "token {at} is {} and not {}: {tokens:?}", tokens[at], expected[at]);
        ties += 1;
    }
    println!("{folder}: {ties} ties");
    assert!(ties <= 2, "{ties} of ten prompts end in a tie");
}

#[test]
fn smollm2_continues_as_in_mlx_lm() {
    equals_mlx_lm("SmolLM2-135M-Instruct", "smollm2.json");
}

#[test]
fn gemma3_continues_as_in_mlx_lm() {
    equals_mlx_lm("gemma-3-270m", "gemma3.json");
}

#[test]
fn gemma3_continues_alike_over_8_bits_across_its_windows_wrap() {
    let prompt = ids(&golden("gemma3.json")["greedy"][9]["prompt"])[..505].to_vec();
    let reply = |kv_quantization| -> Vec<u32> {
        let options = EngineOptions { kv_quantization, kv_type: KvType::F16, ..EngineOptions::default() };
        let loaded = load("gemma-3-270m", 2);
        let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options).unwrap();
        let request = Request { ignore_eos: true, ..Request::new(prompt.clone(), 20) };
        engine.generate(request).unwrap().map(|event| event.unwrap().token.unwrap()).collect()
    };
    let how = KvQuantization::new(8, KvQuantization::GROUP, 0).unwrap();
    assert_eq!(reply(Some(how)), reply(None));
}

/// llama.cpp's protocol: windows of 512 tokens, each beginning with the tokenizer's BOS if it has one, of which the
/// second half is scored.
fn perplexity(loaded: &Loaded, text: &str) -> f64 {
    const WINDOW: usize = 512;
    let tokens = loaded.tokenizer.encode(text, true).unwrap();
    let bos = loaded.tokenizer.adds_bos().then(|| loaded.tokenizer.bos().unwrap());
    let (mut loss, mut count) = (0.0, 0);
    for window in tokens.chunks_exact(WINDOW) {
        let mut window = window.to_vec();
        if let Some(bos) = bos {
            window[0] = bos;
        }
        let mut kv = KvStore::new(kv_spec(&*loaded.model, KvType::F16), usize::MAX);
        let id = kv.add();
        let mut step = StepInputs::default();
        step.push(id, 0, &window, false);
        kv.reserve(id, WINDOW).unwrap();
        let hidden = loaded.model.hidden(&step, &mut kv).unwrap();
        let rows: Vec<usize> = (WINDOW / 2..WINDOW - 1).collect();
        for (&row, logits) in rows.chunks(64).flat_map(|rows| {
            let logits = loaded.model.head(&hidden, rows, &RowAdapters::default()).unwrap();
            let each: Vec<Vec<f32>> = logits.data().chunks(logits.cols()).map(<[f32]>::to_vec).collect();
            rows.iter().zip(each)
        }) {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
            loss += f64::from(max) + sum.ln() - f64::from(logits[window[row + 1] as usize]);
            count += 1;
        }
    }
    (loss / f64::from(count)).exp()
}

#[test]
fn perplexity_of_gguf_files_is_llama_cpps() {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/real/text.txt");
    let text = std::fs::read_to_string(text).unwrap();
    for (file, gguf) in
        [("smollm2.json", "SmolLM2-135M-Instruct.Q4_1.gguf"), ("gemma3.json", "gemma-3-270m-q4_k_m.gguf")]
    {
        let ours = perplexity(&load(gguf, 2), &text);
        let theirs = golden(file)["llama_cpp_perplexity_512"].as_f64().unwrap();
        println!("{gguf}: perplexity {ours:.4}, llama.cpp {theirs:.4}, ratio {:.5}", ours / theirs);
        assert!((ours / theirs - 1.0).abs() < 0.005, "{gguf}: {ours} and not {theirs}");
    }
}

/// What a request got: its tokens, and a hash of all logits that each was drawn from.
type Replies = BTreeMap<usize, (Vec<u32>, Vec<u64>)>;

/// Runs the given prompts, at most `batch` at once.
fn replies(name: &str, prompts: &[Vec<u32>], batch: usize, chunk: usize, threads: usize) -> Replies {
    let loaded = load(name, threads);
    let kv_type = loaded.kv_type;
    let mut engine = engine(loaded, kv_type, chunk);
    let mut replies = Replies::new();
    for (first, group) in prompts.chunks(batch).enumerate().map(|(i, group)| (i * batch, group)) {
        let mut requests = BTreeMap::new();
        for (i, prompt) in group.iter().enumerate() {
            let log = LogitsLog::default();
            let request = Request {
                ignore_eos: true,
                seed: Some((first + i) as u64),
                sampling: lmx::sample::SamplingParams { temperature: 0.7, ..Default::default() },
                logits_processors: vec![log.watch()],
                ..Request::new(prompt.clone(), 4)
            };
            requests.insert(engine.submit(request).unwrap(), (first + i, log));
        }
        while !engine.is_idle() {
            for (id, update) in engine.step() {
                match update {
                    Update::Token(event) => {
                        replies.entry(requests[&id].0).or_default().0.extend(event.token);
                    }
                    Update::Failed(error) => panic!("{error}"),
                    Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
                }
            }
        }
        for (index, log) in requests.into_values() {
            replies.get_mut(&index).unwrap().1 = log.hashes();
        }
    }
    replies
}

#[test]
fn batches_chunks_and_threads_change_no_bit() {
    let text = golden("smollm2.json")["greedy"][9]["prompt"].clone();
    let smollm2 = ids(&text);
    let gemma3 = ids(&golden("gemma3.json")["greedy"][9]["prompt"]);
    for (name, text) in [
        ("SmolLM2-135M-Instruct", &smollm2),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", &smollm2),
        ("gemma-3-270m", &gemma3),
        ("gemma-3-270m-q4_k_m.gguf", &gemma3),
    ] {
        let lengths = [1, 2, 3, 7, 8, 16, 33, 70];
        let prompts: Vec<Vec<u32>> = lengths.iter().map(|&n| text[n..2 * n].to_vec()).collect();
        let alone = replies(name, &prompts, 1, 512, 1);
        for (chunk, threads) in [(1, 2), (7, 1), (64, 2), (512, 2)] {
            let together = replies(name, &prompts, 8, chunk, threads);
            assert_eq!(alone, together, "{name}: chunks of {chunk}, {threads} threads");
        }
        // Longer than Gemma's window of 512.
        if text.len() > 560 {
            let long = [text[..560].to_vec()];
            let whole = replies(name, &long, 1, 2048, 2);
            assert_eq!(whole, replies(name, &long, 1, 333, 1), "{name}: 560 tokens in chunks of 333");
        }
    }
}
