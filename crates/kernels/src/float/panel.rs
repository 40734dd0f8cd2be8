//! What one thread computes at a time: some outputs of one product, for every row.

use super::tile::{self, E4m3, Operands, Plain, Weights};
use super::{FloatMatrix, FloatType, SCALE_GROUP, scalar};
use crate::disjoint::Disjoint;
use crate::simd::{Kernel, Simd};
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of weights that a panel reads where they are read once, from memory.
const STREAM_BYTES: usize = 32 << 10;
/// Bytes of a panel widened to f32, which is read again for each tile of rows: a part of the second-level cache.
const WIDE_BYTES: usize = 512 << 10;
/// Columns of a tile of rows that stay in the first-level cache while the outputs pass by; a multiple of 16.
const DEPTH: usize = 1024;
/// The most outputs of a panel with more columns: their lanes wait in the first-level cache too.
const DEEP_OUTPUTS: usize = 64;

/// The outputs `outputs` of every row.
pub(super) struct Panel<'a> {
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
    pub(super) weight: FloatMatrix<'a>,
    pub(super) outputs: Range<usize>,
    /// `[rows][weight.rows]`; only the columns `outputs` are written here.
    pub(super) out: &'a Disjoint<'a, f32>,
    /// `scratch_len` floats, 64-aligned.
    pub(super) scratch: &'a mut [f32],
}

/// How many outputs a panel should have.
pub(super) fn outputs(weight: &FloatMatrix<'_>, rows: usize) -> usize {
    let cols = weight.cols.max(1);
    let outputs = if !widens(rows) {
        STREAM_BYTES / weight.ty.bytes() / cols
    } else if cols > DEPTH {
        (WIDE_BYTES / size_of::<f32>() / cols).min(DEEP_OUTPUTS)
    } else {
        WIDE_BYTES / size_of::<f32>() / cols
    };
    outputs.max(1)
}

/// Floats of scratch for a panel of `outputs` outputs.
pub(super) fn scratch_len(weight: &FloatMatrix<'_>, rows: usize, outputs: usize) -> usize {
    if widens(rows) { outputs * padded(weight.cols) + lanes_len(weight.cols, outputs) } else { 0 }
}

/// Of it, floats for the lanes of one tile of rows between two ranges of columns.
fn lanes_len(cols: usize, outputs: usize) -> usize {
    // A tile has at least two outputs.
    if cols > DEPTH { outputs.div_ceil(2) * tile::LANES } else { 0 }
}

/// Whether the weights are widened to f32 once, for several tiles of rows.
fn widens(rows: usize) -> bool {
    rows > tile::ROWS
}

fn padded(cols: usize) -> usize {
    cols.next_multiple_of(16)
}

impl Kernel for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        scalar::outputs(self.x, self.rows, &self.weight, self.outputs, self.out);
    }

    #[inline(always)]
    fn simd<S: Simd>(self, simd: S) {
        let start = self.weight.data.as_ptr();
        match self.weight.ty {
            FloatType::F32 => self.with(simd, Plain::<f32>(start.cast())),
            FloatType::F16 => self.with(simd, Plain::<f16>(start.cast())),
            FloatType::Bf16 => self.with(simd, Plain::<bf16>(start.cast())),
            FloatType::E4m3 => {
                let scales = self.weight.scales.as_ptr();
                self.with(simd, E4m3 { codes: start, scales });
            }
        }
    }
}

impl Panel<'_> {
    /// `weights` points to the first element of the matrix.
    #[inline(always)]
    fn with<S: Simd, W: Weights>(self, simd: S, weights: W) {
        let cols = self.weight.cols;
        // SAFETY: the matrix holds `weight.rows * cols` elements, checked by `matmul`.
        let first = unsafe { weights.at(self.outputs.start * cols) };
        if !widens(self.rows) {
            // SAFETY: `outputs` rows of `cols` elements lie from `first` on.
            return unsafe { self.tiles(simd, first, cols, cols, std::ptr::null_mut()) };
        }
        let stride = padded(cols);
        let (wide, lanes) = self.scratch.split_at_mut(self.outputs.len() * stride);
        for (row, wide) in wide.chunks_exact_mut(stride).enumerate() {
            // SAFETY: as above; `row` is less than the number of outputs.
            unsafe { widen(simd, first.at(row * cols), cols, wide) };
        }
        let (wide, lanes) = (Plain(wide.as_ptr()), lanes.as_mut_ptr());
        let ranges = cols.div_ceil(DEPTH).max(1);
        let depth = cols.div_ceil(ranges).next_multiple_of(16);
        // SAFETY: the scratch holds `outputs` rows of `stride` elements, and their lanes.
        unsafe { self.tiles(simd, wide, stride, depth, lanes) };
    }

    /// # Safety
    /// `outputs.len()` rows of `cols` elements, `stride` apart, are readable from `first` on. `lanes` points to
    /// `lanes_len` floats if `depth` is less than `cols`; it is a multiple of 16 then.
    #[inline(always)]
    unsafe fn tiles<S: Simd, W: Weights>(
        &self,
        simd: S,
        first: W,
        stride: usize,
        depth: usize,
        lanes: *mut f32,
    ) {
        let Self { x, rows, weight, outputs, out, .. } = self;
        let (cols, width) = (weight.cols, weight.rows);
        let mut row = 0;
        while row < *rows {
            // Tiles of nearly the same number of rows.
            let left = rows - row;
            let tile_rows = left.div_ceil(left.div_ceil(tile::max_rows::<S>()));
            let step = tile::outputs::<S>(tile_rows);
            let x = x[row * cols..][..tile_rows * cols].as_ptr();
            for start in (0..cols.max(1)).step_by(depth.max(1)) {
                let columns = start..cols.min(start + depth);
                for (index, output) in (0..outputs.len()).step_by(step).enumerate() {
                    let count = step.min(outputs.len() - output);
                    // SAFETY: by this function's contract; `x` holds `tile_rows` rows.
                    let sums = unsafe {
                        let operands = Operands { x, w: first.at(output * stride), cols, stride };
                        let lanes = lanes.wrapping_add(index * tile::LANES);
                        tile::tile(simd, operands, tile_rows, count, columns.clone(), lanes)
                    };
                    if columns.end < cols {
                        continue;
                    }
                    for (r, sums) in sums.iter().enumerate().take(tile_rows) {
                        let at = (row + r) * width + outputs.start + output;
                        // SAFETY: each output of each row belongs to one panel.
                        let out = unsafe { out.part(at..at + count) };
                        // Whole tiles are one store; the rest is rare.
                        match out.as_mut_array() {
                            Some(whole) => *whole = *sums,
                            None => out.iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum),
                        }
                    }
                }
            }
            row += tile_rows;
        }
    }
}

/// Writes `cols` elements to `wide`, and zeros up to its end.
///
/// # Safety
/// `cols` elements are readable from `from` on.
#[inline(always)]
unsafe fn widen<S: Simd, W: Weights>(simd: S, from: W, cols: usize, wide: &mut [f32]) {
    let whole = cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        // SAFETY: `wide` is at least `cols` long; readable by this function's contract.
        unsafe { simd.store(wide[k..k + 16].as_mut_ptr(), from.load(simd, k)) };
    }
    if whole < cols {
        // SAFETY: `wide` is padded to whole lanes; `cols - whole` elements are readable.
        unsafe {
            simd.store(wide[whole..whole + 16].as_mut_ptr(), from.load_tail(simd, whole, cols - whole))
        };
    }
}

const _: () = assert!(SCALE_GROUP.is_multiple_of(16), "a load of 16 has one scale");
