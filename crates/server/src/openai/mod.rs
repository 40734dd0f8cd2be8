//! OpenAI's protocol.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod responses;
pub(crate) mod tools;

use crate::model::Model;
use lmx::engine::Stats;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};
use utoipa::ToSchema;

/// What every object of one answer begins with.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    id: String,
    created: u64,
    model: String,
}

/// An id that nobody else has.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", lmx::sample::random_seed(), lmx::sample::random_seed())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Envelope {
    pub(crate) fn new(prefix: &str, model: &Model) -> Self {
        Self { id: new_id(prefix), created: now(), model: model.name.clone() }
    }

    /// A chunk of a stream; where the last one tells the `usage`, the others say that it is not known yet.
    pub(crate) fn chunk(&self, object: &str, choice: Value, usage: bool) -> Value {
        let mut map = self.object(object, vec![choice]);
        if usage {
            map.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(map)
    }

    pub(crate) fn object(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let Self { id, created, model } = self;
        let mut map = Map::new();
        map.insert("id".to_owned(), id.as_str().into());
        map.insert("object".to_owned(), object.into());
        map.insert("created".to_owned(), (*created).into());
        map.insert("model".to_owned(), model.as_str().into());
        map.insert("system_fingerprint".to_owned(), concat!("lmx-", env!("CARGO_PKG_VERSION")).into());
        map.insert("choices".to_owned(), choices.into());
        map
    }
}

/// `stream_options`
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// Send a chunk with `usage` before the end.
    pub(crate) include_usage: Option<bool>,
    /// Accepted: chunks are never padded.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// What a request's replies cost together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cost {
    prompt: usize,
    cached: usize,
    completion: usize,
    reasoning: usize,
    stats: Stats,
}

impl Cost {
    /// Counts a finished reply; of several to one prompt (`again`) the prompt counts once.
    pub(crate) fn add(&mut self, stats: &Stats, reasoning: usize, again: bool) {
        if !again {
            self.prompt += stats.prompt_tokens;
            self.cached += stats.cached_tokens;
            self.stats.first_token_seconds += stats.first_token_seconds;
        }
        self.completion += stats.generation_tokens;
        self.reasoning += reasoning;
        self.stats.drafted_tokens += stats.drafted_tokens;
        self.stats.accepted_tokens += stats.accepted_tokens;
        self.stats.generation_seconds = self.stats.generation_seconds.max(stats.generation_seconds);
    }

    pub(crate) fn usage(&self) -> Value {
        let Self { prompt, cached, completion, reasoning, stats } = self;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning,
                "accepted_prediction_tokens": stats.accepted_tokens,
                "rejected_prediction_tokens": stats.drafted_tokens - stats.accepted_tokens.min(stats.drafted_tokens),
            },
        })
    }

    /// The same by the names of `/v1/responses`.
    fn responses_usage(&self) -> Value {
        let Self { prompt, cached, completion, reasoning, .. } = self;
        json!({
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + completion,
        })
    }

    /// How long it took; in milliseconds and tokens per second.
    pub(crate) fn timings(&self) -> Value {
        let run = self.prompt - self.cached.min(self.prompt);
        let rate = |count: usize, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let Stats { first_token_seconds, generation_seconds, .. } = self.stats;
        json!({
            "prompt_n": run,
            "prompt_ms": 1000.0 * first_token_seconds,
            "prompt_per_second": rate(run, first_token_seconds),
            "predicted_n": self.completion,
            "predicted_ms": 1000.0 * generation_seconds,
            "predicted_per_second": rate(self.completion.saturating_sub(1), generation_seconds),
            "draft_n": self.stats.drafted_tokens,
            "draft_n_accepted": self.stats.accepted_tokens,
        })
    }
}
