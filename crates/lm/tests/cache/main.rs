//! What is kept of past tokens: keys and values under each policy, prefixes, prompt-cache files.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

mod kv_bounded;
mod kv_model;
mod kv_quantized;
mod kv_states;
mod prefix_cache;
mod prefix_dir;
mod prompt_cache;
mod prompt_cache_quantized;
