//! How each format's calls are written.

use crate::text::reply::ToolFormat;

/// How the calls of a format are written, with `{name}` for the name, `{number}` for any number and `{arguments}` for the
/// arguments.
pub(super) struct Style {
    /// Before all calls.
    pub(super) before: &'static str,
    pub(super) call: &'static str,
    pub(super) between: &'static str,
    pub(super) after: &'static str,
    pub(super) arguments: Written,
}

/// How arguments are written.
#[derive(Clone, Copy)]
pub(super) enum Written {
    /// A JSON object.
    Json,
    /// In tags: what is before a name and before and behind a value, which is text or JSON.
    Tags([&'static str; 3]),
    /// In tags that tell whether the value is text or JSON of a `{type}`.
    TypedTags { key: &'static str, text: &'static str, json: &'static str, close: &'static str },
    /// `key:value`, with strings between two of these marks.
    Braces(&'static str),
    /// `key=value`, as Python has it.
    Keywords,
}

const fn json_style(call: &'static str) -> Style {
    Style { before: "", call, between: "", after: "", arguments: Written::Json }
}

const fn tagged(call: &'static str, tags: [&'static str; 3]) -> Style {
    Style { arguments: Written::Tags(tags), ..json_style(call) }
}

/// The calls of `format`; `has_args` tells Mistral's newer vocabularies, which have a token between name and arguments.
pub(super) fn style(format: ToolFormat, has_args: bool) -> Style {
    use ToolFormat::*;
    match format {
        JsonTools => Style {
            between: "\n",
            ..json_style("<tool_call>\n{\"name\": \"{name}\", \"arguments\": {arguments}}\n</tool_call>")
        },
        Llama3 => {
            Style { between: "; ", ..json_style("{\"name\": \"{name}\", \"parameters\": {arguments}}") }
        }
        Mistral if has_args => json_style("[TOOL_CALLS]{name}[ARGS]{arguments}"),
        Mistral => Style {
            before: "[TOOL_CALLS] [",
            between: ", ",
            after: "]",
            ..json_style("{\"name\": \"{name}\", \"arguments\": {arguments}}")
        },
        KimiK2 => Style {
            before: "<|tool_calls_section_begin|>",
            after: "<|tool_calls_section_end|>",
            ..json_style(
                "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            )
        },
        KimiK3 => Style {
            before: "<|open|>tools<|sep|>",
            after: "<|close|>tools<|sep|>",
            arguments: Written::TypedTags {
                key: "<|open|>argument key=\"",
                text: "\" type=\"string\"<|sep|>",
                json: "\" type=\"{type}\"<|sep|>",
                close: "<|close|>argument<|sep|>",
            },
            ..json_style(
                "<|open|>call tool=\"{name}\" index=\"{number}\"<|sep|>{arguments}<|close|>call<|sep|>",
            )
        },
        DeepseekV3 => Style {
            before: "<｜tool▁calls▁begin｜>",
            after: "<｜tool▁calls▁end｜>",
            ..json_style("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
        },
        DeepseekV32 => Style {
            before: "<｜DSML｜function_calls>\n",
            after: "</｜DSML｜function_calls>",
            arguments: Written::TypedTags {
                key: "<｜DSML｜parameter name=\"",
                text: "\" string=\"true\">",
                json: "\" string=\"false\">",
                close: "</｜DSML｜parameter>\n",
            },
            ..json_style("<｜DSML｜invoke name=\"{name}\">\n{arguments}</｜DSML｜invoke>\n")
        },
        Harmony => Style {
            between: "<|end|><|start|>assistant",
            ..json_style("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")
        },
        Qwen3Coder => Style {
            between: "\n",
            ..tagged(
                "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
                ["<parameter=", ">\n", "\n</parameter>\n"],
            )
        },
        Glm47 | Laguna => tagged(
            "<tool_call>{name}\n{arguments}</tool_call>",
            ["<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"],
        ),
        Longcat => tagged(
            "<longcat_tool_call>{name}\n{arguments}</longcat_tool_call>",
            ["<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"],
        ),
        MinimaxM2 => Style {
            before: "<minimax:tool_call>\n",
            after: "</minimax:tool_call>",
            ..tagged(
                "<invoke name=\"{name}\">\n{arguments}</invoke>\n",
                ["<parameter name=\"", "\">", "</parameter>\n"],
            )
        },
        MuseSpark => Style {
            before: "<atem:function_calls>\n",
            after: "</atem:function_calls>",
            ..tagged(
                "<atem:invoke name=\"{name}\">\n{arguments}</atem:invoke>\n",
                ["<atem:parameter name=\"", "\">", "</atem:parameter>\n"],
            )
        },
        Minicpm5 => {
            tagged("<function name=\"{name}\">{arguments}</function>", ["<param name=\"", "\">", "</param>"])
        }
        FunctionGemma => Style {
            arguments: Written::Braces("<escape>"),
            ..json_style("<start_function_call>call:{name}{{arguments}}<end_function_call>")
        },
        Gemma4 => Style {
            arguments: Written::Braces("<|\"|>"),
            ..json_style("<|tool_call>call:{name}{{arguments}}<tool_call|>")
        },
        Pythonic => Style {
            before: "<|tool_call_start|>[",
            between: ", ",
            after: "]<|tool_call_end|>",
            arguments: Written::Keywords,
            ..json_style("{name}({arguments})")
        },
    }
}
