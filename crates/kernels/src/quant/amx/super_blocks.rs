//! Super-blocks: the sub-scales are multiplied into the weights, two int8 digits for each sc·v, so that the products
//! run over all 256 inputs with full tiles and the float part is needed once.

use super::super::activations::{STRIDE, WORDS, Word};
use super::super::avx512::{AHEAD, bytes, decode, fetch, finish_super, halves, min_pairs, signed_bytes};
use super::super::code;
use super::super::format::{CHUNK, LANES, Layout, SUPER};
use super::super::{Blocks, QuantMatrix};
use super::{Pass, stacked, tile};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Bytes of the two digits of sc·v, for each 64 inputs a tile of the upper and one of the lower.
const TILES: usize = 2 * SUPER * LANES;
/// Bytes of a super-block of a block in the panel: the tiles, 16 d and 16 dmin in f32, m of 16 groups as i16 pairs.
pub(super) const PANEL_STEP: usize = TILES + 128 + 16 * 64;

/// sc·v = 2^SHIFT · upper digit + lower digit. With mins both parts of sc multiply q <= 31 into an unsigned byte, else the
/// digits are the bytes of the product, the upper one signed.
const fn shift(affine: bool) -> u32 {
    if affine { 3 } else { 8 }
}

/// Fills the panel with one super-block of each block.
///
/// # Safety
/// As [`super::matmul`]; `panel` has room.
pub(super) unsafe fn expand(weight: &QuantMatrix, blocks: Blocks, unit: usize, panel: *mut u8) {
    let layout = weight.layout();
    let expand = match code::of(layout) {
        2 => expand_unit::<2>,
        3 => expand_unit::<3>,
        4 => expand_unit::<4>,
        5 => expand_unit::<5>,
        _ => expand_unit::<6>,
    };
    for (i, block) in blocks.enumerate() {
        // SAFETY: by the caller's word.
        unsafe { expand(layout, weight.unit(block, unit), panel.add(i * PANEL_STEP)) };
    }
}

/// # Safety
/// As [`expand`], for one packed super-block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn expand_unit<const CODE: u8>(layout: &Layout, packed: &[u8], to: *mut u8) {
    let affine = const { code::mins(CODE) };
    let groups = const { code::groups_a_chunk(CODE) };
    let packed = packed.as_ptr();
    // SAFETY: everything lies where the layout says, the panel has room.
    unsafe {
        for chunk in 0..SUPER / CHUNK {
            let part = layout.block / (SUPER / CHUNK);
            fetch(packed.add(chunk * part), part, AHEAD);
            let codes = decode::<CODE>(packed.add(chunk * const { 64 * code::bits(CODE) }));
            for half in 0..groups {
                let sub = packed.add(layout.scales_at + (chunk * groups + half) * LANES);
                let sc = if affine { bytes(sub) } else { signed_bytes(sub) };
                let sc = _mm512_or_si512(_mm512_slli_epi32::<16>(sc), _mm512_and_si512(sc, low_half()));
                let quads = CHUNK / 4 / groups;
                for (quad, code) in codes.iter().enumerate().skip(half * quads).take(quads) {
                    let (upper, lower) = if affine {
                        unsigned_digits(*code, sc)
                    } else {
                        signed_digits(*code, sc, layout.zero)
                    };
                    let input = chunk * CHUNK + 4 * quad;
                    let row = to.add(input / STRIDE * 2048 + input % STRIDE * LANES);
                    _mm512_store_si512(row.cast(), upper);
                    _mm512_store_si512(row.add(1024).cast(), lower);
                }
            }
        }
        let floats = to.add(TILES);
        let d = packed.add(layout.d_at);
        _mm512_store_ps(floats.cast(), halves(d));
        if affine {
            _mm512_store_ps(floats.add(64).cast(), halves(d.add(2 * LANES)));
            for group in 0..SUPER / layout.group {
                let m = min_pairs(bytes(packed.add(layout.biases_at + group * LANES)));
                _mm512_store_si512(floats.add(128 + group * 64).cast(), m);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn low_half() -> __m512i {
    _mm512_set1_epi32(0xffff)
}

/// (sc >> 3)·q and (sc & 7)·q for four codes a lane: each at most 7·31, so that two bytes multiplied as one
/// 16-bit number do not meet.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn unsigned_digits(q: __m512i, sc: __m512i) -> (__m512i, __m512i) {
    let (upper, lower) = (_mm512_srli_epi16::<3>(sc), _mm512_and_si512(sc, _mm512_set1_epi16(7)));
    (_mm512_mullo_epi16(q, upper), _mm512_mullo_epi16(q, lower))
}

/// The upper and the lower bytes of sc·(q - zero), which is below 2^13 in magnitude.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn signed_digits(q: __m512i, sc: __m512i, zero: i32) -> (__m512i, __m512i) {
    let low_bytes = _mm512_set1_epi16(0xff);
    let of_zero = _mm512_mullo_epi16(_mm512_set1_epi16(zero as i16), sc);
    // Each byte of a pair is multiplied alone, by an sc beside a zero.
    let product = |sc| _mm512_sub_epi16(_mm512_maddubs_epi16(q, sc), of_zero);
    let (even, odd) = (product(_mm512_and_si512(sc, low_bytes)), product(_mm512_slli_epi16::<8>(sc)));
    let join = |low, high| _mm512_ternarylogic_epi32::<0xca>(low_bytes, low, high);
    (join(_mm512_srli_epi16::<8>(even), odd), join(even, _mm512_slli_epi16::<8>(odd)))
}

/// One pass.
///
/// # Safety
/// As [`super::matmul`]; the panel holds the super-block of the pass, the tiles are configured for it.
pub(super) unsafe fn run(pass: &Pass<'_>) {
    // Groups with mins, 0 without.
    let mins = if pass.layout.affine { SUPER / pass.layout.group } else { 0 };
    let kernel = match (pass.tiles[0].padded, mins) {
        (4, 0) => kernel::<4, 0>,
        (4, 8) => kernel::<4, 8>,
        (4, _) => kernel::<4, 16>,
        (8, 0) => kernel::<8, 0>,
        (8, 8) => kernel::<8, 8>,
        (8, _) => kernel::<8, 16>,
        (12, 0) => kernel::<12, 0>,
        (12, 8) => kernel::<12, 8>,
        (12, _) => kernel::<12, 16>,
        (_, 0) => kernel::<16, 0>,
        (_, 8) => kernel::<16, 8>,
        (_, _) => kernel::<16, 16>,
    };
    // SAFETY: by the caller's word.
    unsafe { kernel(pass) }
}

/// The four sums of a super-block: upper weights x high digits, upper x low, lower x high, lower x low; [row][16].
#[repr(align(64))]
struct Sums([[i32; 256]; 4]);

/// A pipeline over all blocks and tiles: between the products of one runs the float part of the one before.
///
/// # Safety
/// As [`run`]; R is the padded number of rows, MINS the number of groups with mins.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn kernel<const R: usize, const MINS: usize>(pass: &Pass<'_>) {
    let mut places = MaybeUninit::<[Sums; 2]>::uninit();
    // SAFETY: the places exist; what is in them is written before it is read.
    let [mut sums, mut next] =
        unsafe { [0, 1].map(|half| (&raw mut (*places.as_mut_ptr())[half].0).cast::<i32>()) };
    let first_input = pass.steps.start * SUPER;
    // What a block and tile left to its float part.
    let mut left: Option<(usize, usize)> = None;
    // SAFETY: the panel has these blocks, by the caller's word.
    unsafe {
        for block in 0..pass.blocks.len() {
            let weights = pass.panel.add(block * PANEL_STEP);
            for (t, tile) in pass.tiles.iter().enumerate() {
                let digits = tile.digits.as_ptr().add(first_input / STRIDE * 2 * R * STRIDE);
                zero::<R>();
                for quarter in 0..4 {
                    multiply::<R, MINS>(digits.add(quarter * 2 * R * STRIDE), weights.add(quarter * 2048));
                    if let Some((tile, block)) = left {
                        float::<R, MINS>(pass, tile, block, R * quarter / 4..R * (quarter + 1) / 4, sums);
                    }
                }
                store::<R>(next);
                left = Some((t, block));
                std::mem::swap(&mut sums, &mut next);
            }
        }
        if let Some((tile, block)) = left {
            float::<R, MINS>(pass, tile, block, 0..R, sums);
        }
    }
}

/// The four products of 64 inputs.
#[inline(always)]
unsafe fn multiply<const R: usize, const MINS: usize>(digits: *const u8, weights: *const u8) {
    // SAFETY: by the caller's word.
    unsafe {
        tile::load::<6>(weights);
        tile::load::<4>(digits);
        if MINS > 0 {
            tile::multiply::<0, 4, 6, false>();
        } else {
            tile::multiply::<0, 4, 6, true>();
        }
        tile::load::<7>(weights.add(1024));
        tile::multiply::<2, 4, 7, false>();
        if !stacked(R) {
            tile::load::<5>(digits.add(R * STRIDE));
            if MINS > 0 {
                tile::multiply::<1, 5, 6, false>();
            } else {
                tile::multiply::<1, 5, 6, true>();
            }
            tile::multiply::<3, 5, 7, false>();
        }
    }
}

#[inline(always)]
unsafe fn zero<const R: usize>() {
    // SAFETY: by the caller's word.
    unsafe {
        tile::zero::<0>();
        tile::zero::<2>();
        if !stacked(R) {
            tile::zero::<1>();
            tile::zero::<3>();
        }
    }
}

#[inline(always)]
unsafe fn store<const R: usize>(sums: *mut i32) {
    // SAFETY: by the caller's word.
    unsafe {
        tile::store::<0>(sums);
        tile::store::<2>(sums.add(512));
        if !stacked(R) {
            tile::store::<1>(sums.add(256));
            tile::store::<3>(sums.add(768));
        }
    }
}

/// The float part of a super-block for some rows of a tile, from its four sums.
///
/// # Safety
/// As [`kernel`]; tile, block and rows are of the pass.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn float<const R: usize, const MINS: usize>(
    pass: &Pass<'_>,
    tile: usize,
    block: usize,
    rows: Range<usize>,
    sums: *const i32,
) {
    let low = const { if stacked(R) { R * LANES } else { 256 } };
    let step = pass.steps.start * SUPER / pass.layout.step;
    let words = pass.tiles[tile].words.as_ptr().wrapping_add(step * WORDS * R * 4);
    // SAFETY: by the caller's word.
    unsafe {
        let floats = pass.panel.add(block * PANEL_STEP + TILES);
        let d = [_mm512_load_ps(floats.cast()), _mm512_load_ps(floats.add(64).cast())];
        for row in rows {
            let [uh, ul, lh, ll] =
                [0, low, 512, 512 + low].map(|at| _mm512_load_si512(sums.add(at + row * LANES).cast()));
            let (uh, ul) = if MINS > 0 {
                (_mm512_slli_epi32::<{ shift(true) }>(uh), _mm512_slli_epi32::<{ shift(true) }>(ul))
            } else {
                (_mm512_slli_epi32::<{ shift(false) }>(uh), _mm512_slli_epi32::<{ shift(false) }>(ul))
            };
            let mut mins = _mm512_setzero_si512();
            for group in 0..MINS {
                let m = _mm512_load_si512(floats.add(128 + group * 64).cast());
                let sum = words.add(((group * WORDS + Word::Sum as usize) * R + row) * 4).cast::<i32>();
                mins = _mm512_dpwssd_epi32(mins, m, _mm512_set1_epi32(sum.read_unaligned()));
            }
            let a = words.add((Word::Scale as usize * R + row) * 4).cast::<f32>().read_unaligned();
            let sums = [_mm512_add_epi32(uh, lh), _mm512_add_epi32(ul, ll), mins];
            let acc = pass.load::<R>(tile, block, row, pass.steps.start);
            let acc = finish_super(MINS > 0, d, _mm512_set1_ps(a), sums, acc);
            pass.store::<R>(tile, block, row, pass.steps.end, acc);
        }
    }
}
