//! What `/metrics` tells Prometheus.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Labels of a finished HTTP request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Answered {
    pub(crate) path: String,
    pub(crate) status: u16,
}

/// Counters of the server.
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) answered: Family<Answered, Counter>,
    pub(crate) running: Gauge,
    pub(crate) cancelled: Counter,
    pub(crate) refused: Counter,
    pub(crate) panics: Counter,
    pub(crate) tokens: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) drafted_tokens: Counter,
    pub(crate) accepted_tokens: Counter,
    pub(crate) kv_bytes: Gauge,
    pub(crate) kv_limit: Gauge,
    pub(crate) step: Histogram,
    pub(crate) first_token: Histogram,
    pub(crate) between_tokens: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        let mut metrics = Self {
            registry: Registry::with_prefix("lmx"),
            answered: Family::default(),
            running: Gauge::default(),
            cancelled: Counter::default(),
            refused: Counter::default(),
            panics: Counter::default(),
            tokens: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            drafted_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            kv_bytes: Gauge::default(),
            kv_limit: Gauge::default(),
            step: seconds(),
            first_token: seconds(),
            between_tokens: seconds(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register("http_requests", "Answered requests", self.answered.clone());
        registry.register("requests_in_flight", "Replies that wait or are being made", self.running.clone());
        registry.register("requests_cancelled", "Replies that nobody waited for", self.cancelled.clone());
        registry.register("requests_refused", "Requests that found the queue full", self.refused.clone());
        registry.register("engine_panics", "Steps that failed as a whole", self.panics.clone());
        registry.register("generated_tokens", "Tokens of replies", self.tokens.clone());
        registry.register("prompt_tokens", "Tokens of prompts", self.prompt_tokens.clone());
        registry.register(
            "cached_prompt_tokens",
            "Those found in the prefix cache",
            self.cached_tokens.clone(),
        );
        registry.register("drafted_tokens", "Tokens that were guessed", self.drafted_tokens.clone());
        registry.register("accepted_tokens", "Guesses that were right", self.accepted_tokens.clone());
        registry.register(
            "kv_bytes",
            "Keys and values held, those of the prefix cache too",
            self.kv_bytes.clone(),
        );
        registry.register("kv_limit_bytes", "Keys and values that may be held", self.kv_limit.clone());
        registry.register("step_seconds", "Time of an engine's step", self.step.clone());
        registry.register(
            "first_token_seconds",
            "From a request to its first token",
            self.first_token.clone(),
        );
        registry.register("token_seconds", "Mean time between a reply's tokens", self.between_tokens.clone());
    }

    /// All of it, in the text format of Prometheus.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}
