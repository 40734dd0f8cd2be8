//! What `lmx perplexity` is made of: which tokens are scored, and what is said about the losses.

pub(crate) mod plan;
pub(crate) mod report;
