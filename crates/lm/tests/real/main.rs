//! Real models, which `scripts/fetch_models.py` fetches, beside the references.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

mod models;
mod prefix;
mod schedules;
mod speculation;
