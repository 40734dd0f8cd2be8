//! Calls that are held to a schema, of models that would write others.

use crate::common::model::{Model, Then};
use crate::common::server::Server;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A format, and what its models write: up to a value, one that the schema of [`function`] does not allow, the rest.
const SCRIPTS: [[&str; 4]; 10] = [
    ["json_tools", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": ", "\"x\"", "}}\n</tool_call>"],
    ["llama3", "{\"name\": \"f\", \"parameters\": {\"a\": ", "\"x\"", "}}"],
    [
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n",
        "x",
        "\n</parameter>\n</function>\n</tool_call>",
    ],
    [
        "deepseek_v32",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">",
        "77",
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ],
    ["function_gemma", "<start_function_call>call:f{a:", "<escape>x<escape>", "}<end_function_call>"],
    ["gemma4", "<|tool_call>call:f{a:", "<|\"|>x<|\"|>", "}<tool_call|>"],
    [
        "kimi_k3",
        "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"a\" type=\"integer\"<|sep|>",
        "77",
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ],
    [
        "muse_spark",
        "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"a\">",
        "x",
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    ],
    ["pythonic", "<|tool_call_start|>[f(a=", "'x'", ")]<|tool_call_end|>"],
    ["harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": ", "\"x\"", "}"],
];

fn model([format, head, value, tail]: [&str; 4]) -> Model {
    let model = Model::script(&[head.as_bytes(), value.as_bytes(), tail.as_bytes()], Then::End);
    model.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!(format));
    model
}

fn function(strict: Value) -> Value {
    let a = json!({"type": "integer", "minimum": 1, "maximum": 9});
    let parameters =
        json!({"type": "object", "properties": {"a": a}, "required": ["a"], "additionalProperties": false});
    json!({"name": "f", "parameters": parameters, "strict": strict})
}

fn body(model: &Model, strict: Value, choice: Value) -> Value {
    let tools = json!([{"type": "function", "function": function(strict)}]);
    json!({"model": model.path(), "messages": [{"role": "user", "content": "hi"}], "tools": tools,
        "tool_choice": choice, "parallel_tool_calls": false, "temperature": 0, "max_tokens": 300})
}

/// The argument of the only call of a chat.
#[track_caller]
fn argument(reply: &Value) -> Value {
    let calls = reply["choices"][0]["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{reply}"));
    assert_eq!((calls.len(), &reply["choices"][0]["finish_reason"]), (1, &json!("tool_calls")), "{reply}");
    assert_eq!(calls[0]["function"]["name"], "f");
    let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    arguments["a"].clone()
}

#[test]
fn calls_are_held_to_their_schema() {
    let models = SCRIPTS.map(model);
    let also: Vec<&str> = models[1..].iter().flat_map(|model| ["--also", model.path()]).collect();
    let server = Server::start(models[0].path(), &also);
    let within = |value: &Value| value.as_u64().is_some_and(|value| (1..=9).contains(&value));
    let mut replies = Vec::new();
    for ([format, ..], model) in SCRIPTS.iter().zip(&models) {
        let ask = |strict: Value, choice: Value| server.post(CHAT, &body(model, strict, choice)).json();
        for loose in [Value::Null, json!(false)] {
            let value = argument(&ask(loose, json!("auto")));
            assert!(!within(&value), "{format}: {value}");
        }
        let named = json!({"type": "function", "function": {"name": "f"}});
        for (strict, choice) in [
            (json!(true), json!("auto")),
            (json!(true), Value::Null),
            (json!(false), json!("required")),
            (json!(true), named),
        ] {
            let value = argument(&ask(strict, choice.clone()));
            assert!(within(&value), "{format} {choice}: {value}");
        }
        replies.push(ask(json!(true), json!("auto"))["choices"].clone());
    }
    // All of them at once say the same.
    std::thread::scope(|scope| {
        for (model, alone) in models.iter().zip(&replies) {
            let without_ids = |choices: &Value| argument(&json!({"choices": choices}));
            for _ in 0..3 {
                let (server, alone) = (&server, without_ids(alone));
                scope.spawn(move || {
                    let reply = server.post(CHAT, &body(model, json!(true), json!("auto"))).json();
                    assert_eq!(argument(&reply), alone);
                });
            }
        }
    });
}

#[test]
fn every_protocol_knows_strict_tools() {
    let model = model(SCRIPTS[0]);
    let server = Server::start(model.path(), &[]);
    let parameters = function(json!(true))["parameters"].clone();
    let message = |strict: Value| {
        let tools = json!([{"name": "f", "input_schema": parameters, "strict": strict}]);
        let said = json!([{"role": "user", "content": "hi"}]);
        server.post("/v1/messages", &json!({"model": "default_model", "messages": said, "tools": tools, "max_tokens": 300, "temperature": 0}))
    };
    let response = |strict: Value| {
        let tools = json!([{"type": "function", "name": "f", "parameters": parameters, "strict": strict}]);
        server.post("/v1/responses", &json!({"input": "hi", "tools": tools, "temperature": 0}))
    };
    assert_eq!(message(json!(false)).json()["content"][0]["input"]["a"], "x");
    assert!(message(json!(true)).json()["content"][0]["input"]["a"].is_u64());
    assert_eq!(response(Value::Null).json()["output"][0]["arguments"], "{\"a\": \"x\"}");
    let arguments = response(json!(true)).json()["output"][0]["arguments"].clone();
    assert!(serde_json::from_str::<Value>(arguments.as_str().unwrap()).unwrap()["a"].is_u64(), "{arguments}");
    let chat = server.post(CHAT, &body(&model, json!("yes"), Value::Null));
    for (answer, field) in [
        (chat, "tools[0].function.strict"),
        (message(json!(1)), "tools[0].strict"),
        (response(json!([])), "tools[0].strict"),
    ] {
        assert!(answer.status == 400 && answer.body.contains(field), "{answer:?}");
    }
}

#[test]
fn a_strict_schema_that_cannot_be_enforced_is_refused_by_name() {
    let model = model(SCRIPTS[2]);
    let server = Server::start(model.path(), &[]);
    let mut body = body(&model, json!(true), json!("auto"));
    body["tools"][0]["function"]["parameters"]["properties"]["b"] =
        json!({"type": "string", "pattern": "x+"});
    let answer = server.post(CHAT, &body);
    let error = answer.json()["error"].clone();
    assert_eq!((answer.status, &error["param"]), (400, &json!("tools")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("f.b"), "{error}");
    body["tools"][0]["function"]["strict"] = false.into();
    assert_eq!(server.post(CHAT, &body).status, 200);
}
