//! AMX int8 for many rows: tiles of 16 rows x 16 outputs.
//!
//! Packed weights of some blocks of outputs and some inputs are expanded into a panel of int8 tiles, which all
//! rows of a pass then use. The integer sums come out of the tiles, the float part is the same as everywhere.
//! Between panels the results of a pass rest in a dense scratch.

mod plain;
mod super_blocks;
mod tile;
mod weights;

use super::activations::{Activations, SPAN, Tile};
use super::format::{Kind, LANES, Layout};
use super::{Blocks, Out, QuantMatrix};
use crate::AlignedBytes;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

/// Inputs of a panel of a plain format, at most; 256 for super-blocks. The digits of a tile of rows then stay in the
/// first cache.
const PANEL_INPUTS: usize = 640;

/// The same times the rows where weights rest nowhere.
const RING_DIGITS: usize = 10240;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;

/// Rows of the one or two tiles for which weights are not kept.
const FEW_ROWS: usize = 2 * ROWS;

/// The smallest number of rows that is faster here than with VNNI, for weights that come from memory.
pub(super) const MIN_ROWS: usize = 5;

/// Both digits of so few rows are one tile, the low ones behind the high ones.
const fn stacked(padded: usize) -> bool {
    padded <= 8
}

/// How much is done with one panel.
struct Blocking {
    /// Blocks of 16 outputs in a panel.
    blocks: usize,
    /// Tiles of rows that pass over a panel before the next one is expanded.
    tiles: usize,
    /// Inputs of a panel of a plain format, at most.
    inputs: usize,
    /// The panel is a ring that the kernel fills as it goes, between its products.
    ring: bool,
}

impl Blocking {
    /// Weights of the usual formats rest nowhere where one or two tiles need them: the second takes them from the second
    /// cache, packed. Others are used at once with so few rows, while their panel is in the first cache; with many rows it
    /// fills the second.
    fn of(input: &Activations, layout: &Layout) -> Self {
        match input.rows() {
            rows @ 1..=FEW_ROWS if layout.kind == Kind::Plain && plain::fills(layout) => {
                let blocks = if rows > ROWS { 16 } else { 32 };
                Self { blocks, tiles: 2, inputs: RING_DIGITS / rows.min(ROWS), ring: true }
            }
            0..=FEW_ROWS => Self { blocks: 1, tiles: 2, inputs: PANEL_INPUTS, ring: false },
            _ => Self { blocks: 32, tiles: 16, inputs: PANEL_INPUTS, ring: false },
        }
    }
}

/// One pass of some tiles of rows, of equal shape, over a panel.
struct Pass<'a> {
    weight: &'a QuantMatrix,
    layout: &'a Layout,
    tiles: &'a [Tile<'a>],
    panel: *mut u8,
    /// The panel is a ring that is to be filled.
    ring: bool,
    blocks: Blocks,
    /// The steps (plain formats) or super-blocks of the panel.
    steps: Range<usize>,
    /// All of the row.
    all_steps: usize,
    /// Results of these tiles and blocks so far, [tile][block][row][16].
    sums: *mut f32,
    /// Floats from tile to tile in `sums`.
    tile_sums: usize,
    out: Out,
}

thread_local! {
    /// Panel and sums.
    static SCRATCH: RefCell<[AlignedBytes; 2]> = RefCell::new([AlignedBytes::zeroed(0), AlignedBytes::zeroed(0)]);
}

/// All rows of the result for the given blocks of outputs. The tiles have 16 rows, the last a multiple of 4.
///
/// # Safety
/// The CPU has AMX int8 and all of [`super::avx512`]; the blocks exist and belong to this thread.
pub(super) unsafe fn matmul(weight: &QuantMatrix, input: &Activations, blocks: Blocks, out: Out) {
    let layout = weight.layout();
    if blocks.is_empty() {
        return;
    }
    let blocking = Blocking::of(input, layout);
    // Steps of the whole row and of a panel, bytes of a step and block in the panel.
    let (all, per_panel, step_bytes) = match layout.kind {
        Kind::Plain => {
            let inputs = panel_inputs(weight.cols(), blocking.inputs);
            let steps = weight.units() * (layout.unit / layout.step);
            (steps, inputs / layout.step, weights::panel_step(layout.step))
        }
        Kind::Super => (weight.units(), 1, super_blocks::PANEL_STEP),
    };
    SCRATCH.with_borrow_mut(|[panel, sums]| {
        let tile_sums = blocking.blocks * ROWS * LANES;
        let slots = if blocking.ring { weights::RING } else { blocking.blocks * per_panel };
        // And what a kernel multiplies beyond the last step.
        reserve(panel, (slots + 2) * step_bytes);
        reserve(sums, blocking.tiles * tile_sums * 4);
        let (panel, sums) = (panel.as_mut_ptr(), sums.as_mut_ptr().cast::<f32>());
        let mut shape = 0;
        for tiles in chunks(0..input.tiles(), blocking.tiles) {
            let tiles: Vec<Tile<'_>> = tiles.map(|tile| input.tile(tile)).collect();
            for blocks in chunks(blocks.clone(), blocking.blocks) {
                for steps in chunks(0..all, per_panel) {
                    // SAFETY: the panel has room for these blocks and steps, the sums for the tiles and blocks.
                    unsafe {
                        match layout.kind {
                            Kind::Plain if blocking.ring => {}
                            Kind::Plain => weights::expand(weight, blocks.clone(), steps.clone(), panel),
                            Kind::Super => super_blocks::expand(weight, blocks.clone(), steps.start, panel),
                        }
                        let mut sums = sums;
                        for tiles in equal_pairs(&tiles) {
                            if tiles[0].padded != shape {
                                shape = tiles[0].padded;
                                let rows = shape << u32::from(stacked(shape));
                                tile::configure(
                                    rows,
                                    if layout.kind == Kind::Plain { layout.step } else { 64 },
                                );
                            }
                            let pass = Pass {
                                weight,
                                layout,
                                tiles,
                                panel,
                                ring: blocking.ring,
                                blocks: blocks.clone(),
                                steps: steps.clone(),
                                all_steps: all,
                                sums,
                                tile_sums,
                                out,
                            };
                            match layout.kind {
                                Kind::Plain => plain::run(&pass),
                                Kind::Super => super_blocks::run(&pass),
                            }
                            sums = sums.add(tiles.len() * tile_sums);
                        }
                    }
                }
            }
        }
    });
    // SAFETY: the CPU has AMX.
    unsafe { tile::release() };
}

/// Inputs of a panel, of at most `most` where a row of `cols` needs several: whole spans, and as even as they can be, since
/// a short panel costs nearly as much as a long one.
fn panel_inputs(cols: usize, most: usize) -> usize {
    let spans = cols.div_ceil(SPAN);
    if cols <= most { spans * SPAN } else { spans.div_ceil(spans.div_ceil((most / SPAN).max(1))) * SPAN }
}

fn reserve(buffer: &mut AlignedBytes, len: usize) {
    if buffer.len() < len {
        *buffer = AlignedBytes::zeroed(len);
    }
}

/// Cuts a range into pieces of `size`, the last perhaps shorter; an empty range gives one empty piece.
fn chunks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = range.len().div_ceil(size).max(1);
    (0..pieces).map(move |i| {
        let start = range.start + i * size;
        start..range.end.min(start + size)
    })
}

/// Tiles two by two, as far as they have the same number of rows in memory.
fn equal_pairs<'a>(tiles: &'a [Tile<'a>]) -> impl Iterator<Item = &'a [Tile<'a>]> {
    tiles.chunk_by(|a, b| a.padded == b.padded).flat_map(|equal| equal.chunks(2))
}

impl Pass<'_> {
    /// The results of a row of a tile before `step`, the first of a span, for the `index`th block of the panel.
    ///
    /// # Safety
    /// Tile, row and block are of the pass; `R` are the rows in memory.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load<const R: usize>(&self, tile: usize, index: usize, row: usize, step: usize) -> __m512 {
        if step == 0 {
            return _mm512_setzero_ps();
        }
        // SAFETY: by the caller's word.
        unsafe { _mm512_load_ps(self.sums.add(tile * self.tile_sums + (index * R + row) * LANES)) }
    }

    /// Keeps the results of a row up to `step`, or writes them out if that is the end of the row.
    ///
    /// # Safety
    /// As [`Pass::load`]; the block belongs to this thread.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn store<const R: usize>(
        &self,
        tile: usize,
        index: usize,
        row: usize,
        step: usize,
        values: __m512,
    ) {
        let (first, rows) = (self.tiles[tile].first, self.tiles[tile].rows);
        // SAFETY: by the caller's word.
        unsafe {
            if step < self.all_steps {
                _mm512_store_ps(self.sums.add(tile * self.tile_sums + (index * R + row) * LANES), values);
            } else if row < rows {
                super::avx512::store(self.out, first + row, self.blocks.start + index, values);
            }
        }
    }
}
