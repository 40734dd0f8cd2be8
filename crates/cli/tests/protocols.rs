//! What the protocols say of one and the same reply, over script models that say a known text.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "protocols/agreement.rs"]
mod agreement;
mod common;
#[path = "protocols/document.rs"]
mod document;
#[path = "protocols/fields.rs"]
mod fields;
#[path = "protocols/forms.rs"]
mod forms;
#[path = "protocols/responses.rs"]
mod responses;
#[path = "protocols/tools.rs"]
mod tools;
