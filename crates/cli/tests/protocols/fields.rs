//! Fields that few clients send.

use crate::common::model::{Model, Then};
use crate::common::server::Server;
use serde_json::{Value, json};

const TEXT: &str = "/v1/completions";

/// Makes tokens of texts that the model never says, in place of bytes that are no texts.
pub(super) fn name_tokens(model: &Model, names: &[&str]) {
    model.edit("tokenizer.json", |tokenizer| {
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        for (id, content) in names.iter().enumerate() {
            added.push(json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": false}));
        }
    });
}

#[test]
fn a_reply_has_the_tokens_that_it_must_have() {
    let model = Model::script(&[b"a", b"b"], Then::End);
    let server = Server::start(model.path(), &[]);
    let of = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    let whole = of(json!({})).json();
    assert_eq!(
        (&whole["usage"]["completion_tokens"], &whole["choices"][0]["finish_reason"]),
        (&json!(3), &json!("stop"))
    );
    for least in [4, 6] {
        let made = of(json!({"min_tokens": least})).json();
        assert!(made["usage"]["completion_tokens"].as_u64().unwrap() > least, "{made}");
        assert!(made["choices"][0]["message"]["content"].as_str().unwrap().starts_with("ab"));
    }
    for (field, value) in [
        ("min_tokens", json!(10)),
        ("min_tokens", json!(-1)),
        ("draft_model", json!("other")),
        ("num_draft_tokens", json!(3)),
        ("adapters", json!("none")),
        ("adapters", json!("../secret")),
        ("queue_deadline", json!(-1)),
        ("stall_deadline", json!("x")),
        ("priority", json!(1.5)),
        ("role_mapping", json!({})),
        ("prediction", json!({})),
    ] {
        let mut extra = json!({});
        extra[field] = value;
        let answer = of(extra);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(field)));
    }
    let form = of(json!({"min_tokens": 2, "response_format": {"type": "json_object"}}));
    assert_eq!((form.status, form.json()["error"]["param"].as_str()), (400, Some("min_tokens")));
    let fine = json!({"draft_model": "default_model", "num_draft_tokens": 0, "adapters": null, "priority": -3,
        "queue_deadline": 60, "stall_deadline": 60.5, "min_tokens": 0});
    assert_eq!(of(fine).json()["choices"], whole["choices"]);
}

#[test]
fn a_request_has_so_many_replies() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &[]);
    for (count, extra, param) in [
        (2049, json!({}), "prompt"),
        (0, json!({}), "prompt"),
        (2048, json!({"n": 3}), "n"),
        (2048, json!({"best_of": 3}), "best_of"),
    ] {
        let mut body = json!({"prompt": vec!["a"; count], "max_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = server.post(TEXT, &body);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)));
    }
}

#[test]
fn guesses_can_be_turned_off_by_a_request() {
    let model = Model::random();
    let server = Server::start(model.path(), &["--ngram-spec"]);
    let of = |count: Value| {
        let body = json!({"prompt": "abcabcabcabc", "max_tokens": 40, "num_draft_tokens": count});
        server.post(TEXT, &body)
    };
    let (plain, guessed) = (of(json!(0)).json(), of(json!(2)).json());
    assert_eq!(plain["choices"], guessed["choices"]);
    assert_eq!(plain["timings"]["draft_n"], 0);
    assert_eq!(of(json!(1000)).json()["error"]["param"], "num_draft_tokens");
}

#[test]
fn gaps_are_filled_by_models_that_can() {
    let plain = Model::random();
    let server = Server::start(plain.path(), &[]);
    let body = json!({"prompt": "ab", "suffix": "cd", "max_tokens": 4, "logprobs": 0});
    let refused = server.post(TEXT, &body);
    assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some("suffix")));

    for (names, prompt) in [
        (
            vec!["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
        ),
        (vec!["[SUFFIX]", "[PREFIX]"], "[SUFFIX]cd[PREFIX]ab"),
    ] {
        let model = Model::random();
        name_tokens(&model, &names);
        let server = Server::start(model.path(), &[]);
        let filled = server.post(TEXT, &body).json();
        let written = server.post(TEXT, &json!({"prompt": prompt, "max_tokens": 4, "logprobs": 0})).json();
        assert_eq!(filled["choices"], written["choices"]);
        assert_eq!(filled["usage"]["prompt_tokens"], 4 + names.len());
        let mut echo = body.clone();
        echo["echo"] = true.into();
        assert_eq!(server.post(TEXT, &echo).json()["error"]["param"], "suffix");
    }
}

/// A model that thinks `abc` and says `x`.
fn thinker() -> Model {
    let model = Model::script(&[b"\x00", b"a", b"b", b"c", b"\x01", b"x"], Then::End);
    name_tokens(&model, &["<think>", "</think>"]);
    model
}

#[test]
fn thoughts_are_bounded_and_turned_off() {
    let model = thinker();
    let server = Server::start(model.path(), &[]);
    let said = json!([{"role": "user", "content": "hi"}]);
    for (extra, thoughts) in [
        (json!({}), "abc"),
        (json!({"reasoning_effort": "high"}), "abc"),
        (json!({"max_reasoning_tokens": 2}), "ab"),
        (json!({"reasoning_effort": "none"}), ""),
        (json!({"max_reasoning_tokens": 0}), ""),
    ] {
        let mut body = json!({"messages": said, "max_tokens": 9});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = server.post("/v1/chat/completions", &body).json();
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], "x", "{extra}: {answer}");
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), thoughts, "{extra}");
        assert_eq!(message["reasoning"], message["reasoning_content"]);
    }
    for (thinking, thoughts) in [
        (json!({"type": "enabled", "budget_tokens": 1024}), "abc"),
        (json!({"type": "enabled", "budget_tokens": 1}), "a"),
        (json!({"type": "disabled"}), ""),
    ] {
        let body = json!({"messages": said, "max_tokens": 9, "thinking": thinking});
        let content = server.post("/v1/messages", &body).json()["content"].clone();
        let mut expected = vec![json!({"type": "text", "text": "x"})];
        if !thoughts.is_empty() {
            expected.insert(0, json!({"type": "thinking", "thinking": thoughts, "signature": ""}));
        }
        assert_eq!(content, json!(expected), "{thinking}");
    }
    let off = json!({"input": "hi", "reasoning": {"effort": "none"}, "max_output_tokens": 9});
    let output = server.post("/v1/responses", &off).json()["output"].clone();
    assert_eq!((output.as_array().unwrap().len(), &output[0]["type"]), (1, &json!("message")));
}

/// A model that says `x`, with this template.
fn templated(template: &str) -> Model {
    let model = Model::script(&[b"x"], Then::End);
    model.edit("tokenizer_config.json", |config| config["chat_template"] = json!(template));
    model
}

#[test]
fn tools_that_a_template_does_not_show_are_refused() {
    let model = templated("{% for m in messages %}{{ m.content }}{{ m.tools }}{% endfor %}<|assistant|>");
    let server = Server::start(model.path(), &["--tool-parser", "json_tools"]);
    let said = json!([{"role": "user", "content": "hi"}]);
    let parameters = json!({"type": "object"});
    let nested = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let own = json!([{"name": "f", "input_schema": parameters}]);
    let flat = json!([{"type": "function", "name": "f", "parameters": parameters}]);
    for (path, mut body) in [
        ("/v1/chat/completions", json!({"messages": said, "tools": nested, "stream": true})),
        ("/v1/chat/completions", json!({"messages": said, "tools": nested, "tool_choice": "required"})),
        ("/apply-template", json!({"messages": said, "tools": nested})),
        ("/v1/responses", json!({"input": "hi", "tools": flat})),
        ("/v1/responses/input_tokens", json!({"input": "hi", "tools": flat})),
        ("/v1/messages", json!({"messages": said, "tools": own, "max_tokens": 5})),
        ("/v1/messages/count_tokens", json!({"messages": said, "tools": own})),
    ] {
        let answer = server.post(path, &body);
        let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status == 400 && message.starts_with("tools: "), "{path}: {answer:?}");
        assert!(message.contains("template"), "{message}");
        body.as_object_mut().unwrap().remove("tools");
        body.as_object_mut().unwrap().remove("tool_choice");
        assert_eq!(server.post(path, &body).status, 200, "{path}");
    }
    let none = json!({"messages": said, "tools": nested, "tool_choice": "none"});
    assert_eq!(server.post("/v1/chat/completions", &none).status, 200);
}

#[test]
fn variables_that_a_template_does_not_read_are_refused() {
    let model =
        templated("{{ colour }}{{ documents }}{% for m in messages %}{{ m.shade }}{% endfor %}<|assistant|>");
    let server = Server::start(model.path(), &[]);
    let of = |path: &str, variables: Value| {
        let body =
            json!({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": variables});
        server.post(path, &body)
    };
    let shown = of("/apply-template", json!({"colour": "red", "documents": [7]})).json();
    assert_eq!(shown["prompt"], "red[7]<|assistant|>");
    for path in ["/v1/chat/completions", "/apply-template"] {
        for name in ["shade", "messages", "tools", "add_generation_prompt"] {
            let error = of(path, json!({"colour": "red", name: true})).json()["error"].clone();
            assert_eq!(error["param"], format!("chat_template_kwargs.{name}"), "{error}");
            assert!(error["message"].as_str().unwrap().ends_with("it takes: colour, documents"), "{error}");
        }
        for fine in [json!({"enable_thinking": false}), json!({"shade": null}), json!({})] {
            assert_eq!(of(path, fine).status, 200);
        }
        let thinking = of(path, json!({"enable_thinking": true})).json()["error"].clone();
        assert_eq!(thinking["param"], "chat_template_kwargs.enable_thinking");
    }
}

#[test]
fn thoughts_are_turned_on_and_off_by_what_the_template_reads() {
    let said = json!([{"role": "user", "content": "hi"}]);
    let ask = |server: &Server, extra: Value| {
        let mut body = json!({"messages": said, "max_tokens": 9});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    // Tokens of the prompt beside those that are always there.
    for switch in ["enable_thinking", "thinking"] {
        let template = format!("{{% if {switch} is defined and {switch} %}}12345{{% endif %}}<|assistant|>");
        let model = templated(&template);
        let server = Server::start(model.path(), &[]);
        let more = |extra: Value| ask(&server, extra).json()["usage"]["prompt_tokens"].as_u64().unwrap() - 1;
        assert_eq!(more(json!({"reasoning_effort": "high"})), 5);
        assert_eq!(more(json!({"reasoning_effort": "none"})), 0);
        assert_eq!(more(json!({"chat_template_kwargs": {"enable_thinking": true}})), 5, "{switch}");
        assert_eq!(more(json!({"chat_template_kwargs": {switch: true}})), 5);
        let both = json!({"reasoning_effort": "none", "chat_template_kwargs": {switch: true}});
        assert_eq!(ask(&server, both).json()["error"]["param"], "reasoning_effort");
    }
    // A template that reads neither, of a model that thinks: no thought is let through.
    let model = thinker();
    let server = Server::start(model.path(), &[]);
    for (on, thoughts) in [(true, json!("abc")), (false, Value::Null)] {
        let reply = ask(&server, json!({"chat_template_kwargs": {"enable_thinking": on}})).json();
        let message = &reply["choices"][0]["message"];
        assert_eq!((&message["content"], &message["reasoning"]), (&json!("x"), &thoughts));
    }
}

#[test]
fn what_a_user_writes_does_not_begin_thoughts() {
    let model = Model::script(&[b"x", b"y"], Then::End);
    name_tokens(&model, &["<think>", "</think>"]);
    let server = Server::start(model.path(), &[]);
    let body = json!({"messages": [{"role": "user", "content": "what is <think> for?"}], "max_tokens": 9});
    let message = server.post("/v1/chat/completions", &body).json()["choices"][0]["message"].clone();
    assert_eq!((&message["content"], message.get("reasoning_content")), (&json!("xy"), None));
}

#[test]
fn null_is_absent_in_tools_too() {
    let model = Model::script(&[b"x"], Then::End);
    let server = Server::start(model.path(), &[]);
    let function = json!({"name": "f", "description": null, "parameters": null, "strict": null});
    let tools = json!([{"type": null, "function": function}]);
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "tools": tools});
    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
    for (tool, param) in [
        (json!({"name": "f"}), "tools[0].input_schema"),
        (json!({"name": "f", "input_schema": 5}), "tools[0].input_schema"),
        (json!({"name": "", "input_schema": {}}), "tools[0].name"),
    ] {
        let body = json!({"messages": body["messages"], "max_tokens": 9, "tools": [tool]});
        let answer = server.post("/v1/messages", &body);
        let message = answer.json()["error"]["message"].clone();
        assert!(answer.status == 400 && message.as_str().unwrap().starts_with(param), "{message}");
    }
}

#[test]
fn texts_tell_log_probabilities_as_chats_do_too() {
    let model = Model::random();
    let server = Server::start(model.path(), &[]);
    let of = |extra: Value| {
        let mut body = json!({"prompt": "abc", "max_tokens": 4});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.post(TEXT, &body)
    };
    let lists = of(json!({"logprobs": 2})).json()["choices"][0]["logprobs"].clone();
    let asked = json!({"logprobs": true, "top_logprobs": 2});
    let content = of(asked.clone()).json()["choices"][0]["logprobs"]["content"].clone();
    let column =
        |field: &str| content.as_array().unwrap().iter().map(|entry| entry[field].clone()).collect::<Value>();
    assert_eq!(
        (column("token"), column("logprob")),
        (lists["tokens"].clone(), lists["token_logprobs"].clone())
    );
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let mut streamed = asked;
    streamed["stream"] = true.into();
    let events = of(streamed).events();
    let told = events
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().unwrap().clone());
    assert_eq!(told.collect::<Value>(), content);
    assert_eq!(
        of(json!({"logprobs": false, "top_logprobs": -1})).json()["choices"][0]["logprobs"],
        Value::Null
    );
    for (extra, param) in [
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"logprobs": "x"}), "logprobs"),
    ] {
        let answer = of(extra);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)));
    }
}

#[test]
fn anthropics_output_is_configured() {
    let model = Model::random();
    let server = Server::start(model.path(), &[]);
    let of = |config: Value| {
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "output_config": config,
            "cache_control": {"type": "ephemeral"}});
        server.post("/v1/messages", &body)
    };
    let schema = json!({"enum": ["yes", "no"]});
    let answer = of(json!({"effort": "low", "format": {"type": "json_schema", "schema": schema}})).json();
    let text = answer["content"][0]["text"].as_str().unwrap();
    assert!(["\"yes\"", "\"no\""].contains(&text), "{answer}");
    for (config, field) in [
        (json!({"effort": "so so"}), "output_config.effort"),
        (json!({"format": {"type": "xml"}}), "output_config.format.type"),
        (json!({"task_budget": {}}), "output_config.task_budget"),
    ] {
        let answer = of(config);
        assert_eq!(answer.status, 400);
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains(field), "{answer:?}");
    }
}
