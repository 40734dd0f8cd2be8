//! What a server was asked to hold to: forms of replies, and adapters.

use crate::common::model::{Model, Then};
use crate::common::server::Server;
use serde_json::{Value, json};

fn chat(more: &Value) -> Value {
    with(
        &json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "max_tokens": 1500}),
        more,
    )
}

/// The text of a reply and its end.
fn reply(server: &Server, body: &Value) -> (String, String) {
    let answer = server.post("/v1/chat/completions", body);
    let chunks = if body["stream"] == true { answer.events() } else { vec![answer.json()] };
    let (mut text, mut end) = (String::new(), String::new());
    for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
        let part = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
        text += part["content"].as_str().unwrap_or_default();
        end += choice["finish_reason"].as_str().unwrap_or_default();
    }
    (text, end)
}

#[test]
fn a_hundred_replies_of_noise_have_the_form_that_was_asked_for() {
    let colour = json!({"enum": ["red", "green", "a \"b\" é"]});
    let schema = json!({
        "type": "object",
        "properties": {
            "colours": {"type": "array", "items": colour, "minItems": 1, "maxItems": 3},
            "count": {"type": "integer", "minimum": -5, "maximum": 120},
            "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                "additionalProperties": false},
        },
        "required": ["colours", "count", "inner"],
        "additionalProperties": false,
    });
    let check = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let colours = value["colours"].as_array().unwrap();
        assert!((1..=3).contains(&colours.len()), "{text}");
        assert!(colours.iter().all(|one| colour["enum"].as_array().unwrap().contains(one)), "{text}");
        // Minus zero is an integer of JSON, though serde_json reads it as a float.
        let count = value["count"].as_f64().unwrap();
        assert!((-5.0..=120.0).contains(&count) && count.fract() == 0.0, "{text}");
        assert!(value["inner"]["ok"].is_boolean() && value.as_object().unwrap().len() == 3, "{text}");
    };
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    let model = Model::random();
    let server = Server::start(model.path(), &["--draft-model", model.path()]);
    let ask = |seed: u64| chat(&json!({"seed": seed, "stream": seed % 2 == 1, "response_format": format}));
    std::thread::scope(|scope| {
        for worker in 0..10 {
            let (server, ask, check) = (&server, &ask, &check);
            scope.spawn(move || {
                for seed in (worker..100).step_by(10) {
                    let (text, end) = reply(server, &ask(seed));
                    assert_eq!(end, "stop", "{text}");
                    check(&text);
                }
            });
        }
    });
    let cut = chat(&json!({"seed": 1, "max_tokens": 3, "response_format": {"type": "json_object"}}));
    let (text, end) = reply(&server, &cut);
    assert!(text.trim_start().starts_with('{') && end == "length", "{text} {end}");
}

#[test]
fn what_would_be_much_work_is_refused_at_once() {
    let model = Model::script(&[b"a"], Then::End);
    model.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!("gemma4"));
    let server = Server::start(model.path(), &[]);
    let integer = json!({"type": "integer"});
    let wide = |count: usize| {
        let properties: serde_json::Map<String, Value> =
            (0..count).map(|n| (format!("k{n}"), integer.clone())).collect();
        json!({"type": "object", "properties": properties})
    };
    let reference = |n: usize| json!({"$ref": format!("#/$defs/d{n}")});
    let deep = |most: usize| {
        let mut defs: serde_json::Map<String, Value> =
            (0..most).map(|n| (format!("d{n}"), reference(n + 1))).collect();
        defs.insert(format!("d{most}"), integer.clone());
        json!({"type": "object", "properties": {"a": reference(0)}, "$defs": defs})
    };
    let kinds: Vec<&str> = vec!["string"; 10_000];
    let format = |schema: &Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let tool = |schema: &Value| {
        let function = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
        json!({"tools": [function], "tool_choice": "required"})
    };
    let lark = |text: String| json!({"response_format": {"type": "grammar", "grammar": text}});
    let rules: String = (0..30_000).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    for (more, param, says) in [
        (format(&wide(10_000)), "response_format", "10000 properties in one object: at most 500"),
        (format(&deep(30_000)), "response_format", "at most 10000"),
        (lark(format!("start: r0\n{rules}r30000: \"a\"")), "response_format", "30001 rules"),
        (
            lark(format!("start: {}b{}", "a{".repeat(100_000), "}".repeat(100_000))),
            "response_format",
            "at most 10000",
        ),
        (lark(format!("start: %json {}", wide(10_000))), "response_format", "10000 properties in one object"),
        (tool(&wide(600)), "tool_choice", "600 properties in one object"),
        (tool(&json!({"enum": vec![json!({}); 10_001]})), "tool_choice", "at most 10000"),
        (tool(&deep(300)), "tool_choice", "within each other"),
        (tool(&json!({"properties": {"a": {"type": kinds}}})), "tool_choice", "f.a"),
    ] {
        let begin = std::time::Instant::now();
        let answer = server.post("/v1/chat/completions", &chat(&more));
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
        // A fraction of a second, but for what else the machine has to do.
        assert!(begin.elapsed().as_secs_f64() < 3.0, "{:?} for {error}", begin.elapsed());
    }
    // As deep as is allowed, for each of several replies: one form serves them all.
    let fine = json!({"n": 100, "max_tokens": 1});
    let fine = with(&fine, &format(&deep(9_000)));
    let answer = server.post("/v1/chat/completions", &chat(&fine));
    assert_eq!(answer.status, 200, "{answer:?}");
}

fn with(object: &Value, more: &Value) -> Value {
    let mut object = object.clone();
    object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    object
}

#[test]
fn adapters_act_where_they_are_asked_for() {
    let model = Model::script(&[b"h", b"i"], Then::End);
    let (x, y) = (Model::adapter_saying(b'x'), Model::adapter_saying(b'y'));
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("why")).unwrap();
    for file in ["adapters.safetensors", "adapter_config.json"] {
        std::fs::copy(y.path().join(file), folder.path().join("why").join(file)).unwrap();
    }
    let offered = ["--adapters-dir", folder.path().to_str().unwrap()];
    let of = |server: &Server, more: Value| {
        reply(server, &with(&chat(&json!({"max_tokens": 3, "temperature": 0})), &more)).0
    };
    let plain = Server::start(model.path(), &offered);
    let texts = [json!({}), json!({"adapters": "why"}), json!({"adapters": null}), json!({})];
    assert_eq!(texts.map(|more| of(&plain, more)), ["hi", "yyy", "hi", "hi"]);
    let flag = ["--adapter-path", x.path().to_str().unwrap()];
    let adapted = Server::start(model.path(), &[&offered[..], &flag].concat());
    let texts = [json!({}), json!({"adapters": "why"}), json!({"stream": true})];
    assert_eq!(texts.map(|more| of(&adapted, more)), ["xxx", "yyy", "xxx"]);
}
