//! lm-evaluation-harness with lmx's engine as its model.
//!
//! The harness is a Python program of its own, started with `driver.py`, which asks over a loopback socket for what its
//! tasks need: log-likelihoods, texts, rendered conversations. It never sees a token: tokenization, truncation and
//! batching are lmx's (docs/decisions/0011).

pub(crate) mod generate;
pub(crate) mod harness;
pub(crate) mod protocol;
