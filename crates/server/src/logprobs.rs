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

/// An element of a chat choice's `logprobs.content`.
pub(crate) fn of_chat(tokenizer: &Tokenizer, event: &Event) -> Option<Value> {
    let mut object = entry(tokenizer, event.token?, event.logprob);
    let top = event.top.iter().map(|&(id, logprob)| Value::Object(entry(tokenizer, id, logprob)));
    object.insert("top_logprobs".to_owned(), top.collect());
    Some(Value::Object(object))
}

/// A text choice's `logprobs`: lists with an element for each token.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextLogprobs {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    offset: usize,
}

impl TextLogprobs {
    /// Lists that begin after `offset` characters of text.
    pub(crate) fn new(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    /// Adds a token; of the first of a text there is no log-probability.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, id: u32, logprob: Option<f32>, top: &[(u32, f32)]) {
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
        self.tokens.is_empty()
    }

    /// The object.
    pub(crate) fn json(&self) -> Value {
        let Self { tokens, logprobs, top, offsets, .. } = self;
        json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
    }
}
