//! Row-wise kernels: norms, rotary embedding, short convolutions, activations, sums, argmax, log-softmax.
//!
//! Each kernel is plain Rust that is compiled once for each instruction set ([`Isa`](crate::Isa)); the order of
//! its IEEE operations is fixed, so that every level gives the same bits. Small calls run on the calling thread.

mod conv;
mod elementwise;
mod math;
mod norm;
mod reduce;
mod rope;

pub use conv::causal_conv;
pub use elementwise::{add, clamped_swiglu, geglu_tanh, multiply, scale, softcap, swiglu};
pub use math::{exp, gelu_tanh, sigmoid, silu, tanh};
pub use norm::rms_norm;
pub use reduce::{argmax, log_softmax, log_sum_exp};
pub use rope::rope;

pub(crate) use elementwise::capped as softcapped;
pub(crate) use math::{constants, sum16};
