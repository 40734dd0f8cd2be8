//! What one thread computes at a time: some outputs of one product, for every row.

use super::tile::{self, E4m3, Operands, Plain, Weights};
use super::{FloatMatrix, FloatType, SCALE_GROUP, scalar};
use crate::disjoint::Disjoint;
use crate::simd::{Kernel, Simd};
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of weights that a panel of one tile of rows reads, once, from memory.
const STREAM_BYTES: usize = 32 << 10;
/// How many elements ahead they are asked for where four outputs do not fit in the first-level cache.
const AHEAD: usize = 512;
/// Elements of a panel that is read again for each tile of rows: as f32 a part of the second-level cache.
const PANEL_ELEMENTS: usize = 256 << 10;
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
    let outputs = if rows <= tile::ROWS {
        STREAM_BYTES / weight.ty.bytes() / cols
    } else if cols > DEPTH {
        (PANEL_ELEMENTS / cols).min(DEEP_OUTPUTS)
    } else {
        PANEL_ELEMENTS / cols
    };
    outputs.max(1)
}

/// Floats of scratch for a panel of `outputs` outputs.
pub(super) fn scratch_len(weight: &FloatMatrix<'_>, rows: usize, outputs: usize) -> usize {
    wide_len(weight, rows, outputs) + lanes_len(weight.cols, rows, outputs)
}

/// Of it, floats for the weights widened once, where there are enough rows to pay for it.
fn wide_len(weight: &FloatMatrix<'_>, rows: usize, outputs: usize) -> usize {
    let pays = match weight.ty {
        FloatType::F32 => false,
        FloatType::F16 | FloatType::Bf16 => rows > 4 * tile::ROWS,
        FloatType::E4m3 => rows > tile::ROWS,
    };
    if pays { outputs * padded(weight.cols) } else { 0 }
}

/// Of it, floats for the lanes of one tile of rows between two ranges of columns.
fn lanes_len(cols: usize, rows: usize, outputs: usize) -> usize {
    // A tile has at least two outputs.
    if rows > tile::ROWS && cols > DEPTH { outputs.div_ceil(2) * tile::LANES } else { 0 }
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
        let Self { rows, weight, .. } = self;
        let (cols, outputs) = (weight.cols, self.outputs.len());
        // SAFETY: the matrix holds `weight.rows * cols` elements, checked by `matmul`.
        let first = unsafe { weights.at(self.outputs.start * cols) };
        let (wide, lanes) = self.scratch.split_at_mut(wide_len(&weight, rows, outputs));
        let depth = if lanes.is_empty() { cols } else { cols.div_ceil(cols.div_ceil(DEPTH)) };
        let (depth, lanes) = (depth.next_multiple_of(16), lanes.as_mut_ptr());
        if wide.is_empty() {
            // The next tile's weights, or this one's where a tile is too long for the first-level cache.
            let tile = tile::OUTPUTS * cols;
            let ahead = if tile * weight.ty.bytes() <= STREAM_BYTES / 2 { tile } else { AHEAD };
            let layout = Layout { stride: cols, depth, ahead };
            // SAFETY: `outputs` rows of `cols` elements lie from `first` on; the scratch has room for the lanes.
            return unsafe { self.tiles(simd, first, layout, lanes) };
        }
        let stride = padded(cols);
        for (row, wide) in wide.chunks_exact_mut(stride).enumerate() {
            // SAFETY: as above; `row` is less than the number of outputs.
            unsafe { widen(simd, first.at(row * cols), cols, wide) };
        }
        let wide = Plain(wide.as_ptr());
        // SAFETY: the scratch holds `outputs` rows of `stride` elements, and their lanes.
        unsafe { self.tiles(simd, wide, Layout { stride, depth, ahead: 0 }, lanes) };
    }

    /// # Safety
    /// `outputs.len()` rows of `cols` elements, `stride` apart, are readable from `first` on. `lanes` points to
    /// `lanes_len` floats if `depth` is less than `cols`; it is a multiple of 16 then.
    #[inline(always)]
    unsafe fn tiles<S: Simd, W: Weights>(&self, simd: S, first: W, layout: Layout, lanes: *mut f32) {
        let (rows, cols, outputs) = (self.rows, self.weight.cols, self.outputs.len());
        let Layout { stride, depth, mut ahead } = layout;
        let mut row = 0;
        while row < rows {
            // Tiles of nearly the same number of rows.
            let tile_rows = (rows - row).div_ceil((rows - row).div_ceil(tile::max_rows::<S>()));
            let step = tile::outputs::<S>(tile_rows);
            let x = self.x[row * cols..][..tile_rows * cols].as_ptr();
            for start in (0..cols.max(1)).step_by(depth.max(1)) {
                let columns = start..cols.min(start + depth);
                let last = columns.end == cols;
                let next_row = if last { row + tile_rows } else { row };
                let next_column = if last { 0 } else { columns.end };
                let next =
                    (next_row..rows.min(next_row + tile_rows), next_column..cols.min(next_column + depth));
                for (index, output) in (0..outputs).step_by(step).enumerate() {
                    let count = step.min(outputs - output);
                    // SAFETY: by this function's contract; `x` holds `tile_rows` rows.
                    let sums = unsafe {
                        let operands = Operands { x, w: first.at(output * stride), cols, stride, ahead };
                        let lanes = lanes.wrapping_add(index * tile::LANES);
                        tile::tile(simd, operands, tile_rows, count, columns.clone(), lanes)
                    };
                    self.prefetch(simd, &next, output, step);
                    if last {
                        self.write(&sums[..tile_rows], row, output, count);
                    }
                }
            }
            // Once read, the weights are near.
            ahead = 0;
            row += tile_rows;
        }
    }

    /// Puts the first `count` sums of each row of a tile in their places.
    #[inline(always)]
    fn write(&self, sums: &[[f32; tile::OUTPUTS]], row: usize, output: usize, count: usize) {
        for (r, sums) in sums.iter().enumerate() {
            let at = (row + r) * self.weight.rows + self.outputs.start + output;
            // SAFETY: each output of each row belongs to one panel.
            let out = unsafe { self.out.part(at..at + count) };
            // Whole tiles are one store; the rest is rare.
            match out.as_mut_array() {
                Some(whole) => *whole = *sums,
                None => out.iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum),
            }
        }
    }

    /// While a tile is computed, asks for a share of the activations that come `next`, rows and columns, and for
    /// where their outputs go.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, next: &(Range<usize>, Range<usize>), output: usize, step: usize) {
        const LINE: usize = 64 / size_of::<f32>();
        let (rows, columns) = next;
        let row_lines = columns.len().div_ceil(LINE);
        let (lines, outputs) = (rows.len() * row_lines, self.outputs.len());
        for line in lines * output / outputs..lines * (output + step) / outputs {
            let (row, line) = (rows.start + line / row_lines, line % row_lines);
            let at = row * self.weight.cols + columns.start + line * LINE;
            simd.prefetch(self.x.as_ptr().wrapping_add(at).cast());
        }
        if columns.start == 0 {
            for row in rows.clone() {
                let at = row * self.weight.rows + self.outputs.start + output;
                simd.prefetch(self.out.address(at).cast());
            }
        }
    }
}

/// How a panel's weights are read.
#[derive(Clone, Copy)]
struct Layout {
    /// Elements from one output's weights to the next one's.
    stride: usize,
    /// Columns read for all outputs before the next ones.
    depth: usize,
    /// How many elements ahead weights are asked for; 0: not at all.
    ahead: usize,
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
