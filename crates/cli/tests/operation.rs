//! The server in operation: models that come and go, clients that vanish, and whatever else happens to a program that runs
//! for weeks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::model::{Model, Then};
use common::server::Server;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;
use std::time::Duration;

const TEXT: &str = "/v1/completions";

fn copy(model: &Model, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(model.dir()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn ask(server: &Server, model: &str) -> Value {
    let body = json!({"model": model, "prompt": "<|assistant|>", "max_tokens": 9});
    let answer = server.post(TEXT, &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["choices"][0]["text"].clone()
}

/// What `/v1/models` says of each model.
fn states(server: &Server) -> Vec<(String, String)> {
    let list = server.get("/v1/models").json()["data"].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    assert!(list.iter().all(|model| model["loaded"] == (model["status"] == "loaded")));
    list.iter().map(|model| (text(&model["id"]), text(&model["status"]))).collect()
}

fn are(states: &[(&str, &str)]) -> Vec<(String, String)> {
    states.iter().map(|&(name, state)| (name.to_owned(), state.to_owned())).collect()
}

#[test]
fn models_of_a_folder_are_loaded_when_they_are_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("models");
    std::fs::create_dir(&dir).unwrap();
    copy(&Model::script(&[b"one"], Then::End), &dir.join("a"));
    copy(&Model::script(&[b"two", b"!"], Then::Loop), &dir.join("b"));
    copy(&Model::script(&[b"no"], Then::End), &root.path().join("outside"));
    std::os::unix::fs::symlink("../outside", dir.join("out")).unwrap();
    let weights = std::fs::metadata(dir.join("a/model.safetensors")).unwrap().len();
    let (folder, room) = (dir.to_str().unwrap(), (weights * 3 / 2).to_string());
    let server = Server::start_with(&["--models-dir", folder, "--models-memory", &room]);
    assert_eq!(states(&server), are(&[("a", "unloaded"), ("b", "unloaded")]));
    let whole = dir.join("a");
    for name in ["out", "../outside", "./a", "a/", "a/config.json", "..", "", whole.to_str().unwrap()] {
        let answer = server.post(TEXT, &json!({"model": name, "prompt": "x"}));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (404, &json!("model")), "{name}");
    }
    let nameless = server.post(TEXT, &json!({"prompt": "x"}));
    assert_eq!((nameless.status, &nameless.json()["error"]["param"]), (400, &json!("model")));

    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8).map(|_| scope.spawn(|| ask(&server, "a"))).collect();
        asked.into_iter().for_each(|asked| assert_eq!(asked.join().unwrap(), "one"));
    });
    assert_eq!(server.metric("lmx_model_loads_total"), 1.0, "eight requests at once load it once");
    assert_eq!(ask(&server, "b"), "two!two!two!two!two");
    assert_eq!(states(&server), are(&[("a", "unloaded"), ("b", "loaded")]), "it made room");
    assert_eq!(server.metric("lmx_model_unloads_total"), 1.0);

    // While b is in use it stays, and who wants a waits.
    let endless = json!({"model": "b", "prompt": "<|assistant|>", "max_tokens": 100_000, "stream": true});
    let mut running = server.send("POST", TEXT, &[], &endless.to_string());
    running.read_exact(&mut [0; 500]).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ask(&server, "a"));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!waiting.is_finished());
        assert_eq!(states(&server), are(&[("a", "unloaded"), ("b", "loaded")]));
        drop(running);
        assert_eq!(waiting.join().unwrap(), "one");
    });
    assert_eq!(states(&server), are(&[("a", "loaded"), ("b", "unloaded")]));
    assert_eq!(server.metric("lmx_model_loaded"), 1.0);

    // What comes later is served too; what is broken breaks nothing else.
    copy(&Model::script(&[b"three"], Then::End), &dir.join("c"));
    assert_eq!(ask(&server, "c"), "three");
    std::fs::create_dir(dir.join("bad")).unwrap();
    std::fs::write(dir.join("bad/config.json"), "{").unwrap();
    assert_eq!(server.post(TEXT, &json!({"model": "bad", "prompt": "x"})).status, 503);
    assert_eq!(ask(&server, "c"), "three");
    std::fs::write(dir.join("bad/huge.safetensors"), vec![0; 1 << 20]).unwrap();
    let large = server.post(TEXT, &json!({"model": "bad", "prompt": "x"}));
    assert!(large.status == 400 && large.body.contains("--models-memory"), "{large:?}");
}

#[test]
fn folders_and_memory_of_models_must_make_sense() {
    let model = Model::script(&[b"a"], Then::End);
    for (words, code, says) in [
        (&["--models-dir", "/nonexistent/models"][..], 1, "--models-dir /nonexistent/models"),
        (&["--adapters-dir", "/nonexistent/adapters"], 1, "--adapters-dir /nonexistent/adapters"),
        (&["--models-memory", "1GB"], 2, "--models-memory needs --models-dir or --also"),
        (&["--also", model.path(), "--models-memory", "9KB"], 1, "--models-memory"),
        (&["--also", model.path(), "--draft-model", model.path()], 2, "--draft-model"),
    ] {
        let words = [&["server", "--port", "0", "--model", model.path()], words].concat();
        common::run(&words).assert_error(code, &[says]);
    }
}
