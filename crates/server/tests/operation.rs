//! What goes wrong within the server stays where it is: engines that panic, and requests whose own code does.
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
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// A network that panics in the forward pass of a batch with a prompt that begins with `!`.
struct Fragile(Box<dyn Network>);

impl Network for Fragile {
    fn hidden(&self, step: &StepInputs, kv: &mut KvStore) -> Result<Tensor, ForwardError> {
        let mut beginnings = step.positions.iter().zip(&step.tokens).filter(|(position, _)| **position == 0);
        assert!(beginnings.all(|(_, &token)| token != u32::from(b'!')), "a kernel met what it cannot do");
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

/// Loads model folders, and counts.
struct Counting(Arc<AtomicUsize>);

impl Loader for Counting {
    fn bytes(&self, _: &Source) -> Result<usize, String> {
        Ok(0)
    }

    fn load(&self, source: &Source, _: &LoadProgress) -> Result<LoadedModel, String> {
        let Source::Named(name) = source else { return Err("there is no folder".to_owned()) };
        self.0.fetch_add(1, Ordering::Relaxed);
        let options = LoadOptions::new(Device::cpu(Isa::best(), 1));
        let loaded = lmx::load(name, &options).map_err(|error| error.to_string())?;
        let network = Box::new(Fragile(loaded.model));
        let (template, options) = (loaded.tokenizer.chat_template(), EngineOptions::default());
        let engine =
            Engine::new(network, loaded.tokenizer, loaded.eos, options).map_err(|e| e.to_string())?;
        let (xtc_special_tokens, tool_format, adapter, speculation) = (Vec::new(), None, None, None);
        Ok(LoadedModel { engine, template, xtc_special_tokens, tool_format, adapter, speculation })
    }
}

/// A server in this process, on a free port.
struct Running {
    port: u16,
    loads: Arc<AtomicUsize>,
    _runtime: tokio::runtime::Runtime,
}

impl Running {
    fn start(models: &[&Model], options: ServerOptions) -> Self {
        Self::start_with(models, options, None)
    }

    fn start_with(models: &[&Model], options: ServerOptions, tls: Option<Tls>) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let loads = Arc::new(AtomicUsize::new(0));
        let names = models.iter().map(|model| (model.path().to_owned(), model.path().to_owned())).collect();
        let server =
            runtime.block_on(Server::load(options, names, Arc::new(Counting(Arc::clone(&loads))))).unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        runtime.spawn(server.serve(listener, tls, std::future::pending()));
        Self { port, loads, _runtime: runtime }
    }

    fn loads(&self) -> usize {
        self.loads.load(Ordering::Relaxed)
    }

    fn send(&self, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let body = body.to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length";
        stream.write_all(format!("{head}: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
        stream
    }

    /// Status and body.
    fn ask(&self, body: &Value) -> (u16, Value) {
        let text = rest(self.send(body));
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
    }
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
        let answer = rest(other);
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_eq!(text(&(200, body)), text(alone));
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
        let answer = rest(other);
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_eq!(text(&(200, body)), text(&undisturbed), "another model's request does not notice");
        assert_eq!(text(&server.ask(&good)), text(&before));
        assert_eq!(server.loads(), 2 + round);
    }
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
    let server = Running::start_with(&[&model], ServerOptions::default(), Some(tls));

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
