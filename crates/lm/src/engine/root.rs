//! What keys and values depend on beside the tokens.

use crate::adapter::Adapter;

/// The prefix cache's root of a request: what was run with another adapter, or without, is another text. Rope scaling
/// may depend on whether a request exceeds the model's original context.
pub(super) fn root(adapter: Option<&Adapter>, long_context: bool) -> u64 {
    adapter.map_or(0, Adapter::fingerprint) << 1 | u64::from(long_context)
}
