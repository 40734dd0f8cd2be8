//! `lmx inspect` on tiny models.

use crate::common::model::{END, Model, Then};
use crate::common::{Outcome, lmx, outcome, run};
use serde_json::{Value, json};
use std::path::PathBuf;

fn inspect(model: &Model, words: &[&str]) -> Value {
    let outcome = run(&[&["inspect", "--json", "--model", model.path()], words].concat());
    serde_json::from_str(outcome.assert_ok()).unwrap()
}

#[test]
fn the_json_object() {
    let model = Model::random();
    let object = inspect(&model, &["--context", "64"]);
    let keys: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "model_type",
            "parameters",
            "bits_per_weight",
            "context_length",
            "rope",
            "layers",
            "bos",
            "eos",
            "template",
            "thinking",
            "tool_parser",
            "flags_without_effect",
            "memory",
            "isa",
            "notices",
        ]
    );
    // Embedding and head; in each of two layers q and o, k and v, the MLP and two norms; the last norm.
    let parameters = 2 * 260 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 64 + 2 * 64) + 64;
    assert_eq!(object["parameters"], parameters);
    assert_eq!(object["bits_per_weight"], 32.0);
    assert_eq!(object["context_length"], 131_072);
    assert_eq!(object["rope"][0]["base"], 10000.0);
    let layer = json!({
        "kind": "full", "window": null, "kv_heads": 1, "head_dim": 32, "bytes_per_token": 256, "state_bytes": 0,
        "experts": 0
    });
    assert_eq!(object["layers"], json!([layer, layer]));
    assert_eq!((&object["bos"], &object["thinking"]), (&Value::Null, &Value::Null));
    assert_eq!(object["eos"], json!([{"id": 256, "text": END, "source": "config"}]));
    assert_eq!(
        object["template"]["text"],
        "<|system|>You are a helpful assistant.<|end|>\n<|user|>Hello<|end|>\n<|assistant|>"
    );
    assert_eq!(object["template"]["source"], "tokenizer_config.json");
    assert_eq!(object["template"]["ids"].as_array().unwrap().len(), 3 + 28 + 3 + 5 + 1);
    let memory = &object["memory"];
    assert_eq!((&memory["context"], &memory["kv_bytes"]), (&json!(64), &json!(64 * 2 * 256)));
    assert_eq!(memory["weights_bytes"], parameters * 4);
    let parts = ["weights_bytes", "program_bytes", "kv_bytes", "activations_bytes"];
    let total: u64 = parts.iter().map(|part| memory[part].as_u64().unwrap()).sum();
    assert_eq!(memory["total_bytes"], total);
}

#[test]
fn the_memory_forecast_is_what_a_run_takes() {
    let models = std::env::var_os("LMX_TEST_MODELS").map_or("../../models".into(), PathBuf::from);
    let path = models.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing: run scripts/test, which fetches it", path.display());
    let model = ["--model", path.to_str().unwrap(), "--json"];
    let number = |outcome: &Outcome, pointer: &str| {
        let object: Value = serde_json::from_str(outcome.assert_ok()).unwrap();
        object.pointer(pointer).and_then(Value::as_f64).unwrap()
    };
    for context in [256, 1024] {
        // One token a word.
        let prompt = "one two three four ".repeat(context / 4);
        let words = ["--ignore-chat-template", "--prompt", &prompt, "--max-tokens", "1", "--threads", "2"];
        let peak = number(&run(&[&["generate"], &model[..], &words].concat()), "/peak_memory_bytes");
        let context = context.to_string();
        let outcome = run(&[&["inspect", "--context", &context], &model[..]].concat());
        let forecast = number(&outcome, "/memory/total_bytes");
        assert!(forecast < 1.15 * peak, "{context} tokens: {forecast} forecast, only {peak} taken");
        // Pages of the mapped file count as taken too. lmx gives them back as it packs the weights, but the system
        // may map them again in larger pieces than were asked for, up to the whole file.
        let most = 1.15 * forecast + std::fs::metadata(&path).unwrap().len() as f64;
        assert!(peak < most, "{context} tokens: {forecast} forecast, {peak} taken");
    }
}

#[test]
fn windows_and_smaller_caches() {
    let model = Model::random();
    model.edit("config.json", |config| {
        config["model_type"] = json!("mistral");
        config["architectures"] = json!(["MistralForCausalLM"]);
        config["sliding_window"] = json!(40);
    });
    let object = inspect(&model, &["--context", "1024", "--kv-dtype", "bf16"]);
    assert_eq!(
        object["layers"][0],
        json!({
            "kind": "window", "window": 40, "kv_heads": 1, "head_dim": 32, "bytes_per_token": 128, "state_bytes": 0,
            "experts": 0
        })
    );
    // The last 40 of 1024 positions lie in two blocks of 32.
    assert_eq!(object["memory"]["kv_bytes"], 2 * 32 * 2 * 128);
}

#[test]
fn layers_with_state_chunks_and_experts() {
    let model = Model::random();
    let said = |keys: Value| {
        model.edit("config.json", |config| {
            config["architectures"] = Value::Null;
            keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
        });
        let outcome = run(&["inspect", "--kv-dtype", "f32", "--model", model.path()]);
        let line = |title: &str| {
            outcome
                .stdout
                .lines()
                .find_map(|line| line.strip_prefix(title))
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        (line("layers"), line("cache"))
    };
    let (layers, cache) = said(json!({"model_type": "lfm2", "full_attn_idxs": [1], "rms_norm_eps": null}));
    assert_eq!(layers, "1 with a short convolution, 1 full (1 x 32 key/value heads)");
    assert_eq!(cache, "256 bytes per token; 512 bytes of state, and as many for each snapshot of it");
    let (layers, cache) = said(json!({
        "model_type": "llama4_text", "attention_chunk_size": 24, "intermediate_size_mlp": 64, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "full_attn_idxs": null, "rms_norm_eps": 1e-6
    }));
    assert_eq!(
        layers,
        "1 in chunks of 24 (1 x 32 key/value heads), 1 full (1 x 32 key/value heads) with 4 experts"
    );
    assert_eq!(cache, "256 bytes per token, and 256 more until the windows are full");
}

#[test]
fn a_forecast_of_quantized_keys_and_values() {
    let model = Model::random();
    let bits = ["--context", "64", "--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start"];
    // Key and value are each 32 codes of 4 bits, a scale and a bias of 4 bytes.
    let quantized = 2 * (16 + 8);
    for (start, held, notices) in
        [("0", 64 * quantized, 0), ("16", 64 * quantized, 0), ("40", 64 * 256, 0), ("64", 64 * 256, 1)]
    {
        let object = inspect(&model, &[&bits[..], &[start]].concat());
        assert_eq!(object["layers"][0]["bytes_per_token"], quantized);
        assert_eq!(
            object["memory"]["kv_bytes"],
            2 * held.max(if start == "16" { 32 * 256 } else { 0 }),
            "{start}"
        );
        assert_eq!(object["notices"].as_array().unwrap().len(), notices, "{object}");
    }
    run(&["inspect", "--model", model.path(), "--kv-bits", "8"])
        .assert_error(2, &["--kv-group-size 64", "layer 0"]);
    run(&["inspect", "--kv-bits", "1"]).assert_error(2, &["--kv-bits 1"]);
}

#[test]
fn what_the_template_does() {
    let model = Model::script(&[b"a"], Then::End);
    assert_eq!(
        inspect(&model, &[])["flags_without_effect"],
        json!(["--use-default-chat-template", "--trust-remote-code", "--pipeline"])
    );
    let template = |source: Value| {
        model.edit("tokenizer_config.json", |config| config["chat_template"] = source);
        inspect(&model, &[])
    };
    let drops = template(json!("{{ messages[-1].content }}"));
    assert!(drops["flags_without_effect"].to_string().contains("--system-prompt"), "{drops}");
    let refuses = template(json!(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[-1].content }}"
    ));
    assert_eq!(refuses["template"]["text"], "Hello");
    assert!(refuses["notices"][0].as_str().unwrap().contains("no system"), "{refuses}");
    let broken = template(json!("{% if %}"));
    assert_eq!(broken["template"], Value::Null);
    assert!(broken["notices"][0].as_str().unwrap().contains("line 1"), "{broken}");
    let none = template(Value::Null);
    assert_eq!(none["template"], Value::Null);
    assert!(none["flags_without_effect"].to_string().contains("--prefill-response"), "{none}");
}

#[test]
fn the_table_is_for_people() {
    let model = Model::random();
    let words = ["inspect", "--model", model.path()];
    let table = outcome(lmx(&words).env("LMX_ISA", "scalar"), b"");
    for part in
        ["parameters    0.1 million, 32.00 bits", "131072 tokens", "kernels       scalar", "<|user|>Hello"]
    {
        assert!(table.assert_ok().contains(part), "{part:?} is not in {}", table.stdout);
    }
    let wrong = run(&["inspect", "--model", model.path(), "--context", "99999999999"]);
    wrong.assert_error(2, &["--context", "99999999999"]);
}
