//! The formats in which models write tool calls.

use super::framed::{DEEPSEEK, Frame, KIMI_K2, MISTRAL};
use super::json_calls::JsonCalls;
use super::{
    BlockError, ToolCall, Tools, block::Flow, braces, emit::Emitter, framed::FramedCalls, literal, tags, xtml,
};

/// How a model writes tool calls. The names are those of mlx-lm's `tool_parser_type`, where it has the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// V3, V3.1 and R1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
    DeepseekV3,
    /// V3.2: `<｜DSML｜invoke name="NAME">`.
    DeepseekV32,
    /// `call:NAME{key:<escape>text<escape>}`.
    FunctionGemma,
    /// `call:NAME{key:<|"|>text<|"|>}`.
    Gemma4,
    /// `NAME<arg_key>key</arg_key><arg_value>value</arg_value>`.
    Glm47,
    /// Channels of gpt-oss: `<|channel|>commentary to=functions.NAME<|message|>{…}<|call|>`.
    Harmony,
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen and many more.
    JsonTools,
    /// `functions.NAME:0<|tool_call_argument_begin|>{…}`.
    KimiK2,
    /// `<|open|>call tool="NAME"<|sep|>`.
    KimiK3,
    /// As [`Glm47`](Self::Glm47).
    Laguna,
    /// `{"name": …, "parameters": {…}}` as the reply, or behind `<|python_tag|>`.
    Llama3,
    /// As [`Glm47`](Self::Glm47) with tags of its own.
    Longcat,
    /// `<function name="NAME"><param name="key">value</param></function>`.
    Minicpm5,
    /// `<invoke name="NAME"><parameter name="key">value</parameter></invoke>`.
    MinimaxM2,
    /// `[TOOL_CALLS]NAME[ARGS]{…}`, or a JSON list.
    Mistral,
    /// `<atem:invoke name="NAME">`, in messages to itself and to the user.
    MuseSpark,
    /// `[NAME(key=value)]`.
    Pythonic,
    /// `<function=NAME><parameter=key>value</parameter></function>`.
    Qwen3Coder,
}

use ToolFormat::{
    DeepseekV3, DeepseekV32, FunctionGemma, Gemma4, Glm47, Harmony, JsonTools, KimiK2, KimiK3, Laguna,
    Llama3, Longcat, Minicpm5, MinimaxM2, Mistral, MuseSpark, Pythonic, Qwen3Coder,
};

/// What stands between the markers.
pub(super) enum Body {
    /// JSON objects.
    Json,
    /// Names, then JSON objects.
    Framed(&'static Frame),
    /// Something that is read as a whole.
    Whole(fn(&str, &Tools) -> Result<Vec<ToolCall>, BlockError>),
    /// Nothing: calls are messages of their own.
    Channels,
}

/// The texts of chat templates that tell the format, in mlx-lm's order: all texts of a line occur.
const TEMPLATE_TESTS: [(&[&str], ToolFormat); 14] = [
    (&["<minimax:tool_call>"], MinimaxM2),
    (&["<|tool_call>", "<tool_call|>"], Gemma4),
    (&["<start_function_call>"], FunctionGemma),
    (&["<longcat_tool_call>"], Longcat),
    (&["<arg_key>"], Glm47),
    (&["<|tool_list_start|>"], Pythonic),
    (&["<|tool_call_start|>"], Pythonic),
    (&["<tool_call>\\n<function="], Qwen3Coder),
    (&["<tool_call>\n<function="], Qwen3Coder),
    (&["<|tool_calls_section_begin|>"], KimiK2),
    (&["<function name=\"", "<param name=\""], Minicpm5),
    (&["[TOOL_CALLS]"], Mistral),
    (&["<atem:function_calls>"], MuseSpark),
    (&["<tool_call>", "tool_call.name"], JsonTools),
];

/// The tokens of vocabularies that tell it, after all templates.
const VOCABULARY_TESTS: [(&[&str], ToolFormat); 2] = [
    (&["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], KimiK3),
    (&["<|tool_call_start|>", "<|tool_call_end|>"], Pythonic),
];

/// Templates for which mlx-lm has no parser.
const MORE_TEMPLATE_TESTS: [(&[&str], ToolFormat); 6] = [
    (&["｜DSML｜", "function_calls>"], DeepseekV32),
    (&["<｜tool▁calls▁begin｜>"], DeepseekV3),
    (&["<|channel|>", "<|message|>", "to=functions."], Harmony),
    (&["<|python_tag|>"], Llama3),
    (&["{\"name\": function name, \"parameters\": dictionary of argument name and its value}"], Llama3),
    (&["<tool_call>", "</tool_call>"], JsonTools),
];

impl ToolFormat {
    /// All formats, by name.
    pub const ALL: [Self; 18] = [
        DeepseekV3,
        DeepseekV32,
        FunctionGemma,
        Gemma4,
        Glm47,
        Harmony,
        JsonTools,
        KimiK2,
        KimiK3,
        Laguna,
        Llama3,
        Longcat,
        Minicpm5,
        MinimaxM2,
        Mistral,
        MuseSpark,
        Pythonic,
        Qwen3Coder,
    ];

    /// The format of a name: a `tool_parser_type`, or what `--tool-parser` was given.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format of a model without a `tool_parser_type`: by its chat template, else by its vocabulary.
    pub fn infer(template: &str, has_token: impl Fn(&str) -> bool) -> Option<Self> {
        let find = |tests: &[(&[&str], Self)], has: &dyn Fn(&str) -> bool| {
            tests.iter().find(|(texts, _)| texts.iter().all(|text| has(text))).map(|&(_, format)| format)
        };
        let in_template = |text: &str| template.contains(text);
        find(&TEMPLATE_TESTS, &in_template)
            .or_else(|| find(&VOCABULARY_TESTS, &has_token))
            .or_else(|| find(&MORE_TEMPLATE_TESTS, &in_template))
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DeepseekV3 => "deepseek_v3",
            DeepseekV32 => "deepseek_v32",
            FunctionGemma => "function_gemma",
            Gemma4 => "gemma4",
            Glm47 => "glm47",
            Harmony => "harmony",
            JsonTools => "json_tools",
            KimiK2 => "kimi_k2",
            KimiK3 => "kimi_k3",
            Laguna => "laguna",
            Llama3 => "llama3",
            Longcat => "longcat",
            Minicpm5 => "minicpm5",
            MinimaxM2 => "minimax_m2",
            Mistral => "mistral",
            MuseSpark => "muse_spark",
            Pythonic => "pythonic",
            Qwen3Coder => "qwen3_coder",
        }
    }

    /// The marker before calls; empty if a message's header is.
    #[must_use]
    pub fn start(self) -> &'static str {
        match self {
            DeepseekV3 => "<｜tool▁calls▁begin｜>",
            DeepseekV32 => "<｜DSML｜function_calls>",
            FunctionGemma => "<start_function_call>",
            Gemma4 => "<|tool_call>",
            Glm47 | JsonTools | Laguna | Qwen3Coder => "<tool_call>",
            Harmony => "",
            KimiK2 => "<|tool_calls_section_begin|>",
            KimiK3 => "<|open|>tools<|sep|>",
            Llama3 => "<|python_tag|>",
            Longcat => "<longcat_tool_call>",
            Minicpm5 => "<function name=",
            MinimaxM2 => "<minimax:tool_call>",
            Mistral => "[TOOL_CALLS]",
            MuseSpark => "<atem:function_calls>",
            Pythonic => "<|tool_call_start|>",
        }
    }

    /// The marker behind calls; empty if there is none.
    #[must_use]
    pub fn end(self) -> &'static str {
        match self {
            DeepseekV3 => "<｜tool▁calls▁end｜>",
            DeepseekV32 => "</｜DSML｜function_calls>",
            FunctionGemma => "<end_function_call>",
            Gemma4 => "<tool_call|>",
            Glm47 | JsonTools | Laguna | Qwen3Coder => "</tool_call>",
            Harmony | Llama3 | Mistral => "",
            KimiK2 => "<|tool_calls_section_end|>",
            KimiK3 => "<|close|>tools<|sep|>",
            Longcat => "</longcat_tool_call>",
            Minicpm5 => "</function>",
            MinimaxM2 => "</minimax:tool_call>",
            MuseSpark => "</atem:function_calls>",
            Pythonic => "<|tool_call_end|>",
        }
    }

    pub(super) fn body(self) -> Body {
        match self {
            JsonTools | Llama3 => Body::Json,
            DeepseekV3 => Body::Framed(&DEEPSEEK),
            KimiK2 => Body::Framed(&KIMI_K2),
            Mistral => Body::Framed(&MISTRAL),
            Harmony => Body::Channels,
            DeepseekV32 => Body::Whole(|text, tools| tags::DSML.parse(text, tools)),
            MinimaxM2 => Body::Whole(|text, tools| tags::MINIMAX.parse(text, tools)),
            MuseSpark => Body::Whole(|text, tools| tags::MUSE.parse(text, tools)),
            Qwen3Coder => Body::Whole(|text, tools| tags::QWEN.parse(text, tools)),
            // Its markers are those of the call itself.
            Minicpm5 => Body::Whole(|text, tools| {
                tags::MINICPM.parse(&format!("{}{text}{}", Minicpm5.start(), Minicpm5.end()), tools)
            }),
            Glm47 | Laguna => Body::Whole(|text, tools| tags::GLM.parse(text, tools)),
            Longcat => Body::Whole(|text, tools| tags::LONGCAT.parse(text, tools)),
            FunctionGemma => Body::Whole(|text, _| braces::parse(text, "<escape>")),
            Gemma4 => Body::Whole(|text, _| braces::parse(text, "<|\"|>")),
            Pythonic => Body::Whole(|text, _| literal::call_list(text)),
            KimiK3 => Body::Whole(|text, _| xtml::parse(text)),
        }
    }

    /// Whether the ids of calls must be nine letters and digits: Mistral's templates refuse any other.
    #[must_use]
    pub fn wants_short_ids(self) -> bool {
        self == Mistral
    }

    /// Whether a block that has come to `body` is within a value, so that a marker there is text.
    pub(super) fn is_within_value(self, body: &str, tools: &Tools) -> bool {
        let is_open = |open: &str, close: &str| match (body.rfind(open), body.rfind(close)) {
            (Some(open), Some(close)) => open > close,
            (open, _) => open.is_some(),
        };
        let unfinished = |calls| matches!(calls, Err(BlockError::Unfinished { .. }));
        match self {
            Qwen3Coder | MinimaxM2 | MuseSpark | DeepseekV32 | Glm47 | Laguna | Longcat => {
                unfinished(self.parse_body(body, tools))
            }
            // Its markers are those of the call itself.
            Minicpm5 => unfinished(tags::MINICPM.parse(&format!("{}{body}", self.start()), tools)),
            FunctionGemma => body.matches("<escape>").count() % 2 == 1,
            Gemma4 => body.matches("<|\"|>").count() % 2 == 1,
            KimiK3 => is_open("<|open|>argument ", "<|close|>argument<|sep|>"),
            Pythonic => literal::is_within_string(body),
            DeepseekV3 | Harmony | JsonTools | KimiK2 | Llama3 | Mistral => false,
        }
    }

    /// The calls in the text between two markers.
    ///
    /// # Errors
    /// [`BlockError`] if all of it is not calls.
    pub fn parse_body(self, text: &str, tools: &Tools) -> Result<Vec<ToolCall>, BlockError> {
        let mut emit = Emitter::default();
        let read = |step: &mut dyn FnMut(char, &mut Emitter) -> Flow, emit: &mut Emitter| {
            text.chars().all(|c| step(c, emit) == Flow::More)
        };
        let rest = match self.body() {
            Body::Whole(parse) => return parse(text, tools),
            Body::Framed(frame) if !frame.or_json || !text.trim_start().starts_with(['[', '{']) => {
                let mut calls = FramedCalls::new(String::new(), frame);
                read(&mut |c, emit| calls.step(c, emit), &mut emit).then(|| calls.finish(&mut emit))
            }
            Body::Json | Body::Framed(_) | Body::Channels => {
                let mut calls = JsonCalls::new(String::new(), "", self == Llama3);
                read(&mut |c, emit| calls.step(c, emit), &mut emit).then(|| calls.finish(&mut emit))
            }
        };
        let mut reply = super::Reply::default();
        emit.take().into_iter().for_each(|part| reply.add(part));
        let whole =
            rest.is_some_and(|rest| rest.is_empty()) && reply.tool_calls.iter().all(|call| call.complete);
        if whole && !reply.tool_calls.is_empty() { Ok(reply.tool_calls) } else { Err(BlockError::NoCall) }
    }
}
