//! Anthropic's protocol.

pub(crate) mod convert;
pub(crate) mod messages;
