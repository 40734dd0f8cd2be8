//! Measuring speed: this program's engine, and servers beside it.
//!
//! Every trial has prompts of its own, so that no prefix cache knows them; all who are measured get the same ones.

pub(crate) mod charts;
pub(crate) mod client;
pub(crate) mod engine;
pub(crate) mod machine;
pub(crate) mod prompts;
pub(crate) mod report;
pub(crate) mod trial;
