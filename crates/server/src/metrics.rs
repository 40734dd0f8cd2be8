//! What `/metrics` tells Prometheus.

use lmx::engine::Engine;
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

/// Label of what is counted for each model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OfModel {
    pub(crate) model: String,
}

/// What an engine's thread counts of one of them.
pub(crate) struct EngineMetrics {
    pub(crate) in_flight: Gauge,
    pub(crate) tokens: Counter,
    pub(crate) between_tokens: Histogram,
    waiting: Gauge,
    loaded: Gauge,
    kv_bytes: Gauge,
    kv_cached: Gauge,
    kv_limit: Gauge,
    kv_blocks_used: Gauge,
    kv_blocks_free: Gauge,
}

impl EngineMetrics {
    /// What the engine holds now.
    pub(crate) fn show(&self, engine: &Engine) {
        let signed = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let budget = engine.kv().budget();
        self.loaded.set(1);
        self.waiting.set(signed(engine.liveness().waiting));
        self.kv_bytes.set(signed(budget.used()));
        self.kv_cached.set(signed(engine.prefix_stats().bytes()));
        self.kv_limit.set(signed(budget.limit()));
        self.kv_blocks_used.set(signed(budget.blocks()));
        self.kv_blocks_free.set(signed(engine.kv().free_blocks()));
    }

    /// There is no engine any more.
    pub(crate) fn clear(&self) {
        for gauge in [
            &self.in_flight,
            &self.waiting,
            &self.loaded,
            &self.kv_bytes,
            &self.kv_cached,
            &self.kv_limit,
            &self.kv_blocks_used,
            &self.kv_blocks_free,
        ] {
            gauge.set(0);
        }
    }
}

/// A histogram of seconds.
type Seconds = Family<OfModel, Histogram, fn() -> Histogram>;

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

/// Counters of the server.
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) answered: Family<Answered, Counter>,
    in_flight: Family<OfModel, Gauge>,
    waiting: Family<OfModel, Gauge>,
    pub(crate) await_model: Gauge,
    pub(crate) cancelled: Counter,
    pub(crate) refused: Counter,
    pub(crate) panics: Counter,
    tokens: Family<OfModel, Counter>,
    pub(crate) prompt_tokens: Family<OfModel, Counter>,
    pub(crate) cached_tokens: Family<OfModel, Counter>,
    pub(crate) drafted_tokens: Family<OfModel, Counter>,
    pub(crate) accepted_tokens: Family<OfModel, Counter>,
    kv_bytes: Family<OfModel, Gauge>,
    kv_cached: Family<OfModel, Gauge>,
    kv_limit: Family<OfModel, Gauge>,
    kv_blocks_used: Family<OfModel, Gauge>,
    kv_blocks_free: Family<OfModel, Gauge>,
    loaded: Family<OfModel, Gauge>,
    pub(crate) loads: Family<OfModel, Counter>,
    pub(crate) unloads: Family<OfModel, Counter>,
    pub(crate) step: Histogram,
    pub(crate) first_token: Seconds,
    between_tokens: Seconds,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("lmx"),
            answered: Family::default(),
            in_flight: Family::default(),
            waiting: Family::default(),
            await_model: Gauge::default(),
            cancelled: Counter::default(),
            refused: Counter::default(),
            panics: Counter::default(),
            tokens: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            drafted_tokens: Family::default(),
            accepted_tokens: Family::default(),
            kv_bytes: Family::default(),
            kv_cached: Family::default(),
            kv_limit: Family::default(),
            kv_blocks_used: Family::default(),
            kv_blocks_free: Family::default(),
            loaded: Family::default(),
            loads: Family::default(),
            unloads: Family::default(),
            step: seconds(),
            first_token: Family::new_with_constructor(seconds),
            between_tokens: Family::new_with_constructor(seconds),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register("http_requests", "Answered requests", self.answered.clone());
        registry.register(
            "requests_in_flight",
            "Replies that wait or are being made",
            self.in_flight.clone(),
        );
        registry.register("requests_waiting", "Those of them that have not begun", self.waiting.clone());
        registry.register(
            "requests_awaiting_model",
            "Requests whose model is being loaded",
            self.await_model.clone(),
        );
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
        registry.register("kv_cached_bytes", "Those of the prefix cache", self.kv_cached.clone());
        registry.register("kv_limit_bytes", "Keys and values that may be held", self.kv_limit.clone());
        registry.register(
            "kv_blocks_used",
            "Blocks of 32 tokens' keys and values that are held, shared ones once",
            self.kv_blocks_used.clone(),
        );
        registry.register("kv_blocks_free", "Blocks that there is room for", self.kv_blocks_free.clone());
        registry.register("model_loaded", "Whether the model is loaded", self.loaded.clone());
        registry.register("model_loads", "How often it was loaded", self.loads.clone());
        registry.register("model_unloads", "How often it was unloaded to make room", self.unloads.clone());
        registry.register("step_seconds", "Time of an engine's step", self.step.clone());
        registry.register(
            "first_token_seconds",
            "From a request to its first token",
            self.first_token.clone(),
        );
        registry.register("token_seconds", "Time between a reply's tokens", self.between_tokens.clone());
    }

    /// What the engine of a model counts.
    pub(crate) fn of_engine(&self, model: &OfModel) -> EngineMetrics {
        let gauge = |family: &Family<OfModel, Gauge>| family.get_or_create_owned(model);
        EngineMetrics {
            in_flight: gauge(&self.in_flight),
            waiting: gauge(&self.waiting),
            tokens: self.tokens.get_or_create_owned(model),
            between_tokens: self.between_tokens.get_or_create_owned(model),
            loaded: gauge(&self.loaded),
            kv_bytes: gauge(&self.kv_bytes),
            kv_cached: gauge(&self.kv_cached),
            kv_limit: gauge(&self.kv_limit),
            kv_blocks_used: gauge(&self.kv_blocks_used),
            kv_blocks_free: gauge(&self.kv_blocks_free),
        }
    }

    /// All of it, in the text format of Prometheus.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}
