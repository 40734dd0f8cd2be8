//! Checkpoints, families and their logits against the references.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

mod checkpoint;
mod experts;
mod families;
mod golden;
mod inspect;
