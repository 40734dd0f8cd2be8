//! The operations that a forward pass is made of. Each checks its shapes, then calls one kernel.
//!
//! Every op works row by row: what it computes for a row depends on that row alone, so results never change
//! with the batch.

mod attention;
mod conv;
mod linear;
mod row;

pub use attention::attention;
pub use conv::{Conv, causal_conv};
pub use linear::{embed, linear, linears, read_ahead};
pub use row::{
    Gate, Norm, Rope, add, add_rows, gated, multiply, rms_norm, rms_norm_heads, rope, scale_features,
    scale_rows, select_rows, softcap,
};

/// An op was called with shapes that do not fit: a bug of the caller, or a checkpoint that lies about itself.
#[derive(Debug, thiserror::Error)]
#[error("{op}: {problem}")]
pub struct OpError {
    op: &'static str,
    problem: String,
}

impl OpError {
    pub(crate) fn new(op: &'static str, problem: String) -> Self {
        Self { op, problem }
    }

    /// An error unless `fits`.
    pub(crate) fn unless(fits: bool, op: &'static str, problem: impl FnOnce() -> String) -> Result<(), Self> {
        if fits { Ok(()) } else { Err(Self::new(op, problem())) }
    }
}
