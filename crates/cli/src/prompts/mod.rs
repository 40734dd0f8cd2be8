//! `--prompts-file`: many requests in, as many replies out.

pub(crate) mod input;
pub(crate) mod output;
