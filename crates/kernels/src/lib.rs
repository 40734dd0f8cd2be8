//! CPU compute kernels of lmx: numbers on plain slices.
//!
//! This crate knows no tensor, no file and no model. It is the only home of SIMD `unsafe`.
//!
//! * [`Exec`] says how to run: an [`Isa`] (proof that the CPU has it) and a thread [`Pool`].
//! * [`quant`]: quantized matrices and their exact-integer matmul.
//! * [`float`]: matmul over f32, f16, bf16 and fp8 weights.
//! * [`attention`]: attention over KV blocks, and how keys and values lie in a block.
//! * [`vector`]: norms, rotary embedding, activations, and other row-wise kernels.
//! * [`read_bandwidth`]: what the memory gives.
//!
//! Every kernel has a scalar twin that is its definition; all ISA paths give the scalar twin's bits, and the
//! result of a row never depends on the other rows, on the number of rows, or on the number of threads.

pub mod attention;
mod bandwidth;
mod disjoint;
pub mod float;
pub mod isa;
pub mod memory;
pub mod pool;
pub mod quant;
mod scratch;
mod simd;
pub mod vector;

pub use bandwidth::read_bandwidth;
pub use isa::Isa;
pub use memory::{AlignedBytes, Arena};
pub use pool::Pool;

/// How a kernel runs: with which instructions and on which threads.
#[derive(Debug)]
pub struct Exec {
    /// The instruction set that every kernel called through this value uses.
    pub isa: Isa,
    /// The threads that share the work.
    pub pool: Pool,
    /// Where the weights are.
    pub arena: Arena,
}

impl Exec {
    /// An `Exec` of `threads` threads (at least 1; the caller's own is one of them).
    #[must_use]
    pub fn new(isa: Isa, threads: usize) -> Self {
        Self { isa, pool: Pool::new(threads), arena: Arena::default() }
    }
}
