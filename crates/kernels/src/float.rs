//! Matmul over float weights that stay as they lie in the file: f32, f16, bf16, and fp8 with block scales.
//!
//! out\[r, o\] = sum over k of x\[r, k\] * w\[o, k\]. There is one arithmetic for every number of rows: both
//! operands are seen as padded with zeros to a multiple of 16; lane j sums the k with k mod 16 = j in ascending
//! order by fma, then the lanes are added j + 8, j + 4, j + 2, j + 1. See docs/decisions/0002.

mod panel;
mod scalar;
mod tile;
mod widen;

use crate::disjoint::Disjoint;
use crate::{Exec, scratch};
use panel::Panel;

/// How the elements of a [`FloatMatrix`] are stored, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// OCP E4M3 bytes (0x7F and 0xFF are NaN) times an E8M0 scale byte, 2^(byte - 127), for each
    /// [`SCALE_GROUP`] elements of a row: the mxfp8 format.
    E4m3,
}

/// Elements of a row that share one scale byte in [`FloatType::E4m3`].
pub const SCALE_GROUP: usize = 32;

impl FloatType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::Bf16 => 2,
            FloatType::E4m3 => 1,
        }
    }
}

/// A weight matrix `[rows][cols]`, row-major, in borrowed bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct FloatMatrix<'a> {
    /// The elements.
    pub data: &'a [u8],
    /// How they are stored.
    pub ty: FloatType,
    /// `[rows][cols / SCALE_GROUP]` scale bytes of [`FloatType::E4m3`]; empty for the others.
    pub scales: &'a [u8],
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

impl FloatMatrix<'_> {
    fn check(&self) {
        assert_eq!(
            self.data.len(),
            self.rows * self.cols * self.ty.bytes(),
            "bytes of a {:?} matrix",
            self.ty
        );
        let scales = match self.ty {
            FloatType::E4m3 => {
                assert!(self.cols.is_multiple_of(SCALE_GROUP), "{} columns of mxfp8", self.cols);
                self.rows * self.cols / SCALE_GROUP
            }
            _ => 0,
        };
        assert_eq!(self.scales.len(), scales, "scale bytes of a {:?} matrix", self.ty);
    }
}

/// One product of [`matmul`].
#[derive(Debug)]
pub struct FloatProduct<'a> {
    /// The weights.
    pub weight: FloatMatrix<'a>,
    /// `[rows][weight.rows]`.
    pub out: &'a mut [f32],
}

/// Products of the same activations `x` `[rows][cols]` with several matrices, in one parallel region.
///
/// # Panics
/// If a length does not fit its shape.
pub fn matmul(exec: &Exec, x: &[f32], rows: usize, products: &mut [FloatProduct<'_>]) {
    let all_outputs: usize = products.iter().map(|p| p.weight.rows).sum();
    // More panels than threads, so that a thread that is held up does not hold up the others.
    let share = all_outputs.div_ceil(8 * exec.pool.threads());
    let products: Vec<SharedProduct<'_>> = products
        .iter_mut()
        .map(|FloatProduct { weight, out }| {
            weight.check();
            assert_eq!(x.len(), rows * weight.cols, "activations of {rows} rows");
            assert_eq!(out.len(), rows * weight.rows, "outputs of {rows} rows");
            let step = panel::outputs(weight, rows).min(share).next_multiple_of(tile::OUTPUTS);
            SharedProduct { weight: *weight, out: Disjoint::new(out), step }
        })
        .collect();
    let run = |item: usize| {
        let mut item = item;
        for SharedProduct { weight, out, step } in &products {
            let panels = weight.rows.div_ceil(*step);
            if item < panels {
                let outputs = item * step..weight.rows.min((item + 1) * step);
                return scratch::with_scratch(panel::scratch_len(weight, rows, outputs.len()), |scratch| {
                    exec.isa.run(Panel { x, rows, weight: *weight, outputs, out, scratch });
                });
            }
            item -= panels;
        }
    };
    let panels = products.iter().map(|p| p.weight.rows.div_ceil(p.step)).sum();
    let bytes: usize = products.iter().map(|p| p.weight.data.len()).sum();
    if bytes * rows < PARALLEL_MIN {
        (0..panels).for_each(run);
    } else {
        exec.pool.for_each(panels, &run);
    }
}

/// Weight bytes times rows below which a call runs on the calling thread: about a microsecond of work.
const PARALLEL_MIN: usize = 1 << 15;

struct SharedProduct<'a> {
    weight: FloatMatrix<'a>,
    out: Disjoint<'a, f32>,
    /// Outputs of a panel.
    step: usize,
}

/// Writes row `row` of `weight` to `out` as f32 (an embedding lookup).
///
/// # Panics
/// If there is no such row or `out` is not one row long.
pub fn widen_row(weight: &FloatMatrix<'_>, row: usize, out: &mut [f32]) {
    weight.check();
    assert!(row < weight.rows, "row {row} of {}", weight.rows);
    assert_eq!(out.len(), weight.cols, "length of a row");
    widen::row(weight, row, out);
}
