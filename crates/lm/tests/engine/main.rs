//! Requests on tiny models: each gets what it gets alone, whatever runs beside it and however it is run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

mod adapters;
mod batch;
mod choices;
mod draft;
mod invariance;
mod observe;
mod requests;
mod schedules;
mod scoring;
mod speculation;
