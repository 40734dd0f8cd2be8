//! Log-probabilities in the two shapes of OpenAI's protocol.

use lmx::engine::Event;
use lmx::text::Tokenizer;
use serde_json::{Map, Value, json};

/// JSON has no infinity; no token that can be drawn is so unlikely.
const LEAST: f32 = -9999.0;

/// A log-probability as JSON can write it.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LEAST } else { logprob.max(LEAST) }
}

/// A token's text by itself, and its bytes: of a cut character only the bytes tell it.
fn token(tokenizer: &Tokenizer, id: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

fn entry(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Map<String, Value> {
    let (text, bytes) = token(tokenizer, id);
    let mut entry = Map::new();
    entry.insert("token".to_owned(), text.into());
    entry.insert("logprob".to_owned(), json!(finite(logprob)));
    entry.insert("bytes".to_owned(), bytes.into());
    entry.insert("id".to_owned(), id.into());
    entry
}

/// An element of a choice's `logprobs.content`.
fn element(tokenizer: &Tokenizer, id: u32, logprob: f32, top: &[(u32, f32)]) -> Value {
    let mut object = entry(tokenizer, id, logprob);
    let top = top.iter().map(|&(id, logprob)| Value::Object(entry(tokenizer, id, logprob)));
    object.insert("top_logprobs".to_owned(), top.collect());
    Value::Object(object)
}

/// The same for a token of a chat.
pub(crate) fn of_chat(tokenizer: &Tokenizer, event: &Event) -> Option<Value> {
    Some(element(tokenizer, event.token?, event.logprob, &event.top))
}

/// A text choice's `logprobs`: lists with an element for each token, or one list in the shape of chats.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextLogprobs {
    /// In the shape of chats.
    content: Option<Vec<Value>>,
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    offset: usize,
}

impl TextLogprobs {
    /// Lists that begin after `offset` characters of text; one in the shape of chats if `as_chat`.
    pub(crate) fn new(offset: usize, as_chat: bool) -> Self {
        Self { offset, content: as_chat.then(Vec::new), ..Self::default() }
    }

    /// Adds a token; of the first of a text there is no log-probability.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, id: u32, logprob: Option<f32>, top: &[(u32, f32)]) {
        if let Some(content) = &mut self.content {
            content.extend(logprob.map(|logprob| element(tokenizer, id, logprob, top)));
            return;
        }
        let (text, _) = token(tokenizer, id);
        let mut best = Map::new();
        for &(id, logprob) in top {
            best.entry(token(tokenizer, id).0).or_insert(json!(finite(logprob)));
        }
        self.offsets.push(self.offset);
        self.offset += text.chars().count();
        self.tokens.push(text.into());
        self.top.push(if logprob.is_some() { Value::Object(best) } else { Value::Null });
        self.logprobs.push(logprob.map(finite).into());
    }

    /// Characters up to here.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.content.as_ref().is_none_or(Vec::is_empty)
    }

    /// The object.
    pub(crate) fn json(&self) -> Value {
        let Self { tokens, logprobs, top, offsets, .. } = self;
        if let Some(content) = &self.content {
            return json!({"content": content});
        }
        json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
    }
}
