//! Formats with plain scales: one product of K = 16, 32 or 64 for each step and digit.

use super::super::activations::{SPAN, STRIDE, WORDS, Word};
use super::super::code;
use super::super::format::{LANES, Layout};
use super::weights::{Expanded, Expander, LEAD, Slots, Weights};
use super::{Pass, stacked, tile};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

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

/// Whether there are kernels that fill the panel themselves.
pub(super) fn fills(layout: &Layout) -> bool {
    filling(layout, super::ROWS).is_some()
}

/// The kernel that fills the panel, a ring, as it goes; for the usual formats.
fn filling<'a>(layout: &Layout, padded: usize) -> Option<Kernel<'a>> {
    fn of<'a, const NARROW: bool, const CODE: u8, const STEP: usize>(
        affine: bool,
        padded: usize,
    ) -> Kernel<'a> {
        match (padded, affine) {
            (4, false) => kernel::<4, false, NARROW, Expander<'_, CODE, STEP, false>>,
            (4, true) => kernel::<4, true, NARROW, Expander<'_, CODE, STEP, true>>,
            (8, false) => kernel::<8, false, NARROW, Expander<'_, CODE, STEP, false>>,
            (8, true) => kernel::<8, true, NARROW, Expander<'_, CODE, STEP, true>>,
            (12, false) => kernel::<12, false, NARROW, Expander<'_, CODE, STEP, false>>,
            (12, true) => kernel::<12, true, NARROW, Expander<'_, CODE, STEP, true>>,
            (_, false) => kernel::<16, false, NARROW, Expander<'_, CODE, STEP, false>>,
            (_, true) => kernel::<16, true, NARROW, Expander<'_, CODE, STEP, true>>,
        }
    }
    Some(match (code::of(layout), layout.step, narrow(layout)) {
        (4, 32, true) => of::<true, 4, 32>(layout.affine, padded),
        (4, 64, false) => of::<false, 4, 64>(layout.affine, padded),
        (8, 32, false) => of::<false, 8, 32>(layout.affine, padded),
        (8, 64, false) => of::<false, 8, 64>(layout.affine, padded),
        _ => return None,
    })
}

/// Sums of two steps, each of high and low digits, [row][16].
#[repr(align(64))]
struct Ring([[i32; 512]; 2]);

/// A pipeline over the steps of all blocks: while the float part of one step runs, the sums of the next are stored
/// and the products of the one after are issued, spread between the rows. At the end it multiplies two steps that do
/// not exist, of memory that does.
///
/// # Safety
/// As [`run`]; R is the padded number of rows, NARROW is [`narrow`], W fits the layout and the panel's state.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")]
unsafe fn kernel<'a, const R: usize, const AFFINE: bool, const NARROW: bool, W: Weights<'a>>(
    pass: &Pass<'a>,
    tile: usize,
) {
    let mut ring = MaybeUninit::<Ring>::uninit();
    // SAFETY: the place exists; what is in it is written before it is read.
    let [even, odd] = unsafe { [0, 1].map(|half| (&raw mut (*ring.as_mut_ptr()).0[half]).cast::<i32>()) };
    let (step, slots) = (pass.layout.step, Slots::of(pass));
    let mut ahead = Ahead::<R>::new(pass, tile);
    let mut slot = slots.first;
    // SAFETY: all steps of the pipeline are in the panel and the tile, by the caller's word.
    unsafe {
        let mut weights = W::of(pass);
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
            let mut words =
                pass.tiles[tile].words.as_ptr().add(pass.steps.start * WORDS * R * 4).cast::<f32>();
            for span in super::chunks(pass.steps.clone(), SPAN / step) {
                let (scale, mut sums) = (words, [_mm512_setzero_ps(); R]);
                for _ in span.clone() {
                    let scales = slot.add(step * LANES).cast::<f32>();
                    if is_odd {
                        advance::<R, AFFINE, NARROW, 2, 3, 0, 1>(ahead, odd, even, scales, words, &mut sums);
                    } else {
                        advance::<R, AFFINE, NARROW, 0, 1, 2, 3>(ahead, even, odd, scales, words, &mut sums);
                    }
                    weights.next();
                    ahead.next();
                    slot = slots.after(slot);
                    words = words.add(WORDS * R);
                    is_odd = !is_odd;
                }
                end_span::<R>(pass, tile, block, span, scale, sums);
            }
        }
    }
}

/// Adds the sums of a span, times its scales, to the results of the rows.
///
/// # Safety
/// As [`run`]; tile, block and span are of the pass, `words` are those of the span's first step.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn end_span<const R: usize>(
    pass: &Pass<'_>,
    tile: usize,
    block: usize,
    span: Range<usize>,
    words: *const f32,
    sums: [__m512; R],
) {
    // SAFETY: by the caller's word.
    unsafe {
        let results = pass.sums.add(tile * pass.tile_sums + block * R * LANES);
        let some = if span.start == 0 { 0 } else { !0 };
        // Spelled out: in a loop the sums would have to be in memory.
        macro_rules! each_row {
            ($($row:literal)*) => { $(
                if $row < R {
                    let a = _mm512_set1_ps(*words.add(Word::Scale as usize * R + $row));
                    let to = results.add($row * LANES);
                    _mm512_store_ps(to, _mm512_fmadd_ps(a, sums[$row % R], _mm512_maskz_load_ps(some, to)));
                }
            )* };
        }
        each_row!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        if span.end == pass.all_steps {
            for row in 0..R {
                pass.store::<R>(tile, block, row, span.end, _mm512_load_ps(results.add(row * LANES)));
            }
        }
    }
}

/// Operands of the step whose products are to be issued next.
#[derive(Clone, Copy)]
struct Ahead<const R: usize> {
    /// Steps of the block that are still to come.
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
        Self { left: steps, weights: slots.first, digits: first, first, step, steps, slots }
    }

    #[inline(always)]
    fn next(&mut self) {
        self.weights = self.slots.after(self.weights.cast_mut());
        self.digits = self.digits.wrapping_add(self.step);
        // The tile begins with a stride.
        if self.digits.addr().is_multiple_of(STRIDE) {
            self.digits = self.digits.wrapping_add((2 * R - 1) * STRIDE);
        }
        self.left -= 1;
        if self.left == 0 {
            (self.digits, self.left) = (self.first, self.steps);
        }
    }

    #[inline(always)]
    unsafe fn load_weights(self) {
        // SAFETY: by the caller's word.
        unsafe { tile::load::<6>(self.weights) };
    }

    /// The product of the high digits into tile H, or of both digits.
    #[inline(always)]
    unsafe fn high<const H: u8>(self) {
        // SAFETY: by the caller's word.
        unsafe {
            tile::load::<4>(self.digits);
            tile::zero::<H>();
            tile::multiply::<H, 4, 6, true>();
        }
    }

    /// The product of the low digits into tile L.
    #[inline(always)]
    unsafe fn low<const L: u8>(self) {
        if !stacked(R) {
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
///
/// In assembly and in this order: the compiler would gather it across the tile instructions, for which there are too
/// few registers. While tiles are in use only one port multiplies vectors of 512 bits (and shifts them, and converts),
/// which limits this, but another one adds and permutes: so of the sums of digits, which can be had either way, every
/// other one is, or all are.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
unsafe fn rows<const R: usize, const QUARTER: usize, const AFFINE: bool, const NARROW: bool>(
    sums: *const i32,
    scales: *const f32,
    words: *const f32,
    acc: &mut [__m512; R],
) {
    let first = const { R * QUARTER / 4 };
    // SAFETY: by the caller's word.
    unsafe {
        let (sums, words) = (sums.add(first * LANES), words.add(first));
        let s = _mm512_load_ps(scales);
        let c = _mm512_load_ps(scales.add(LANES));
        macro_rules! each_row {
            ($($row:literal)*) => { $(
                if $row < R / 4 {
                    let acc = &mut acc[first + $row];
                    let sum = if NARROW && !AFFINE && $row % 2 == 0 {
                        sum_by_product::<R, $row>(sums)
                    } else {
                        sum_by_shuffle::<R, $row>(sums)
                    };
                    add_product(acc, sum, s);
                    if AFFINE {
                        add_bias::<R, $row>(acc, c, words);
                    }
                }
            )* };
        }
        each_row!(0 1 2 3);
    }
}

/// Bytes from a row's sums of high digits to those of low ones.
const fn low(rows: usize) -> usize {
    if stacked(rows) { rows * 64 } else { 1024 }
}

/// low + 256·high of a row, for a `high` whose lower half is all of it. The intrinsic would become two operations.
///
/// # Safety
/// `sums` are those of R rows, ROW is one of them.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
unsafe fn sum_by_product<const R: usize, const ROW: usize>(sums: *const i32) -> __m512i {
    let sum;
    // SAFETY: reads what the caller says; the function's features have the instructions.
    unsafe {
        asm!("vmovdqa64 {sum}, [{sums} + {low}]", "vpdpwssd {sum}, {by}, [{sums} + {high}]",
            sum = out(zmm_reg) sum, sums = in(reg) sums, by = in(zmm_reg) _mm512_set1_epi32(256),
            high = const ROW * 64, low = const ROW * 64 + low(R), options(readonly, nostack, preserves_flags));
    }
    sum
}

/// low + 256·high of a row.
///
/// # Safety
/// As [`sum_by_product`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn sum_by_shuffle<const R: usize, const ROW: usize>(sums: *const i32) -> __m512i {
    let up = _mm_set_epi8(14, 13, 12, -1, 10, 9, 8, -1, 6, 5, 4, -1, 2, 1, 0, -1);
    let sum;
    // SAFETY: as above.
    unsafe {
        asm!("vmovdqa64 {sum}, [{sums} + {high}]", "vpshufb {sum}, {sum}, {up}",
            "vpaddd {sum}, {sum}, [{sums} + {low}]",
            sum = out(zmm_reg) sum, sums = in(reg) sums, up = in(zmm_reg) _mm512_broadcast_i32x4(up),
            high = const ROW * 64, low = const ROW * 64 + low(R), options(readonly, nostack, preserves_flags));
    }
    sum
}

/// acc += s·sum.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_product(acc: &mut __m512, sum: __m512i, s: __m512) {
    // Named, since what has no name may get a register that these instructions do not take.
    let mut _float: __m512i;
    // SAFETY: registers alone; the function's features have the instructions.
    unsafe {
        asm!("vcvtdq2ps {sum}, {sum}", "vfmadd231ps {acc}, {s}, {sum}",
            acc = inout(zmm_reg) *acc, sum = inout(zmm_reg) sum => _float, s = in(zmm_reg) s,
            options(nomem, nostack, preserves_flags));
    }
}

/// acc += c·(the sum of a row's inputs).
///
/// # Safety
/// `words` are those of R rows, ROW is one of them.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn add_bias<const R: usize, const ROW: usize>(acc: &mut __m512, c: __m512, words: *const f32) {
    // SAFETY: as above.
    unsafe {
        asm!("vfmadd231ps {acc}, {c}, dword ptr [{words} + {sum}]{{1to16}}",
            acc = inout(zmm_reg) *acc, c = in(zmm_reg) c, words = in(reg) words,
            sum = const (Word::Sum as usize * R + ROW) * 4, options(readonly, nostack, preserves_flags));
    }
}
