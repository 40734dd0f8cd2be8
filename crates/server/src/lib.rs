//! The protocols of OpenAI and Anthropic over one lmx engine.
//!
//! A request goes one way: its JSON becomes a typed body (`body`), a protocol (`openai`, `anthropic`) turns that into
//! engine requests (`fields`), the engines' thread (`worker`) runs them among all others (`running`), and the protocol
//! writes the reply's parts (`reply`) as JSON or as server-sent events (`stream`, `sse`).

mod adapters;
mod answering;
mod anthropic;
mod app;
mod blocks;
mod body;
mod conversation;
mod error;
mod fields;
mod folder;
mod guard;
mod http;
mod infill;
mod logprobs;
mod metrics;
mod min_tokens;
mod model;
mod models;
mod openai;
mod openapi;
mod options;
mod reply;
mod running;
mod schemas;
mod sse;
mod stream;
mod text;
mod worker;

pub use folder::{Entries, Folder};
pub use http::{ServeError, Server, Tls};
pub use model::{LoadProgress, LoadedModel, Loader, Source};
pub use models::weight_bytes;
pub use options::{Defaults, Hook, Limits, ServerOptions};
