//! How a model marks its thinking and its tool calls.

use super::tokenizer::Tokenizer;

/// The texts between which a model thinks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingMarkers {
    /// Before the thoughts, such as `<think>`.
    pub start: String,
    /// After them.
    pub end: String,
    /// The ids of `start`.
    pub start_tokens: Vec<u32>,
    /// The ids of `end`.
    pub end_tokens: Vec<u32>,
}

/// Markers that are single tokens, in the order in which they are looked for.
const SINGLE: [(&str, &str); 3] =
    [("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>")];
/// The tokens from which Kimi K3 builds its tags.
const XTML: [&str; 4] = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"];

/// Tests on the chat template, in order: all these texts occur, so the tool calls have this format.
const TOOL_FORMATS: [(&[&str], &str); 14] = [
    (&["<minimax:tool_call>"], "minimax_m2"),
    (&["<|tool_call>", "<tool_call|>"], "gemma4"),
    (&["<start_function_call>"], "function_gemma"),
    (&["<longcat_tool_call>"], "longcat"),
    (&["<arg_key>"], "glm47"),
    (&["<|tool_list_start|>"], "pythonic"),
    (&["<|tool_call_start|>"], "pythonic"),
    (&["<tool_call>\\n<function="], "qwen3_coder"),
    (&["<tool_call>\n<function="], "qwen3_coder"),
    (&["<|tool_calls_section_begin|>"], "kimi_k2"),
    (&["<function name=\"", "<param name=\""], "minicpm5"),
    (&["[TOOL_CALLS]"], "mistral"),
    (&["<atem:function_calls>"], "muse_spark"),
    (&["<tool_call>", "tool_call.name"], "json_tools"),
];

/// Names that `tool_parser_type` may have besides those found by the template.
const OTHER_FORMATS: [&str; 2] = ["kimi_k3", "laguna"];

impl Tokenizer {
    /// The thinking markers, by the vocabulary: a model that has the tokens counts as one that thinks, as in
    /// mlx-lm.
    pub fn thinking_markers(&self) -> Option<ThinkingMarkers> {
        let has = |token: &str| self.id(token).is_some();
        let (start, end) = if let Some(pair) = SINGLE.into_iter().find(|(s, e)| has(s) && has(e)) {
            pair
        } else if has("<|channel>") && has("<channel|>") {
            ("<|channel>thought", "<channel|>")
        } else if XTML.iter().all(|token| has(token)) {
            ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
        } else {
            return None;
        };
        let ids = |text: &str| self.encode(text, false).ok();
        Some(ThinkingMarkers {
            start: start.to_owned(),
            end: end.to_owned(),
            start_tokens: ids(start)?,
            end_tokens: ids(end)?,
        })
    }

    /// The name of the format in which the model writes tool calls: as its configuration says, else by the
    /// chat template, else by the vocabulary.
    pub fn tool_parser(&self) -> Option<&str> {
        if let Some(name) = &self.inner.tool_parser {
            return Some(name);
        }
        let template = self.inner.templates.get_any().unwrap_or_default();
        let by_template = TOOL_FORMATS.iter().find(|(texts, _)| texts.iter().all(|t| template.contains(t)));
        if let Some((_, name)) = by_template {
            return Some(name);
        }
        let has = |token: &&str| self.id(token).is_some();
        if XTML.iter().all(has) {
            return Some("kimi_k3");
        }
        ["<|tool_call_start|>", "<|tool_call_end|>"].iter().all(has).then_some("pythonic")
    }
}

/// The names of all tool call formats that mlx-lm has.
pub(crate) fn tool_formats() -> Vec<&'static str> {
    let mut names: Vec<&str> = TOOL_FORMATS.iter().map(|(_, name)| *name).chain(OTHER_FORMATS).collect();
    names.sort_unstable();
    names.dedup();
    names
}
