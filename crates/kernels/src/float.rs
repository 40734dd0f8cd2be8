//! Matmul over float weights that stay as they lie in the file: f32, f16, bf16, and fp8 with block scales.
//!
//! out\[r, o\] = sum over k of x\[r, k\] * w\[o, k\]. There is one arithmetic for every number of rows: both
//! operands are seen as padded with zeros to a multiple of 16; lane j sums the k with k mod 16 = j in ascending
//! order by fma, then the lanes are added j + 8, j + 4, j + 2, j + 1. See docs/decisions/0002.

mod scalar;
mod widen;

use crate::Exec;
use crate::disjoint::Disjoint;

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
    for product in products {
        let weight = product.weight;
        weight.check();
        assert_eq!(x.len(), rows * weight.cols, "activations of {rows} rows");
        assert_eq!(product.out.len(), rows * weight.rows, "outputs of {rows} rows");
        let out = Disjoint::new(product.out);
        exec.pool.for_ranges(weight.rows, 1, &|outputs| {
            exec.isa.run(scalar::Outputs { x, rows, weight, outputs, out: &out });
        });
    }
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
