//! Every protocol says the same of a reply, streamed or not, however its tokens cut markers, stop strings and characters.

use super::fields::name_tokens;
use super::responses::named;
use crate::common::model::{Model, Then};
use crate::common::server::{Answer, Server};
use serde_json::{Map, Value, json};

/// Replies with thoughts, texts and calls, by the format of the calls.
fn samples() -> Vec<(&'static str, &'static str)> {
    vec![
        (
            "json_tools",
            "<think>hm é</think>Grüße 😀 <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x ü\"}}\n</tool_call>\n<tool_call>{\"name\":\"g\"}</tool_call>",
        ),
        ("json_tools", "<think>never ends é 😀 <tool_call> x"),
        ("json_tools", "5 < 7 <tool_call>nope é</tool_call> and <tool_call>{\"name\": \"f\", \"argu"),
        ("json_tools", "<think>a</think>é<think>b</think>😀 </think> c"),
        (
            "llama3",
            "{\"name\": \"f\", \"parameters\": {\"a\": \"x ü\"}}; {\"name\": \"g\", \"parameters\": {}}",
        ),
        ("llama3", "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}} é"),
        ("mistral", "Grüße [TOOL_CALLS]f[ARGS]{\"a\": \"x ü\"}[TOOL_CALLS]g[ARGS]{}"),
        ("mistral", "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"ü\"}}]"),
        (
            "kimi_k2",
            "é<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"ü\"}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            "deepseek_v3",
            "é<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"ü\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm é<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"a\": \"ü\"}<|call|>",
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Grüße 😀",
        ),
        (
            "deepseek_v32",
            "é<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">ü</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        (
            "qwen3_coder",
            "<think>hm</think>é<tool_call>\n<function=f>\n<parameter=a>\nx ü\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "minimax_m2",
            "é<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">x ü</parameter></invoke>\n</minimax:tool_call>",
        ),
        (
            "minicpm5",
            "é<function name=\"f\"><param name=\"a\">x ü</param></function><function name=\"g\"></function>",
        ),
        (
            "muse_spark",
            "to=self<|message|>hm é<|eom|>to=user<|message|>Grüße <atem:function_calls><atem:invoke name=\"f\"><atem:parameter name=\"a\">ü</atem:parameter></atem:invoke></atem:function_calls>",
        ),
        (
            "glm47",
            "<think>hm</think>é<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x ü</arg_value></tool_call>",
        ),
        (
            "laguna",
            "é<tool_call>f {\"a\": \"ü\"}</tool_call><tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
        ),
        (
            "longcat",
            "é<longcat_tool_call>f<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>ü</longcat_arg_value></longcat_tool_call>",
        ),
        ("function_gemma", "é<start_function_call>call:f{a:<escape>x ü<escape>}<end_function_call>"),
        ("gemma4", "é<|tool_call>call:f{a:<|\"|>x ü<|\"|>}<tool_call|>"),
        (
            "kimi_k3",
            "é<|open|>tools<|sep|>\n<|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"a\" type=\"string\"<|sep|>ü<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        ("pythonic", "é<|tool_call_start|>[f(a='x ü'), g()]<|tool_call_end|>"),
    ]
}

/// Numbers that come again.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }
}

/// Cuts a text anywhere, between bytes too, into pieces of which no two are the same: a script says each only once.
fn cut(text: &[u8], random: &mut Random) -> Vec<Vec<u8>> {
    const PIECES: usize = 55;
    let longest = 1 + 2 * text.len() / PIECES;
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for &byte in text {
        let begin = pieces
            .last()
            .is_none_or(|last| !pieces[..pieces.len() - 1].contains(last) && random.below(longest) == 0);
        if begin && pieces.len() < PIECES {
            pieces.push(Vec::new());
        }
        if let Some(last) = pieces.last_mut() {
            last.push(byte);
        }
    }
    while let Some(last) = pieces.pop() {
        if !pieces.contains(&last) {
            pieces.push(last);
            break;
        }
        pieces.last_mut().unwrap().extend(last);
    }
    pieces
}

fn model(format: &str, pieces: &[Vec<u8>]) -> Model {
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    let model = Model::script(&pieces, Then::End);
    name_tokens(&model, &["<think>", "</think>"]);
    model.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!(format));
    model
}

/// The data of all events but `[DONE]`.
fn data(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{answer:?}");
    let data =
        answer.body.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn append(text: &mut Value, more: &Value) {
    *text = json!(format!("{}{}", text.as_str().unwrap_or_default(), more.as_str().unwrap_or_default()));
}

/// A chat's or a text's only choice, joined from its chunks.
fn joined_choice(chunks: &[Value]) -> Value {
    let (mut message, mut text, mut calls, mut finish) = (json!({}), Value::Null, Vec::new(), Value::Null);
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        if choice.get("text").is_some() {
            append(&mut text, &choice["text"]);
        }
        for field in ["content", "reasoning_content"] {
            if choice["delta"].get(field).is_some() {
                append(&mut message[field], &choice["delta"][field]);
            }
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if call.get("id").is_some() {
                assert_eq!(index, calls.len(), "calls come one after the other");
                calls.push(json!([call["function"]["name"], ""]));
            }
            append(&mut calls[index][1], &call["function"]["arguments"]);
        }
        if !choice["finish_reason"].is_null() {
            assert!(finish.is_null(), "one reason");
            finish = choice["finish_reason"].clone();
        }
    }
    json!({"content": message["content"], "reasoning": message["reasoning_content"], "calls": calls, "text": text, "finish": finish})
}

fn whole_choice(answer: &Answer) -> Value {
    let choice = answer.json()["choices"][0].clone();
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let calls: Vec<Value> =
        calls.map(|call| json!([call["function"]["name"], call["function"]["arguments"]])).collect();
    let content = Some(&message["content"]).filter(|content| *content != "").unwrap_or(&Value::Null);
    json!({"content": content, "reasoning": message["reasoning_content"], "calls": calls, "text": choice["text"], "finish": choice["finish_reason"]})
}

/// The blocks of Anthropic's messages: kind, text or name, arguments.
fn message_blocks(content: &[Value]) -> Vec<Value> {
    let block = |block: &Value| match block["type"].as_str().unwrap() {
        "text" => json!(["text", block["text"]]),
        "thinking" => json!(["thinking", block["thinking"]]),
        _ => json!(["tool_use", block["name"], block["input"]]),
    };
    content.iter().map(block).collect()
}

fn joined_message(events: &[Value]) -> Value {
    let (mut blocks, mut json_text, mut reason): (Vec<Value>, String, Value) =
        (Vec::new(), String::new(), Value::Null);
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                json_text.clear();
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                let block = blocks.last_mut().unwrap();
                for field in ["text", "thinking"] {
                    if delta.get(field).is_some() {
                        append(&mut block[field], &delta[field]);
                    }
                }
                json_text += delta["partial_json"].as_str().unwrap_or_default();
            }
            "content_block_stop" if !json_text.is_empty() => {
                blocks.last_mut().unwrap()["input"] = serde_json::from_str(&json_text).unwrap();
            }
            "message_delta" => reason = event["delta"]["stop_reason"].clone(),
            _ => {}
        }
    }
    json!([message_blocks(&blocks), reason])
}

/// An item without its ids.
fn item(item: &Value) -> Value {
    let mut item = item.clone();
    let own: &mut Map<String, Value> = item.as_object_mut().unwrap();
    own.remove("id");
    own.remove("call_id");
    item
}

fn joined_items(answer: &Answer) -> Value {
    let events = named(answer);
    let (mut texts, mut done): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    for (name, event) in &events {
        match name.as_str() {
            "response.output_item.added" => {
                assert_eq!(event["output_index"], texts.len());
                texts.push(json!(""));
            }
            "response.output_text.delta"
            | "response.reasoning_text.delta"
            | "response.function_call_arguments.delta" => {
                append(texts.last_mut().unwrap(), &event["delta"]);
            }
            "response.output_item.done" => {
                let item = &event["item"];
                let said = if item["type"] == "function_call" {
                    &item["arguments"]
                } else {
                    &item["content"][0]["text"]
                };
                assert_eq!(said, texts.last().unwrap());
                done.push(item.clone());
            }
            _ => {}
        }
    }
    let response = &events.last().unwrap().1["response"];
    assert_eq!(response["output"], json!(done));
    json!([done.iter().map(item).collect::<Vec<_>>(), response["status"]])
}

fn with(body: &Value, extra: &[(&str, Value)]) -> Value {
    let mut body = body.clone();
    extra.iter().for_each(|(field, value)| body[*field] = value.clone());
    body
}

/// Asks every protocol for the reply, whole and streamed; returns what the chat says.
fn ask(server: &Server, name: &str, tools: bool, most: usize, stop: Option<&str>) -> (Value, Value) {
    let said = json!([{"role": "user", "content": "hi"}]);
    let stream = ("stream", Value::from(true));
    let parameters = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let function = |name: &str| json!({"name": name, "parameters": parameters});
    let list = |make: &dyn Fn(&str) -> Value| if tools { json!([make("f"), make("g")]) } else { Value::Null };
    let base = json!({"model": name, "stop": stop, "temperature": 0});

    let nested = list(&|name| json!({"type": "function", "function": function(name)}));
    let chat = with(&base, &[("messages", said.clone()), ("tools", nested), ("max_tokens", most.into())]);
    let whole = whole_choice(&server.post("/v1/chat/completions", &chat));
    let streamed = server.post("/v1/chat/completions", &with(&chat, std::slice::from_ref(&stream)));
    assert_eq!(joined_choice(&data(&streamed)), whole, "{name}");

    let text = with(&base, &[("prompt", json!("<|assistant|>")), ("max_tokens", most.into())]);
    let plain = whole_choice(&server.post("/v1/completions", &text));
    let streamed = server.post("/v1/completions", &with(&text, std::slice::from_ref(&stream)));
    assert_eq!(joined_choice(&data(&streamed)), plain, "{name}");

    let own = list(&|name| json!({"name": name, "input_schema": parameters}));
    let stops = stop.map(|stop| json!([stop]));
    let message = json!({"model": name, "messages": said, "tools": own, "max_tokens": most, "stop_sequences": stops, "temperature": 0});
    let answer = server.post("/v1/messages", &message).json();
    let blocks = message_blocks(answer["content"].as_array().unwrap());
    let streamed = server.post("/v1/messages", &with(&message, std::slice::from_ref(&stream)));
    assert_eq!(joined_message(&data(&streamed)), json!([blocks, answer["stop_reason"]]), "{name}");

    let flat = list(&|name| json!({"type": "function", "name": name, "parameters": parameters}));
    let response =
        with(&base, &[("input", json!("hi")), ("tools", flat), ("max_output_tokens", most.into())]);
    let answer = server.post("/v1/responses", &response).json();
    let items: Vec<Value> = answer["output"].as_array().unwrap().iter().map(item).collect();
    let streamed = server.post("/v1/responses", &with(&response, &[stream]));
    assert_eq!(joined_items(&streamed), json!([items, answer["status"]]), "{name}");

    // What the lists of blocks say is what the chat says, but for white space between calls.
    let text_of = |kind: &str| -> String {
        blocks.iter().filter(|block| block[0] == kind).map(|block| block[1].as_str().unwrap()).collect()
    };
    let squeezed = |text: &str| text.split_whitespace().collect::<String>();
    assert_eq!(squeezed(&text_of("text")), squeezed(whole["content"].as_str().unwrap_or_default()), "{name}");
    assert_eq!(text_of("thinking"), whole["reasoning"].as_str().unwrap_or_default(), "{name}");
    let calls: Vec<Value> = items
        .iter()
        .filter(|item| item["type"] == "function_call")
        .map(|item| json!([item["name"], item["arguments"]]))
        .collect();
    assert_eq!(json!(calls), whole["calls"], "{name}");
    let lengths = [blocks.len(), items.len().max(1)];
    assert!(lengths[0] == lengths[1] || blocks.is_empty(), "{name}: {blocks:?} {items:?}");
    (whole, plain)
}

#[test]
fn streams_join_to_whole_replies_in_every_protocol() {
    let mut random = Random(20_261_130);
    let mut models = Vec::new();
    for (format, text) in samples() {
        models.push((text, model(format, &cut(text.as_bytes(), &mut random))));
    }
    let also: Vec<&str> = models[1..].iter().flat_map(|(_, model)| ["--also", model.path()]).collect();
    let server = Server::start(models[0].1.path(), &also);
    let mut calls = 0;
    for (text, model) in &models {
        let (whole, plain) = ask(&server, model.path(), true, 200, None);
        calls += whole["calls"].as_array().unwrap().len();
        assert_eq!(plain["text"], *text, "plain text has all of it");
        ask(&server, model.path(), false, 200, None);
        ask(&server, model.path(), true, 1 + random.below(40), None);
        let letters: Vec<char> = text.chars().collect();
        let from = random.below(letters.len() - 3);
        let stop: String = letters[from..from + 1 + random.below(3)].iter().collect();
        let (_, plain) = ask(&server, model.path(), true, 200, Some(&stop));
        assert_eq!(plain["text"], text.split(stop.as_str()).next().unwrap());
    }
    assert!(calls > models.len() / 2, "most replies call: {calls}");
}
