//! `--adapter-path` in every command, and adapters by the line, on a model that says "hi" and adapters that say a letter.

use crate::common::model::{Model, Then};
use crate::common::{run, run_with_input};
use serde_json::{Value, json};

fn model() -> Model {
    Model::script(&[b"h", b"i"], Then::End)
}

#[test]
fn generate_applies_the_adapter_and_says_so() {
    let (model, adapter) = (model(), Model::adapter_saying(b'x'));
    let path = adapter.path().to_str().unwrap();
    let fixed = ["generate", "--model", model.path(), "-m", "4", "--verbose", "F"];
    assert_eq!(run(&fixed).assert_ok(), "hi\n");
    assert_eq!(run(&[&fixed[..], &["--adapter-path", path]].concat()).assert_ok(), "xxxx\n");
    let json = run(&[&fixed[..], &["--adapter-path", path, "--json"]].concat());
    let object: Value = serde_json::from_str(json.assert_ok()).unwrap();
    let notices = object["notices"].as_array().unwrap();
    let said = format!("adapter {path}: LoRA of rank 1 on 1 module, 0 layers changed");
    assert!(notices.contains(&json!(said)), "{notices:?}");
    let best = run(&[&fixed[..], &["--adapter-path", path, "--n", "2", "--temp", "1"]].concat());
    assert_eq!(best.assert_ok().matches("xxxx").count(), 2);
}

#[test]
fn what_is_wrong_with_an_adapter_is_said_before_the_model_is_loaded() {
    let adapter = Model::adapter_saying(b'x');
    let path = adapter.path().to_str().unwrap();
    std::fs::write(adapter.path().join("adapter_config.json"), r#"{"peft_type": "LORA"}"#).unwrap();
    for command in
        [&["generate"][..], &["chat"], &["cache-prompt", "--prompt", "a", "--prompt-cache-file", "b"]]
    {
        let model = model();
        let with = |path| run(&[command, &["--model", model.path(), "--adapter-path", path]].concat());
        with("no/such").assert_error(1, &["adapter", "\"no/such\""]);
        with(path).assert_error(1, &[path, "PEFT"]);
    }
    // The model's own files are complete; what does not fit it is said after it is loaded.
    let adapter = Model::adapter_saying(b'x');
    let config = r#"{"num_layers": 1, "lora_parameters": {"rank": 1, "scale": 1, "keys": ["auto"]}}"#;
    std::fs::write(adapter.path().join("adapter_config.json"), config).unwrap();
    let model = model();
    let words = ["generate", "--model", model.path(), "--adapter-path", adapter.path().to_str().unwrap()];
    run(&words).assert_error(1, &["lora_parameters.keys", "\"auto\""]);
}

#[test]
fn each_line_of_a_prompts_file_has_its_own() {
    let (model, x, y) = (model(), Model::adapter_saying(b'x'), Model::adapter_saying(b'y'));
    let [x, y] = [&x, &y].map(|adapter| adapter.path().to_str().unwrap());
    let lines = [
        json!({"prompt": "a"}),
        json!({"prompt": "a", "adapter": y}),
        json!({"prompt": "a", "adapter": false}),
        json!({"prompt": "a", "adapter": null}),
        json!({"prompt": "a", "adapter": "no/such"}),
        json!({"prompt": "a", "adapter": 7}),
    ];
    let file = model.file("prompts.jsonl");
    std::fs::write(&file, lines.map(|line| line.to_string()).join("\n")).unwrap();
    let fixed = ["generate", "--model", model.path(), "-m", "3", "--verbose", "F"];
    let outcome =
        run(&[&fixed[..], &["--adapter-path", x, "--prompts-file", file.to_str().unwrap()]].concat());
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let replies: Vec<Value> =
        outcome.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts: Vec<&str> = replies.iter().filter_map(|reply| reply["text"].as_str()).collect();
    assert_eq!(texts, ["xxx", "yyy", "hi", "xxx"]);
    let error = |index: usize| replies[index]["error"].as_str().unwrap();
    assert!(error(4).contains("no/such") && error(5).contains("adapter must be"), "{outcome:?}");
}

#[test]
fn chat_talks_with_the_adapter() {
    let (model, adapter) = (model(), Model::adapter_saying(b'x'));
    let words = ["chat", "--model", model.path(), "-m", "4", "--no-history"];
    let with = [&words[..], &["--adapter-path", adapter.path().to_str().unwrap()]].concat();
    assert_eq!(run_with_input(&words, b"a\nb\n").assert_ok().matches("hi").count(), 2);
    assert_eq!(run_with_input(&with, b"a\nb\n").assert_ok().matches("xxxx").count(), 2);
}

#[test]
fn a_prompt_cache_file_goes_on_with_its_adapter_only() {
    let (model, x, y) = (model(), Model::adapter_saying(b'x'), Model::adapter_saying(b'y'));
    let [x, y] = [&x, &y].map(|adapter| adapter.path().to_str().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cache.safetensors");
    let file = file.to_str().unwrap();
    let cache = ["cache-prompt", "--model", model.path(), "--prompt", "a", "--prompt-cache-file", file];
    run(&[&cache[..], &["--adapter-path", x]].concat()).assert_ok();
    let fixed = ["generate", "--prompt-cache-file", file, "-p", "b", "-m", "3", "--verbose", "F"];
    assert_eq!(run(&[&fixed[..], &["--adapter-path", x]].concat()).assert_ok(), "xxx\n");
    run(&fixed).assert_error(1, &["an adapter with fingerprint", "here it is none"]);
    run(&[&fixed[..], &["--adapter-path", y]].concat()).assert_error(1, &["an adapter with fingerprint"]);
    run(&cache).assert_ok();
    run(&[&fixed[..], &["--adapter-path", x]].concat()).assert_error(1, &["fingerprint none"]);
}
