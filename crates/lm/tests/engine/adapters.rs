//! Adapters: logits against mlx-lm's, alone and in one batch with others, and what is refused.
//!
//! tests/gen/adapters_golden.py wrote the data.

use crate::common::golden_cases::{Case, Stored, Tensors, read_safetensors, write_safetensors};
use crate::common::text_data;
use crate::common::tiny::{self, model};
use lmx::cache::{KvStore, PrefixCacheOptions};
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{Engine, EngineOptions, Request, RequestError};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx::prompt_cache::{Identity, Notes, PromptCacheError, PromptCacheFile};
use lmx::sample::SamplingParams;
use lmx::{Adapter, AdapterError, AdapterFiles, KvType};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The largest difference of a row of logits, relative to its largest logit.
const FLOAT_TOLERANCE: f32 = 1e-4;
const QUANTIZED_TOLERANCE: f32 = 2e-4;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/adapters").join(name)
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(folder("")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 10, "the golden data is incomplete");
    names
}

fn json_of(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn load(path: &Path, model: &dyn Model) -> Result<Adapter, AdapterError> {
    AdapterFiles::open(path.to_str().unwrap(), &OpenOptions::default())?.fit(model)
}

/// A prompt and what it runs with.
type Row<'a> = (&'a [u32], Option<&'a Adapter>);

/// The logits of every position of prompts that run together, in pieces of `chunk` tokens.
fn logits(model: &Decoder, prompts: &[Row<'_>], chunk: usize) -> Vec<Vec<Vec<f32>>> {
    let mut kv = KvStore::new(kv_spec(model, KvType::F32), usize::MAX);
    let ids: Vec<_> = prompts.iter().map(|_| kv.add()).collect();
    let mut found = vec![Vec::new(); prompts.len()];
    let longest = prompts.iter().map(|(tokens, _)| tokens.len()).max().unwrap();
    for first in (0..longest).step_by(chunk) {
        let mut step = StepInputs::default();
        let mut parts = Vec::new();
        for (index, &(tokens, adapter)) in prompts.iter().enumerate() {
            let piece = &tokens[first.min(tokens.len())..tokens.len().min(first + chunk)];
            if piece.is_empty() {
                continue;
            }
            step.push(ids[index], first, piece, false);
            adapter.iter().for_each(|adapter| step.adapt(adapter.weights()));
            kv.reserve(ids[index], piece.len()).unwrap();
            parts.push((index, piece.len()));
        }
        let hidden = model.hidden(&step, &mut kv).unwrap();
        let all: Vec<usize> = (0..step.tokens.len()).collect();
        let head = model.head(&hidden, &all, &step.adapters).unwrap();
        let mut rows = all.iter().map(|&row| head.row(row).unwrap().to_vec());
        for (index, count) in parts {
            kv.commit(ids[index], count).unwrap();
            found[index].extend(rows.by_ref().take(count));
        }
    }
    found
}

fn difference(row: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(row.len(), wanted.len());
    // A NaN must not be lost in the maximum.
    let largest = |values: &mut dyn Iterator<Item = f32>| {
        values.fold(0.0, |max: f32, value| if value > max || value.is_nan() { value } else { max })
    };
    largest(&mut row.iter().zip(wanted).map(|(a, b)| (a - b).abs()))
        / largest(&mut wanted.iter().map(|b| b.abs()))
}

#[test]
fn logits_are_mlx_lms_alone_and_in_a_mixed_batch() {
    let mut wrong = Vec::new();
    for name in names() {
        let expected = json_of(&folder(&name).join("expected.json"));
        let base = expected["base"].as_str().unwrap();
        let model = model(base, 1);
        let adapter = load(&folder(&name), &model).unwrap();
        let quantized = base.contains("-q");
        let tolerance = if quantized { QUANTIZED_TOLERANCE } else { FLOAT_TOLERANCE };
        let mut worst: f32 = 0.0;
        for prompt in expected["prompts"].as_array().unwrap() {
            let tokens: Vec<u32> = serde_json::from_value(prompt["tokens"].clone()).unwrap();
            let own: Row<'_> = (&tokens, Some(&adapter));
            let alone = logits(&model, &[own], tokens.len()).remove(0);
            let mixed = logits(&model, &[(&tokens, None), own, (&tokens[1..], None)], 3).remove(1);
            let wanted: BTreeMap<String, Vec<f32>> =
                serde_json::from_value(prompt["logits"].clone()).unwrap();
            for (position, wanted) in wanted {
                let position: usize = position.parse().unwrap();
                for rows in [&alone, &mixed] {
                    let found = difference(&rows[position], &wanted);
                    worst = if found.is_nan() { found } else { worst.max(found) };
                }
            }
        }
        println!("{name:22} {adapter}: {worst:.1e} of {tolerance:.0e}");
        if worst.is_nan() || worst > tolerance {
            wrong.push(format!("{name} {worst:.1e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

fn tokens(count: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * i * 5 + i + salt * 13) % 61) as u32).collect()
}

#[test]
fn a_row_is_the_same_bit_for_bit_in_any_company() {
    let mut bases: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names() {
        let base = json_of(&folder(&name).join("expected.json"))["base"].as_str().unwrap().to_owned();
        bases.entry(base).or_default().push(name);
    }
    for (base, names) in bases {
        let (alone, model) = (model(&base, 1), model(&base, 2));
        let adapters = |model: &Decoder| -> Vec<Adapter> {
            names.iter().map(|name| load(&folder(name), model).unwrap()).collect()
        };
        let (own, mixed) = (adapters(&alone), adapters(&model));
        // Each adapter twice, with requests without any before, between and after them.
        let choice = |i: usize| if i.is_multiple_of(3) { None } else { Some((i / 3) % names.len()) };
        let prompts: Vec<Vec<u32>> = (0..3 * names.len() + 1).map(|i| tokens(5 + 7 * i % 31, i)).collect();
        let rows: Vec<Row<'_>> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| (&prompt[..], choice(i).map(|a| &mixed[a])))
            .collect();
        let together: Vec<_> = [64, 5].map(|chunk| logits(&model, &rows, chunk)).into();
        for (i, prompt) in prompts.iter().enumerate() {
            let solo = logits(&alone, &[(prompt, choice(i).map(|a| &own[a]))], 1).remove(0);
            for found in &together {
                assert!(found[i] == solo, "{base}, prompt {i}");
            }
        }
    }
}

fn engine(base: &str) -> Engine {
    let options = EngineOptions {
        kv_type: KvType::F32,
        prefix_cache: Some(PrefixCacheOptions::default()),
        prefill_step_size: 16,
        ..EngineOptions::default()
    };
    tiny::engine(base, 2, options)
}

fn adapter(engine: &Engine, name: &str) -> Adapter {
    load(&folder(name), engine.model()).unwrap()
}

/// Request `index` of a batch in which each has another adapter than its neighbours, on prompts that begin alike.
fn request(index: usize, adapters: &[Adapter]) -> Request {
    let sampling = SamplingParams { temperature: [0.0, 1.0][index % 2], ..SamplingParams::default() };
    Request {
        sampling,
        seed: Some(index as u64),
        adapter: adapters.get(index % (adapters.len() + 1)).cloned(),
        ..Request::new(tokens(40 + index, 1), 12)
    }
}

const THREE: [&str; 3] = ["llama-f32-lora", "llama-f32-dora", "llama-f32-outer"];

#[test]
fn requests_with_other_adapters_and_none_share_a_batch_but_no_prefix() {
    let reply = |reply: &lmx::engine::Reply| (reply.token_ids.clone(), reply.logprobs.clone());
    let mut together = engine("llama-f32");
    let adapters = THREE.map(|name| adapter(&together, name));
    // The second round finds what the first has left.
    let mut rounds = Vec::new();
    for _ in 0..2 {
        let requests = (0..8).map(|index| request(index, &adapters));
        let replies = together.batch_generate(requests, &mut |_| {});
        rounds.push(replies.into_iter().map(Result::unwrap).collect::<Vec<_>>());
    }
    assert!(rounds[1].iter().all(|reply| reply.stats.cached_tokens >= 32));
    let mut texts = Vec::new();
    for index in 0..8 {
        let mut alone = engine("llama-f32");
        let loaded = THREE.map(|name| adapter(&alone, name));
        let mut replies = alone.batch_generate([request(index, &loaded)], &mut |_| {});
        let solo = reply(&replies.remove(0).unwrap());
        assert!(rounds.iter().all(|round| reply(&round[index]) == solo), "request {index}");
        texts.push(solo);
    }
    // The adapters change what is said: nothing was compared with itself.
    assert!((0..3).all(|index| texts[index] != texts[3] && texts[index].1[0] != texts[7].1[0]));
}

#[test]
fn what_was_run_with_one_adapter_is_not_found_with_another() {
    let mut engine = engine("llama-f32");
    let [one, other] = ["llama-f32-lora", "llama-f32-dora"].map(|name| adapter(&engine, name));
    let prompt = tokens(70, 2);
    let run = |engine: &mut Engine, adapter: Option<&Adapter>| {
        let request = Request { adapter: adapter.cloned(), ..Request::new(prompt.clone(), 0) };
        engine.batch_generate([request], &mut |_| {}).remove(0).unwrap().stats.cached_tokens
    };
    assert_eq!(run(&mut engine, Some(&one)), 0);
    assert_eq!(engine.cached_tokens(&prompt, None), 0);
    assert_eq!(run(&mut engine, Some(&other)), 0);
    assert_eq!(run(&mut engine, None), 0);
    // The same files loaded again are the same adapter.
    let again = adapter(&engine, "llama-f32-lora");
    assert_eq!(run(&mut engine, Some(&again)), 70);
}

#[test]
fn the_choices_of_a_prompt_run_it_once_with_its_adapter() {
    let mut engine = engine("llama-f32");
    let adapter = adapter(&engine, "llama-f32-lora");
    let mut make =
        |seed| Request { adapter: Some(adapter.clone()), seed: Some(seed), ..Request::new(tokens(50, 3), 4) };
    let replies = engine.choices(3, 7, &mut make).unwrap();
    assert_eq!(replies.iter().map(|reply| reply.stats.cached_tokens).collect::<Vec<_>>(), [0, 49, 49]);
}

#[test]
fn an_adapter_belongs_to_a_model_and_a_prompt_cache_to_an_adapter() {
    let (mut first, mut second) = (engine("llama-f32"), engine("llama-f32"));
    let foreign = adapter(&second, "llama-f32-lora");
    let error = first.submit(Request { adapter: Some(foreign.clone()), ..Request::new(vec![1], 1) });
    assert!(matches!(error, Err(RequestError::Adapter { name }) if name.contains("llama-f32-lora")));

    let prompt = tokens(40, 4);
    let with =
        |adapter: Option<&Adapter>| Request { adapter: adapter.cloned(), ..Request::new(prompt.clone(), 3) };
    let whole = second.batch_generate([with(Some(&foreign))], &mut |_| {}).remove(0).unwrap();
    let cache = second.prompt_cache(&prompt, Some(&foreign)).unwrap();
    assert_eq!(cache.len(), 40);
    let error = second.submit(Request { cache: Some(cache.fork().unwrap()), ..with(None) });
    assert!(matches!(error, Err(RequestError::CacheAdapter { cache: Some(_), request: None })));

    // A file says which adapter made it, whatever the identity that it is given was made for.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache.safetensors");
    let model = Case::read("llama-f32").folder();
    for entry in std::fs::read_dir(text_data::golden().join("byte_level")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.path().join(path.file_name().unwrap())).unwrap();
    }
    let checkpoint = Checkpoint::open(model.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
    let identity = Identity::of(&checkpoint, None).unwrap();
    cache.save(&path, &Notes { identity: Some(identity.clone()), ..Notes::default() }).unwrap();
    let file = PromptCacheFile::open(&path).unwrap();
    let own = adapter(&first, "llama-f32-lora");
    let other = adapter(&first, "llama-f32-dora");
    for wrong in [None, Some(&other)] {
        let error = first.load_prompt_cache(&file, wrong).map(drop).unwrap_err();
        assert!(
            matches!(&error, PromptCacheError::Mismatch { field, .. } if field.contains("adapter")),
            "{error}"
        );
        assert!(file.check_identity(&identity.clone().with_adapter(wrong)).is_err());
    }
    file.check_identity(&identity.with_adapter(Some(&own))).unwrap();
    let cache = first.load_prompt_cache(&file, Some(&own)).unwrap();
    let request = Request { cache: Some(cache), ..with(Some(&own)) };
    let reply = first.batch_generate([request], &mut |_| {}).remove(0).unwrap();
    assert_eq!((reply.token_ids, reply.logprobs), (whole.token_ids, whole.logprobs));
    assert_eq!(reply.stats.cached_tokens, 39);
}

/// A folder with a changed copy of an adapter.
fn changed(name: &str, change: &dyn Fn(&mut Value, &mut Tensors)) -> TempDir {
    let mut config = json_of(&folder(name).join("adapter_config.json"));
    let mut tensors = read_safetensors(&folder(name).join("adapters.safetensors"));
    change(&mut config, &mut tensors);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    write_safetensors(&dir.path().join("adapters.safetensors"), &tensors);
    dir
}

type Change<'a> = &'a dyn Fn(&mut Value, &mut Tensors);

fn set<'a>(key: &'a str, value: Value) -> impl Fn(&mut Value, &mut Tensors) + 'a {
    move |config, _| *config.pointer_mut(key).unwrap() = value.clone()
}

fn without<'a>(object: &'a str, key: &'a str) -> impl Fn(&mut Value, &mut Tensors) + 'a {
    move |config, _| drop(config.pointer_mut(object).unwrap().as_object_mut().unwrap().remove(key).unwrap())
}

#[test]
fn what_an_adapter_says_is_held_against_it() {
    let model = model("llama-f32", 1);
    let first = "model.layers.1.self_attn.q_proj";
    let (a, b, m) = (format!("{first}.lora_a"), format!("{first}.lora_b"), format!("{first}.m"));
    let cases: [(&str, Change<'_>, &[&str]); 22] = [
        (
            "llama-f32-lora",
            &set("/fine_tune_type", json!("full")),
            &["adapter_config.json", "fine_tune_type", "full"],
        ),
        ("llama-f32-lora", &set("/fine_tune_type", json!("qlora")), &["fine_tune_type", "lora or dora"]),
        ("llama-f32-lora", &without("", "num_layers"), &["`num_layers` is missing"]),
        ("llama-f32-lora", &set("/num_layers", json!(1.5)), &["num_layers", "1.5"]),
        ("llama-f32-lora", &set("/num_layers", json!(2)), &["model.layers.0", "is missing"]),
        ("llama-f32-lora", &without("", "lora_parameters"), &["`lora_parameters` is missing"]),
        ("llama-f32-lora", &set("/lora_parameters", json!(null)), &["`lora_parameters` is missing"]),
        ("llama-f32-lora", &without("/lora_parameters", "scale"), &["lora_parameters.scale", "missing"]),
        ("llama-f32-lora", &set("/lora_parameters/scale", json!("2")), &["lora_parameters.scale", "number"]),
        (
            "llama-f32-lora",
            &set("/lora_parameters/rank", json!(8)),
            &["down_proj.lora_a", "[128, 8]", "[128, 4]"],
        ),
        ("llama-f32-lora", &set("/lora_parameters/rank", json!(0)), &["lora_parameters.rank", "from 1"]),
        ("llama-f32-lora", &set("/lora_parameters/dropout", json!(-1)), &["lora_parameters.dropout"]),
        (
            "llama-f32-lora",
            &|c, _| c["lora_parameters"]["alpha"] = json!(16),
            &["lora_parameters.alpha", "absent"],
        ),
        (
            "llama-f32-lora",
            &|c, _| c["lora_parameters"]["keys"] = json!(["auto"]),
            &["\"auto\"", "last 1 layers"],
        ),
        ("llama-f32-lora", &|c, _| c["lora_parameters"]["keys"] = json!([]), &["no module"]),
        (
            "llama-f32-lora",
            &|c, _| c["lora_parameters"]["keys"] = json!([7]),
            &["lora_parameters.keys", "[7]"],
        ),
        ("llama-f32-lora", &|c, _| c["peft_type"] = json!("LORA"), &["PEFT"]),
        ("llama-f32-lora", &|_, t| drop(t.remove(&a)), &[&a, "missing"]),
        ("llama-f32-lora", &|_, t| drop(t.remove(&b)), &[&b, "missing"]),
        ("llama-f32-dora", &|_, t| drop(t.remove(&m)), &[&m, "missing"]),
        (
            "llama-f32-lora",
            &|_, t| drop(t.insert("model.norm.weight".into(), Stored::f32(vec![1], &[1.0]))),
            &["model.norm.weight", "belongs to no module"],
        ),
        (
            "llama-f32-lora",
            &|_, t| drop(t.insert(b.clone(), Stored::f32(vec![4, 63], &[0.0; 252]))),
            &[&b, "[4, 63]", "[4, 64]"],
        ),
    ];
    for (name, change, says) in cases {
        let dir = changed(name, change);
        let error = load(dir.path(), &model).map(drop).unwrap_err().to_string();
        assert!(
            says.iter().all(|part| error.contains(part)) && error.lines().count() == 1,
            "{says:?}: {error}"
        );
    }
}

#[test]
fn modules_that_adapters_cannot_change_are_named() {
    // Experts have no DoRA in mlx-lm, and Baichuan's head has rows that are brought to length 1.
    let dora = changed("gpt-oss-f32-experts", &set("/fine_tune_type", json!("dora")));
    let error = load(dora.path(), &model("gpt-oss-f32", 1)).map(drop).unwrap_err().to_string();
    assert!(error.contains("experts") && error.contains("DoRA"), "{error}");
    let head =
        changed("llama-f32-outer", &|config, _| config["lora_parameters"]["keys"] = json!(["lm_head"]));
    let error = load(head.path(), &model("baichuan-m1-f32", 1)).map(drop).unwrap_err().to_string();
    assert!(error.contains("lm_head") && error.contains("length 1"), "{error}");
}

#[test]
fn a_folder_without_its_files_says_which() {
    let model = model("llama-f32", 1);
    let open = |path: &Path| load(path, &model).map(drop).unwrap_err().to_string();
    assert!(open(Path::new("no/such/adapter")).contains("no/such/adapter"));
    let dir = tempfile::tempdir().unwrap();
    assert!(open(dir.path()).contains("no adapter_config.json"));
    std::fs::write(dir.path().join("adapter_config.json"), "{").unwrap();
    assert!(open(dir.path()).contains("not valid JSON"));
    std::fs::copy(
        folder("llama-f32-lora").join("adapter_config.json"),
        dir.path().join("adapter_config.json"),
    )
    .unwrap();
    assert!(open(dir.path()).contains("no adapters.safetensors"));
    std::fs::write(dir.path().join("adapter_model.safetensors"), "").unwrap();
    assert!(open(dir.path()).contains("PEFT"));
    std::fs::write(dir.path().join("adapters.safetensors"), [255; 16]).unwrap();
    assert!(open(dir.path()).contains("adapters.safetensors"));
}
