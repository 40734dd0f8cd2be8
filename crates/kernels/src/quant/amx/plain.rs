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
pub(super) fn panel_step(layout: &Layout) -> usize {
    layout.step * LANES + 128
}

/// Fills the panel, [block][step].
///
/// # Safety
/// As [`super::matmul`]; `panel` has room, the steps begin with a unit.
pub(super) unsafe fn expand(weight: &QuantMatrix, blocks: Blocks, steps: Range<usize>, panel: *mut u8) {
    let layout = weight.layout();
    let expand = match code::of(layout) {
        2 => expand_unit::<2>,
        3 => expand_unit::<3>,
        4 => expand_unit::<4>,
        5 => expand_unit::<5>,
        6 => expand_unit::<6>,
        code::E2M1_32 => expand_unit::<{ code::E2M1_32 }>,
        code::E2M1_16 => expand_unit::<{ code::E2M1_16 }>,
        _ => expand_unit::<8>,
    };
    let per_unit = layout.unit / layout.step;
    let mut to = panel;
    for block in blocks {
        for first in steps.clone().step_by(per_unit) {
            let count = per_unit.min(steps.end - first);
            let packed = weight.unit(block, first / per_unit);
            // SAFETY: the packed unit has these steps, the panel has room for them.
            unsafe {
                expand(layout, packed.as_ptr(), count, to);
                to = to.add(count * panel_step(layout));
            }
        }
    }
}

/// # Safety
/// As [`expand`], for the first `steps` steps of one packed unit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn expand_unit<const CODE: u8>(layout: &Layout, packed: *const u8, steps: usize, to: *mut u8) {
    let zero = _mm512_set1_epi8(layout.zero as i8);
    let middle = _mm512_set1_ps(layout.zero as f32);
    let slot = panel_step(layout);
    fetch_ahead(packed, layout.block);
    // SAFETY: chunks and scales lie where the layout says; each step has a slot.
    unsafe {
        for chunk in 0..(steps * layout.step).div_ceil(CHUNK) {
            let codes = decode::<CODE>(packed.add(chunk * const { 64 * code::bits(CODE) }));
            for (quad, code) in codes.into_iter().enumerate() {
                let input = chunk * CHUNK + 4 * quad;
                if input < steps * layout.step {
                    let row = to.add(input / layout.step * slot + input % layout.step * LANES);
                    _mm512_store_si512(row.cast(), _mm512_sub_epi8(code, zero));
                }
            }
        }
        for step in 0..steps {
            let at = step * layout.step / layout.group * LANES * layout.scale.bytes();
            let floats = to.add(step * slot + layout.step * LANES).cast::<f32>();
            let s = scales::<CODE>(layout, packed.add(layout.scales_at + at));
            _mm512_store_ps(floats, s);
            if layout.affine {
                let b = scales::<CODE>(layout, packed.add(layout.biases_at + at));
                _mm512_store_ps(floats.add(LANES), _mm512_fmadd_ps(middle, s, b));
            }
        }
    }
}

/// One pass.
///
/// # Safety
/// As [`super::matmul`]; the panel holds the blocks and steps of the pass, the tiles are configured for it.
pub(super) unsafe fn run(pass: &Pass<'_>) {
    let kernel = match (pass.tile.padded, pass.layout.affine) {
        (4, false) => kernel::<4, false>,
        (4, true) => kernel::<4, true>,
        (8, false) => kernel::<8, false>,
        (8, true) => kernel::<8, true>,
        (12, false) => kernel::<12, false>,
        (12, true) => kernel::<12, true>,
        (_, false) => kernel::<16, false>,
        (_, true) => kernel::<16, true>,
    };
    // SAFETY: by the caller's word.
    unsafe { kernel(pass) }
}

/// Sums of two steps, each of high and low digits, [row][16].
#[repr(align(64))]
struct Ring([[[i32; 256]; 2]; 2]);

/// A pipeline over the steps of all blocks: while the float part of one step runs, the sums of the next are stored
/// and the products of the one after are issued, spread between the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn kernel<const R: usize, const AFFINE: bool>(pass: &Pass<'_>) {
    let mut ring = Ring([[[0; 256]; 2]; 2]);
    let [even, odd] = &mut ring.0;
    let per_block = pass.steps.len();
    let total = per_block * pass.blocks.len();
    let slot = panel_step(pass.layout);
    let at = |index: usize| Step::<R> {
        digits: {
            let input = (pass.steps.start + index % per_block) * pass.layout.step;
            pass.tile.digits.as_ptr().wrapping_add(input / STRIDE * 2 * R * STRIDE + input % STRIDE)
        },
        weights: pass.panel.wrapping_add(index * slot),
    };
    // SAFETY: steps below `total` are in the panel and the tile, by the caller's word.
    unsafe {
        if total > 0 {
            at(0).multiply::<0, 1>();
        }
        if total > 1 {
            at(1).multiply::<2, 3>();
        }
        tile::store::<0>(even[0].as_mut_ptr());
        tile::store::<1>(even[1].as_mut_ptr());
        let mut index = 0;
        for block in 0..pass.blocks.len() {
            let mut acc = pass.load_sums::<R>(block);
            for step in pass.steps.clone() {
                let float = Float {
                    scales: pass.panel.add(index * slot + pass.layout.step * LANES).cast(),
                    words: pass.tile.words.as_ptr().add(step * WORDS * R * 4).cast(),
                };
                let ahead = (index + 2 < total).then(|| at(index + 2));
                if index % 2 == 0 {
                    advance::<R, AFFINE, 0, 1, 2, 3>(ahead, even, odd, float, &mut acc);
                } else {
                    advance::<R, AFFINE, 2, 3, 0, 1>(ahead, odd, even, float, &mut acc);
                }
                index += 1;
            }
            pass.store_sums(block, &acc);
        }
    }
}

/// Where the operands of a step lie.
#[derive(Clone, Copy)]
struct Step<const R: usize> {
    digits: *const u8,
    weights: *const u8,
}

impl<const R: usize> Step<R> {
    /// Both products of the step, into tiles H and L.
    #[inline(always)]
    unsafe fn multiply<const H: u8, const L: u8>(self) {
        // SAFETY: by the caller's word.
        unsafe {
            tile::load::<6>(self.weights);
            self.high::<H>();
            self.low::<L>();
        }
    }

    #[inline(always)]
    unsafe fn high<const H: u8>(self) {
        // SAFETY: by the caller's word.
        unsafe {
            tile::load::<4>(self.digits);
            tile::zero::<H>();
            tile::multiply::<H, 4, 6, true>();
        }
    }

    #[inline(always)]
    unsafe fn low<const L: u8>(self) {
        // SAFETY: by the caller's word.
        unsafe {
            tile::load::<5>(self.digits.add(R * STRIDE));
            tile::zero::<L>();
            tile::multiply::<L, 5, 6, true>();
        }
    }
}

/// What the float part of a step needs: s and c of the outputs, the words of the rows.
#[derive(Clone, Copy)]
struct Float {
    scales: *const f32,
    words: *const f32,
}

/// One step of the pipeline: products into tiles H and L, sums of tiles NH and NL to `next`, float part of `sums`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn advance<
    const R: usize,
    const AFFINE: bool,
    const H: u8,
    const L: u8,
    const NH: u8,
    const NL: u8,
>(
    ahead: Option<Step<R>>,
    sums: &[[i32; 256]; 2],
    next: &mut [[i32; 256]; 2],
    float: Float,
    acc: &mut [__m512; R],
) {
    // SAFETY: by the caller's word.
    unsafe {
        if let Some(step) = ahead {
            tile::load::<6>(step.weights);
        }
        rows::<R, AFFINE>(0..R / 4, sums, float, acc);
        if let Some(step) = ahead {
            step.high::<H>();
        }
        tile::store::<NH>(next[0].as_mut_ptr());
        rows::<R, AFFINE>(R / 4..R / 2, sums, float, acc);
        rows::<R, AFFINE>(R / 2..R * 3 / 4, sums, float, acc);
        if let Some(step) = ahead {
            step.low::<L>();
        }
        tile::store::<NL>(next[1].as_mut_ptr());
        rows::<R, AFFINE>(R * 3 / 4..R, sums, float, acc);
    }
}

/// The float part of a step for some rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn rows<const R: usize, const AFFINE: bool>(
    rows: Range<usize>,
    sums: &[[i32; 256]; 2],
    float: Float,
    acc: &mut [__m512; R],
) {
    // SAFETY: by the caller's word.
    unsafe {
        let s = _mm512_load_ps(float.scales);
        let c = _mm512_load_ps(float.scales.add(LANES));
        for row in rows {
            let sum = |digit: usize| _mm512_load_si512(sums[digit].as_ptr().add(row * LANES).cast());
            let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(sum(0)), sum(1)));
            let word = |word: Word| _mm512_set1_ps(*float.words.add(word as usize * R + row));
            acc[row] = _mm512_fmadd_ps(_mm512_mul_ps(s, word(Word::Scale)), sum, acc[row]);
            if AFFINE {
                acc[row] = _mm512_fmadd_ps(c, word(Word::Sum), acc[row]);
            }
        }
    }
}
