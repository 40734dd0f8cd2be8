//! What a server is told when it starts.

use crate::folder::Folder;
use lmx::engine::Request;
use lmx::sample::SamplingParams;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a server allows, and what a request is where it says nothing.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// The keys of which a request must have one; without keys all are let in.
    pub api_keys: Vec<String>,
    /// Origins whose pages may use the server, `*` for all; its own page always may.
    pub allowed_origins: Vec<String>,
    /// Names besides loopback ones that a request may give as the server's host; `None` takes any.
    pub allowed_hosts: Option<Vec<String>>,
    /// Models that requests may name, besides those that are named at the start.
    pub models: Option<Folder>,
    /// Adapters that requests may name.
    pub adapters: Option<Folder>,
    /// What requests are where they say nothing.
    pub defaults: Defaults,
    /// Bounds of requests.
    pub limits: Limits,
    /// What is done with every request before its engine gets it.
    pub hook: Option<Hook>,
}

/// Sees every request before its engine gets it, and may change it: for programs that embed the server, and for tests.
#[derive(Clone)]
pub struct Hook(pub Arc<dyn Fn(&mut Request) + Send + Sync>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hook").finish()
    }
}

/// What a request is where it says nothing.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// Temperature and filters.
    pub sampling: SamplingParams,
    /// Tokens of a reply at most.
    pub max_tokens: usize,
    /// Variables of the chat template.
    pub template: serde_json::Map<String, serde_json::Value>,
}

impl Default for Defaults {
    fn default() -> Self {
        // The numbers of mlx-lm's server.
        Self { sampling: SamplingParams::default(), max_tokens: 512, template: serde_json::Map::new() }
    }
}

/// Bounds of requests, so that none can take the machine from the others.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Messages of a conversation.
    pub messages: usize,
    /// Replies to one request.
    pub choices: usize,
    /// Responses that are kept for `previous_response_id`.
    pub stored_responses: usize,
    /// Bytes of them together.
    pub stored_bytes: usize,
    /// Requests that wait or run; more are refused with 429.
    pub queue: usize,
    /// Requests of one key (without keys: of all) in a minute; 0 for any number.
    pub requests_per_minute: u32,
    /// How long a client may take to send a request's head, and then its body.
    pub read_timeout: Duration,
    /// Bytes that loaded models may hold together, weights, keys and values: those that nobody uses make room for others.
    pub models_bytes: usize,
    /// Connections at a time.
    pub connections: usize,
    /// How long a stream may be silent before a comment is sent.
    pub keep_alive: Duration,
    /// How long no token may be delivered, with requests in flight, until the server counts as stalled.
    pub stall: Duration,
    /// How long running requests may take to end when the server is stopped.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            messages: 10_000,
            choices: 128,
            stored_responses: 1000,
            stored_bytes: 64 << 20,
            queue: 256,
            requests_per_minute: 0,
            read_timeout: Duration::from_secs(30),
            models_bytes: usize::MAX,
            connections: 8192,
            keep_alive: Duration::from_secs(5),
            stall: Duration::from_secs(120),
            grace: Duration::from_secs(30),
        }
    }
}
