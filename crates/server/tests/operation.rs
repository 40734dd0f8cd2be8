//! What goes wrong within the server stays where it is: engines that panic or stall, requests whose own code does, and models
//! that are long in coming.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../../cli/tests/common/model.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests of the program use the rest")]
mod model;

use lmx::cache::{KvStore, LayerKv, StateSlot};
use lmx::engine::{Engine, EngineOptions};
use lmx::models::{ForwardError, LinearVisitor, Model as Network, StepInputs};
use lmx::sample::{LogitsProcessor, SampleError};
use lmx::{Device, Isa, LoadOptions};
use lmx_server::{Hook, LoadProgress, LoadedModel, Loader, Server, ServerOptions, Source, Tls};
use lmx_tensor::{RowAdapters, Tensor};
use model::{Model, Then};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// A network that panics in the forward pass of a batch with a prompt that begins with `!`, and takes a while for one that
/// begins with `~`.
struct Fragile(Box<dyn Network>);

/// Longer than the deadlines of requests.
const A_WHILE: Duration = Duration::from_millis(600);

impl Network for Fragile {
    fn hidden(&self, step: &StepInputs, kv: &mut KvStore) -> Result<Tensor, ForwardError> {
        let beginnings = step.positions.iter().zip(&step.tokens).filter(|(position, _)| **position == 0);
        for (_, &token) in beginnings {
            assert!(token != u32::from(b'!'), "a kernel met what it cannot do");
            if token == u32::from(b'~') {
                std::thread::sleep(A_WHILE);
            }
        }
        self.0.hidden(step, kv)
    }
    fn final_norm(&self, hidden: &Tensor, rows: &[usize]) -> Result<Tensor, ForwardError> {
        self.0.final_norm(hidden, rows)
    }
    fn head(&self, hidden: &Tensor, rows: &[usize], adapters: &RowAdapters) -> Result<Tensor, ForwardError> {
        self.0.head(hidden, rows, adapters)
    }
    fn layer_kv(&self) -> Vec<LayerKv> {
        self.0.layer_kv()
    }
    fn states(&self) -> Vec<StateSlot> {
        self.0.states()
    }
    fn device(&self) -> &Device {
        self.0.device()
    }
    fn visit_linears<'a>(&'a self, visit: &mut LinearVisitor<'_, 'a>) {
        self.0.visit_linears(visit);
    }
    fn context_length(&self) -> usize {
        self.0.context_length()
    }
    fn vocab(&self) -> usize {
        self.0.vocab()
    }
    fn width(&self) -> usize {
        self.0.width()
    }
    fn original_context(&self) -> Option<usize> {
        self.0.original_context()
    }
}

/// A request's own code that panics at its third token.
struct Bomb;

impl LogitsProcessor for Bomb {
    fn process(&mut self, history: &[u32], _: &mut [f32]) -> Result<(), SampleError> {
        assert!(history.len() < 6, "boom");
        Ok(())
    }
    fn accept(&mut self, _: u32) {}
    fn rollback(&mut self, _: usize) {}
}

/// Loads model folders, and counts; it waits while somebody holds the gate.
struct Counting {
    loads: Arc<AtomicUsize>,
    gate: Arc<Mutex<()>>,
    options: EngineOptions,
}

impl Loader for Counting {
    fn bytes(&self, _: &Source) -> Result<usize, String> {
        Ok(0)
    }

    fn load(&self, source: &Source, _: &LoadProgress) -> Result<LoadedModel, String> {
        let Source::Named(name) = source else { return Err("there is no folder".to_owned()) };
        drop(self.gate.lock());
        self.loads.fetch_add(1, Ordering::Relaxed);
        let options = LoadOptions::new(Device::cpu(Isa::best(), 1));
        let loaded = lmx::load(name, &options).map_err(|error| error.to_string())?;
        let network = Box::new(Fragile(loaded.model));
        let template = loaded.tokenizer.chat_template();
        let engine =
            Engine::new(network, loaded.tokenizer, loaded.eos, self.options).map_err(|e| e.to_string())?;
        let (xtc_special_tokens, tool_format, adapter, speculation) = (Vec::new(), None, None, None);
        Ok(LoadedModel { engine, template, xtc_special_tokens, tool_format, adapter, speculation })
    }
}

/// A server in this process, on a free port.
struct Running {
    port: u16,
    loads: Arc<AtomicUsize>,
    gate: Arc<Mutex<()>>,
    _runtime: tokio::runtime::Runtime,
}

impl Running {
    fn start(models: &[&Model], options: ServerOptions) -> Self {
        Self::start_with(models, options, EngineOptions::default(), None)
    }

    fn start_with(
        models: &[&Model],
        options: ServerOptions,
        of_engines: EngineOptions,
        tls: Option<Tls>,
    ) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (loads, gate) = (Arc::new(AtomicUsize::new(0)), Arc::default());
        let loader = Counting { loads: Arc::clone(&loads), gate: Arc::clone(&gate), options: of_engines };
        let names = models.iter().map(|model| (model.path().to_owned(), model.path().to_owned())).collect();
        let server = runtime.block_on(Server::load(options, names, Arc::new(loader))).unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        runtime.spawn(server.serve(listener, tls, std::future::pending()));
        Self { port, loads, gate, _runtime: runtime }
    }

    fn loads(&self) -> usize {
        self.loads.load(Ordering::Relaxed)
    }

    fn send(&self, body: &Value) -> TcpStream {
        self.send_to("POST /v1/completions", &body.to_string())
    }

    fn send_to(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = "HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length";
        stream.write_all(format!("{path} {head}: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
        stream
    }

    /// Status and body.
    fn ask(&self, body: &Value) -> (u16, Value) {
        answer(self.send(body))
    }

    /// Waits until `/metrics` has that line.
    fn await_metric(&self, line: &str) {
        let begin = Instant::now();
        while !rest(self.send_to("GET /metrics", "")).lines().any(|own| own == line) {
            assert!(begin.elapsed() < Duration::from_secs(30), "{}", rest(self.send_to("GET /metrics", "")));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Status and body.
fn answer(stream: TcpStream) -> (u16, Value) {
    let text = rest(stream);
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
}

fn rest(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn text(answer: &(u16, Value)) -> &str {
    assert_eq!(answer.0, 200, "{answer:?}");
    answer.1["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn a_request_whose_own_code_panics_ends_alone() {
    let model = Model::random();
    let hook = Hook(Arc::new(|request| {
        if request.seed == Some(666) {
            request.logits_processors.push(Box::new(Bomb));
        }
    }));
    let server = Running::start(&[&model], ServerOptions { hook: Some(hook), ..ServerOptions::default() });
    let body = |seed: u64| json!({"prompt": "abc", "max_tokens": 60, "temperature": 1, "seed": seed});
    let alone: Vec<_> = (0..3).map(|seed| server.ask(&body(seed))).collect();
    let others: Vec<TcpStream> = (0..3).map(|seed| server.send(&body(seed))).collect();
    for stream in [false, true] {
        let mut bad = body(666);
        bad["stream"] = stream.into();
        let answer = rest(server.send(&bad));
        assert!(answer.contains("the request's logits processor panicked: boom"), "{answer}");
        assert!(answer.contains("\"server_error\"") && !answer.contains("[DONE]"), "{answer}");
        assert!(stream || answer.starts_with("HTTP/1.1 500"), "{answer}");
    }
    for (other, alone) in others.into_iter().zip(&alone) {
        assert_eq!(text(&answer(other)), text(alone));
    }
    assert_eq!(server.loads(), 1, "the engine lives on");
}

#[test]
fn an_engine_that_panics_is_loaded_again_and_others_go_on() {
    let (fragile, other) = (Model::random(), Model::script(&[b"x", b"y"], Then::Loop));
    let server = Running::start(&[&fragile, &other], ServerOptions::default());
    let good = json!({"prompt": "abc", "max_tokens": 9});
    let before = server.ask(&good);
    let long = json!({"model": other.path(), "prompt": "<|assistant|>", "max_tokens": 2000});
    let undisturbed = server.ask(&long);
    for round in 1..=2 {
        let other = server.send(&long);
        let endless = json!({"prompt": "zz", "max_tokens": 100_000, "ignore_eos": true, "stream": true});
        let mut neighbour = server.send(&endless);
        neighbour.read_exact(&mut [0; 800]).unwrap();
        let answer = server.ask(&json!({"prompt": "!a", "max_tokens": 9}));
        assert_eq!((answer.0, &answer.1["error"]["type"]), (500, &json!("server_error")), "{answer:?}");
        let end = rest(neighbour);
        assert!(
            end.contains("the engine failed") && !end.contains("[DONE]"),
            "what shared the engine is told so"
        );
        assert_eq!(text(&self::answer(other)), text(&undisturbed), "another model's request does not notice");
        assert_eq!(text(&server.ask(&good)), text(&before));
        assert_eq!(server.loads(), 2 + round);
    }
}

#[test]
fn a_response_that_fails_says_so_in_its_stream() {
    let model = Model::random();
    let hook = Hook(Arc::new(|request| request.logits_processors.push(Box::new(Bomb))));
    let server = Running::start(&[&model], ServerOptions { hook: Some(hook), ..ServerOptions::default() });
    let body = json!({"input": "a", "max_output_tokens": 60, "ignore_eos": true, "stream": true});
    let text = rest(server.send_to("POST /v1/responses", &body.to_string()));
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
    assert_eq!(kinds.iter().position(|&kind| kind == "response.failed"), Some(kinds.len() - 1), "{kinds:?}");
    assert!(text.contains("event: response.failed\n"), "{text}");
    assert!(events.iter().enumerate().all(|(number, event)| event["sequence_number"] == number));
    let response = &events.last().unwrap()["response"];
    assert_eq!((&response["status"], &response["error"]["code"]), (&json!("failed"), &json!("server_error")));
    assert!(response["error"]["message"].as_str().unwrap().contains("boom"), "{response}");
    // What failed is not stored, and without a stream it is a plain error.
    let path = format!("GET /v1/responses/{}", response["id"].as_str().unwrap());
    assert!(rest(server.send_to(&path, "")).starts_with("HTTP/1.1 404"));
    let whole = json!({"input": "a", "max_output_tokens": 60, "ignore_eos": true}).to_string();
    let (status, whole) = answer(server.send_to("POST /v1/responses", &whole));
    assert_eq!((status, &whole["error"]["type"]), (500, &json!("server_error")), "{whole}");
}

#[test]
fn deadlines_end_what_waits_and_what_does_not_get_on() {
    let (model, other) = (Model::random(), Model::random());
    let one_at_a_time = EngineOptions { max_running: 1, ..EngineOptions::default() };
    let server = Running::start_with(&[&model, &other], ServerOptions::default(), one_at_a_time, None);
    let with = |extra: Value| {
        let mut body = json!({"prompt": "abc", "max_tokens": 100_000, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let warm = json!({"model": other.path(), "prompt": "abc", "max_tokens": 1});
    assert_eq!(server.ask(&warm).0, 200);

    // In the queue.
    let mut running = server.send(&with(json!({"stream": true})));
    running.read_exact(&mut [0; 500]).unwrap();
    for stream in [false, true] {
        let begin = Instant::now();
        let (status, answer) = server.ask(&with(json!({"queue_deadline": 0.3, "stream": stream})));
        assert!(begin.elapsed() >= Duration::from_millis(300));
        let error = &answer["error"];
        assert_eq!((status, &error["type"]), (503, &json!("server_error")), "{answer}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("queue_deadline") && message.contains("0.3 s"), "{message}");
    }
    drop(running);

    // While it generates: another model takes a while for a step, and they take turns.
    let slow = json!({"model": other.path(), "prompt": "~a", "max_tokens": 1});
    for stream in [false, true] {
        let stalling = with(json!({"stall_deadline": 0.3, "stream": stream}));
        let mut stalling = server.send(&stalling);
        if stream {
            stalling.read_exact(&mut [0; 500]).unwrap();
        }
        server.await_metric(&format!("lmx_requests_in_flight{{model=\"{}\"}} 1", model.path()));
        // The first slow step may come before it has begun.
        let ended = std::thread::scope(|scope| {
            let ended = scope.spawn(|| rest(stalling));
            while !ended.is_finished() {
                assert_eq!(server.ask(&slow).0, 200);
            }
            ended.join().unwrap()
        });
        assert!(ended.contains("stall_deadline: the request made no progress for 0.3 s"), "{ended}");
        assert!(!ended.contains("[DONE]") && ended.contains("\"server_error\""));
        assert!(stream || ended.starts_with("HTTP/1.1 503"), "{ended}");
    }
    let patient = with(json!({"max_tokens": 400, "stall_deadline": 60, "queue_deadline": 60}));
    assert_eq!(server.ask(&patient).0, 200, "deadlines that do not pass do nothing");
}

#[test]
fn who_waits_for_a_model_has_a_place_in_the_queue() {
    let (model, other) = (Model::random(), Model::random());
    let mut options = ServerOptions::default();
    options.limits.queue = 3;
    let server = Running::start(&[&model, &other], options);
    let of = |model: &Model| json!({"model": model.path(), "prompt": "abc", "max_tokens": 3});
    let shut = server.gate.lock().unwrap();
    let waiting: Vec<TcpStream> = (0..3).map(|_| server.send(&of(&other))).collect();
    server.await_metric("lmx_requests_awaiting_model 3");
    for model in [&other, &model] {
        let text = rest(server.send(&of(model)));
        assert!(text.starts_with("HTTP/1.1 429") && text.contains("--max-queue"), "{text}");
        assert!(text.to_lowercase().contains("retry-after: 1\r\n"), "{text}");
    }
    server.await_metric("lmx_requests_refused_total 2");
    // Who leaves gives the place up.
    let mut waiting = waiting.into_iter();
    drop(waiting.next());
    server.await_metric("lmx_requests_awaiting_model 2");
    let served = server.ask(&of(&model));
    drop(shut);
    waiting.for_each(|stream| assert_eq!(text(&answer(stream)), text(&served)));
    server.await_metric("lmx_requests_awaiting_model 0");
    assert_eq!(server.loads(), 2);
}

#[test]
fn tls_with_a_certificate_of_its_own() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    for (cert, key, named) in [
        (&key, &key, &key),
        (&cert, &cert, &cert),
        (&dir.path().join("none"), &key, &dir.path().join("none")),
    ] {
        let error = Tls::open(cert, key).unwrap_err().to_string();
        assert!(error.contains(named.to_str().unwrap()), "{error}");
    }
    let tls = Tls::open(&cert, &key).unwrap();
    let model = Model::script(&[b"safe"], Then::End);
    let options = (ServerOptions::default(), EngineOptions::default());
    let server = Running::start_with(&[&model], options.0, options.1, Some(tls));

    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let ask = |roots: RootCertStore, protocol: &[u8]| {
        let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = "localhost".try_into().unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut stream =
            StreamOwned::new(connection, TcpStream::connect(("127.0.0.1", server.port)).unwrap());
        stream.sock.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let body = json!({"prompt": "<|assistant|>", "max_tokens": 4}).to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length";
        write!(stream, "{head}: {}\r\n\r\n{body}", body.len())?;
        let mut bytes = Vec::new();
        // A server may leave without saying goodbye.
        let _ = stream.read_to_end(&mut bytes);
        std::io::Result::Ok((stream.conn.alpn_protocol().map(<[u8]>::to_vec), bytes))
    };
    let (protocol, answer) = ask(roots.clone(), b"http/1.1").unwrap();
    assert_eq!(protocol.as_deref(), Some(b"http/1.1".as_slice()));
    assert!(String::from_utf8_lossy(&answer).contains("\"text\":\"safe\""), "{answer:?}");
    let (protocol, _) = ask(roots.clone(), b"h2").unwrap();
    assert_eq!(protocol.as_deref(), Some(b"h2".as_slice()));
    assert!(ask(RootCertStore::empty(), b"http/1.1").is_err(), "nobody else has signed it");
    // Who does not speak TLS is not answered, and holds nobody up.
    let plain = std::panic::catch_unwind(|| rest(server.send(&json!({"prompt": "x"}))));
    assert!(!plain.is_ok_and(|text| text.contains("HTTP/1.1 200")));
    assert!(ask(roots, b"http/1.1").is_ok());
}
