//! Damaged and hostile files: each is refused quickly, in little memory and without a panic.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../../../../tests/hostile/mod.rs"]
mod replay;

mod config;
mod prompt_cache;
mod text;
