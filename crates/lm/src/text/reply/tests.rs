//! Replies of every format, whole and in pieces.

use super::*;
use crate::text::ThinkingMarkers;
use ToolFormat::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn tools() -> Tools {
    let properties = json!({"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}});
    Tools::new(&[
        json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}),
    ])
}

fn options(format: ToolFormat) -> ReplyOptions {
    let [start, end] = ["<think>", "</think>"].map(str::to_owned);
    let thinking = ThinkingMarkers { start, end, start_tokens: vec![], end_tokens: vec![] };
    ReplyOptions { thinking: Some(thinking), format: Some(format), tools: tools(), ..ReplyOptions::default() }
}

fn parse(format: ToolFormat, text: &str) -> Reply {
    let reply = Reply::parse(text, ReplyEnd::Stop, options(format));
    assert_eq!(by_character(format, text, ReplyEnd::Stop), reply, "{text}");
    reply
}

fn by_character(format: ToolFormat, text: &str, end: ReplyEnd) -> Reply {
    let mut parser = ReplyParser::new(options(format));
    let mut reply = Reply::default();
    for c in text.chars() {
        parser.push(c.encode_utf8(&mut [0; 4])).into_iter().for_each(|part| reply.add(part));
    }
    parser.finish(end).into_iter().for_each(|part| reply.add(part));
    reply
}

/// Names and arguments.
fn calls(reply: &Reply) -> Vec<(&str, Value)> {
    let call = |call: &'_ ToolCall| serde_json::from_str(&call.arguments).unwrap();
    reply.tool_calls.iter().map(|c| (c.name.as_str(), call(c))).collect()
}

/// A reply with two calls of each format: `f` with a, b and c, then `g` without arguments.
fn samples() -> Vec<(ToolFormat, String)> {
    let f = r#"{"a": 1, "b": "x {y} \"é", "c": {"d": [1, 2]}}"#;
    let sample = |format, text: &str| (format, text.replace("$F", f));
    vec![
        sample(
            JsonTools,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": $F}\n</tool_call><tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
        ),
        sample(JsonTools, "<tool_call>[{\"name\":\"f\",\"arguments\":$F}, {\"name\":\"g\"}]</tool_call>"),
        sample(
            JsonTools,
            "<tool_call>{\"arguments\":$F,\"name\":\"f\"}\n{\"name\":\"g\",\"parameters\":{}}</tool_call>",
        ),
        sample(Llama3, "{\"name\": \"f\", \"parameters\": $F}; {\"name\": \"g\", \"parameters\": {}}"),
        sample(
            Llama3,
            "<|python_tag|>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": $F}}{\"name\": \"g\"}",
        ),
        sample(Mistral, "[TOOL_CALLS]f[ARGS]$Fg[ARGS]{}"),
        sample(Mistral, "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]$F[TOOL_CALLS]g[ARGS]{}"),
        sample(
            Mistral,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": $F, \"id\": \"abcdefghi\"}, {\"name\": \"g\", \"arguments\": \"{}\"}]",
        ),
        sample(
            KimiK2,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>$F<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        sample(
            DeepseekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>$F<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        sample(
            DeepseekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n$F\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        sample(
            Harmony,
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>$F<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>",
        ),
        sample(
            DeepseekV32,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1</｜DSML｜parameter>\n<｜DSML｜parameter name=\"b\" string=\"true\">x {y} \"é</｜DSML｜parameter>\n<｜DSML｜parameter name=\"c\" string=\"false\">{\"d\": [1, 2]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        sample(
            Qwen3Coder,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx {y} \"é\n</parameter>\n<parameter=c>\n{\"d\": [1, 2]}\n</parameter>\n</function>\n<function=g>\n</function>\n</tool_call>",
        ),
        sample(
            MinimaxM2,
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">1</parameter><parameter name=\"b\">x {y} \"é</parameter><parameter name=\"c\">{'d': [1, 2]}</parameter></invoke>\n<invoke name=g></invoke>\n</minimax:tool_call>",
        ),
        sample(
            Minicpm5,
            "<function name=\"f\"><param name=\"a\">1</param><param name=\"b\"><![CDATA[x {y} \"é]]></param><param name=\"c\">{\"d\": [1, 2]}</param></function><function name=\"g\"></function>",
        ),
        sample(
            MuseSpark,
            "to=user<|message|><atem:function_calls><atem:invoke name=\"f\"><atem:parameter name=\"a\">1</atem:parameter><atem:parameter name=\"b\">x {y} \"é</atem:parameter><atem:parameter name=\"c\">{\"d\": [1, 2]}</atem:parameter></atem:invoke><atem:invoke name=\"g\"></atem:function_calls>",
        ),
        sample(
            Glm47,
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value><arg_key>b</arg_key><arg_value>x {y} \"é</arg_value><arg_key>c</arg_key><arg_value>{\"d\": [1, 2]}</arg_value></tool_call><tool_call>g</tool_call>",
        ),
        sample(
            Laguna,
            "<tool_call>f $F</tool_call><tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
        ),
        sample(
            Longcat,
            "<longcat_tool_call>f<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>1</longcat_arg_value><longcat_arg_key>b</longcat_arg_key><longcat_arg_value>x {y} \"é</longcat_arg_value><longcat_arg_key>c</longcat_arg_key><longcat_arg_value>{\"d\": [1, 2]}</longcat_arg_value></longcat_tool_call><longcat_tool_call>{\"name\": \"g\"}</longcat_tool_call>",
        ),
        sample(
            FunctionGemma,
            "<start_function_call>call:f{a:1,b:<escape>x {y} \"é<escape>,c:{d:[1,2]}}<end_function_call><start_function_call>call:g{}<end_function_call>",
        ),
        sample(Gemma4, "<|tool_call>call:f{a:1,b:<|\"|>x {y} \"é<|\"|>,c:{d:[1,2]}}call:g{}<tool_call|>"),
        sample(
            KimiK3,
            "<|open|>tools<|sep|>\n<|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"a\" type=\"number\"<|sep|>1<|close|>argument<|sep|><|open|>argument key=\"b\" type=\"string\"<|sep|>x {y} \"é<|close|>argument<|sep|><|open|>argument key=\"c\" type=\"object\"<|sep|>{\"d\": [1, 2]}<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"g\" index=\"2\"<|sep|><|open|>json type=\"object\"<|sep|>{}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        sample(Pythonic, "<|tool_call_start|>[f(a=1, b='x {y} \"é', c={'d': [1, 2]}), g()]<|tool_call_end|>"),
    ]
}

#[test]
fn every_format_has_two_calls() {
    let expected = json!({"a": 1, "b": "x {y} \"é", "c": {"d": [1, 2]}});
    for (format, text) in samples() {
        let reply = parse(format, &text);
        assert_eq!(calls(&reply), [("f", expected.clone()), ("g", json!({}))], "{format:?} {text}");
        assert_eq!(
            (reply.content.trim_matches([';', ' ']), reply.reasoning.as_str()),
            ("", ""),
            "{format:?} {text}"
        );
        assert!(reply.calls_tools());
        assert!(
            reply.tool_calls[0].arguments.starts_with("{\"a\": 1, \"b\": \"x {y} \\\"é\", "),
            "{reply:?}"
        );
    }
    let formats: std::collections::HashSet<_> = samples().into_iter().map(|(format, _)| format).collect();
    assert_eq!(formats.len(), ToolFormat::ALL.len());
}

#[test]
fn ids_of_the_model_are_kept_if_they_are_unique() {
    let ids =
        |format, text: &str| parse(format, text).tool_calls.into_iter().map(|c| c.id).collect::<Vec<_>>();
    let (_, kimi) = samples().into_iter().find(|(format, _)| *format == KimiK2).unwrap();
    assert_eq!(ids(KimiK2, &kimi), [Some("functions.f:0".to_owned()), Some("functions.g:1".to_owned())]);
    assert_eq!(ids(KimiK2, &kimi.replace("g:1", "f:0")), [Some("functions.f:0".to_owned()), None]);
    assert_eq!(ids(Mistral, "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"), [Some("abcdefghi".to_owned())]);
    assert_eq!(
        ids(JsonTools, "<tool_call>{\"id\":\"x\",\"name\":\"f\"}</tool_call>"),
        [Some("x".to_owned())]
    );
}

/// The table of spec/server.md section 13, with its bugs put right.
#[test]
fn the_reference_servers_table() {
    const TC: &str = "{\"name\": \"f\", \"arguments\": {\"a\": \"é\"}}";
    let reply = parse(JsonTools, &format!("<think> why </think>Hello <tool_call> {TC} </tool_call>"));
    assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), ("Hello ", " why "));
    assert_eq!(reply.tool_calls[0].arguments, "{\"a\": \"é\"}");
    let reply = parse(JsonTools, &format!("<tool_call>{TC}"));
    assert!(reply.calls_tools() && reply.content.is_empty());
    let reply = parse(JsonTools, &format!("<tool_call>{TC}</tool_call>\n<tool_call>{TC}</tool_call>"));
    assert_eq!((reply.content.as_str(), reply.tool_calls.len()), ("\n", 2));
    for (text, content, reasoning) in [
        ("<tool_call>nope</tool_call>", "<tool_call>nope</tool_call>", ""),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", ""),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", ""),
        ("<tool_call>{\"name\": \"f\", \"argu", "<tool_call>{\"name\": \"f\", \"argu", ""),
        ("<tool_call>{\"nom\": \"f\"} x", "<tool_call>{\"nom\": \"f\"} x", ""),
        ("5 <", "5 <", ""),
        ("5 <tool_cal", "5 <tool_cal", ""),
        ("<think>a<think>b</think>c", "c", "a<think>b"),
        ("a</think>b", "a</think>b", ""),
        ("<think>\nA\n</think>\n\nB", "\n\nB", "\nA\n"),
        ("<think>a</think>b<think>c</think>d", "bd", "ac"),
        ("<think>a", "", "a"),
        ("<think>a</thin", "", "a</thin"),
        ("<<think>a</</think>b", "<b", "a</"),
        ("<think>use <tool_call> now</think>b", "b", "use <tool_call> now"),
        ("<tool_call> <tool_call> x", "<tool_call> <tool_call> x", ""),
    ] {
        let reply = parse(JsonTools, text);
        assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), (content, reasoning), "{text}");
        assert!(reply.tool_calls.is_empty(), "{text}");
    }
    let opened = ReplyOptions { in_reasoning: true, ..options(JsonTools) };
    let reply = Reply::parse("why not</think>ok", ReplyEnd::Stop, opened.clone());
    assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), ("ok", "why not"));
    let reply = Reply::parse("why not", ReplyEnd::Cut, opened);
    assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), ("", "why not"));
    let plain = Reply::parse("<think>a</think>b", ReplyEnd::Stop, ReplyOptions::default());
    assert_eq!(plain.content, "<think>a</think>b");
}

#[test]
fn broken_arguments_that_have_begun_are_closed() {
    for (text, arguments, content) in [
        ("<tool_call>{\"name\":\"f\",\"arguments\":{\"re\":", "{\"re\": null}", ""),
        ("<tool_call>{\"name\":\"f\",\"arguments\":{\"b\":\"Par", "{\"b\": \"Par\"}", ""),
        (
            "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": 1 \"b\": 2}}</tool_call>",
            "{\"a\": 1}",
            "\"b\": 2}}</tool_call>",
        ),
    ] {
        let reply = parse(JsonTools, text);
        assert_eq!(
            (reply.tool_calls[0].arguments.as_str(), reply.content.as_str()),
            (arguments, content),
            "{text}"
        );
        assert!(!reply.calls_tools(), "{text}");
    }
    // What misses only the last brace is whole.
    let reply = parse(JsonTools, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": 1}</tool_call>x");
    assert!(reply.calls_tools());
    assert_eq!((reply.tool_calls[0].arguments.as_str(), reply.content.as_str()), ("{\"a\": 1}", "x"));
    let reply = parse(JsonTools, "<tool_call>{\"name\":\"f\",\"arguments\":{\"re\":\"\\d+\"}}</tool_call>");
    assert_eq!(calls(&reply), [("f", json!({"re": "\\d+"}))]);
    let reply =
        parse(JsonTools, "<tool_call>{\"name\":\"f\",\"arguments\":{\"b\":\"a</tool_call>b\"}}</tool_call>");
    assert_eq!(calls(&reply), [("f", json!({"b": "a</tool_call>b"}))]);
}

#[test]
fn what_is_no_call_comes_back_as_it_was() {
    for (format, text) in [
        (JsonTools, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
        (JsonTools, "<tool_call>{\"name\": \"f\", \"arguments\": \"text\"}</tool_call>"),
        (JsonTools, "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>"),
        (JsonTools, "<tool_call>{\"name\": \"f\", \"city\": \"Paris\"}</tool_call>"),
        (Llama3, "{\"name\": \"Bob\", \"age\": 3}"),
        (Llama3, " {\"answer\": [1, 2]} and {more}"),
        (Llama3, "Say {\"name\": \"f\", \"parameters\": {}}"),
        (Llama3, "<|python_tag|>import os"),
        (Mistral, "[TOOL_CALLS]what is this?"),
        (Mistral, "[TOOL_CALLS]f[ARGS]12"),
        (
            KimiK2,
            "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        (
            KimiK2,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>text<|tool_call_end|>",
        ),
        (DeepseekV3, "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>x{}"),
        (Qwen3Coder, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        (Qwen3Coder, "<tool_call>\n<function=f>\n</tool_call>"),
        (MinimaxM2, "<minimax:tool_call>text</minimax:tool_call>"),
        (Minicpm5, "<function name=>x</function>"),
        (Glm47, "<tool_call>f some free text</tool_call>"),
        (Glm47, "<tool_call></tool_call>"),
        (Glm47, "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        (Longcat, "<longcat_tool_call>f some text</longcat_tool_call>"),
        (FunctionGemma, "<start_function_call>call:f{a:1<end_function_call>"),
        (Gemma4, "<|tool_call>call:f{a}<tool_call|>"),
        (
            KimiK3,
            "<|open|>tools<|sep|><|open|>call index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        (Pythonic, "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        (Pythonic, "<|tool_call_start|>[]<|tool_call_end|>"),
        (Pythonic, "<|tool_call_start|>f(a=1)<|tool_call_end|>"),
        (DeepseekV32, "<｜DSML｜function_calls>x</｜DSML｜function_calls>"),
    ] {
        let reply = parse(format, text);
        assert_eq!((reply.content.as_str(), reply.tool_calls.len()), (text, 0), "{format:?}");
    }
}

#[test]
fn values_keep_what_looks_like_a_marker_or_a_brace() {
    let one = |format, text| calls(&parse(format, text)).remove(0).1;
    let text =
        "<tool_call><function=f><parameter=b>a </tool_call> <tool_call> b</parameter></function></tool_call>";
    assert_eq!(one(Qwen3Coder, text), json!({"b": "a </tool_call> <tool_call> b"}));
    let text = "<function name=\"f\"><param name=\"b\"><![CDATA[x</function>y</param>]]></param></function>";
    assert_eq!(one(Minicpm5, text), json!({"b": "x</function>y</param>"}));
    assert_eq!(
        one(Gemma4, "<|tool_call>call:f{b:<|\"|><tool_call|>}<|\"|>}<tool_call|>"),
        json!({"b": "<tool_call|>}"})
    );
    let text = "<start_function_call>call:f{a:hello,c:{b:{d:1}},e:true}<end_function_call>";
    assert_eq!(one(FunctionGemma, text), json!({"a": "hello", "c": {"b": {"d": 1}}, "e": true}));
    assert_eq!(
        one(Pythonic, "<|tool_call_start|>[x.f(a=hello world, b=2)]<|tool_call_end|>"),
        json!({"a": "hello world", "b": 2})
    );
    assert_eq!(one(Glm47, "<tool_call>f a=1 b='x y'</tool_call>"), json!({"a": 1, "b": "x y"}));
    assert_eq!(
        one(Glm47, "<tool_call>f<arg_key>b</arg_key><arg_value>007</arg_value></tool_call>"),
        json!({"b": "007"})
    );
    let text = "<tool_call>{\"function\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>";
    assert_eq!(one(Glm47, text), json!({"a": 1}));
}

/// One call of `f` with these values of c (an object) and b (a text), in the formats that write values between tags.
fn tagged([c, b]: [&str; 2]) -> Vec<(ToolFormat, String)> {
    let dsml = |key, string, value| {
        format!("<｜DSML｜parameter name=\"{key}\" string=\"{string}\">{value}</｜DSML｜parameter>\n")
    };
    let plain = |tag: &str, key: &str, value: &str| format!("<{tag} name=\"{key}\">{value}</{tag}>");
    let pair = |tag: &str, key: &str, value: &str| {
        format!("<{tag}_key>{key}</{tag}_key><{tag}_value>{value}</{tag}_value>")
    };
    let of = |parameter: &dyn Fn(&str, &str) -> String| parameter("c", c) + &parameter("b", b);
    let qwen = of(&|key, value| format!("<parameter={key}>\n{value}\n</parameter>\n"));
    let minimax = of(&|key, value| plain("parameter", key, value));
    let muse = of(&|key, value| plain("atem:parameter", key, value));
    let minicpm = of(&|key, value| plain("param", key, value));
    let (glm, longcat) =
        (of(&|key, value| pair("arg", key, value)), of(&|key, value| pair("longcat_arg", key, value)));
    let dsml = dsml("c", "false", c) + &dsml("b", "true", b);
    vec![
        (Qwen3Coder, format!("<tool_call>\n<function=f>\n{qwen}</function>\n</tool_call>")),
        (
            MinimaxM2,
            format!("<minimax:tool_call>\n<invoke name=\"f\">{minimax}</invoke></minimax:tool_call>"),
        ),
        (Minicpm5, format!("<function name=\"f\">{minicpm}</function>")),
        (
            MuseSpark,
            format!(
                "to=user<|message|><atem:function_calls><atem:invoke name=\"f\">{muse}</atem:invoke></atem:function_calls>"
            ),
        ),
        (
            DeepseekV32,
            format!(
                "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n{dsml}</｜DSML｜invoke>\n</｜DSML｜function_calls>"
            ),
        ),
        (Glm47, format!("<tool_call>f{glm}</tool_call>")),
        (Longcat, format!("<longcat_tool_call>f{longcat}</longcat_tool_call>")),
    ]
}

#[test]
fn a_closing_tag_within_json_is_a_part_of_it() {
    for (format, plain) in tagged([r#"{"d": ["x"]}"#, "y"]) {
        // All tags of the format, one after the other and each alone.
        let tags: Vec<&str> =
            plain.split_inclusive('>').filter_map(|tag| Some(&tag[tag.find('<')?..])).collect();
        for inner in tags.iter().copied().chain([tags.concat().as_str()]) {
            let c = json!({"d": [inner, format!("é{inner}\"{inner}")], inner: {}});
            for json in [c.to_string(), serde_json::to_string_pretty(&c).unwrap()] {
                let (_, text) = tagged([&json, "y"]).into_iter().find(|(other, _)| *other == format).unwrap();
                let reply = parse(format, &format!("Hm. {text}"));
                let expected = json!({"c": c, "b": "y"});
                // Muse Spark's messages have a header.
                let before = if format == MuseSpark { "" } else { "Hm. " };
                assert_eq!(calls(&reply), [("f", expected)], "{format:?} {text}");
                assert_eq!(
                    (reply.content.as_str(), reply.calls_tools()),
                    (before, true),
                    "{format:?} {text}"
                );
            }
        }
    }
}

#[test]
fn what_only_begins_as_json_ends_at_its_tag() {
    for c in ["{\"d\": [1}", "[1] or so"] {
        for (format, text) in tagged([c, "[\"y"]) {
            assert_eq!(calls(&parse(format, &text)), [("f", json!({"c": c, "b": "[\"y"}))], "{format:?}");
        }
    }
    // A string in it that does not end takes all that follows: then there is no call.
    let (_, text) = tagged(["{\"d\": \"x", "y"]).remove(0);
    let reply = parse(Qwen3Coder, &text);
    assert_eq!((reply.content.as_str(), reply.tool_calls.len()), (text.as_str(), 0));
}

#[test]
fn texts_around_calls_are_content() {
    let sample = |format| samples().into_iter().find(|(of, _)| *of == format).unwrap().1;
    let dsml = sample(DeepseekV32);
    let kimi = sample(KimiK3);
    let (f, g) = sample(Harmony).split_once("<|start|>").map(|(f, g)| (f.to_owned(), g.to_owned())).unwrap();
    let said = |text: &str| format!("<|channel|>commentary<|message|>{text}<|end|><|start|>assistant");
    for (format, text, content, reasoning, count) in [
        (
            DeepseekV32,
            format!(
                "<think>Hm. <｜DSML｜x</think>\n\nI look. <｜DSML｜ 5 < 7\n\n{dsml}\n\nThen: {dsml}</｜DSML｜function_calls> Bye <"
            ),
            "\n\nI look. <｜DSML｜ 5 < 7\n\n\n\nThen: </｜DSML｜function_calls> Bye <",
            "Hm. <｜DSML｜x",
            4,
        ),
        (
            KimiK3,
            format!(
                "<|open|>response<|sep|>I look. <|open|>x <|sep|><|close|>response<|sep|>{kimi}\nThen: {kimi}<|close|>message<|sep|>"
            ),
            "I look. <|open|>x <|sep|>\nThen: ",
            "",
            4,
        ),
        (
            Harmony,
            format!(
                "<|channel|>analysis<|message|>Hm. {{}} to=functions.f<|end|><|start|>assistant{}{f}<|start|>assistant{}<|start|>{g}<|start|>assistant<|channel|>final<|message|>Bye <|x <|return|>",
                said("I look. {\"a\": 1}"),
                said("Then:").trim_end_matches("<|start|>assistant"),
            ),
            "I look. {\"a\": 1}Then:Bye <|x ",
            "Hm. {} to=functions.f",
            2,
        ),
    ] {
        let reply = parse(format, &text);
        assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), (content, reasoning), "{text}");
        assert_eq!((reply.tool_calls.len(), reply.calls_tools()), (count, true), "{text}");
        for at in text.char_indices().map(|(at, _)| at) {
            let (mut parser, mut streamed) = (ReplyParser::new(options(format)), Reply::default());
            for piece in [&text[..at], &text[at..]] {
                parser.push(piece).into_iter().for_each(|part| streamed.add(part));
            }
            parser.finish(ReplyEnd::Stop).into_iter().for_each(|part| streamed.add(part));
            assert_eq!(streamed, reply, "cut at {at} of {text}");
        }
    }
}

#[test]
fn messages_of_a_reply() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b><|return|>";
    let reply = parse(Harmony, text);
    assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), ("Hi <b>", "Hm."));
    let text = "<|channel|>commentary to=functions.f<|message|>no json<|call|>";
    assert_eq!(parse(Harmony, text).content, "<|channel|>commentary to=functions.f<|message|>no json");
    let text = "to=self<|message|>Hm.<|eom|> to=user<|message|>Hi<|eot|>";
    let reply = parse(MuseSpark, text);
    assert_eq!((reply.content.as_str(), reply.reasoning.as_str()), ("Hi", "Hm."));
    let visible = ReplyOptions { reasoning_is_content: true, thinking: None, ..options(MuseSpark) };
    assert_eq!(Reply::parse(text, ReplyEnd::Stop, visible).content, "Hm.Hi");
    let text = "<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>";
    assert_eq!(parse(KimiK3, text).content, "Hi");
    let long = "x".repeat(5000);
    assert_eq!(parse(MuseSpark, &long).content, long);
}

#[test]
fn calls_are_text_where_they_are_not_wanted() {
    for (format, text) in samples() {
        let options = ReplyOptions { calls_are_text: true, ..options(format) };
        let reply = Reply::parse(&text, ReplyEnd::Stop, options);
        assert!(reply.tool_calls.is_empty() && !reply.content.is_empty(), "{text}");
        assert!(reply.content == text || matches!(format, Harmony | MuseSpark), "{text}");
    }
}

#[test]
fn arguments_stream_as_they_come() {
    let mut parser = ReplyParser::new(options(JsonTools));
    let start = ReplyPart::ToolCallStart { index: 0, id: None, name: "f".to_owned() };
    let more = |text: &str| ReplyPart::ToolCallArguments { index: 0, text: text.to_owned() };
    let content = ReplyPart::Content("Sure.".to_owned());
    assert_eq!(parser.push("Sure.<tool"), [content]);
    assert_eq!(parser.push("_call>{\"name\": \"f\", \"argu"), []);
    assert_eq!(parser.push("ments\": {\"b\":\"Par"), [start, more("{\"b\": \"Par")]);
    assert_eq!(parser.push("is\"}"), [more("is\"}")]);
    assert_eq!(parser.push("}</tool_call>"), [ReplyPart::ToolCallEnd { index: 0, complete: true }]);
    assert_eq!(parser.finish(ReplyEnd::Stop), []);
}

/// Pieces of markers, JSON and tags of all formats, put together at random.
fn noise() -> impl Strategy<Value = String> {
    let mut pieces: Vec<String> = samples().into_iter().map(|(_, text)| text).collect();
    for format in ToolFormat::ALL {
        pieces.extend([format.start().to_owned(), format.end().to_owned()]);
    }
    let more = [
        "<think>",
        "</think>",
        "<",
        "[",
        "{",
        "}",
        "\"",
        "x",
        "é👩‍🚀",
        " ",
        "\n",
        "{\"name\":\"f\",\"arguments\":",
        "{\"a\":1}",
        "call:f{",
        "f[ARGS]",
        "<function=f>",
        "<parameter=a>",
        "<arg_key>",
        "<|message|>",
        "to=self",
        "to=functions.f",
        "[f(a=",
        "\\",
        ",",
    ];
    pieces.extend(more.map(str::to_owned));
    prop::collection::vec(prop::sample::select(pieces), 0..6).prop_flat_map(|pieces| {
        let text = pieces.concat();
        let ends: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
        (Just(text), prop::sample::select(ends.clone()), prop::sample::select(ends))
            .prop_map(|(text, a, b)| text[a.min(b)..a.max(b)].to_owned())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_joins_to_the_whole_reply(
        text in noise(), format in prop::sample::select(ToolFormat::ALL.to_vec()),
        cuts in prop::collection::vec(0..40usize, 1..20), cut in any::<bool>(), in_reasoning in any::<bool>(),
        calls_are_text in any::<bool>(),
    ) {
        let options = ReplyOptions { in_reasoning, calls_are_text, ..options(format) };
        let end = if cut { ReplyEnd::Cut } else { ReplyEnd::Stop };
        let whole = Reply::parse(&text, end, options.clone());
        let (mut parser, mut streamed) = (ReplyParser::new(options), Reply::default());
        let (mut parts, mut rest, mut sizes) = (Vec::new(), text.as_str(), cuts.iter().cycle());
        while !rest.is_empty() {
            let size = sizes.next().copied().unwrap_or(1);
            let at = rest.char_indices().map(|(i, _)| i).nth(size).unwrap_or(rest.len());
            parts.extend(parser.push(&rest[..at]));
            rest = &rest[at..];
            if size == 0 && cuts.iter().all(|&c| c == 0) {
                parts.extend(parser.push(rest));
                rest = "";
            }
        }
        parts.extend(parser.finish(end));
        check_order(&parts)?;
        parts.into_iter().for_each(|part| streamed.add(part));
        prop_assert_eq!(&streamed, &whole);
        for call in &whole.tool_calls {
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            prop_assert!(arguments.is_object() && !call.name.is_empty());
        }
        // Without markers that are dropped, nothing is lost.
        if whole.tool_calls.is_empty() && !matches!(format, Harmony | MuseSpark | KimiK3) {
            let said = whole.content.len() + whole.reasoning.len();
            let markers = text.matches("<think>").count() * 7 + text.matches("</think>").count() * 8;
            prop_assert!(said <= text.len() && said + markers >= text.len(), "{:?}", whole);
        }
    }

    #[test]
    fn text_without_markers_is_content_at_once(text in "[a-zé .,!\n]{0,40}", format in 0..ToolFormat::ALL.len() - 1) {
        // Muse Spark begins with a message's header.
        let format = ToolFormat::ALL.into_iter().filter(|&format| format != MuseSpark).nth(format).unwrap();
        let mut parser = ReplyParser::new(options(format));
        let shown: String = parser.push(&text).into_iter().map(|part| match part {
            ReplyPart::Content(text) => text,
            other => panic!("{other:?}"),
        }).collect();
        prop_assert_eq!(shown, text);
    }
}

/// Each call begins, goes on and ends before anything else comes, with the next index.
fn check_order(parts: &[ReplyPart]) -> Result<(), TestCaseError> {
    let (mut next, mut open) = (0, false);
    for part in parts {
        match part {
            ReplyPart::ToolCallStart { index, .. } => {
                prop_assert!(!open && *index == next);
                open = true;
            }
            ReplyPart::ToolCallArguments { index, text } => {
                prop_assert!(open && *index == next && !text.is_empty())
            }
            ReplyPart::ToolCallEnd { index, .. } => {
                prop_assert!(open && *index == next);
                (open, next) = (false, next + 1);
            }
            ReplyPart::Content(text) | ReplyPart::Reasoning(text) => prop_assert!(!open && !text.is_empty()),
        }
    }
    prop_assert!(!open);
    Ok(())
}

#[test]
fn formats_are_told_by_template_then_vocabulary_then_what_mlx_lm_lacks() {
    let infer = |template: &str| {
        ToolFormat::infer(template, |token| token == "<|tool_call_start|>" || token == "<|tool_call_end|>")
    };
    assert_eq!(infer("[TOOL_CALLS]"), Some(Mistral));
    assert_eq!(infer("<|python_tag|>"), Some(Pythonic));
    let infer = |template: &str| ToolFormat::infer(template, |_| false);
    assert_eq!(infer("<|python_tag|>"), Some(Llama3));
    assert_eq!(infer("<tool_call> </tool_call>"), Some(JsonTools));
    assert_eq!(infer("<｜tool▁calls▁begin｜>"), Some(DeepseekV3));
    assert_eq!(infer("<|channel|> <|message|> to=functions.x"), Some(Harmony));
    assert_eq!(infer("plain"), None);
    for format in ToolFormat::ALL {
        assert_eq!(ToolFormat::from_name(format.name()), Some(format));
    }
}
