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
    let tokenizer = crate::common::text_data::small("byte_level");
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
        ToolFormat::Minicpm5 => format!(
            "<function name=\"get_weather\"><param name=\"city\">{city}</param><param name=\"days\">{days}</param></function>"
        ),
        _ => panic!("{format:?}"),
    }
}

fn enforceable(world: &World) -> impl Iterator<Item = (ToolFormat, String)> {
    let grammar = |format| CallGrammar::default().lark(format, &tools(), &|token| world.control(token)).ok();
    ToolFormat::ALL.into_iter().filter_map(move |format| Some((format, grammar(format)?)))
}

#[test]
fn each_grammar_lets_calls_through_that_its_parser_reads_and_nothing_else() {
    let world = world();
    let mut formats = 0;
    for (format, lark) in enforceable(&world) {
        formats += 1;
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
    assert_eq!(formats, 12);
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
    let error = lark(ToolFormat::Gemma4, &f(json!({}))).unwrap_err();
    assert!(
        error.to_string().starts_with("calls in the format gemma4 cannot be enforced; those in "),
        "{error}"
    );
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
