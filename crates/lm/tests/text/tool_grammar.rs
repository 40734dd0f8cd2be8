//! Replies that must call a tool: what the grammar of each format lets through on a small vocabulary.

use lmx::grammar::{Form, Grammars};
use lmx::text::reply::{CallGrammar, CallGrammarError, Reply, ReplyEnd, ReplyOptions, ToolFormat, Tools};
use lmx::text::{EosSet, EosSource, ThinkingMarkers, Tokenizer};
use serde_json::{Value, json};

fn tools() -> Tools {
    Tools::new(&[
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city"], "additionalProperties": false}}}),
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {},
            "additionalProperties": false}}}),
    ])
}

struct World {
    tokenizer: Tokenizer,
    grammars: Grammars,
}

fn world() -> World {
    world_of(crate::common::text_data::small("byte_level"))
}

/// A world in whose vocabulary these texts are control tokens.
fn world_with(controls: &[&str]) -> World {
    let folder = tempfile::tempdir().unwrap();
    let from = crate::common::text_data::golden().join("byte_level");
    std::fs::copy(from.join("tokenizer_config.json"), folder.path().join("tokenizer_config.json")).unwrap();
    let text = std::fs::read_to_string(from.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let first = world().tokenizer.vocab_size();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((first..).zip(controls).map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    }));
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    world_of(Tokenizer::from_folder(folder.path()).unwrap())
}

fn world_of(tokenizer: Tokenizer) -> World {
    let mut eos = EosSet::default();
    for id in ["<|im_end|>", "<|endoftext|>"].into_iter().filter_map(|end| tokenizer.id(end)) {
        eos.insert(id, EosSource::Config);
    }
    let grammars = Grammars::new(&tokenizer, &eos, tokenizer.vocab_size()).unwrap();
    World { tokenizer, grammars }
}

impl World {
    fn control(&self, token: &str) -> Option<u32> {
        self.tokenizer.id(token).filter(|&id| self.tokenizer.is_control(id))
    }

    /// Whether the grammar lets all of `text` through and may end there; else how far it went.
    fn accepts(&self, lark: &str, text: &str) -> Result<(), String> {
        let mut grammar =
            self.grammars.compile(&Form::Lark(lark.to_owned())).unwrap_or_else(|e| panic!("{e}\n{lark}"));
        let mut said = Vec::new();
        for id in self.tokenizer.encode(text, false).unwrap() {
            let mut logits = vec![0.0; self.tokenizer.vocab_size()];
            grammar.apply(&mut logits).map_err(|error| error.to_string())?;
            if logits[id as usize] != 0.0 {
                return Err(self.tokenizer.decode(&said));
            }
            grammar.accept(id).map_err(|error| error.to_string())?;
            said.push(id);
        }
        let mut logits = vec![0.0; self.tokenizer.vocab_size()];
        let ends = ["<|im_end|>", "<|endoftext|>"].into_iter().filter_map(|end| self.tokenizer.id(end));
        let may_end = grammar.is_complete() || {
            grammar.apply(&mut logits).map_err(|error| error.to_string())?;
            ends.into_iter().any(|id| logits[id as usize] == 0.0)
        };
        if may_end { Ok(()) } else { Err("the end".to_owned()) }
    }
}

/// A call of each enforceable format, of `get_weather` with city and days.
fn call(format: ToolFormat, city: &str, days: &str) -> String {
    let json = format!("{{\"city\": {}, \"days\": {days}}}", json!(city));
    match format {
        ToolFormat::JsonTools => {
            format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {json}}}\n</tool_call>")
        }
        ToolFormat::Llama3 => format!("{{\"name\": \"get_weather\", \"parameters\": {json}}}"),
        ToolFormat::Mistral => format!("[TOOL_CALLS] [{{\"name\": \"get_weather\", \"arguments\": {json}}}]"),
        ToolFormat::KimiK2 => format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{json}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        ToolFormat::DeepseekV3 => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{json}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ToolFormat::Harmony => {
            format!("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{json}")
        }
        ToolFormat::Qwen3Coder => format!(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
        ),
        ToolFormat::Glm47 | ToolFormat::Laguna => format!(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n</tool_call>"
        ),
        ToolFormat::Longcat => format!(
            "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>{city}</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>{days}</longcat_arg_value>\n</longcat_tool_call>"
        ),
        ToolFormat::MinimaxM2 => format!(
            "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">{city}</parameter>\n<parameter name=\"days\">{days}</parameter>\n</invoke>\n</minimax:tool_call>"
        ),
        ToolFormat::DeepseekV32 => format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">{city}</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">{days}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        ),
        ToolFormat::FunctionGemma => format!(
            "<start_function_call>call:get_weather{{city:<escape>{city}<escape>,days:{days}}}<end_function_call>"
        ),
        ToolFormat::Gemma4 => {
            format!("<|tool_call>call:get_weather{{city:<|\"|>{city}<|\"|>,days:{days}}}<tool_call|>")
        }
        ToolFormat::KimiK3 => format!(
            "<|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>{city}<|close|>argument<|sep|><|open|>argument key=\"days\" type=\"integer\"<|sep|>{days}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
        ),
        ToolFormat::MuseSpark => format!(
            "<atem:function_calls>\n<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"city\">{city}</atem:parameter>\n<atem:parameter name=\"days\">{days}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
        ),
        ToolFormat::Pythonic => {
            format!("<|tool_call_start|>[get_weather(city={}, days={days})]<|tool_call_end|>", json!(city))
        }
        ToolFormat::Minicpm5 => format!(
            "<function name=\"get_weather\"><param name=\"city\">{city}</param><param name=\"days\">{days}</param></function>"
        ),
    }
}

#[test]
fn each_grammar_lets_calls_through_that_its_parser_reads_and_nothing_else() {
    let world = world();
    for format in ToolFormat::ALL {
        let lark = CallGrammar::default().lark(format, &tools(), &|token| world.control(token)).unwrap();
        let text = call(format, "São Paulo", "3");
        assert_eq!(world.accepts(&lark, &text), Ok(()), "{format:?}\n{lark}");
        let options = ReplyOptions { format: Some(format), tools: tools(), ..ReplyOptions::default() };
        let reply = Reply::parse(&text, ReplyEnd::Stop, options);
        let arguments: Value = serde_json::from_str(&reply.tool_calls[0].arguments).unwrap();
        assert_eq!(
            (reply.tool_calls[0].name.as_str(), arguments),
            ("get_weather", json!({"city": "São Paulo", "days": 3}))
        );
        for wrong in [
            call(format, "Paris", "12"),
            call(format, "Paris", "many"),
            call(format, "Paris", "3").replace("get_weather", "get_whether"),
            call(format, "Paris", "3").replace("city", "town"),
            "Hello".to_owned(),
            format!("{0}{0}", call(format, "Paris", "3")),
        ] {
            assert!(world.accepts(&lark, &wrong).is_err(), "{format:?} {wrong}\n{lark}");
        }
    }
}

#[test]
fn a_named_tool_several_calls_and_thoughts() {
    let world = world();
    let lark =
        |options: &CallGrammar| options.lark(ToolFormat::JsonTools, &tools(), &|t| world.control(t)).unwrap();
    let weather = call(ToolFormat::JsonTools, "Rome", "1");
    let now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let only = lark(&CallGrammar { only: Some("now".to_owned()), ..CallGrammar::default() });
    assert_eq!(world.accepts(&only, now), Ok(()));
    assert!(world.accepts(&only, &weather).is_err());
    let parallel = lark(&CallGrammar { parallel: true, ..CallGrammar::default() });
    assert_eq!(world.accepts(&parallel, &format!("{weather}\n{now}\n{now}")), Ok(()));
    let thinking = Some(ThinkingMarkers {
        start: "<think>".to_owned(),
        end: "</think>".to_owned(),
        start_tokens: vec![],
        end_tokens: vec![],
    });
    let thinks = lark(&CallGrammar { thinking: thinking.clone(), ..CallGrammar::default() });
    for text in [now.to_owned(), format!("<think>\nHm. {{</think>\n\n{now}"), format!("<think></think>{now}")]
    {
        assert_eq!(world.accepts(&thinks, &text), Ok(()), "{text}\n{thinks}");
    }
    let opened = lark(&CallGrammar { thinking, in_reasoning: true, ..CallGrammar::default() });
    assert_eq!(world.accepts(&opened, &format!("Hm.</think>\n\n{now}")), Ok(()));
    assert!(world.accepts(&opened, now).is_err());
}

#[test]
fn what_cannot_be_enforced_is_said() {
    let lark = |format, tools: &[Value]| CallGrammar::default().lark(format, &Tools::new(tools), &|_| None);
    let f = |parameters: Value| [json!({"name": "f", "parameters": parameters})];
    assert_eq!(lark(ToolFormat::JsonTools, &[]), Err(CallGrammarError::NoTool));
    let unknown = CallGrammar { only: Some("g".to_owned()), ..CallGrammar::default() };
    let error = unknown.lark(ToolFormat::JsonTools, &Tools::new(&f(json!({}))), &|_| None).unwrap_err();
    assert_eq!(error, CallGrammarError::Unknown { name: "g".to_owned() });
    let name = lark(ToolFormat::JsonTools, &[json!({"name": "a\"b"})]).unwrap_err();
    assert_eq!(name, CallGrammarError::Name { name: "a\"b".to_owned() });
    let pattern = f(json!({"properties": {"a": {"type": "string", "pattern": "x+"}}}));
    let error = lark(ToolFormat::Qwen3Coder, &pattern).unwrap_err();
    assert_eq!(error.to_string(), "the schema of f.a cannot be enforced in this model's tool calls: pattern");
    assert!(lark(ToolFormat::JsonTools, &pattern).is_ok());
    assert!(lark(ToolFormat::Qwen3Coder, &f(json!({"anyOf": []}))).is_err());
    assert!(lark(ToolFormat::Qwen3Coder, &f(json!({"required": ["x"]}))).is_err());
}

/// Where a marker is a control token, only that token is it.
#[test]
fn markers_that_are_control_tokens_are_asked_for_by_id() {
    let world = world();
    let id = world.tokenizer.id("<|im_start|>").unwrap();
    let control = |token: &str| (token == "<tool_call>").then_some(id);
    let lark = CallGrammar::default().lark(ToolFormat::JsonTools, &tools(), &control).unwrap();
    let text = call(ToolFormat::JsonTools, "Rome", "1");
    assert_eq!(world.accepts(&lark, &text.replace("<tool_call>", "<|im_start|>")), Ok(()), "{lark}");
    assert!(world.accepts(&lark, &text).is_err());
}

/// A tool with arguments of all types, and one without any.
fn typed(strict: bool) -> Vec<Value> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "wet": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["C", "°F", "a b"]},
            "level": {"$ref": "#/$defs/level"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "integer"}, "at": {"type": "array", "items": {"type": "boolean"}}},
                "required": ["lat"], "additionalProperties": false,
            },
        },
        "required": ["city", "wet", "unit", "tags"], "additionalProperties": false,
        "$defs": {"level": {"enum": [1, 2, 30]}},
    });
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    vec![
        json!({"name": "f", "parameters": parameters, "strict": strict}),
        json!({"name": "no.thing-2", "parameters": nothing, "strict": strict}),
    ]
}

/// Whether `value` is what `schema` says, for the keywords of [`typed`].
fn fits(value: &Value, schema: &Value, root: &Value) -> bool {
    let list = |key: &str| schema[key].as_array().into_iter().flatten();
    if let Some(pointer) = schema["$ref"].as_str() {
        return fits(value, root.pointer(&pointer[1..]).unwrap(), root);
    }
    let kind = match schema["type"].as_str() {
        Some("string") => value.is_string(),
        // Minus zero is an integer of JSON, though serde_json reads it as a float.
        Some("integer") => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some("array") => value.as_array().is_some_and(|items| {
            let least = schema["minItems"].as_u64().unwrap_or(0);
            let most = schema["maxItems"].as_u64().unwrap_or(u64::MAX);
            (least..=most).contains(&(items.len() as u64))
                && items.iter().all(|item| fits(item, &schema["items"], root))
        }),
        Some("object") => value.as_object().is_some_and(|members| {
            let known = |(key, value): (&String, &Value)| {
                schema["properties"].get(key).is_some_and(|schema| fits(value, schema, root))
            };
            members.iter().all(known)
                && list("required").all(|key| members.contains_key(key.as_str().unwrap()))
        }),
        _ => true,
    };
    let within = |key: &str, fits: fn(f64, f64) -> bool| match (schema[key].as_f64(), value.as_f64()) {
        (Some(bound), Some(value)) => fits(value, bound),
        _ => true,
    };
    kind && (schema["enum"].is_null() || list("enum").any(|choice| choice == value))
        && (schema["anyOf"].is_null() || list("anyOf").any(|schema| fits(value, schema, root)))
        && within("minimum", |value, least| value >= least)
        && within("maximum", |value, most| value <= most)
}

/// The calls of a reply, of which each must be whole and fit; the others' arguments are any.
fn fitting_calls(text: &str, format: ToolFormat, tools: &[Value], in_reasoning: bool) -> Reply {
    let thinking = in_reasoning.then(thinking);
    let tools_read = Tools::new(tools);
    let options = ReplyOptions {
        format: Some(format),
        tools: tools_read,
        thinking,
        in_reasoning,
        ..ReplyOptions::default()
    };
    let end = if text.len() < BABBLE { ReplyEnd::Stop } else { ReplyEnd::Cut };
    let reply = Reply::parse(text, end, options);
    for call in &reply.tool_calls {
        let tool = tools
            .iter()
            .find(|tool| tool["name"] == call.name.as_str())
            .unwrap_or_else(|| panic!("{call:?}"));
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        let schema = &tool["parameters"];
        assert!(call.complete || text.len() >= BABBLE, "{format:?}: {text}");
        assert!(!call.complete || fits(&arguments, schema, schema), "{format:?}: {text}\n{call:?}");
    }
    reply
}

fn thinking() -> ThinkingMarkers {
    let [start, end] = ["<think>", "</think>"].map(str::to_owned);
    ThinkingMarkers { start, end, start_tokens: vec![], end_tokens: vec![] }
}

/// Bytes of what is said at most, where nothing else ends it.
const BABBLE: usize = 2000;

/// Says what it is let, byte by byte: where it can, it goes on with one of `wishes`, texts that are dear to it.
fn babble(world: &World, lark: &str, wishes: &[&str], seed: u64) -> String {
    let mut grammar =
        world.grammars.compile(&Form::Lark(lark.to_owned())).unwrap_or_else(|e| panic!("{e}\n{lark}"));
    let bytes: Vec<(u32, u8)> = (0..world.tokenizer.vocab_size() as u32)
        .filter_map(|id| match world.tokenizer.token_bytes(id)?.as_slice() {
            &[byte] if !world.tokenizer.is_control(id) => Some((id, byte)),
            _ => None,
        })
        .collect();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut below = move |most: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % most.max(1)
    };
    let mut said: Vec<u8> = Vec::new();
    while !grammar.is_complete() && said.len() < BABBLE {
        let mut logits = vec![0.0; world.tokenizer.vocab_size()];
        grammar
            .apply(&mut logits)
            .unwrap_or_else(|e| panic!("{e}: {}\n{lark}", String::from_utf8_lossy(&said)));
        let allowed: Vec<(u32, u8)> =
            bytes.iter().copied().filter(|(id, _)| logits[*id as usize] == 0.0).collect();
        if allowed.is_empty() {
            break;
        }
        let begun = |wish: &&str| {
            let wish = wish.as_bytes();
            let length = (1..wish.len()).rev().find(|&n| said.ends_with(&wish[..n]))?;
            let next = allowed.iter().copied().find(|(_, byte)| *byte == wish[length])?;
            Some((length, next))
        };
        let mut begun: Vec<(usize, (u32, u8))> = wishes.iter().filter_map(begun).collect();
        let longest = begun.iter().map(|(length, _)| *length).max();
        begun.retain(|(length, _)| Some(*length) == longest);
        let wish = (!begun.is_empty() && below(20) > 0).then(|| begun[below(begun.len())].1);
        let (id, byte) = wish.unwrap_or_else(|| {
            let begins = |(_, byte): &&(u32, u8)| wishes.iter().any(|wish| wish.as_bytes()[0] == *byte);
            let starts: Vec<&(u32, u8)> = allowed.iter().filter(begins).collect();
            if !starts.is_empty() && below(2) == 0 {
                *starts[below(starts.len())]
            } else {
                allowed[below(allowed.len())]
            }
        });
        grammar.accept(id).unwrap();
        said.push(byte);
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// What ends texts, and what is no part of them.
const ENDS: [&str; 13] = [
    "</parameter>\n",
    "\n</parameter>\n",
    "</arg_value>\n",
    "</longcat_arg_value>\n",
    "</param>",
    "</atem:parameter>\n",
    "</｜DSML｜parameter>\n",
    "<|close|>argument<|sep|>",
    "<escape>",
    "<|\"|>",
    "\"",
    "</think>",
    "<|end|>",
];

#[test]
fn calls_of_every_format_fit_whatever_a_model_says() {
    let world = world();
    for format in ToolFormat::ALL {
        let lark = CallGrammar { parallel: true, ..CallGrammar::default() };
        let lark = lark.lark(format, &Tools::new(&typed(false)), &|_| None).unwrap();
        let only = CallGrammar { only: Some("f".to_owned()), ..CallGrammar::default() };
        let only = only.lark(format, &Tools::new(&typed(false)), &|_| None).unwrap();
        let mut calls = 0;
        for seed in 0..8 {
            let text = babble(&world, if seed % 2 == 0 { &lark } else { &only }, &ENDS, seed);
            let reply = fitting_calls(&text, format, &typed(false), false);
            assert!(seed % 2 == 0 || reply.tool_calls.iter().all(|call| call.name == "f"));
            assert!(text.len() >= BABBLE || !reply.tool_calls.is_empty(), "{format:?}: {text}");
            calls += reply.tool_calls.len();
        }
        assert!(calls >= 2, "{format:?}: {calls}");
    }
}

/// A call as a model would write it that heeds no schema.
fn wrong_call(format: ToolFormat, name: &str) -> String {
    call(format, "Rome", "true").replace("get_weather", name).replace("city", "town")
}

fn with_text(parallel: bool) -> CallGrammar {
    CallGrammar { parallel, free_text: Some(Vec::new()), ..CallGrammar::default() }
}

#[test]
fn calls_of_strict_tools_fit_wherever_they_begin() {
    let world = world();
    let mut calls = 0;
    for format in ToolFormat::ALL {
        for (thinking, in_reasoning) in [(None, false), (Some(thinking()), true)] {
            let options = CallGrammar { thinking, in_reasoning, ..with_text(false) };
            let lark = options.lark(format, &Tools::new(&typed(true)), &|_| None).unwrap();
            let wrong = wrong_call(format, "f");
            let wishes: Vec<&str> = std::iter::once(wrong.as_str()).chain(ENDS).collect();
            for seed in 0..4 {
                let text = babble(&world, &lark, &wishes, seed);
                calls += fitting_calls(&text, format, &typed(true), in_reasoning).tool_calls.len();
            }
        }
    }
    assert!(calls > 40, "{calls}");
}

#[test]
fn text_without_a_call_is_free() {
    let world = world();
    let [strict, loose] = [true, false].map(|strict| {
        let mut tools = typed(strict);
        tools[1]["strict"] = true.into();
        tools
    });
    for format in ToolFormat::ALL {
        let lark = |options: CallGrammar, tools: &[Value]| {
            options.lark(format, &Tools::new(tools), &|_| None).unwrap()
        };
        let plain = lark(with_text(true), &strict);
        let call = wrong_call(format, "f");
        for text in ["", "Hello <you> {\"a\": [1]}, é", "< <| <tool <｜ <think>hm</think> x", "\n\n"] {
            assert_eq!(world.accepts(&plain, text), Ok(()), "{format:?} {text:?}\n{plain}");
        }
        assert!(world.accepts(&plain, &format!("Hm. {call}")).is_err() || format == ToolFormat::Llama3);
        // Arguments of other tools are not looked at; tools that are none cannot be called.
        let mixed = lark(with_text(true), &loose);
        let between = if format == ToolFormat::Llama3 { "; " } else { "\n" };
        let calls = format!("{call}{between}{call}");
        assert_eq!(world.accepts(&mixed, &calls), Ok(()), "{format:?} {calls}\n{mixed}");
        assert!(world.accepts(&mixed, &wrong_call(format, "g")).is_err(), "{format:?}");
        let one = lark(with_text(false), &loose);
        assert!(
            world.accepts(&one, &call).is_ok() && world.accepts(&one, &calls).is_err(),
            "{format:?}\n{one}"
        );
        // What looks like a call within thoughts is none, and cannot be.
        let thinks = CallGrammar { thinking: Some(thinking()), in_reasoning: true, ..with_text(true) };
        let thinks = lark(thinks, &loose);
        assert_eq!(world.accepts(&thinks, "Hm <too"), Ok(()), "{format:?}");
        assert_eq!(
            world.accepts(&thinks, &format!("Hm <tool</think>\n{call}")),
            Ok(()),
            "{format:?}\n{thinks}"
        );
    }
}

/// Families whose markers are made of control tokens, which their texts may have too; and such texts.
const FAMILIES: [(ToolFormat, &[&str], &[&str]); 3] = [
    (
        ToolFormat::KimiK3,
        &["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
        &["<|open|>response<|sep|>Hi, é.<|close|>response<|sep|>", "a <|close|>tools<|sep|> b", "<|sep|>"],
    ),
    (
        ToolFormat::DeepseekV32,
        &["｜DSML｜"],
        &["<｜DSML｜x>, </｜DSML｜y>", "function_calls> ｜DSML｜function calls"],
    ),
    (
        ToolFormat::Harmony,
        &["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"],
        &[
            "<|channel|>analysis<|message|>Hm. to=functions.x<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "<|message|>a<|constrain|>b<|end|>",
        ],
    ),
];

#[test]
fn control_tokens_of_a_family_are_text_around_calls() {
    for (format, tokens, texts) in FAMILIES {
        let world = world_with(tokens);
        let ids: Vec<u32> = tokens.iter().map(|token| world.control(token).unwrap()).collect();
        let strict = typed(true);
        let options = CallGrammar { free_text: Some(ids), ..with_text(true) };
        let lark = options.lark(format, &Tools::new(&strict), &|token| world.control(token)).unwrap();
        let good = call(format, "x", "3").replace("get_weather", "no.thing-2");
        let good = match format {
            ToolFormat::KimiK3 => {
                good.split_inclusive("<|sep|>").filter(|tag| !tag.contains("argument")).collect()
            }
            ToolFormat::DeepseekV32 => {
                good.lines().filter(|line| !line.contains("parameter")).collect::<Vec<_>>().join("\n")
            }
            _ => good.split("{\"").next().unwrap().to_owned() + "{}",
        };
        let wrong = wrong_call(format, "f");
        for text in texts.iter().copied().chain([""]) {
            assert_eq!(world.accepts(&lark, text), Ok(()), "{format:?} {text:?}\n{lark}");
            let around = format!("{text}{good}{text}{good}{text}");
            assert_eq!(world.accepts(&lark, &around), Ok(()), "{format:?} {around:?}\n{lark}");
            let options =
                ReplyOptions { format: Some(format), tools: Tools::new(&strict), ..ReplyOptions::default() };
            let reply = Reply::parse(&around, ReplyEnd::Stop, options);
            let names: Vec<&str> = reply.tool_calls.iter().map(|call| call.name.as_str()).collect();
            assert_eq!(names, ["no.thing-2"; 2], "{format:?} {around:?}");
            for refused in [wrong.clone(), good.replace("no.thing-2", "no.thing-3")] {
                let refused = format!("{text}{refused}");
                assert!(world.accepts(&lark, &refused).is_err(), "{format:?} {refused:?}\n{lark}");
            }
        }
    }
}

#[test]
fn a_marker_within_an_enforced_text_is_part_of_it() {
    let world = world();
    for format in ToolFormat::ALL {
        let lark = CallGrammar::default().lark(format, &tools(), &|_| None).unwrap();
        let city = format!("{} it's {}", format.start(), format.end());
        let text = call(format, &city, "3");
        if world.accepts(&lark, &text).is_ok() {
            let options = ReplyOptions { format: Some(format), tools: tools(), ..ReplyOptions::default() };
            let reply = Reply::parse(&text, ReplyEnd::Stop, options);
            assert_eq!((reply.tool_calls.len(), reply.content.as_str()), (1, ""), "{format:?}");
            let arguments: Value = serde_json::from_str(&reply.tool_calls[0].arguments).unwrap();
            assert_eq!(arguments["city"].as_str().unwrap().trim(), city.trim(), "{format:?}");
        }
    }
}
