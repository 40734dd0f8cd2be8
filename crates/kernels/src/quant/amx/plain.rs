//! Formats with plain scales: one product of K = 16, 32 or 64 for each step and digit.

use super::super::activations::{STRIDE, WORDS, Word};
use super::super::avx512::{decode, fetch_ahead, scales};
use super::super::code;
use super::super::format::{CHUNK, LANES, Layout};
use super::super::{Blocks, QuantMatrix};
use super::{Pass, tile};
use std::arch::x86_64::*;
use std::ops::Range;

/// Bytes of one step of a block in the panel: the tile of v, 16 s and 16 c in f32.
pub(super) const fn panel_step(step: usize) -> usize {
    step * LANES + 128
}

/// Fills the panel, [block][step].
///
/// # Safety
/// As [`super::matmul`]; `panel` has room, the steps begin with a unit.
pub(super) unsafe fn expand(weight: &QuantMatrix, blocks: Blocks, steps: Range<usize>, panel: *mut u8) {
    let layout = weight.layout();
    let expand = match (code::of(layout), layout.step) {
        (2, 32) => expand_steps::<2, 32>,
        (2, _) => expand_steps::<2, 64>,
        (3, 32) => expand_steps::<3, 32>,
        (3, _) => expand_steps::<3, 64>,
        (4, 32) => expand_steps::<4, 32>,
        (4, _) => expand_steps::<4, 64>,
        (5, 32) => expand_steps::<5, 32>,
        (5, _) => expand_steps::<5, 64>,
        (6, 32) => expand_steps::<6, 32>,
        (6, _) => expand_steps::<6, 64>,
        (8, 32) => expand_steps::<8, 32>,
        (8, _) => expand_steps::<8, 64>,
        (code::E2M1_16, _) => expand_steps::<{ code::E2M1_16 }, 16>,
        _ => expand_steps::<{ code::E2M1_32 }, 32>,
    };
    for (i, block) in blocks.enumerate() {
        // SAFETY: by the caller's word.
        unsafe { expand(weight, block, steps.clone(), panel.add(i * steps.len() * panel_step(layout.step))) };
    }
}

/// # Safety
/// As [`expand`], for one block; CODE and STEP are those of the layout.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn expand_steps<const CODE: u8, const STEP: usize>(
    weight: &QuantMatrix,
    block: usize,
    steps: Range<usize>,
    mut to: *mut u8,
) {
    let layout = weight.layout();
    let zero = _mm512_set1_epi8(layout.zero as i8);
    let middle = _mm512_set1_ps(layout.zero as f32);
    let steps_a_unit = layout.unit / STEP;
    // Both steps of a group of 128 have the same scale.
    let scale_bytes = if layout.group > STEP { 0 } else { LANES * layout.scale.bytes() };
    let mut unit = weight.strip(block).wrapping_add(steps.start / steps_a_unit * layout.block);
    for first in steps.clone().step_by(steps_a_unit) {
        let (mut at, mut scale) = (unit, 0);
        for step in first..steps.end.min(first + steps_a_unit) {
            // SAFETY: the step lies in this unit of the block; everything is where the layout says; the panel has
            // a slot for it.
            unsafe {
                let (s_at, b_at) = (unit.add(layout.scales_at + scale), unit.add(layout.biases_at + scale));
                fetch_ahead(at, const { 2 * STEP * code::bits(CODE) });
                fetch_ahead(s_at, 1);
                fetch_ahead(b_at, 1);
                if STEP < CHUNK {
                    let codes = decode::<CODE>(at);
                    let second = (step - first) % 2 == 1;
                    store_codes(if second { &codes[4..] } else { &codes[..4] }, zero, to);
                    at = at.add(if second { const { 64 * code::bits(CODE) } } else { 0 });
                } else {
                    for chunk in 0..STEP / CHUNK {
                        store_codes(&decode::<CODE>(at), zero, to.add(chunk * CHUNK * LANES));
                        at = at.add(const { 64 * code::bits(CODE) });
                    }
                }
                let floats = to.add(STEP * LANES).cast::<f32>();
                let s = scales::<CODE>(layout, s_at);
                _mm512_store_ps(floats, s);
                if layout.affine {
                    let b = scales::<CODE>(layout, b_at);
                    _mm512_store_ps(floats.add(LANES), _mm512_fmadd_ps(middle, s, b));
                }
                to = to.add(const { panel_step(STEP) });
                scale += scale_bytes;
            }
        }
        unit = unit.wrapping_add(layout.block);
    }
}

/// Writes v = code - zero as rows of a tile.
///
/// # Safety
/// `to` has 64 bytes for each vector.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn store_codes(codes: &[__m512i], zero: __m512i, to: *mut u8) {
    for (row, code) in codes.iter().enumerate() {
        // SAFETY: by the caller's word.
        unsafe { _mm512_store_si512(to.add(row * 64).cast(), _mm512_sub_epi8(*code, zero)) };
    }
}

/// One pass.
///
/// # Safety
/// As [`super::matmul`]; the panel holds the blocks and steps of the pass, the tiles are configured for it.
pub(super) unsafe fn run(pass: &Pass<'_>) {
    fn of<const R: usize>(affine: bool, narrow: bool) -> unsafe fn(&Pass<'_>, usize) {
        match (affine, narrow) {
            (false, false) => kernel::<R, false, false>,
            (false, true) => kernel::<R, false, true>,
            (true, false) => kernel::<R, true, false>,
            (true, true) => kernel::<R, true, true>,
        }
    }
    let Layout { affine, step, .. } = *pass.layout;
    let narrow = pass.layout.largest_value() * 127 * step as i32 <= i32::from(i16::MAX);
    let kernel = match pass.tiles[0].padded {
        4 => of::<4>(affine, narrow),
        8 => of::<8>(affine, narrow),
        12 => of::<12>(affine, narrow),
        _ => of::<16>(affine, narrow),
    };
    for tile in 0..pass.tiles.len() {
        // SAFETY: by the caller's word.
        unsafe { kernel(pass, tile) }
    }
}

/// Sums of two steps, each of high and low digits, [row][16].
#[repr(align(64))]
struct Ring([[i32; 512]; 2]);

/// A pipeline over the steps of all blocks: while the float part of one step runs, the sums of the next are stored
/// and the products of the one after are issued, spread between the rows.
///
/// # Safety
/// As [`run`]; R is the padded number of rows, NARROW says that sums of high digits fit an i16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn kernel<const R: usize, const AFFINE: bool, const NARROW: bool>(pass: &Pass<'_>, tile: usize) {
    let mut ring = Ring([[0; 512]; 2]);
    let [even, odd] = &mut ring.0;
    let (even, odd) = (even.as_mut_ptr(), odd.as_mut_ptr());
    let step = pass.layout.step;
    let slot = panel_step(step);
    let mut ahead = Ahead::<R>::new(pass, tile);
    // SAFETY: all steps of the pipeline are in the panel and the tile, by the caller's word.
    unsafe {
        ahead.load_weights();
        ahead.high::<0>();
        ahead.low::<1>();
        ahead.next(pass, slot);
        ahead.load_weights();
        ahead.high::<2>();
        ahead.low::<3>();
        ahead.next(pass, slot);
        tile::store::<0>(even);
        tile::store::<1>(even.add(256));
        let mut scales = pass.panel.add(step * LANES).cast::<f32>();
        let mut is_odd = false;
        for block in 0..pass.blocks.len() {
            let mut acc = [_mm512_setzero_ps(); R];
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = pass.load::<R>(tile, block, row);
            }
            let mut words =
                pass.tiles[tile].words.as_ptr().add(pass.steps.start * WORDS * R * 4).cast::<f32>();
            for _ in pass.steps.clone() {
                if is_odd {
                    advance::<R, AFFINE, NARROW, 2, 3, 0, 1>(ahead, odd, even, scales, words, &mut acc);
                } else {
                    advance::<R, AFFINE, NARROW, 0, 1, 2, 3>(ahead, even, odd, scales, words, &mut acc);
                }
                ahead.next(pass, slot);
                scales = scales.byte_add(slot);
                words = words.add(WORDS * R);
                is_odd = !is_odd;
            }
            for (row, acc) in acc.into_iter().enumerate() {
                pass.store::<R>(tile, block, row, acc);
            }
        }
    }
}

/// Operands of the step whose products are to be issued next; past the last step its flag is false.
#[derive(Clone, Copy)]
struct Ahead<const R: usize> {
    more: bool,
    input: usize,
    end: usize,
    blocks: usize,
    weights: *const u8,
    digits: *const u8,
}

impl<const R: usize> Ahead<R> {
    #[inline(always)]
    fn new(pass: &Pass<'_>, tile: usize) -> Self {
        let [input, end] = [pass.steps.start, pass.steps.end].map(|step| step * pass.layout.step);
        let blocks = pass.blocks.len();
        let digits = pass.tiles[tile].digits.as_ptr();
        Self { more: blocks > 0 && input < end, input, end, blocks, weights: pass.panel, digits }
    }

    #[inline(always)]
    fn next(&mut self, pass: &Pass<'_>, slot: usize) {
        self.weights = self.weights.wrapping_add(slot);
        self.input += pass.layout.step;
        if self.input == self.end {
            self.input = pass.steps.start * pass.layout.step;
            self.blocks -= usize::from(self.more);
            self.more = self.blocks > 0;
        }
    }

    #[inline(always)]
    unsafe fn load_weights(self) {
        if self.more {
            // SAFETY: by the caller's word.
            unsafe { tile::load::<6>(self.weights) };
        }
    }

    /// The product of the high digits into tile H.
    #[inline(always)]
    unsafe fn high<const H: u8>(self) {
        if self.more {
            let stride = self.input / STRIDE * 2 * R * STRIDE + self.input % STRIDE;
            // SAFETY: by the caller's word.
            unsafe {
                tile::load::<4>(self.digits.add(stride));
                tile::zero::<H>();
                tile::multiply::<H, 4, 6, true>();
            }
        }
    }

    /// The product of the low digits into tile L.
    #[inline(always)]
    unsafe fn low<const L: u8>(self) {
        if self.more {
            let stride = self.input / STRIDE * 2 * R * STRIDE + self.input % STRIDE;
            // SAFETY: by the caller's word.
            unsafe {
                tile::load::<5>(self.digits.add(stride + R * STRIDE));
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
        tile::store::<NL>(next.add(256));
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
            let high = _mm512_load_si512(sums.add(row * LANES).cast());
            let low = _mm512_load_si512(sums.add(256 + row * LANES).cast());
            // 256·high + low, in one operation if the lower half of a lane is all of `high`.
            let sum = if NARROW {
                _mm512_dpwssd_epi32(low, high, _mm512_set1_epi32(256))
            } else {
                _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)
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
