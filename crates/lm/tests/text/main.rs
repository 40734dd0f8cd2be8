//! Tokenizers, templates, replies, grammars and sampling.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

mod chat;
mod gguf;
mod grammar;
mod sample;
mod template;
mod tokenizer;
mod tool_grammar;
