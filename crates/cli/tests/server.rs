//! The server as its clients see it, over script models that say a known text.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::model::{Model, Then};
use common::server::{Answer, Server};
use serde_json::{Value, json};
use std::io::{Read, Write};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn ask(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 40})
}

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

/// The joined texts of a stream's deltas, and its finish reasons.
fn joined(answer: &Answer) -> (String, Vec<Value>) {
    let (mut text, mut reasons) = (String::new(), Vec::new());
    for event in answer.events() {
        for choice in event["choices"].as_array().unwrap() {
            text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
            reasons.extend(Some(choice["finish_reason"].clone()).filter(|reason| !reason.is_null()));
        }
    }
    (text, reasons)
}

#[test]
fn a_stream_says_what_the_whole_reply_says() {
    // A character is cut by tokens.
    let model = Model::script(&[b"Grus", b"s ", b"\xf0\x9f", b"\x98", b"\x80", b" euch"], Then::End);
    let server = Server::start(model.path(), &[]);
    for (extra, text, reason) in [
        (json!({}), "Gruss 😀 euch", "stop"),
        (json!({"max_tokens": 2}), "Gruss ", "length"),
        (json!({"max_completion_tokens": 2, "max_tokens": 9}), "Gruss ", "length"),
        (json!({"stop": ["s 😀"]}), "Grus", "stop"),
        (json!({"stop": "euch"}), "Gruss 😀 ", "stop"),
    ] {
        let mut body = ask("hi");
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let whole = server.post(CHAT, &body).json();
        assert_eq!(whole["choices"][0]["message"]["content"], text, "{whole}");
        assert_eq!(whole["choices"][0]["finish_reason"], reason);
        assert_eq!(whole["object"], "chat.completion");
        let stream = server.post(CHAT, &with(body, "stream", true.into()));
        assert!(stream.head.contains("content-type: text/event-stream"));
        assert_eq!(joined(&stream), (text.to_owned(), vec![reason.into()]), "{stream:?}");
        assert_eq!(stream.events()[0]["choices"][0]["delta"]["role"], "assistant");
        let roles = stream.events().iter().filter(|e| e["choices"][0]["delta"].get("role").is_some()).count();
        assert_eq!(roles, 1);
    }
}

#[test]
fn usage_comes_when_it_is_asked_for() {
    let model = Model::script(&[b"a", b"b"], Then::End);
    let server = Server::start(model.path(), &[]);
    let body = with(with(ask("hi"), "stream", true.into()), "stream_options", json!({"include_usage": true}));
    let events = server.post(CHAT, &body).events();
    let last = events.last().unwrap();
    assert_eq!(
        (last["choices"].as_array().unwrap().len(), &last["usage"]["completion_tokens"]),
        (0, &json!(3))
    );
    assert!(events[..events.len() - 1].iter().all(|event| event.get("usage") == Some(&Value::Null)));
    let events = server.post(CHAT, &with(ask("hi"), "stream", true.into())).events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
    let whole = server.post(CHAT, &ask("hi")).json();
    assert_eq!(whole["usage"]["completion_tokens"], 3);
    let cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(
        cached + 1,
        whole["usage"]["prompt_tokens"].as_u64().unwrap(),
        "the second time all but one token"
    );
}

#[test]
fn null_is_absent_and_what_is_wrong_is_named() {
    let model = Model::script(&[b"a", b"b"], Then::End);
    let server = Server::start(model.path(), &["--max-messages", "3"]);
    let plain = server.post(CHAT, &ask("hi")).json()["choices"].clone();
    let fields = [
        "temperature",
        "top_p",
        "stop",
        "seed",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
        "stream_options",
        "user",
        "n",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "model",
        "stream",
    ];
    for field in fields {
        let answer = server.post(CHAT, &with(ask("hi"), field, Value::Null)).json();
        assert_eq!(answer["choices"], plain, "{field}");
    }
    for (field, value, param) in [
        ("temperature", json!("hot"), "temperature"),
        ("temperature", json!(-1), "temperature"),
        ("temperature", json!(1e9), "temperature"),
        ("top_p", json!(3), "top_p"),
        ("min_p", json!(-0.1), "min_p"),
        ("max_tokens", json!(0), "max_tokens"),
        ("max_tokens", json!(1.0), "max_tokens"),
        ("max_tokens", json!(true), "max_tokens"),
        ("n", json!(1_000_000), "n"),
        ("top_logprobs", json!(1_000_000), "top_logprobs"),
        ("logit_bias", json!({"999999": 1}), "logit_bias"),
        ("stop", json!(5), "stop"),
        ("stop", json!([5]), "stop"),
        ("stop", json!([""]), "stop"),
        ("messages", json!([]), "messages"),
        ("messages", json!("x"), "messages"),
        ("messages", json!(vec![json!({"role": "user", "content": "x"}); 4]), "messages"),
        ("messages", json!([{"role": "wizard", "content": "x"}]), "messages[0].role"),
        ("xtc_threshold", json!(0.9), "xtc_threshold"),
        ("tool_choice", json!("required"), "tool_choice"),
        ("response_format", json!({"type": "yaml"}), "response_format.type"),
        ("stream_options", json!({"include_usage": true}), "stream_options"),
        ("temprature", json!(1), "temprature"),
        ("store", json!(true), "store"),
    ] {
        let answer = server.post(CHAT, &with(with(ask("hi"), "logprobs", true.into()), field, value.clone()));
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{field}: {value}: {error}");
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error", "{error}");
    }
    for (method, path, body, status) in [
        ("POST", CHAT, "[]", 400),
        ("POST", CHAT, "{", 400),
        ("POST", CHAT, "\u{7f}", 400),
        ("POST", CHAT, &"[".repeat(100_000), 400),
        ("POST", CHAT, r#"{"model": "gpt-4o", "messages": [{"role": "user", "content": "x"}]}"#, 404),
        ("POST", CHAT, r#"{"model": "../../etc", "messages": [{"role": "user", "content": "x"}]}"#, 404),
        ("GET", "/v1/models/none", "", 404),
        ("GET", "/nowhere", "", 404),
        ("GET", CHAT, "", 405),
        ("POST", TEXT, r#"{"prompt": ""}"#, 400),
        ("POST", TEXT, r#"{"prompt": []}"#, 400),
        ("POST", TEXT, r#"{"prompt": [1, "a"]}"#, 400),
        ("POST", TEXT, r#"{"prompt": [99999]}"#, 400),
        ("POST", TEXT, r#"{"prompt": "a", "suffix": "b"}"#, 400),
    ] {
        let answer = server.ask(method, path, &[], body);
        assert_eq!(answer.status, status, "{path} {body:.40}: {answer:?}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    assert_eq!(server.post(CHAT, &ask("hi")).json()["choices"], plain, "it still answers");
}

#[test]
fn choices_differ_by_their_seeds_and_come_again() {
    let model = Model::random();
    let server = Server::start(model.path(), &[]);
    let body = |n: usize, seed: i64| json!({"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "n": n, "seed": seed});
    let texts = |answer: Answer| -> Vec<String> {
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        assert!(choices.iter().enumerate().all(|(index, choice)| choice["index"] == index));
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let three = texts(server.post(TEXT, &body(3, 7)));
    assert!(three[0] != three[1] && three[1] != three[2], "{three:?}");
    assert_eq!(texts(server.post(TEXT, &body(3, 7))), three);
    assert_eq!(texts(server.post(TEXT, &body(1, 7))), three[..1], "the first has the seed itself");
    let echo = texts(server.post(TEXT, &with(body(1, 7), "echo", true.into())));
    assert_eq!(echo, [format!("abc{}", three[0])]);
    let lists = texts(server.post(TEXT, &with(body(2, 7), "prompt", json!(["abc", "xyz"]))));
    assert_eq!((lists.len(), &lists[..2]), (4, &three[..2]));
    let streamed = server.post(TEXT, &with(body(1, 7), "stream", true.into()));
    assert_eq!(joined(&streamed).0, three[0]);
    // Without a seed each request draws its own; without draws all are the same.
    let unseeded = |temperature: f64| {
        let body = json!({"prompt": "abc", "max_tokens": 12, "temperature": temperature});
        [(); 2].map(|()| texts(server.post(TEXT, &body)))
    };
    let ([one, other], [greedy, again]) = (unseeded(1.0), unseeded(0.0));
    assert!(one != other && greedy == again, "{one:?} {greedy:?}");
}

#[test]
fn log_probabilities_are_those_of_the_tokens_that_were_drawn() {
    let model = Model::random();
    let server = Server::start(model.path(), &[]);
    let mut body = ask("hi");
    for (field, value) in
        [("logprobs", json!(true)), ("top_logprobs", json!(3)), ("temperature", json!(1)), ("seed", json!(5))]
    {
        body[field] = value;
    }
    let whole = server.post(CHAT, &body).json();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len() as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
    for entry in content {
        let top: Vec<f64> = entry["top_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t["logprob"].as_f64().unwrap())
            .collect();
        assert!(
            top.len() == 3 && top.is_sorted_by(|a, b| a >= b) && entry["logprob"].as_f64().unwrap() <= top[0]
        );
    }
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|e| e["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(String::from_utf8_lossy(&bytes).starts_with(text));
    let streamed = server.post(CHAT, &with(body, "stream", true.into())).events();
    let streamed: Vec<&Value> =
        streamed.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten().collect();
    assert_eq!(streamed, content.iter().collect::<Vec<_>>());
}

#[test]
fn what_nobody_waits_for_is_ended() {
    let model = Model::script(&[b"x", b"y"], Then::Loop);
    let server = Server::start(model.path(), &[]);
    for stream in [true, false] {
        let body =
            json!({"messages": [{"role": "user", "content": "go"}], "max_tokens": 100_000, "stream": stream});
        let mut connection = server.send("POST", CHAT, &[], &body.to_string());
        server.await_metric("lmx_requests_in_flight", 1.0);
        if stream {
            connection.read_exact(&mut [0; 500]).unwrap();
        }
        drop(connection);
        server.await_metric("lmx_requests_in_flight", 0.0);
    }
    assert_eq!(server.metric("lmx_requests_cancelled_total"), 2.0);
    assert_eq!(server.post(CHAT, &ask("hi")).status, 200);
}

#[test]
fn a_full_queue_is_said() {
    let model = Model::script(&[b"x", b"y"], Then::Loop);
    let server = Server::start(model.path(), &["--max-queue", "1"]);
    let body =
        json!({"messages": [{"role": "user", "content": "go"}], "max_tokens": 100_000, "stream": true});
    let connection = server.send("POST", CHAT, &[], &body.to_string());
    server.await_metric("lmx_requests_in_flight", 1.0);
    let answer = server.post(CHAT, &ask("hi"));
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (429, Some("rate_limit_error")));
    assert!(answer.head.contains("retry-after: "));
    drop(connection);
    server.await_metric("lmx_requests_in_flight", 0.0);
    assert_eq!(server.post(CHAT, &ask("hi")).status, 200);
}

#[test]
fn who_may_ask_is_checked() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &["--api-key", "k1", "--allowed-origins", "https://a.example"]);
    let status = |headers: &[&str]| server.ask("GET", "/v1/models", headers, "").status;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&["authorization: Bearer no"]), 401);
    assert_eq!(status(&["authorization: Bearer k1"]), 200);
    assert_eq!(status(&["x-api-key: k1"]), 200);
    assert_eq!(status(&["x-api-key: k1", "host: evil.example"]), 403);
    assert_eq!(server.get("/health").status, 200);
    let head = |origin: &str| server.ask("OPTIONS", CHAT, &[origin], "").head;
    assert!(head("origin: https://a.example").contains("access-control-allow-origin: https://a.example"));
    assert!(!head("origin: https://evil.example").contains("access-control-allow-origin"));
    common::run(&["server", "--model", model.path(), "--host", "0.0.0.0"])
        .assert_error(2, &["--host", "--api-key"]);
}

#[test]
fn connections_on_which_nothing_is_asked_are_closed() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &["--read-timeout", "0.5"]);
    for beginning in ["", "G", "PRI * HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
        stream.write_all(beginning.as_bytes()).unwrap();
        assert!(stream.read_to_end(&mut Vec::new()).is_ok(), "{beginning:?} holds a place");
    }
}

#[test]
fn pages_of_others_are_refused() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &["--allowed-origins", "https://a.example"]);
    let own = format!("127.0.0.1:{}", server.port);
    let body = ask("hi").to_string();
    for (origin, host, status) in [
        ("https://evil.example", own.as_str(), 403),
        // As a browser sends it without asking first.
        ("null", &own, 403),
        ("http://localhost:1", &own, 403),
        ("https://a.example", &own, 200),
        (&format!("http://{own}"), &own, 200),
        ("http://localhost:3000", "localhost:3000", 200),
    ] {
        let headers =
            [format!("origin: {origin}"), format!("host: {host}"), "content-type: text/plain".into()];
        let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
        let answer = server.ask("POST", CHAT, &headers, &body);
        assert_eq!(answer.status, status, "{origin}: {answer:?}");
        if status == 403 {
            assert!(answer.json()["error"]["message"].as_str().unwrap().contains("--allowed-origins"));
        }
    }
    let open = Server::start(model.path(), &["--allowed-origins", "*"]);
    assert_eq!(open.ask("POST", CHAT, &["origin: https://any.example"], &body).status, 200);
}

#[test]
fn a_request_may_have_more_prompts_than_there_are_places() {
    let model = Model::random();
    let server = Server::start(model.path(), &["--max-queue", "2"]);
    let prompts: Vec<String> = (0..7).map(|n| format!("prompt {n}")).collect();
    let body = json!({"prompt": prompts, "n": 2, "max_tokens": 5, "temperature": 1, "seed": 3});
    let together = server.post(TEXT, &body).json();
    let alone: Vec<Value> = prompts
        .iter()
        .flat_map(|prompt| {
            server.post(TEXT, &with(body.clone(), "prompt", json!(prompt))).json()["choices"]
                .as_array()
                .unwrap()
                .clone()
        })
        .collect();
    let texts = |choices: &[Value]| choices.iter().map(|choice| choice["text"].clone()).collect::<Vec<_>>();
    assert_eq!(texts(together["choices"].as_array().unwrap()), texts(&alone));
    let vectors = server.post("/v1/embeddings", &json!({"input": prompts})).json();
    assert_eq!(vectors["data"].as_array().unwrap().len(), prompts.len());
    let streamed = server.post(TEXT, &with(body, "stream", true.into()));
    assert_eq!(joined(&streamed).1.len(), 14);
    server.await_metric("lmx_requests_in_flight", 0.0);
    assert_eq!(server.metric("lmx_requests_refused_total"), 0.0);
}

#[test]
fn prompts_that_are_much_too_long_are_refused_by_how_they_begin() {
    let model = Model::script(&[b"a"], Then::End);
    model.edit("config.json", |config| config["max_position_embeddings"] = 64.into());
    let server = Server::start(model.path(), &[]);
    for (letters, says) in [(100, "the model's context of 64"), (100_000, "more than 128 tokens")] {
        let text = "x".repeat(letters);
        for (path, body, param) in [
            (CHAT, ask(&text), "messages"),
            (TEXT, json!({"prompt": ["a", text]}), "prompt"),
            ("/v1/responses", json!({"input": text}), "input"),
            ("/v1/embeddings", json!({"input": text}), "input"),
        ] {
            let answer = server.post(path, &body);
            let error = &answer.json()["error"];
            assert_eq!(
                (answer.status, &error["param"], &error["code"]),
                (400, &json!(param), &json!("context_length_exceeded")),
                "{path}: {error}"
            );
            assert!(error["message"].as_str().unwrap().contains(says), "{path}: {error}");
        }
    }
    let long = "x".repeat(100_000);
    assert_eq!(server.post("/tokenize", &json!({"content": long})).json()["count"], 100_000);
}

#[test]
fn anthropics_protocol() {
    let model = Model::script(&[b"Hel", b"lo"], Then::End);
    let server = Server::start(model.path(), &[]);
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "system": "be"});
    let whole = server.post("/v1/messages", &body).json();
    assert_eq!(whole["content"], json!([{"type": "text", "text": "Hello"}]));
    assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    let count = server
        .post("/v1/messages/count_tokens", &json!({"messages": body["messages"], "system": "be"}))
        .json();
    let usage = &whole["usage"];
    let input = ["input_tokens", "cache_read_input_tokens"].map(|field| usage[field].as_u64().unwrap());
    assert_eq!(count["input_tokens"].as_u64().unwrap(), input.iter().sum::<u64>());
    let stopped = server.post("/v1/messages", &with(body.clone(), "stop_sequences", json!(["lo"]))).json();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("lo")));
    assert_eq!(stopped["content"][0]["text"], "Hel");
    let stream = server.post("/v1/messages", &with(body.clone(), "stream", true.into())).body;
    let names: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!(names.first(), Some(&"message_start"));
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let error = server.post("/v1/messages", &with(body.clone(), "max_tokens", Value::Null));
    assert_eq!((error.status, error.json()["error"]["type"].as_str()), (400, Some("invalid_request_error")));
    assert!(error.head.contains("\r\nrequest-id: "));
    for (method, path, headers, status) in [
        ("POST", "/v1/messages/none", &[][..], 404),
        ("GET", "/v1/messages", &[], 405),
        ("POST", "/v1/messages", &["host: evil.example"], 403),
    ] {
        let error = server.ask(method, path, headers, "{}");
        assert_eq!((error.status, &error.json()["type"]), (status, &json!("error")), "{error:?}");
    }
    let model = Model::script(&[b"a", b"b"], Then::End);
    let server = Server::start(model.path(), &[]);
    let begun = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]);
    let rest = server.post("/v1/messages", &with(body, "messages", begun)).json();
    assert_eq!(rest["content"], json!([{"type": "text", "text": "b"}]), "it goes on with what was begun");
}

#[test]
fn tokens_and_templates_can_be_asked_for() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &[]);
    let tokens = server.post("/tokenize", &json!({"content": "hé"})).json();
    assert_eq!(tokens["count"], 3);
    assert_eq!(server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).json()["content"], "hé");
    let prompt =
        server.post("/apply-template", &json!({"messages": [{"role": "user", "content": "x"}]})).json();
    assert_eq!(prompt["prompt"], "<|user|>x<|end|>\n<|assistant|>");
    let like_a_chat = json!({"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": "y", "name": null}]});
    let prompt = server.post("/apply-template", &like_a_chat).json();
    assert_eq!(prompt["prompt"], "<|system|>x<|end|>\n<|user|>y<|end|>\n<|assistant|>");
    for (field, value, param) in [
        ("messages", json!([]), "messages"),
        ("messages", json!([{"role": "wizard", "content": "x"}]), "messages[0].role"),
        ("messages", json!([{"role": "user", "content": null}]), "messages[0].content"),
        ("tools", json!([5]), "tools[0].function.name"),
    ] {
        let answer = server.post("/apply-template", &with(like_a_chat.clone(), field, value));
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)));
    }
    assert_eq!(server.post("/detokenize", &json!({"tokens": [99_999]})).status, 400);
}

#[test]
fn stopping_lets_replies_end_or_says_that_they_did_not() {
    let model = Model::script(&[b"x", b"y"], Then::Loop);
    let mut server = Server::start(model.path(), &["--grace-period", "0.5"]);
    let body =
        json!({"messages": [{"role": "user", "content": "go"}], "max_tokens": 100_000, "stream": true});
    let mut connection = server.send("POST", CHAT, &[], &body.to_string());
    server.await_metric("lmx_requests_in_flight", 1.0);
    server.terminate();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    assert!(
        text.contains("the server was stopped before the reply was complete") && !text.contains("[DONE]"),
        "{}",
        &text[text.len() - 400..]
    );
    assert!(server.wait().success());
}

#[test]
fn a_prompts_own_log_probabilities() {
    let model = Model::random();
    let server = Server::start(model.path(), &[]);
    let of = |body: Value| server.post(TEXT, &body).json()["choices"][0].clone();
    let reply = of(json!({"prompt": "abc", "max_tokens": 6, "logprobs": 2, "temperature": 1, "seed": 4}));
    let text = format!("abc{}", reply["text"].as_str().unwrap());
    let echo = of(
        json!({"prompt": "abc", "max_tokens": 6, "logprobs": 2, "temperature": 1, "seed": 4, "echo": true}),
    );
    assert_eq!(echo["text"], text);
    let list = |choice: &Value, field: &str| choice["logprobs"][field].as_array().unwrap().clone();
    assert_eq!(list(&echo, "token_logprobs")[3..], list(&reply, "token_logprobs"));
    assert_eq!(list(&echo, "token_logprobs")[0], Value::Null);
    for (stream, max_tokens) in [(false, 0), (false, 1), (true, 0)] {
        let body = json!({"prompt": [97, 98, 99], "max_tokens": max_tokens, "logprobs": 2, "echo": true, "stream": stream});
        let scored =
            if stream { server.post(TEXT, &body).events()[0]["choices"][0].clone() } else { of(body) };
        for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(&scored, field)[..3], list(&echo, field)[..3], "{field}, {stream}, {max_tokens}");
        }
    }
    let several = json!({"prompt": ["abc", "xyzw"], "max_tokens": 1, "logprobs": 0, "echo": true, "n": 2, "temperature": 1});
    let choices = server.post(TEXT, &several).json()["choices"].as_array().unwrap().clone();
    let counts: Vec<usize> = choices.iter().map(|choice| list(choice, "tokens").len()).collect();
    assert_eq!(counts, [4, 4, 5, 5]);
}

#[test]
fn embeddings_are_units_and_come_again() {
    let model = Model::random();
    let server = Server::start(model.path(), &[]);
    let path = "/v1/embeddings";
    let vectors = |body: Value| -> Vec<Vec<f64>> {
        let answer = server.post(path, &body).json();
        let data = answer["data"].as_array().unwrap().clone();
        data.iter()
            .map(|one| one["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect())
            .collect()
    };
    let two = vectors(json!({"input": ["abc", "abd"]}));
    assert!(two[0].len() == 64 && two[0] != two[1]);
    assert!(two.iter().all(|v| (v.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5));
    assert_eq!(vectors(json!({"input": "abc"}))[0], two[0], "alone, and though it is cached");
    let last = vectors(json!({"input": "abc", "pooling": "last", "normalize": false}));
    assert!(last[0] != two[0]);
    let coded = server.post(path, &json!({"input": "abc", "encoding_format": "base64"})).json();
    assert_eq!(coded["data"][0]["embedding"].as_str().unwrap().len(), 344);
    let run = server.metric("lmx_prompt_tokens_total");
    assert!(
        run > 0.0 && !server.get("/metrics").body.contains("lmx_first_token_seconds_count"),
        "no token came"
    );
    for (field, value) in [
        ("input", json!("")),
        ("input", json!([])),
        ("pooling", json!("max")),
        ("dimensions", json!(3)),
        ("encoding_format", json!("hex")),
    ] {
        let mut body = json!({"input": "abc"});
        body[field] = value;
        let answer = server.post(path, &body);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(field)));
    }
    assert_eq!(server.metric("lmx_prompt_tokens_total"), run, "what is refused is not run");
}

#[test]
fn guesses_change_nothing_but_the_speed() {
    let model = Model::random();
    let body = json!({"prompt": "abcabcabc", "max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2});
    let text =
        |words: &[&str]| Server::start(model.path(), words).post(TEXT, &body).json()["choices"].clone();
    let plain = text(&[]);
    assert_eq!(text(&["--ngram-spec"]), plain);
    assert_eq!(text(&["--draft-model", model.path()]), plain);
    common::run(&["server", "--model", model.path(), "--num-draft-tokens", "2"])
        .assert_error(2, &["--num-draft-tokens"]);
}

#[test]
fn bodies_must_be_short_and_come_in_time() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &["--max-body", "1KB", "--read-timeout", "0.3"]);
    let long = server.post(CHAT, &ask(&"x".repeat(2000)));
    assert_eq!((long.status, long.json()["error"]["type"].as_str()), (413, Some("invalid_request_error")));
    // The length is more than what comes.
    let mut connection = server.send("POST", CHAT, &["content-length: 900"], "");
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 408") && text.contains("--read-timeout"), "{text}");
    // Nothing, and half a head.
    for words in ["", "POST /v1/comp"] {
        let mut connection = std::net::TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        connection.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        connection.write_all(words.as_bytes()).unwrap();
        let end = connection.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
        assert_ne!(end, Err(std::io::ErrorKind::WouldBlock), "{words:?} is waited for");
    }
    assert_eq!(server.post(CHAT, &ask("hi")).status, 200);
}
