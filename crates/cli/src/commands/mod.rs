//! The commands, one file each.

pub(crate) mod benchmark;
pub(crate) mod cache_prompt;
pub(crate) mod chat;
mod choices;
pub(crate) mod completions;
pub(crate) mod evaluate;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod perplexity;
mod prompts;
pub(crate) mod server;
