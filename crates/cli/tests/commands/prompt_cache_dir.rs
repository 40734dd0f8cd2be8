//! `--prompt-cache-dir`, and the limits of what is kept of earlier texts, on tiny models.

use crate::common::model::Model;
use crate::common::{run, run_with_input};
use serde_json::{Value, json};
use std::fs;

/// Two blocks of 32 tokens with the template; each byte is one.
const PROMPT: &str = "A prompt that two processes have in common, and it is long.";

fn generate(model: &Model, words: &[&str]) -> Value {
    let fixed = ["generate", "--model", model.path(), "--json", "-m", "8", "--temp", "0", "-p", PROMPT];
    serde_json::from_str(run(&[&fixed, words].concat()).assert_ok()).unwrap()
}

#[test]
fn a_second_process_goes_on_from_the_first() {
    let model = Model::random();
    let dir = model.file("kept");
    let dir = ["--prompt-cache-dir", dir.to_str().unwrap()];
    let cold = generate(&model, &[]);
    for (run, least) in [(1, 0), (2, 32)] {
        let reply = generate(&model, &dir);
        assert_eq!((&reply["text"], &reply["token_ids"]), (&cold["text"], &cold["token_ids"]), "run {run}");
        let cached = reply["cached_tokens"].as_u64().unwrap();
        assert!(cached >= least && (run == 2) == (cached > 0), "run {run}: {reply}");
    }
    // Requests of a file, and turns of a chat, find it too.
    let requests = model.file("requests.jsonl");
    fs::write(&requests, json!({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}).to_string()).unwrap();
    let words = ["generate", "--model", model.path(), "--prompts-file", requests.to_str().unwrap()];
    let out = run(&[&words[..], &dir].concat());
    let reply: Value = serde_json::from_str(out.assert_ok().trim()).unwrap();
    assert_eq!(reply["token_ids"], cold["token_ids"]);
    assert!(reply["cached_tokens"].as_u64().unwrap() >= 32, "{reply}");
    let chat = ["chat", "--model", model.path(), "--temp", "0", "-m", "8"];
    let chat = run_with_input(&[&chat[..], &dir].concat(), format!("{PROMPT}\n").as_bytes());
    chat.assert_ok();
    assert!(chat.stderr.contains(" cached") && !chat.stderr.contains(" 0 cached"), "{chat:?}");
}

#[test]
fn damaged_files_are_named_and_change_nothing() {
    let model = Model::random();
    let folder = model.file("kept");
    let dir = ["--prompt-cache-dir", folder.to_str().unwrap()];
    let cold = generate(&model, &dir);
    for file in fs::read_dir(&folder).unwrap() {
        fs::write(file.unwrap().path(), "damaged").unwrap();
    }
    let reply = generate(&model, &dir);
    assert_eq!((&reply["token_ids"], &reply["cached_tokens"]), (&cold["token_ids"], &json!(0)));
    let notices = reply["notices"].to_string();
    assert!(
        notices.contains("--prompt-cache-dir: ") && notices.contains("is damaged and is dropped"),
        "{notices}"
    );
    assert!(generate(&model, &dir)["cached_tokens"].as_u64().unwrap() >= 32);
}

#[test]
fn flags_that_would_change_nothing_are_refused() {
    let model = Model::random();
    let error = |words: &[&str], says: &[&str]| {
        run(&[&["generate", "--model", model.path()], words].concat()).assert_error(2, says);
    };
    error(&["--prompt-cache-size", "3"], &["--prompt-cache-size needs --prompts-file or --prompt-cache-dir"]);
    error(&["--prompt-cache-bytes", "3M"], &["--prompt-cache-bytes needs"]);
    let not_with = "cannot be used with --prompt-cache-file";
    error(&["--prompt-cache-file", "x", "--prompt-cache-dir", "y"], &["--prompt-cache-dir", not_with]);
    let file = model.file("config.json");
    error(
        &["--prompt-cache-dir", file.to_str().unwrap()],
        &["--prompt-cache-dir: the folder", "config.json"],
    );
    let alone = run(&["generate", "--model", model.path(), "--prompt-cache-dir-bytes", "1G"]);
    assert!(alone.code == Some(2) && alone.stderr.contains("--prompt-cache-dir"), "{alone:?}");
}

#[test]
fn memory_and_folder_have_limits() {
    let model = Model::random();
    let folder = model.file("kept");
    let dir = ["--prompt-cache-dir", folder.to_str().unwrap()];
    // Nothing is kept that is larger than all of it.
    generate(&model, &[&dir[..], &["--prompt-cache-dir-bytes", "1K"]].concat());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    let requests = model.file("requests.jsonl");
    let line = json!({"prompt": PROMPT, "max_tokens": 2, "temperature": 0}).to_string();
    fs::write(&requests, format!("{line}\n{line}\n")).unwrap();
    let words = ["generate", "--model", model.path(), "--decode-concurrency", "1"];
    let words = [&words[..], &["--prompts-file", requests.to_str().unwrap()]].concat();
    for (limit, found) in
        [(&[][..], true), (&["--prompt-cache-size", "9"], true), (&["--prompt-cache-bytes", "1"], false)]
    {
        let out = run(&[&words[..], limit].concat());
        let last: Value = serde_json::from_str(out.assert_ok().lines().last().unwrap()).unwrap();
        assert_eq!(last["cached_tokens"].as_u64().unwrap() > 0, found, "{limit:?}: {last}");
    }
}
