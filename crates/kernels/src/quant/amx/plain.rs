//! Formats with plain scales: one product of K = 16, 32 or 64 for each step and digit.

use super::super::activations::{STRIDE, WORDS, Word};
use super::super::code;
use super::super::format::{LANES, Layout};
use super::weights::{Expanded, Expander, LEAD, Slots, Weights};
use super::{Pass, tile};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// One pass.
///
/// # Safety
/// As [`super::matmul`]; the panel holds the blocks and steps of the pass, the tiles are configured for it.
pub(super) unsafe fn run<'a>(pass: &Pass<'a>) {
    fn expanded<'a, const R: usize>(affine: bool, narrow: bool) -> Kernel<'a> {
        match (affine, narrow) {
            (false, false) => kernel::<R, false, false, Expanded>,
            (false, true) => kernel::<R, false, true, Expanded>,
            (true, false) => kernel::<R, true, false, Expanded>,
            (true, true) => kernel::<R, true, true, Expanded>,
        }
    }
    let (layout, padded) = (pass.layout, pass.tiles[0].padded);
    let kernel = filling(layout, padded).filter(|_| pass.ring).unwrap_or_else(|| match padded {
        4 => expanded::<4>(layout.affine, narrow(layout)),
        8 => expanded::<8>(layout.affine, narrow(layout)),
        12 => expanded::<12>(layout.affine, narrow(layout)),
        _ => expanded::<16>(layout.affine, narrow(layout)),
    });
    for tile in 0..pass.tiles.len() {
        // SAFETY: by the caller's word.
        unsafe { kernel(pass, tile) }
    }
}

/// One tile of a pass.
type Kernel<'a> = unsafe fn(&Pass<'a>, usize);

/// Sums of high digits fit an i16.
fn narrow(layout: &Layout) -> bool {
    layout.largest_value() * 127 * layout.step as i32 <= i32::from(i16::MAX)
}

/// The kernel that fills the panel, a ring, as it goes; for the usual formats.
pub(super) fn filling<'a>(layout: &Layout, padded: usize) -> Option<Kernel<'a>> {
    fn of<'a, const NARROW: bool, const CODE: u8, const STEP: usize>(
        affine: bool,
        padded: usize,
    ) -> Option<Kernel<'a>> {
        Some(match (padded, affine) {
            (8, false) => kernel::<8, false, NARROW, Expander<'_, CODE, STEP>>,
            (8, true) => kernel::<8, true, NARROW, Expander<'_, CODE, STEP>>,
            (12, false) => kernel::<12, false, NARROW, Expander<'_, CODE, STEP>>,
            (12, true) => kernel::<12, true, NARROW, Expander<'_, CODE, STEP>>,
            (16, false) => kernel::<16, false, NARROW, Expander<'_, CODE, STEP>>,
            (16, true) => kernel::<16, true, NARROW, Expander<'_, CODE, STEP>>,
            _ => return None,
        })
    }
    match (code::of(layout), layout.step, narrow(layout)) {
        (4, 32, true) => of::<true, 4, 32>(layout.affine, padded),
        (4, 64, false) => of::<false, 4, 64>(layout.affine, padded),
        (8, 32, false) => of::<false, 8, 32>(layout.affine, padded),
        (8, 64, false) => of::<false, 8, 64>(layout.affine, padded),
        _ => None,
    }
}

/// Both digits of so few rows are one tile, the low ones behind the high ones.
pub(super) const fn stacked(padded: usize) -> bool {
    padded <= 8
}

/// Sums of two steps, each of high and low digits, [row][16].
#[repr(align(64))]
struct Ring([[i32; 512]; 2]);

/// A pipeline over the steps of all blocks: while the float part of one step runs, the sums of the next are stored
/// and the products of the one after are issued, spread between the rows.
///
/// # Safety
/// As [`run`]; R is the padded number of rows, NARROW is [`narrow`], W fits the layout and the panel's state.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,gfni")]
unsafe fn kernel<'a, const R: usize, const AFFINE: bool, const NARROW: bool, W: Weights<'a>>(
    pass: &Pass<'a>,
    tile: usize,
) {
    let mut ring = MaybeUninit::<Ring>::uninit();
    // SAFETY: the place exists; what is in it is written before it is read.
    let [even, odd] = unsafe { [0, 1].map(|half| (&raw mut (*ring.as_mut_ptr()).0[half]).cast::<i32>()) };
    let (step, slots) = (pass.layout.step, Slots::of(pass));
    let mut weights = W::of(pass);
    let mut ahead = Ahead::<R>::new(pass, tile);
    let mut slot = slots.first;
    // SAFETY: all steps of the pipeline are in the panel and the tile, by the caller's word.
    unsafe {
        for _ in 0..3 + LEAD {
            weights.next();
        }
        ahead.load_weights();
        ahead.high::<0>();
        ahead.low::<1>();
        ahead.next();
        ahead.load_weights();
        ahead.high::<2>();
        ahead.low::<3>();
        ahead.next();
        tile::store::<0>(even);
        if !stacked(R) {
            tile::store::<1>(even.add(256));
        }
        let mut is_odd = false;
        for block in 0..pass.blocks.len() {
            let mut acc = [_mm512_setzero_ps(); R];
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = pass.load::<R>(tile, block, row);
            }
            let mut words =
                pass.tiles[tile].words.as_ptr().add(pass.steps.start * WORDS * R * 4).cast::<f32>();
            for _ in pass.steps.clone() {
                let scales = slot.add(step * LANES).cast::<f32>();
                if is_odd {
                    advance::<R, AFFINE, NARROW, 2, 3, 0, 1>(ahead, odd, even, scales, words, &mut acc);
                } else {
                    advance::<R, AFFINE, NARROW, 0, 1, 2, 3>(ahead, even, odd, scales, words, &mut acc);
                }
                weights.next();
                ahead.next();
                slot = slots.after(slot);
                words = words.add(WORDS * R);
                is_odd = !is_odd;
            }
            for (row, acc) in acc.into_iter().enumerate() {
                pass.store::<R>(tile, block, row, acc);
            }
        }
    }
}

/// Operands of the step whose products are to be issued next; past the last step no blocks are left.
#[derive(Clone, Copy)]
struct Ahead<const R: usize> {
    /// Blocks that have steps to come, and the steps of the first of them.
    blocks: usize,
    left: usize,
    weights: *const u8,
    /// The digits of the step, and of the first one of a block.
    digits: *const u8,
    first: *const u8,
    step: usize,
    steps: usize,
    slots: Slots,
}

impl<const R: usize> Ahead<R> {
    #[inline(always)]
    fn new(pass: &Pass<'_>, tile: usize) -> Self {
        let (step, steps, slots) = (pass.layout.step, pass.steps.len(), Slots::of(pass));
        let input = pass.steps.start * step;
        let first = pass.tiles[tile].digits.as_ptr();
        let first = first.wrapping_add(input / STRIDE * 2 * R * STRIDE + input % STRIDE);
        let blocks = if steps > 0 { pass.blocks.len() } else { 0 };
        Self { blocks, left: steps, weights: slots.first, digits: first, first, step, steps, slots }
    }

    #[inline(always)]
    fn next(&mut self) {
        self.weights = self.slots.after(self.weights.cast_mut());
        self.digits = self.digits.wrapping_add(self.step);
        // The tile begins with a stride.
        if self.digits.addr().is_multiple_of(STRIDE) {
            self.digits = self.digits.wrapping_add((2 * R - 1) * STRIDE);
        }
        self.left = self.left.wrapping_sub(1);
        if self.left == 0 {
            (self.digits, self.left) = (self.first, self.steps);
            self.blocks = self.blocks.saturating_sub(1);
        }
    }

    #[inline(always)]
    unsafe fn load_weights(self) {
        if self.blocks > 0 {
            // SAFETY: by the caller's word.
            unsafe { tile::load::<6>(self.weights) };
        }
    }

    /// The product of the high digits into tile H, or of both digits.
    #[inline(always)]
    unsafe fn high<const H: u8>(self) {
        if self.blocks > 0 {
            // SAFETY: by the caller's word.
            unsafe {
                tile::load::<4>(self.digits);
                tile::zero::<H>();
                tile::multiply::<H, 4, 6, true>();
            }
        }
    }

    /// The product of the low digits into tile L.
    #[inline(always)]
    unsafe fn low<const L: u8>(self) {
        if self.blocks > 0 && !stacked(R) {
            // SAFETY: by the caller's word.
            unsafe {
                tile::load::<5>(self.digits.add(R * STRIDE));
                tile::zero::<L>();
                tile::multiply::<L, 5, 6, true>();
            }
        }
    }
}

/// One step of the pipeline: products of the step ahead into tiles H and L, tiles NH and NL to `next`, the float
/// part of `sums`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn advance<
    const R: usize,
    const AFFINE: bool,
    const NARROW: bool,
    const H: u8,
    const L: u8,
    const NH: u8,
    const NL: u8,
>(
    ahead: Ahead<R>,
    sums: *const i32,
    next: *mut i32,
    scales: *const f32,
    words: *const f32,
    acc: &mut [__m512; R],
) {
    // SAFETY: by the caller's word.
    unsafe {
        ahead.load_weights();
        rows::<R, 0, AFFINE, NARROW>(sums, scales, words, acc);
        ahead.high::<H>();
        tile::store::<NH>(next);
        rows::<R, 1, AFFINE, NARROW>(sums, scales, words, acc);
        rows::<R, 2, AFFINE, NARROW>(sums, scales, words, acc);
        ahead.low::<L>();
        if !stacked(R) {
            tile::store::<NL>(next.add(256));
        }
        rows::<R, 3, AFFINE, NARROW>(sums, scales, words, acc);
    }
}

/// The float part of a step for a quarter of the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn rows<const R: usize, const QUARTER: usize, const AFFINE: bool, const NARROW: bool>(
    sums: *const i32,
    scales: *const f32,
    words: *const f32,
    acc: &mut [__m512; R],
) {
    // SAFETY: by the caller's word.
    unsafe {
        let s = _mm512_load_ps(scales);
        let c = _mm512_load_ps(scales.add(LANES));
        let quarter = const { R * QUARTER / 4..R * (QUARTER + 1) / 4 };
        for (row, acc) in quarter.clone().zip(&mut acc[quarter]) {
            let high = sums.add(row * LANES);
            let low = sums.add(const { if stacked(R) { R * LANES } else { 256 } } + row * LANES);
            let low = _mm512_load_si512(low.cast());
            let sum = if NARROW {
                add_256(low, high)
            } else {
                _mm512_add_epi32(_mm512_slli_epi32::<8>(_mm512_load_si512(high.cast())), low)
            };
            let sum = _mm512_cvtepi32_ps(sum);
            let a = _mm512_set1_ps(*words.add(Word::Scale as usize * R + row));
            *acc = _mm512_fmadd_ps(_mm512_mul_ps(s, a), sum, *acc);
            if AFFINE {
                let a_sum = _mm512_set1_ps(*words.add(Word::Sum as usize * R + row));
                *acc = _mm512_fmadd_ps(c, a_sum, *acc);
            }
        }
    }
}

/// low + 256·high for lanes of `high` whose lower half is all of them. The intrinsic would become two operations.
///
/// # Safety
/// `high` has 16 values, aligned.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
unsafe fn add_256(mut low: __m512i, high: *const i32) -> __m512i {
    // SAFETY: reads what the caller says; the function's features have the instruction.
    unsafe {
        asm!("vpdpwssd {low}, {by}, [{high}]", low = inout(zmm_reg) low, high = in(reg) high,
            by = in(zmm_reg) _mm512_set1_epi32(256), options(pure, readonly, nostack, preserves_flags));
    }
    low
}
