//! Checkpoints: what opens, and that whatever is wrong with a folder or file is named.

use std::fs;
use std::path::Path;

use crate::common::golden_cases::{
    Case, Stored, Tensors, golden_folder, read_safetensors, write_safetensors,
};
use lmx::checkpoint::{Checkpoint, CheckpointError, Kind, ModelSource, OpenOptions};
use lmx::models::FeedForwardConfig;
use lmx_tensor::files::DType;
use lmx_tensor::kernels::{Exec, Isa};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(folder.to_str().unwrap(), &OpenOptions::default())
}

/// The error of opening a folder, which must be one line and name all `parts`.
fn assert_refused(folder: &Path, parts: &[&str]) {
    let error = open(folder).map(|_| ()).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    for part in parts {
        assert!(error.contains(part), "{error}");
    }
}

/// A folder with a tiny Llama, and its tensors.
fn llama() -> (TempDir, Tensors) {
    let folder = Case::read("llama-f32").folder();
    let tensors = read_safetensors(&folder.path().join(WEIGHTS));
    (folder, tensors)
}

fn edit_config(folder: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, Value::Object(config).to_string()).unwrap();
}

/// Builds every matrix and norm of a Llama-like model, as the decoder does.
fn load(checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let exec = Exec::new(Isa::best(), 1);
    let decoder = checkpoint.describe()?;
    let hidden = decoder.hidden;
    checkpoint.linear(&exec, "model.embed_tokens", decoder.vocab, hidden, false)?;
    checkpoint.vector("model.norm.weight", hidden)?;
    if !decoder.tied_head {
        checkpoint.linear(&exec, "lm_head", decoder.vocab, hidden, false)?;
    }
    for (i, layer) in decoder.layers.iter().enumerate() {
        let attention = layer.attention().unwrap();
        let FeedForwardConfig::Dense(mlp) = layer.feed_forward else { unreachable!("{layer:?}") };
        let q = attention.heads * attention.head_dim;
        let kv = attention.kv_heads * attention.head_dim;
        for (module, rows, columns) in [
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", mlp.intermediate, hidden),
            ("mlp.up_proj", mlp.intermediate, hidden),
            ("mlp.down_proj", hidden, mlp.intermediate),
        ] {
            checkpoint.linear(&exec, &format!("model.layers.{i}.{module}"), rows, columns, false)?;
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            checkpoint.vector(&format!("model.layers.{i}.{norm}.weight"), hidden)?;
        }
    }
    checkpoint.expect_all_used()
}

fn assert_load_refused(folder: &Path, parts: &[&str]) {
    let error = load(&open(folder).unwrap()).unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{error}");
    }
}

/// Cuts the weights into three shards and writes the index.
fn shard(folder: &Path, tensors: &Tensors) {
    fs::remove_file(folder.join(WEIGHTS)).unwrap();
    let mut map = Map::new();
    let mut shards = vec![Tensors::new(); 3];
    for (i, (name, tensor)) in tensors.iter().enumerate() {
        shards[i % 3].insert(name.clone(), tensor.clone());
        map.insert(name.clone(), json!(format!("model-0000{}-of-00003.safetensors", i % 3 + 1)));
    }
    for (i, tensors) in shards.iter().enumerate() {
        write_safetensors(&folder.join(format!("model-0000{}-of-00003.safetensors", i + 1)), tensors);
    }
    fs::write(folder.join(INDEX), json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
}

#[test]
fn a_single_file_and_shards_load_alike() {
    let (folder, tensors) = llama();
    load(&open(folder.path()).unwrap()).unwrap();
    shard(folder.path(), &tensors);
    fs::write(folder.path().join("model-old.safetensors"), b"not read").unwrap();
    fs::write(folder.path().join("model-00002-of-00003.safetensors.incomplete"), b"").unwrap();
    let checkpoint = open(folder.path()).unwrap();
    load(&checkpoint).unwrap();
    assert_eq!(checkpoint.notices(), ["not part of the checkpoint, so not read: model-old.safetensors"]);
    // Numbered shards without an index are enough.
    fs::remove_file(folder.path().join(INDEX)).unwrap();
    load(&open(folder.path()).unwrap()).unwrap();
    fs::remove_file(folder.path().join("model-00003-of-00003.safetensors")).unwrap();
    assert_refused(folder.path(), &["model-00003-of-00003.safetensors", "missing"]);
}

#[test]
fn interrupted_downloads_are_noticed_before_any_use() {
    let (folder, tensors) = llama();
    shard(folder.path(), &tensors);
    let second = folder.path().join("model-00002-of-00003.safetensors");
    let whole = fs::read(&second).unwrap();
    fs::remove_file(&second).unwrap();
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors", "7 tensors", "interrupted"]);
    fs::write(&second, &whole[..whole.len() - 4]).unwrap();
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors", "cut short"]);
    fs::write(&second, b"").unwrap();
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors", "header"]);
    // A shard of another model, whole in itself.
    let name = tensors.keys().nth(1).unwrap();
    write_safetensors(&second, &Tensors::from([("other".to_owned(), Stored::f32(vec![1], &[1.0]))]));
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors", name, "missing"]);
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let (folder, tensors) = llama();
    shard(folder.path(), &tensors);
    let second = folder.path().join("model-00002-of-00003.safetensors");
    let mut contents = read_safetensors(&second);
    let (name, tensor) = tensors.first_key_value().unwrap();
    contents.insert(name.clone(), tensor.clone());
    write_safetensors(&second, &contents);
    assert_refused(folder.path(), &[name, "model-00001-of-00003", "model-00002-of-00003"]);
}

#[test]
fn a_broken_index_is_refused() {
    let (folder, _) = llama();
    for (text, part) in [
        ("{", "not valid JSON"),
        ("{}", "weight_map"),
        (r#"{"weight_map": {}}"#, "empty"),
        (r#"{"weight_map": {"a": 1}}"#, "file name"),
        (r#"{"weight_map": {"a": "../model.safetensors"}}"#, "file name"),
        (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "file name"),
        (r#"{"weight_map": {"a": ".."}}"#, "file name"),
    ] {
        fs::write(folder.path().join(INDEX), text).unwrap();
        assert_refused(folder.path(), &[INDEX, part]);
    }
}

#[test]
fn missing_extra_and_misshapen_tensors_are_named() {
    let (folder, tensors) = llama();
    let weights = folder.path().join(WEIGHTS);
    let up = "model.layers.1.mlp.up_proj.weight";
    let changed = |edit: &dyn Fn(&mut Tensors)| {
        let mut tensors = tensors.clone();
        edit(&mut tensors);
        write_safetensors(&weights, &tensors);
    };
    changed(&|tensors| drop(tensors.remove(up)));
    assert_load_refused(folder.path(), &[up, "missing"]);
    changed(&|tensors| {
        drop(tensors.insert("model.layers.2.extra.weight".to_owned(), Stored::f32(vec![1], &[0.0])))
    });
    assert_load_refused(folder.path(), &["1 tensor ", "model.layers.2.extra.weight"]);
    changed(&|tensors| tensors.get_mut(up).unwrap().shape.reverse());
    assert_load_refused(folder.path(), &[WEIGHTS, up, "[128, 64]", "[64, 128]"]);
    changed(&|tensors| tensors.get_mut(up).unwrap().dtype = "I32".to_owned());
    assert_load_refused(folder.path(), &[WEIGHTS, up, "I32"]);
    // Old files store what follows from the configuration.
    changed(&|tensors| {
        let frequencies = Stored::f32(vec![8], &[0.0; 8]);
        drop(tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), frequencies));
    });
    load(&open(folder.path()).unwrap()).unwrap();
}

#[test]
fn folders_that_are_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    assert_refused(folder.path(), &["no config.json"]);
    fs::write(folder.path().join("model.gguf"), b"").unwrap();
    assert_refused(folder.path(), &["no config.json", "model.gguf"]);
    fs::write(folder.path().join("config.json"), "{\"model_type\": \"llama\"").unwrap();
    assert_refused(folder.path(), &["config.json", "not valid JSON"]);
    fs::write(folder.path().join("config.json"), Case::read("llama-f32").config.to_string()).unwrap();
    assert_refused(folder.path(), &["no model.safetensors"]);
    fs::write(folder.path().join("pytorch_model.bin"), b"\x80\x02").unwrap();
    assert_refused(folder.path(), &["pytorch_model.bin", "never read"]);
    fs::write(folder.path().join("generation_config.json"), "[]").unwrap();
    assert_refused(folder.path(), &["generation_config.json"]);
}

#[test]
fn names_that_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let resolve = |name: &str, options: &OpenOptions| {
        ModelSource::resolve(name, options).map_err(|error| error.to_string())
    };
    let none = OpenOptions::default();
    for name in ["no/such/folder", "no/such", "nosuch", "", "../x", "a b"] {
        let error = resolve(name, &none).unwrap_err();
        assert!(
            error.contains(&format!("{name:?}")) && error.contains("no hub id in the local cache"),
            "{error}"
        );
    }
    let file = folder.path().join(WEIGHTS);
    fs::write(&file, b"").unwrap();
    assert!(resolve(file.to_str().unwrap(), &none).unwrap_err().contains("give a folder"));
}

#[test]
fn hub_ids_resolve_in_the_local_cache() {
    let cache = tempfile::tempdir().unwrap();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repository = cache.path().join("models--org--tiny");
    let snapshot = repository.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("blobs")).unwrap();
    fs::create_dir_all(repository.join("refs/pr")).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();
    fs::write(repository.join("refs/pr/1"), format!("{commit}\n")).unwrap();
    fs::write(repository.join("refs/bad"), "../../elsewhere").unwrap();
    let (original, _) = llama();
    for (blob, name) in [("aa", "config.json"), ("bb", WEIGHTS)] {
        fs::copy(original.path().join(name), repository.join("blobs").join(blob)).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    let open = |id: &str, revision: Option<&str>| {
        let options = OpenOptions {
            revision: revision.map(str::to_owned),
            hub_cache_dirs: vec![cache.path().join("absent"), cache.path().to_owned()],
        };
        Checkpoint::open(id, &options).map_err(|error| error.to_string())
    };
    for revision in [None, Some("main"), Some("pr/1"), Some(commit)] {
        let checkpoint = open("org/tiny", revision).unwrap();
        assert_eq!(checkpoint.source(), &ModelSource::Hub(snapshot.clone()));
        load(&checkpoint).unwrap();
    }
    for revision in ["v2", "bad", "../main", ""] {
        let error = open("org/tiny", Some(revision)).map(|_| ()).unwrap_err();
        assert!(error.contains(&format!("{revision:?}")) && error.contains("main"), "{error}");
    }
    assert!(open("org/other", None).map(|_| ()).unwrap_err().contains("org/other"));
    // A revision says nothing about a local path.
    let notices = open(original.path().to_str().unwrap(), Some("v2")).unwrap().notices();
    assert!(notices[0].contains("revision v2 has no effect"), "{notices:?}");
}

#[cfg(unix)]
#[test]
fn links_out_of_the_folder_are_refused() {
    use std::os::unix::fs::symlink;
    let (folder, _) = llama();
    let (other, _) = llama();
    for name in ["tokenizer.json", WEIGHTS, "config.json"] {
        let link = folder.path().join(name);
        let _ = fs::remove_file(&link);
        let target = other.path().join(if name == "tokenizer.json" { "config.json" } else { name });
        symlink(&target, &link).unwrap();
        assert_refused(folder.path(), &[name, "leads out of the folder"]);
        fs::remove_file(&link).unwrap();
        fs::copy(&target, &link).unwrap();
    }
    // Within the folder they are fine, and so is a link to the folder.
    fs::rename(folder.path().join(WEIGHTS), folder.path().join("weights")).unwrap();
    symlink("weights", folder.path().join(WEIGHTS)).unwrap();
    let place = tempfile::tempdir().unwrap();
    symlink(folder.path(), place.path().join("model")).unwrap();
    load(&open(&place.path().join("model")).unwrap()).unwrap();
}

#[test]
fn code_in_the_folder_is_never_needed() {
    let (folder, _) = llama();
    fs::write(folder.path().join("modeling_custom.py"), "raise SystemExit").unwrap();
    edit_config(folder.path(), |config| {
        drop(config.insert("auto_map".into(), json!({"AutoModel": "modeling_custom.M"})))
    });
    let checkpoint = open(folder.path()).unwrap();
    load(&checkpoint).unwrap();
    assert!(checkpoint.notices()[0].contains("not run"));
    edit_config(folder.path(), |config| drop(config.insert("model_type".into(), json!("custom"))));
    assert_refused(folder.path(), &["auto_map", "modeling_custom.M", "never runs code"]);
}

#[test]
fn tied_heads() {
    for name in ["smollm3-f32", "smollm3-q4"] {
        let folder = Case::read(name).folder();
        let weights = folder.path().join(WEIGHTS);
        let plain = read_safetensors(&weights);
        let heads = || {
            let parts = plain.iter().filter_map(|(name, tensor)| {
                Some((format!("lm_head{}", name.strip_prefix("model.embed_tokens")?), tensor.clone()))
            });
            parts.collect::<Tensors>()
        };
        let with =
            |head: Tensors| write_safetensors(&weights, &plain.clone().into_iter().chain(head).collect());
        let set_tie = |tie: Value| {
            edit_config(folder.path(), |config| drop(config.insert("tie_word_embeddings".into(), tie)))
        };
        let opened = || {
            let checkpoint = open(folder.path()).unwrap();
            load(&checkpoint).map(|()| (checkpoint.describe().unwrap().tied_head, checkpoint.notices()))
        };
        assert_eq!(opened().unwrap(), (true, vec![]), "{name}: tied");
        with(heads());
        assert_eq!(opened().unwrap(), (true, vec![]), "{name}: tied, and stored again");
        let mut other = heads();
        other.get_mut("lm_head.weight").unwrap().bytes[0] ^= 1;
        with(other);
        let (tied, notices) = opened().unwrap();
        assert!(!tied && notices[0].contains("lm_head is used"), "{name}: tied, but different: {notices:?}");
        set_tie(json!(false));
        assert_eq!(opened().unwrap(), (false, vec![]), "{name}: not tied");
        write_safetensors(&weights, &plain);
        let error = opened().unwrap_err().to_string();
        assert!(
            error.contains("lm_head.weight") && error.contains("tie_word_embeddings is false"),
            "{error}"
        );
    }
    // Without the key a Llama is not tied, but without a head it cannot be anything else.
    let (folder, mut tensors) = llama();
    edit_config(folder.path(), |config| drop(config.remove("tie_word_embeddings")));
    load(&open(folder.path()).unwrap()).unwrap();
    tensors.remove("lm_head.weight");
    write_safetensors(&folder.path().join(WEIGHTS), &tensors);
    let checkpoint = open(folder.path()).unwrap();
    load(&checkpoint).unwrap();
    assert!(checkpoint.notices()[0].contains("the embedding is taken"));
}

#[test]
fn the_quantization_block_is_checked_against_the_tensors() {
    let folder = Case::read("llama-mixed").folder();
    let checkpoint = open(folder.path()).unwrap();
    load(&checkpoint).unwrap();
    assert_eq!(checkpoint.kind(), Kind::Mlx);
    let exec = Exec::new(Isa::best(), 1);
    let format = |module: &str, rows: usize, columns: usize| {
        checkpoint.linear(&exec, module, rows, columns, false).unwrap().format_name().to_owned()
    };
    assert_eq!(format("model.layers.0.mlp.down_proj", 64, 128), "affine 6-bit group 32");
    assert_eq!(format("model.layers.1.self_attn.v_proj", 32, 64), "mxfp4 4-bit group 32");
    assert_eq!(format("model.layers.0.mlp.up_proj", 128, 64), "affine 4-bit group 64");
    assert_eq!(format("lm_head", 64, 64), "BF16");

    let block = open(folder.path()).unwrap().config().get("quantization").unwrap().clone();
    let with = |changes: Value| {
        edit_config(folder.path(), |config| {
            let mut block = block.as_object().unwrap().clone();
            block.extend(changes.as_object().unwrap().clone());
            config.insert("quantization".into(), Value::Object(block));
        });
    };
    // What is not listed follows from the tensors, what is listed must agree with them.
    with(json!({"bits": 8, "group_size": null, "unlisted": true}));
    load(&open(folder.path()).unwrap()).unwrap();
    let down = "model.layers.0.mlp.down_proj";
    with(json!({down: {"bits": 6}}));
    assert_load_refused(folder.path(), &[down, "affine 6-bit group 32", "affine 6-bit group 64"]);
    with(json!({down: true}));
    assert_load_refused(folder.path(), &[down, "affine 6-bit group 32", "affine 4-bit group 64"]);
    with(json!({down: false}));
    assert_load_refused(folder.path(), &[down]);
    with(json!({"lm_head": true}));
    assert_load_refused(folder.path(), &["lm_head.scales", "missing"]);
    for (changes, parts) in [
        (json!({"mode": "affine2"}), ["`quantization.mode`", "affine2", "nvfp4"].as_slice()),
        (json!({down: {"bits": "six"}}), &["down_proj.bits", "six"]),
        (json!({down: {"group_size": 1 << 20}}), &["down_proj.group_size", "1048576"]),
    ] {
        with(changes);
        assert_refused(folder.path(), parts);
    }
}

#[test]
fn quantization_methods_of_transformers() {
    let folder = Case::read("llama-mxfp4").folder();
    let with = |block: Value| {
        edit_config(folder.path(), |config| {
            config.remove("quantization");
            config.insert("quantization_config".into(), block);
        });
    };
    for block in
        [json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}), json!({"quant_method": "mxfp4"}), json!(null)]
    {
        with(block);
        load(&open(folder.path()).unwrap()).unwrap();
    }
    for method in ["gptq", "awq", "bitsandbytes", "fp8", "zzz"] {
        with(json!({"quant_method": method}));
        assert_refused(folder.path(), &["quantization_config.quant_method", method, "mxfp4"]);
    }
    with(json!(null));
    fs::write(folder.path().join("hf_quant_config.json"), "{}").unwrap();
    assert_refused(folder.path(), &["hf_quant_config.json", "ModelOpt"]);
}

#[test]
fn the_text_part_of_a_wrapper_loads() {
    let case = Case::read("gemma3-q4");
    let folder = case.folder();
    let plain = open(folder.path()).unwrap();
    let wanted = format!("{:?}", plain.describe().unwrap());
    let names: Vec<String> = plain.unused();
    let weights = folder.path().join(WEIGHTS);
    let tensors = read_safetensors(&weights);
    for (prefix, rest) in [("language_model.model.", "model."), ("model.language_model.", "model.")] {
        let renamed = tensors
            .iter()
            .map(|(name, tensor)| (format!("{prefix}{}", name.strip_prefix(rest).unwrap()), tensor.clone()));
        let mut renamed: Tensors = renamed.collect();
        renamed.insert("vision_tower.blocks.0.weight".to_owned(), Stored::f32(vec![1], &[0.0]));
        write_safetensors(&weights, &renamed);
        let mut text = case.config.as_object().unwrap().clone();
        let mut block = text.remove("quantization").unwrap();
        text.remove("model_type");
        let module = format!("{prefix}layers.0.mlp.up_proj");
        block[&module] = json!({"group_size": 64, "bits": 4});
        let config = json!({"model_type": "gemma3", "text_config": text, "quantization": block, "vision_config": {"a": 1}});
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let checkpoint = open(folder.path()).unwrap();
        assert_eq!(format!("{:?}", checkpoint.describe().unwrap()), wanted);
        assert_eq!(checkpoint.unused(), names);
        assert_eq!(checkpoint.notices(), ["only the text model is loaded; 1 vision tensors are left out"]);
        let exec = Exec::new(Isa::best(), 1);
        checkpoint.linear(&exec, "model.layers.0.mlp.up_proj", 128, 64, false).unwrap();
    }
}

#[test]
fn the_models_own_float_type() {
    let (folder, _) = llama();
    assert_eq!(open(folder.path()).unwrap().float_type().unwrap(), DType::F32);
    for (key, value, wanted) in [("torch_dtype", "float16", DType::F16), ("dtype", "bfloat16", DType::Bf16)] {
        edit_config(folder.path(), |config| drop(config.insert(key.into(), json!(value))));
        assert_eq!(open(folder.path()).unwrap().float_type().unwrap(), wanted);
    }
    edit_config(folder.path(), |config| drop(config.insert("dtype".into(), json!("float8"))));
    assert!(
        open(folder.path()).unwrap().float_type().unwrap_err().to_string().contains("`dtype` is \"float8\"")
    );
    let quantized = Case::read("llama-q8").folder();
    assert_eq!(open(quantized.path()).unwrap().float_type().unwrap(), DType::F16);
}

#[test]
fn gguf_files_describe_themselves() {
    let path = golden_folder().join("gguf-llama.gguf");
    let checkpoint = open(&path).unwrap();
    assert_eq!(checkpoint.kind(), Kind::Gguf);
    assert_eq!(checkpoint.float_type().unwrap(), DType::F16);
    assert!(checkpoint.gguf().is_some() && checkpoint.folder().is_none() && checkpoint.notices().is_empty());
    let decoder = checkpoint.describe().unwrap();
    assert!(!decoder.tied_head);
    assert_eq!(decoder.ropes[0].to_string(), "stored divisors, base 10000, 16 dims");
    load(&checkpoint).unwrap();
    // Another architecture of the same length: everything else in the file stays valid.
    let bytes = fs::read(&path).unwrap();
    let at = bytes.windows(5).position(|window| window == b"llama").unwrap();
    let mut other = bytes.clone();
    other[at..at + 5].copy_from_slice(b"mamba");
    let folder = tempfile::tempdir().unwrap();
    let edited = folder.path().join("other.GGUF");
    fs::write(&edited, &other).unwrap();
    assert_refused(&edited, &["other.GGUF", "general.architecture", "mamba", "smollm3"]);
    // A key that lmx does not know is noticed.
    let mut other = bytes.clone();
    let at = other.windows(16).position(|window| window == b"llama.vocab_size").unwrap();
    other[at..at + 16].copy_from_slice(b"llama.vocab_sice");
    fs::write(&edited, &other).unwrap();
    let notices = open(&edited).unwrap().notices();
    assert!(notices[0].contains("keys without effect: vocab_sice"), "{notices:?}");
}
