//! The commands, as their users run them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod adapters;
mod chat;
mod choices;
mod flags;
mod form;
mod generate;
mod inspect;
mod prompt_cache;
mod prompt_cache_dir;
mod prompts;
