//! The server in operation: models that come and go, clients that vanish, and whatever else happens to a program that runs
//! for weeks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::model::{Model, Then};
use common::server::Server;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
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
    copy(Model::script(&[b"one"], Then::End).dir(), &dir.join("a"));
    copy(Model::script(&[b"two", b"!"], Then::Loop).dir(), &dir.join("b"));
    copy(Model::script(&[b"no"], Then::End).dir(), &root.path().join("outside"));
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
    copy(Model::script(&[b"three"], Then::End).dir(), &dir.join("c"));
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

/// Waits until nothing is in flight, and all keys and values that are held are the prefix cache's. A loaded machine may take
/// longer than the step that it is.
#[track_caller]
fn await_freed(server: &Server, running: f64) {
    let begin = Instant::now();
    let held = || server.metric("lmx_kv_bytes") - server.metric("lmx_kv_cached_bytes");
    while server.metric("lmx_requests_in_flight") != running || (running == 0.0 && held() != 0.0) {
        assert!(begin.elapsed() < Duration::from_secs(3), "{}", server.get("/metrics").body);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a counter has grown by so much.
#[track_caller]
fn await_more(server: &Server, name: &str, more: f64) {
    let (begin, before) = (Instant::now(), server.metric(name));
    while server.metric(name) < before + more {
        assert!(begin.elapsed() < Duration::from_secs(30), "{name} does not grow");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn clients_vanish_in_queue_prefill_and_decode() {
    let model = Model::random();
    let words = ["--decode-concurrency", "1", "--prompt-concurrency", "1", "--prefill-step-size", "32"];
    let server = Server::start(model.path(), &words);
    let send = |prompt: &str, stream: bool| {
        let body = json!({"prompt": prompt, "max_tokens": 100_000, "ignore_eos": true, "stream": stream});
        server.send("POST", TEXT, &[], &body.to_string())
    };
    for stream in [true, false] {
        let decoding = send("abc", stream);
        await_more(&server, "lmx_generated_tokens_total", 1.0);
        let queued = send("xyz", stream);
        await_freed(&server, 2.0);
        server.await_metric("lmx_requests_waiting", 1.0);
        drop(queued);
        await_freed(&server, 1.0);
        drop(decoding);
        await_freed(&server, 0.0);
        // A prompt that takes minutes.
        let tokens = server.metric("lmx_generated_tokens_total");
        let reading = send(&"long ago ".repeat(14_000), stream);
        await_more(&server, "lmx_step_seconds_count", 20.0);
        drop(reading);
        await_freed(&server, 0.0);
        assert_eq!(server.metric("lmx_generated_tokens_total"), tokens, "it was still reading");
    }
    assert_eq!(server.metric("lmx_requests_cancelled_total"), 6.0);
    assert_eq!(server.post(TEXT, &json!({"prompt": "abc", "max_tokens": 3, "stream": true})).status, 200);
    let told = |status: &str| server.log().matches(status).count();
    // A stream is told when it has ended, which its client may see first.
    let whole = "\"/v1/completions\" status=200";
    let begin = Instant::now();
    while told("status=499") < 6 || told(whole) < 1 {
        assert!(begin.elapsed() < Duration::from_secs(30), "not all are told: {}", server.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!([told("status=499"), told(whole)], [6, 1]);
    assert!(server.get("/metrics").body.contains("path=\"/v1/completions\",status=\"499\"} 6"));
}

#[test]
fn times_that_would_stop_everything_are_refused() {
    for flag in ["--read-timeout", "--keep-alive", "--generation-stall-timeout"] {
        common::run(&["server", "--model", "none", flag, "0"]).assert_error(2, &[flag, "above 0"]);
    }
}

#[test]
fn keys_and_values_are_counted_in_blocks() {
    let model = Model::random();
    let server = Server::start(model.path(), &["--kv-memory", "2MB"]);
    let empty = server.metric("lmx_kv_blocks_free");
    assert_eq!(server.metric("lmx_kv_blocks_used"), 0.0);
    let body = json!({"prompt": "a".repeat(100), "max_tokens": 20, "ignore_eos": true});
    assert_eq!(server.post(TEXT, &body).status, 200);
    await_freed(&server, 0.0);
    let (used, free) = (server.metric("lmx_kv_blocks_used"), server.metric("lmx_kv_blocks_free"));
    assert!((3.0..=4.0).contains(&used), "what 119 tokens leave in the prefix cache: {used}");
    assert_eq!(used + free, empty);
    let block = server.metric("lmx_kv_bytes") / used;
    assert_eq!(empty, (server.metric("lmx_kv_limit_bytes") / block).floor());
}

#[test]
fn a_port_in_use_is_said() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &[]);
    let port = server.port.to_string();
    common::run(&["server", "--model", model.path(), "--port", &port])
        .assert_error(1, &["cannot listen on 127.0.0.1", &port, "--port"]);
    common::run(&[
        "server",
        "--model",
        model.path(),
        "--port",
        "0",
        "--tls-cert",
        "/none",
        "--tls-key",
        "/none",
    ])
    .assert_error(1, &["/none cannot be used"]);
}

#[test]
fn a_cache_folder_that_cannot_be_written() {
    let (model, dir) = (Model::random(), tempfile::tempdir().unwrap());
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    common::run(&[
        "server",
        "--model",
        model.path(),
        "--port",
        "0",
        "--prompt-cache-dir",
        file.to_str().unwrap(),
    ])
    .assert_error(1, &["--prompt-cache-dir", file.to_str().unwrap()]);

    let body =
        |n: usize| json!({"prompt": format!("{n} {}", "once upon a time ".repeat(20)), "max_tokens": 9});
    let plain = Server::start(model.path(), &[]);
    let texts = |server: &Server| -> Vec<Value> {
        (0..4).map(|n| server.post(TEXT, &body(n)).json()["choices"][0]["text"].clone()).collect()
    };
    let expected = texts(&plain);
    // No file may grow beyond a block, as on a disk that is full.
    let cache = dir.path().join("cache");
    let words = ["--model", model.path(), "--prompt-cache-dir", cache.to_str().unwrap()];
    let mut full =
        Server::start_below(&["sh", "-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\""], &words);
    assert_eq!(texts(&full), expected);
    assert_eq!(texts(&full), expected);
    full.terminate();
    assert!(full.wait().success());
    assert!(full.log().contains("--prompt-cache-dir: "), "it is said: {}", full.log());
    // The folder goes away while it is used.
    let server = Server::start_with(&words);
    assert_eq!(texts(&server)[..2], expected[..2]);
    std::fs::remove_dir_all(&cache).unwrap();
    std::fs::write(&cache, "").unwrap();
    assert_eq!(texts(&server), expected);
    assert_eq!(server.get("/health").status, 200);
}

/// Whether something has come on a connection; it stays there to be read.
fn has_answered(stream: &std::net::TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let came = stream.peek(&mut [0]).is_ok();
    stream.set_nonblocking(false).unwrap();
    came
}

#[test]
fn stopping_under_load_ends_what_can_end_and_tells_the_rest() {
    let model = Model::script(&[b"x", b"y"], Then::Loop);
    let mut server = Server::start(model.path(), &["--grace-period", "4"]);
    let send = |max_tokens: usize, stream: bool| {
        let body = json!({"prompt": "<|assistant|>", "max_tokens": max_tokens, "stream": stream});
        server.send("POST", TEXT, &[], &body.to_string())
    };
    let endless = [send(120_000, true), send(120_000, false)];
    // Long enough for all to run at the same time, however long this machine takes to send them.
    let short = [300, 1200, 4800, 19_200].into_iter().find_map(|length| {
        server.await_metric("lmx_requests_in_flight", 2.0);
        let short: Vec<_> = (0..6).map(|n| send(length + n, n % 2 == 0)).collect();
        while server.metric("lmx_requests_in_flight") != 8.0 {
            if has_answered(&short[1]) {
                return None;
            }
        }
        Some(short)
    });
    server.terminate();
    let rest = |mut stream: std::net::TcpStream| {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    for (n, stream) in short.unwrap().into_iter().enumerate() {
        let text = rest(stream);
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("\"length\""), "{text}");
        assert!(n % 2 == 1 || text.trim_end().contains("[DONE]"), "{text}");
    }
    let [stream, whole] = endless.map(rest);
    let reason = "the server was stopped before the reply was complete";
    assert!(stream.contains(reason) && !stream.contains("[DONE]"));
    assert!(whole.starts_with("HTTP/1.1 503") && whole.contains(reason), "{whole}");
    assert!(std::net::TcpStream::connect(("127.0.0.1", server.port)).is_err(), "nobody new is let in");
    assert!(server.wait().success());
}

#[test]
fn stopping_does_not_wait_for_silent_connections() {
    let model = Model::script(&[b"x"], Then::End);
    let words = ["--grace-period", "60", "--read-timeout", "60"];
    let mut server = Server::start(model.path(), &words);
    let _silent = std::net::TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    assert_eq!(server.get("/health").status, 200);
    let begin = Instant::now();
    server.terminate();
    assert!(server.wait().success());
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

#[test]
fn adapters_of_a_folder_share_a_batch_with_the_model_itself() {
    let (model, folder) = (Model::random(), tempfile::tempdir().unwrap());
    for (name, seed) in [("a", 1), ("b", 2)] {
        copy(Model::random_adapter(seed).path(), &folder.path().join(name));
    }
    std::fs::create_dir(folder.path().join("broken")).unwrap();
    std::fs::write(folder.path().join("broken/adapter_config.json"), "{").unwrap();
    let server = Server::start(model.path(), &["--adapters-dir", folder.path().to_str().unwrap()]);
    let body = |number: usize| {
        let adapter = [None, Some("a"), Some("b")][number % 3];
        json!({"prompt": format!("abc{}", number / 3), "max_tokens": 120, "temperature": 0.7, "seed": number, "ignore_eos": true,
            "adapters": adapter, "logprobs": 1})
    };
    let choices = |number| server.post(TEXT, &body(number)).json()["choices"][0].clone();
    let alone: Vec<Value> = (0..9).map(choices).collect();
    let same =
        |a: usize, b: usize| alone[a]["logprobs"]["token_logprobs"] == alone[b]["logprobs"]["token_logprobs"];
    assert!(!same(0, 1) && !same(1, 2) && !same(0, 2), "the adapters act");
    let steps = || server.metric("lmx_step_seconds_count");
    let before = steps();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..9).map(|number| scope.spawn(move || choices(number))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
    assert!(steps() - before < 9.0 * 120.0 / 2.0, "they were one batch: {} steps", steps() - before);
    // By the program without a server.
    let path = folder.path().join("a");
    let words = [
        "generate",
        "--model",
        model.path(),
        "--adapter-path",
        path.to_str().unwrap(),
        "--ignore-chat-template",
    ];
    let words = [&words[..], &["--prompt", "abc0", "--max-tokens", "40", "--temp", "0"]].concat();
    let greedy = json!({"prompt": "abc0", "max_tokens": 40, "temperature": 0, "adapters": "a"});
    let greedy = server.post(TEXT, &greedy).json();
    let printed = common::run(&words);
    assert_eq!(greedy["choices"][0]["text"], printed.assert_ok().strip_suffix('\n').unwrap());
    for (name, says) in [("c", "no adapter"), ("../a", "no adapter"), ("broken", "cannot be used")] {
        let answer = server.post(TEXT, &json!({"prompt": "x", "adapters": name}));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("adapters")), "{name}");
        assert!(answer.body.contains(says), "{answer:?}");
    }
    let listed = server.get("/v1/models").body;
    assert!(listed.contains("\"a\"") && listed.contains("\"b\""), "{listed}");
}

/// What the driver of tests/clients says to a server.
fn soak(server: &Server, words: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/soak.py");
    let url = format!("http://127.0.0.1:{}", server.port);
    let mut command = std::process::Command::new("python3");
    let output = command.arg(script).arg(url).args(words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("all ok"), "{text}{}", server.log());
}

#[test]
fn a_thousand_requests_of_all_kinds_get_what_they_would_get_alone() {
    let model = Model::random();
    model.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!("json_tools"));
    let words = ["--read-timeout", "3", "--prompt-cache-bytes", "4MB"];
    let server = Server::start(model.path(), &words);
    let pid = server.pid().to_string();
    soak(&server, &["--requests", "1000", "--at-once", "32", "--idle", "500", "--pid", &pid]);
    assert_eq!(server.metric("lmx_model_loads_total"), 1.0);
}
