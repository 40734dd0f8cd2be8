//! Run large language models: load a checkpoint, generate, stream, batch.
//!
//! * [`load`] turns a folder, a GGUF file or a cached hub id into a [`Loaded`] model.
//! * [`engine`] runs requests over it, many at once, each with its own options.
//! * [`adapter`] loads LoRA and DoRA adapters, one for each request that wants one.
//! * [`eval`] measures how likely a model finds a text, and what is made of such numbers.
//! * [`grammar`] makes a request's reply follow a JSON schema, a regular expression or a grammar.
//! * [`prompt_cache`] keeps what was run of a prompt, in memory and in files.
//! * [`text`], [`sample`], [`cache`], [`models`], [`checkpoint`] are what those are made of.
//!
//! The examples folder has the ten lines that generate text, a batch, and a sampler of one's own.

pub mod adapter;
pub mod cache;
pub mod checkpoint;
pub mod engine;
pub mod eval;
pub mod grammar;
pub mod inspect;
mod load;
pub mod models;
pub mod prompt_cache;
pub mod sample;
pub mod text;

pub use adapter::{Adapter, AdapterError, AdapterFiles};
pub use lmx_tensor::Device;
pub use lmx_tensor::kernels::Isa;
pub use lmx_tensor::kernels::attention::KvType;
pub use lmx_tensor::kernels::isa::Level;
pub use load::{LoadError, LoadOptions, Loaded, load, load_with_progress};
pub use prompt_cache::{PromptCache, make_prompt_cache};
