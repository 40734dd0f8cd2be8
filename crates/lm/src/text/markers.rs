//! How a model marks its thinking and its tool calls.

use super::reply::ToolFormat;
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

impl ThinkingMarkers {
    /// Whether a prompt ends within thoughts, so that the reply begins there. Texts of the markers within messages do
    /// not count: their tokens are others.
    #[must_use]
    pub fn opened_by(&self, prompt: &[u32]) -> bool {
        let last = |marker: &[u32]| prompt.windows(marker.len().max(1)).rposition(|tokens| tokens == marker);
        last(&self.start_tokens) > last(&self.end_tokens)
    }
}

/// Markers that are single tokens, in the order in which they are looked for.
const SINGLE: [(&str, &str); 3] =
    [("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>")];
/// The tokens from which Kimi K3 builds its tags.
const XTML: [&str; 4] = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"];

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

    /// The format in which the model writes tool calls: as its configuration says, else by the chat template, else
    /// by the vocabulary.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        let template = self.inner.templates.get_any().unwrap_or_default();
        self.inner.tool_format.or_else(|| ToolFormat::infer(template, |token| self.id(token).is_some()))
    }
}
