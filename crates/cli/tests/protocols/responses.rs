//! `/v1/responses`

use crate::common::model::{Model, Then};
use crate::common::server::{Answer, Server};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

/// A model that writes calls in the format of Hermes, and thoughts.
fn caller(pieces: &[&[u8]]) -> Model {
    let model = Model::script(pieces, Then::End);
    model.edit("tokenizer_config.json", |config| {
        let template = config["chat_template"].as_str().unwrap();
        config["chat_template"] =
            json!(template.replace(
                "{{ message.content }}",
                "{{ message.reasoning_content or '' }}{{ message.content }}"
            ));
        config["tool_parser_type"] = json!("json_tools");
    });
    model
}

fn tool() -> Value {
    json!({"type": "function", "name": "f", "parameters": {"type": "object"}})
}

/// The named events of a stream, with their data.
#[track_caller]
pub(super) fn named(answer: &Answer) -> Vec<(String, Value)> {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(!answer.body.contains("[DONE]"));
    let mut events = Vec::new();
    let mut name = "";
    for line in answer.body.lines() {
        if let Some(event) = line.strip_prefix("event: ") {
            name = event;
        } else if let Some(data) = line.strip_prefix("data: ") {
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], name);
            assert_eq!(data["sequence_number"], events.len());
            events.push((name.to_owned(), data));
        }
    }
    events
}

fn prompt_of(server: &Server, body: &Value) -> u64 {
    server.post("/v1/responses/input_tokens", body).json()["input_tokens"].as_u64().unwrap()
}

#[test]
fn a_stream_has_the_events_of_the_real_one() {
    let model = Model::script(&[b"Hel", b"lo"], Then::End);
    let server = Server::start(model.path(), &[]);
    let body =
        json!({"input": "hi", "instructions": "be", "metadata": {"a": "b"}, "temperature": 0.5, "top_k": 1});
    let whole = server.post(PATH, &body).json();
    assert_eq!(whole["output"][0]["content"][0]["text"], "Hello", "{whole}");
    let expected = json!({"object": "response", "status": "completed", "instructions": "be", "metadata": {"a": "b"},
        "temperature": 0.5, "store": true, "error": null, "incomplete_details": null, "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "previous_response_id": null});
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&whole[field], value, "{field}");
    }
    let usage = &whole["usage"];
    assert_eq!(
        (&usage["output_tokens"], &usage["output_tokens_details"]["reasoning_tokens"]),
        (&json!(3), &json!(0))
    );
    assert_eq!(usage["input_tokens"], prompt_of(&server, &body));
    assert_eq!(usage["total_tokens"], usage["input_tokens"].as_u64().unwrap() + 3);

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named(&server.post(PATH, &streamed));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(
        (&events[0].1["response"]["status"], &events[0].1["response"]["output"]),
        (&json!("in_progress"), &json!([]))
    );
    assert_eq!(
        events[3].1["part"],
        json!({"type": "output_text", "annotations": [], "logprobs": [], "text": ""})
    );
    let last = &events[9].1["response"];
    assert_eq!((&last["output"][0], &events[8].1["item"]), (&events[8].1["item"], &last["output"][0]));
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
    assert!(last["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "the second time");
    let ids: Vec<&Value> = events[3..8].iter().map(|(_, data)| &data["item_id"]).collect();
    assert!(ids.iter().all(|&id| *id == last["output"][0]["id"]), "{ids:?}");

    streamed["max_output_tokens"] = 1.into();
    let events = named(&server.post(PATH, &streamed));
    let (name, data) = events.last().unwrap();
    assert_eq!(name, "response.incomplete");
    assert_eq!(data["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(
        (&data["response"]["status"], &data["response"]["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
}

#[test]
fn thoughts_and_calls_are_items() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let model = caller(&[
        b"<think>",
        b"hm",
        b"</think>",
        b"\n\n",
        call.as_bytes(),
        b"\n ",
        call.replace('1', "2").as_bytes(),
    ]);
    model.edit("tokenizer.json", |tokenizer| {
        for (id, text) in [(256, "<think>"), (258, "</think>")] {
            let added = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": false});
            tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
        }
    });
    let server = Server::start(model.path(), &[]);
    let body = json!({"input": "hi", "tools": [tool()], "include": ["reasoning.encrypted_content"]});
    let whole = server.post(PATH, &body).json();
    let output = whole["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "function_call", "function_call"], "{whole}");
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    assert_eq!(
        (&output[1]["arguments"], &output[2]["arguments"]),
        (&json!("{\"x\": 1}"), &json!("{\"x\": 2}"))
    );
    assert!(output[1]["call_id"] != output[2]["call_id"] && output[1]["id"] != output[2]["id"]);
    assert!(whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() >= 1);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named(&server.post(PATH, &streamed));
    let of = |name: &str| -> Vec<&Value> {
        events.iter().filter(|(own, _)| own == name).map(|(_, data)| data).collect()
    };
    assert_eq!(of("response.reasoning_text.delta")[0]["delta"], "hm");
    assert_eq!(of("response.function_call_arguments.done").len(), 2);
    let deltas: String = of("response.function_call_arguments.delta")
        .iter()
        .filter(|d| d["output_index"] == 1)
        .map(|d| d["delta"].as_str().unwrap())
        .collect();
    assert_eq!(deltas, "{\"x\": 1}");
    let one = json!({"input": "hi", "tools": [tool()], "parallel_tool_calls": false});
    assert_eq!(server.post(PATH, &one).json()["output"].as_array().unwrap().len(), 2);

    // The next turn, by its items and by the id: the same prompt.
    let answer = json!({"type": "function_call_output", "call_id": output[1]["call_id"], "output": "5"});
    let second = json!({"type": "function_call_output", "call_id": output[2]["call_id"], "output": [{"type": "input_text", "text": "6"}]});
    let mut items = vec![json!({"role": "user", "content": "hi"})];
    items.extend(output.iter().cloned());
    items.extend([answer.clone(), second.clone()]);
    let by_items = prompt_of(&server, &json!({"input": items, "tools": [tool()]}));
    let by_id = json!({"input": [answer, second], "previous_response_id": whole["id"], "tools": [tool()]});
    assert_eq!(by_items, prompt_of(&server, &by_id));
    assert!(by_items > whole["usage"]["input_tokens"].as_u64().unwrap() + 20);
    // Without their plain texts, thoughts are found in what only the server can read.
    items[1]["content"] = json!([]);
    assert_eq!(by_items, prompt_of(&server, &json!({"input": items, "tools": [tool()]})));
    let references: Vec<Value> =
        output.iter().map(|item| json!({"type": "item_reference", "id": item["id"]})).collect();
    drop(items.splice(1..4, references));
    assert_eq!(by_items, prompt_of(&server, &json!({"input": items, "tools": [tool()]})));
    let next = server.post(PATH, &by_id).json();
    assert_eq!((&next["status"], &next["previous_response_id"]), (&json!("completed"), &whole["id"]));
    let listed =
        server.get(&format!("{PATH}/{}/input_items?order=asc&limit=5", next["id"].as_str().unwrap())).json();
    let kinds: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["message", "reasoning", "function_call", "function_call", "function_call_output"]);
    assert_eq!(listed["has_more"], true);
}

#[test]
fn what_is_stored_is_bounded_and_can_be_taken_back() {
    let model = Model::script(&[b"yes"], Then::End);
    let server =
        Server::start(model.path(), &["--stored-responses", "2", "--api-key", "k1", "--api-key", "k2"]);
    let post = |key: &str, body: Value| server.ask("POST", PATH, &[key], &body.to_string());
    let on = |method: &str, key: &str, id: &Value| {
        server.ask(method, &format!("{PATH}/{}", id.as_str().unwrap()), &[key], "")
    };
    let (own, other) = ("x-api-key: k1", "x-api-key: k2");
    let first = post(own, json!({"input": "a"})).json();
    assert_eq!(on("GET", own, &first["id"]).json(), first);
    assert_eq!((on("GET", other, &first["id"]).status, on("DELETE", other, &first["id"]).status), (404, 404));
    let going_on = |id: &Value| post(own, json!({"input": "b", "previous_response_id": id}));
    let second = going_on(&first["id"]).json();
    assert_eq!(
        on("DELETE", own, &first["id"]).json(),
        json!({"id": first["id"], "object": "response", "deleted": true})
    );
    assert_eq!(on("GET", own, &first["id"]).status, 404);
    let error = going_on(&first["id"]);
    assert_eq!((error.status, &error.json()["error"]["code"]), (400, &json!("previous_response_not_found")));
    assert_eq!(error.json()["error"]["param"], "previous_response_id");
    let third = going_on(&second["id"]).json();
    assert!(
        third["usage"]["input_tokens"].as_u64() > second["usage"]["input_tokens"].as_u64(),
        "what came before is kept"
    );
    let unstored = post(own, json!({"input": "a", "store": false})).json();
    assert_eq!((on("GET", own, &unstored["id"]).status, &unstored["store"]), (404, &json!(false)));
    post(own, json!({"input": "c"}));
    assert_eq!(on("GET", own, &second["id"]).status, 404, "two are kept, and it was used before the others");
    assert_eq!(on("GET", own, &third["id"]).status, 200);

    let none = Server::start(model.path(), &["--stored-responses", "0"]);
    assert_eq!(none.post(PATH, &json!({"input": "a"})).json()["store"], false);
    assert_eq!(none.post(PATH, &json!({"input": "a", "store": true})).json()["error"]["param"], "store");
}

#[test]
fn what_is_not_supported_is_refused_by_its_name() {
    let model = Model::script(&[b"{\"a\":", b" 1}"], Then::End);
    let server = Server::start(model.path(), &[]);
    for (field, value, param) in [
        ("input", json!(5), "input"),
        ("input", json!([]), "input"),
        ("input", json!([{"role": "wizard", "content": "x"}]), "input[0].role"),
        ("input", json!([{"role": "user"}]), "input[0].content"),
        (
            "input",
            json!([{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]),
            "input[0].content[0].type",
        ),
        ("input", json!([{"type": "web_search_call"}]), "input[0].type"),
        ("input", json!([{"type": "function_call", "name": "f", "arguments": "{}"}]), "input[0].call_id"),
        ("input", json!(["x"]), "input[0].type"),
        (
            "input",
            json!([{"type": "function_call_output", "call_id": "c", "output": "x"}]),
            "input[0].call_id",
        ),
        ("input", json!([{"type": "reasoning", "encrypted_content": "?"}]), "input[0].encrypted_content"),
        ("previous_response_id", json!("resp_1"), "previous_response_id"),
        ("background", json!(true), "background"),
        ("conversation", json!("conv_1"), "conversation"),
        ("prompt", json!({"id": "p"}), "prompt"),
        ("truncation", json!("auto"), "truncation"),
        ("max_output_tokens", json!(0), "max_output_tokens"),
        ("max_tokens", json!(5), "max_tokens"),
        ("include", json!(["web_search_call.results"]), "include[0]"),
        ("top_logprobs", json!(3), "top_logprobs"),
        ("tools", json!([{"type": "web_search"}]), "tools[0].type"),
        ("tools", json!([{"type": "function"}]), "tools[0].name"),
        ("tool_choice", json!("required"), "tool_choice"),
        ("tool_choice", json!({"type": "file_search"}), "tool_choice"),
        ("text", json!({"format": {"type": "json_schema", "name": "x"}}), "text.format.schema"),
        ("text", json!({"format": {"type": "yaml"}}), "text.format.type"),
        ("text", json!({"verbosity": "high"}), "text.verbosity"),
        ("reasoning", json!({"effort": "high"}), "reasoning.effort"),
        ("reasoning", json!({"summary": "detailed"}), "reasoning.summary"),
        ("metadata", json!({"a": 1}), "metadata"),
        ("stream_options", json!({}), "stream_options"),
        ("temperature", json!(-1), "temperature"),
    ] {
        let mut body = json!({"input": "hi"});
        body[field] = value.clone();
        let answer = server.post(PATH, &body);
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{field}: {value}: {error}");
    }
    let nulls = [
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
        "metadata",
        "store",
        "previous_response_id",
        "truncation",
        "max_output_tokens",
        "stream",
    ];
    for field in nulls {
        let mut body = json!({"input": "hi"});
        body[field] = Value::Null;
        assert_eq!(server.post(PATH, &body).status, 200, "{field}");
    }
    let unknown = server.post(PATH, &json!({"input": "hi", "text": {"colour": "red"}}));
    assert!(unknown.status == 400 && unknown.body.contains("colour"), "{unknown:?}");
    let missing = json!({"input": [{"type": "item_reference", "id": "msg_1"}]});
    assert_eq!(
        (server.post(PATH, &missing).status, server.get("/v1/responses/x?stream=true").status),
        (404, 400)
    );
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let formed = json!({"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": true}}});
    assert_eq!(server.post(PATH, &formed).json()["output"][0]["content"][0]["text"], "{\"a\": 1}");
}

#[test]
fn log_probabilities_are_those_of_the_text() {
    let model = Model::script(&[b"Hel", b"lo"], Then::End);
    let server = Server::start(model.path(), &[]);
    let body = json!({"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let whole = server.post(PATH, &body).json();
    let logprobs = whole["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    let text: String = logprobs.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), logprobs[0]["top_logprobs"].as_array().unwrap().len()), ("Hello", 2));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named(&server.post(PATH, &streamed));
    let told: Vec<&Value> = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta")
        .flat_map(|(_, data)| data["logprobs"].as_array().unwrap())
        .collect();
    assert_eq!(told, logprobs.iter().collect::<Vec<_>>());
}
