//! Quantized matrices and their matmul, out = x · wᵀ, with exact integer sums.
//!
//! # Definition
//! A weight is w = s·v + c with an integer v that fits an int8. Symmetric formats: v is the code less the code of
//! zero, and there is no c. Affine formats, w = s·q + b: v = q - z with the middle code z = 2^(bits - 1), and
//! c = fma(z, s, b). E2M1 codes count in halves: v = 2·value, and s is halved. A row of activations is cut into
//! spans of 256 inputs, the last perhaps shorter; each span gets
//!
//! * m = max |x|; if m <= 1e-30 then a = 0 and all t = 0; if m is not finite then a = NaN and all t = 0; else
//!   a = m / 32512 and t = rint(x · (32512 / m)), an integer below 2^15 in magnitude;
//! * hi = (t + 128) >> 8 and lo = t - 256·hi, two digits that each fit an int8.
//!
//! **Plain formats** (one scale a group). A step is a group, or half a group of 128. For each span, inputs ascending,
//! from acc = +0:
//!
//! ```text
//! sum = 0; for each of its steps, inputs ascending:
//!     sum = fma(s, f32(Σ v·t), sum)            Σ exact in i32
//!     sum = fma(c, f32(Σ t), sum)              only if the format has biases
//! acc = fma(a, sum, acc)
//! ```
//!
//! A sum without its a may overflow from weights of 2^99 on.
//!
//! **Super-blocks of 256 inputs** (w = d·sc·v - dmin·m; v = q with mins, else as above). For each, inputs ascending:
//!
//! ```text
//! H = Σ_g sc_g·Σ v·hi,  L = Σ_g sc_g·Σ v·lo,  M = Σ_g m_g·Σ t       exact in i32
//! acc = fma(d·a, fma(256, f32(H), f32(L)), acc)
//! acc = fma(-(dmin·a), f32(M), acc)            only if the format has mins
//! ```
//!
//! f32(integer) rounds to nearest even; every other operation is one IEEE f32 operation. Nothing else touches a
//! float, so a result depends on its own row and weights alone, and every instruction set gives the same bits.
//! Why this scheme, and what it costs: docs/decisions/0001-quantized-matmul.md.

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod code;
mod format;
mod pack;
mod scalar;

pub use format::{Codes, Format, ScaleType, Scales};
pub use pack::{QuantMatrix, RowBuf};

use crate::isa::Level;
use crate::{Exec, Isa};
use activations::{Activations, Form};
use format::LANES;
use std::ops::Range;

/// Why a quantized matrix cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ShapeError {
    /// The combination of codes, group and scales is none that the kernels know.
    #[error("quantization format {format:?} is not supported: {reason}")]
    Format {
        /// The format asked for.
        format: Format,
        /// The rule it breaks.
        reason: &'static str,
    },
    /// A row does not consist of whole groups.
    #[error("{cols} inputs of a quantized matrix: must be a multiple of {multiple}")]
    Cols {
        /// Inputs of the matrix.
        cols: usize,
        /// The group, or 256 for super-blocks.
        multiple: usize,
    },
    /// The packed matrix would exceed the address space.
    #[error("a quantized matrix of {rows} x {cols} is too large")]
    Size {
        /// Outputs of the matrix.
        rows: usize,
        /// Inputs of the matrix.
        cols: usize,
    },
}

/// One matrix of a [`matmul`] and where its result goes.
pub struct Product<'a> {
    /// The matrix w: [outputs, inputs].
    pub weight: &'a QuantMatrix,
    /// The result, `[rows, weight.rows()]`.
    pub out: &'a mut [f32],
}

/// out\[r, o\] = Σ_k x\[r, k\] · w\[o, k\] for each product, all over the same input `x` of `[rows, cols]`.
///
/// Activations are quantized once for all products whose formats group them alike. A row with an infinity or
/// NaN gives NaN in the outputs that the value reaches.
///
/// # Panics
/// If the length of `x` or of an `out` does not fit `rows` and the matrices.
pub fn matmul(exec: &Exec, x: &[f32], rows: usize, products: &mut [Product<'_>]) {
    for product in &*products {
        assert_eq!(x.len(), rows * product.weight.cols(), "matmul: x is not [rows, cols]");
        assert_eq!(product.out.len(), rows * product.weight.rows(), "matmul: out is not [rows, outputs]");
    }
    if x.is_empty() {
        // No rows, or sums of nothing.
        products.iter_mut().for_each(|product| product.out.fill(0.0));
        return;
    }
    let mut inputs: Vec<Activations> = Vec::new();
    let mut tasks: Vec<Task<'_>> = Vec::new();
    let bytes: usize = products.iter().map(|p| p.weight.bytes()).sum();
    for product in products {
        let form = Form::of(product.weight.layout());
        let input = inputs.iter().position(|i| i.form() == form).unwrap_or_else(|| {
            inputs.push(Activations::quantize(exec, x, rows, tile_rows(exec.isa, rows), form));
            inputs.len() - 1
        });
        let out = Out { start: product.out.as_mut_ptr(), width: product.weight.rows() };
        let weight = product.weight;
        let size = task_blocks(weight, bytes, exec.pool.threads());
        tasks.extend((0..weight.blocks()).step_by(size).map(|first| {
            let blocks = first..weight.blocks().min(first + size);
            Task { weight, input, blocks, out }
        }));
    }
    exec.pool.for_each(tasks.len(), &|i| run(exec.isa, &tasks[i], &inputs[tasks[i].input]));
}

/// Blocks of outputs that a kernel for few rows computes at once.
const KERNEL_BLOCKS: usize = 2;

/// Blocks of outputs that a thread takes at a time: small enough that all threads end together, large enough that
/// memory is read in long runs.
fn task_blocks(weight: &QuantMatrix, bytes: usize, threads: usize) -> usize {
    const TASKS_A_THREAD: usize = 8;
    const MIN_BYTES: usize = 32 << 10;
    const MAX_BLOCKS: usize = 32;
    if threads == 1 {
        return weight.blocks().max(1);
    }
    let block_bytes = weight.bytes() / weight.blocks().max(1);
    ((bytes / (threads * TASKS_A_THREAD)).max(MIN_BYTES) / block_bytes.max(1))
        .clamp(1, MAX_BLOCKS)
        .next_multiple_of(KERNEL_BLOCKS)
}

/// Rows of a tile of the input, as the kernels of the level like them.
fn tile_rows(isa: Isa, rows: usize) -> usize {
    match isa.level() {
        Level::Scalar => 1,
        #[cfg(target_arch = "x86_64")]
        Level::Amx if rows >= amx::MIN_ROWS => amx::ROWS,
        Level::Avx2 | Level::Avx512 | Level::Amx => rows.next_power_of_two().min(4),
    }
}

/// Computes a task, whose blocks of outputs belong to this thread alone.
fn run(isa: Isa, task: &Task<'_>, input: &Activations) {
    let Task { weight, out, .. } = *task;
    let blocks = task.blocks.clone();
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was checked.
        Level::Amx if input.tile_rows() == amx::ROWS => unsafe { amx::matmul(weight, input, blocks, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was checked.
        Level::Avx512 | Level::Amx => unsafe { avx512::matmul(weight, input, blocks, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was checked.
        Level::Avx2 => unsafe { avx2::matmul(weight, input, blocks, out) },
        _ => scalar::matmul(weight, input, blocks, out),
    }
}

/// Some blocks of outputs of one product.
struct Task<'a> {
    weight: &'a QuantMatrix,
    input: usize,
    blocks: Blocks,
    out: Out,
}

/// The result matrix, `width` floats a row, which threads fill in disjoint blocks of outputs.
#[derive(Clone, Copy)]
struct Out {
    start: *mut f32,
    width: usize,
}

// SAFETY: a pointer into the `&mut [f32]` of a product that outlives the parallel region; each thread writes only
// the columns of its own blocks of outputs.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

impl Out {
    /// Writes the 16 outputs of a block for one row, fewer where the matrix ends.
    ///
    /// # Safety
    /// `row` is a row of the result, `block` starts inside its width and belongs to this thread.
    unsafe fn store(self, row: usize, block: usize, values: &[f32; LANES]) {
        let count = LANES.min(self.width - block * LANES);
        // SAFETY: the caller vouches for row and block; `count` ends at the row's end.
        unsafe {
            let to = self.start.add(row * self.width + block * LANES);
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, count);
        }
    }
}

type Blocks = Range<usize>;
