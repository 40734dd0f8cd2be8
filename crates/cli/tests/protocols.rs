//! What the protocols say of one and the same reply, over script models that say a known text.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;
#[path = "protocols/responses.rs"]
mod responses;
