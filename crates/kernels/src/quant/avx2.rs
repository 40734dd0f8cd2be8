//! AVX2 with FMA and F16C: a block's 16 outputs as two halves of 8 lanes, 1, 2 or 4 rows of the input at a time.
//!
//! There is no four-way byte product that cannot saturate. Plain formats multiply codes, widened to 16 bits, with
//! whole activations t; [`quantize_tile`] stores t instead of its digits for them. Super-blocks, whose codes have at
//! most 6 bits, multiply codes with digits into 16 bits and those with the sub-scale into 32.

use super::activations::{Activations, Form, SPAN, STRIDE, Tile, WORDS, Word};
use super::code;
use super::format::{CHUNK, Kind, LANES, Layout, ScaleCode, planes};
use super::scalar::E2M1;
use super::{Blocks, Out, QuantMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// How far ahead of the reading packed weights are fetched, in bytes.
const AHEAD: usize = 4096;

/// Outputs of half a block.
const HALF: usize = LANES / 2;

/// Quantizes the rows of one tile (the definition, compiled for AVX2). For plain formats the digits of each 64
/// inputs are then replaced by `t[R][64]` in i16, each four in the order 0, 2, 1, 3.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize_tile(form: Form, x: &[f32], digits: &mut [u8], words: &mut [u8], count: usize) {
    super::activations::quantize_tile(form, x, digits, words, count);
    if form.kind == Kind::Super {
        return;
    }
    let rows = digits.len() / (x.len() / count).next_multiple_of(STRIDE).max(1) / 2;
    for stride in digits.chunks_exact_mut((rows * 2 * STRIDE).max(1)) {
        let copy = stride.to_vec();
        let (high, low) = copy.split_at(rows * STRIDE);
        for (i, to) in stride.chunks_exact_mut(2).enumerate() {
            let from = i & !3 | [0, 2, 1, 3][i & 3];
            let digit = |digits: &[u8]| i16::from(digits[from].cast_signed());
            to.copy_from_slice(&(256 * digit(high) + digit(low)).to_le_bytes());
        }
    }
}

type Kernel = unsafe fn(&QuantMatrix, &Tile<'_>, usize, Out);

/// All rows of the result for the given blocks of outputs. The tiles have 1, 2 or 4 rows.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the blocks exist and belong to this thread.
pub(super) unsafe fn matmul(weight: &QuantMatrix, input: &Activations, blocks: Blocks, out: Out) {
    for block in blocks {
        for tile in (0..input.tiles()).map(|t| input.tile(t)) {
            let kernel = kernel(weight.layout(), tile.padded);
            // SAFETY: the caller vouches for the CPU and the block; the kernel is the one of this layout and tile.
            unsafe { kernel(weight, &tile, block, out) };
        }
    }
}

fn kernel(layout: &Layout, rows: usize) -> Kernel {
    fn plain_of<const CODE: u8, const STEP: usize>(rows: usize) -> Kernel {
        match rows {
            1 => plain::<CODE, STEP, 1>,
            2 => plain::<CODE, STEP, 2>,
            _ => plain::<CODE, STEP, 4>,
        }
    }
    fn super_of<const CODE: u8>(rows: usize) -> Kernel {
        match rows {
            1 => super_blocks::<CODE, 1>,
            2 => super_blocks::<CODE, 2>,
            _ => super_blocks::<CODE, 4>,
        }
    }
    match (layout.kind, code::of(layout)) {
        (Kind::Plain, 2) if layout.step == 32 => plain_of::<2, 32>(rows),
        (Kind::Plain, 2) => plain_of::<2, 64>(rows),
        (Kind::Plain, 3) if layout.step == 32 => plain_of::<3, 32>(rows),
        (Kind::Plain, 3) => plain_of::<3, 64>(rows),
        (Kind::Plain, 4) if layout.step == 32 => plain_of::<4, 32>(rows),
        (Kind::Plain, 4) => plain_of::<4, 64>(rows),
        (Kind::Plain, 5) if layout.step == 32 => plain_of::<5, 32>(rows),
        (Kind::Plain, 5) => plain_of::<5, 64>(rows),
        (Kind::Plain, 6) if layout.step == 32 => plain_of::<6, 32>(rows),
        (Kind::Plain, 6) => plain_of::<6, 64>(rows),
        (Kind::Plain, 8) if layout.step == 32 => plain_of::<8, 32>(rows),
        (Kind::Plain, 8) => plain_of::<8, 64>(rows),
        (Kind::Plain, code::E2M1_16) => plain_of::<{ code::E2M1_16 }, 16>(rows),
        (Kind::Plain, _) => plain_of::<{ code::E2M1_32 }, 32>(rows),
        (Kind::Super, 2) => super_of::<2>(rows),
        (Kind::Super, 3) => super_of::<3>(rows),
        (Kind::Super, 4) => super_of::<4>(rows),
        (Kind::Super, 5) => super_of::<5>(rows),
        (Kind::Super, _) => super_of::<6>(rows),
    }
}

/// Eight outputs' half of the vectors of codes of a packed chunk of 32 inputs.
///
/// # Safety
/// `packed` points to that half of the first vector; the chunk has 64 bytes a bit.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn decode<const CODE: u8>(packed: *const u8) -> [__m256i; CHUNK / 4] {
    let mut codes = [_mm256_setzero_si256(); CHUNK / 4];
    let (mut at, mut low) = (0, 0);
    for &width in const { planes(code::bits(CODE)) } {
        let (mask, per_vector) = (_mm256_set1_epi8((((1u32 << width) - 1) << low) as i8), 8 / width);
        for (j, code) in codes.iter_mut().enumerate() {
            let shift = (j % per_vector * width) as i64 - low as i64;
            // SAFETY: the planes of a chunk take 64 bytes a bit.
            let plane = unsafe { _mm256_loadu_si256(packed.add(at + j / per_vector * 64).cast()) };
            let moved = if shift >= 0 {
                _mm256_srl_epi16(plane, _mm_cvtsi64_si128(shift))
            } else {
                _mm256_sll_epi16(plane, _mm_cvtsi64_si128(-shift))
            };
            *code = if width == 8 { plane } else { _mm256_or_si256(*code, _mm256_and_si256(moved, mask)) };
        }
        at += 64 * width;
        low += width;
    }
    if CODE >= code::E2M1_16 {
        let table = const { E2M1 };
        // SAFETY: the table has 16 bytes.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        codes = codes.map(|code| _mm256_shuffle_epi8(table, code));
    }
    codes
}

/// Eight scales (or biases) of a group as f32.
///
/// # Safety
/// `at` has 8 of them in the layout's encoding; CODE is the layout's.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn scales<const CODE: u8>(layout: &Layout, at: *const u8) -> __m256 {
    let factor = _mm256_set1_ps(layout.factor);
    // SAFETY: the loads read 8 values of the encoding.
    unsafe {
        match (CODE, layout.scale) {
            (code::E2M1_32, _) => {
                let byte = bytes(at);
                // Byte 0 is a subnormal, 255 a NaN; the others are an exponent.
                let bits = _mm256_max_epi32(_mm256_slli_epi32::<23>(byte), _mm256_set1_epi32(0x0040_0000));
                let nan = _mm256_cmpeq_epi32(byte, _mm256_set1_epi32(255));
                let bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0_0000), nan);
                _mm256_mul_ps(_mm256_castsi256_ps(bits), factor)
            }
            (code::E2M1_16, _) => {
                // The same exponent and mantissa in an f16, whose bias is 8 more.
                let byte = _mm_cvtepu8_epi16(_mm_loadl_epi64(at.cast()));
                let size = _mm_and_si128(byte, _mm_set1_epi16(0x7f));
                let sign = _mm_slli_epi16::<8>(_mm_and_si128(byte, _mm_set1_epi16(0x80)));
                let half = _mm_or_si128(_mm_slli_epi16::<7>(size), sign);
                let nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f)));
                let value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0));
                let value = _mm256_blendv_ps(value, _mm256_set1_ps(f32::NAN), _mm256_castsi256_ps(nan));
                _mm256_mul_ps(value, factor)
            }
            (_, ScaleCode::F16) => halves(at),
            (_, ScaleCode::Bf16) => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            _ => _mm256_loadu_ps(at.cast()),
        }
    }
}

/// # Safety
/// `at` has 8 f16.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: 16 bytes, by the caller's word.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
}

/// # Safety
/// `at` has 8 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn bytes(at: *const u8) -> __m256i {
    // SAFETY: 8 bytes, by the caller's word.
    _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(at.cast()) })
}

/// Asks for the packed bytes `AHEAD` of a range that is about to be read.
#[inline(always)]
fn fetch_ahead(packed: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        // SAFETY: a prefetch of any address is harmless; every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(packed.wrapping_add(64 * line + AHEAD).cast()) };
    }
}

/// The activations and words of a tile of M rows, as broadcast operands.
#[derive(Clone, Copy)]
struct Input<const M: usize> {
    digits: *const u8,
    words: *const u8,
}

impl<const M: usize> Input<M> {
    fn new(tile: &Tile<'_>) -> Self {
        assert_eq!(tile.padded, M);
        Self { digits: tile.digits.as_ptr(), words: tile.words.as_ptr() }
    }

    /// # Safety
    /// `step` is a step of the tile.
    #[inline(always)]
    unsafe fn word(self, step: usize, word: Word, row: usize) -> i32 {
        // SAFETY: inside the words of the tile.
        unsafe {
            self.words.add(((step * WORDS + word as usize) * M + row) * 4).cast::<i32>().read_unaligned()
        }
    }

    /// # Safety
    /// `step` is a step of the tile.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn float(self, step: usize, word: Word, row: usize) -> __m256 {
        // SAFETY: by the caller's word.
        _mm256_castsi256_ps(_mm256_set1_epi32(unsafe { self.word(step, word, row) }))
    }

    /// The sums before the first product of a step: what the zero code adds to them.
    ///
    /// # Safety
    /// `step` is a step of the tile.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn start(self, step: usize) -> [__m256i; M] {
        // SAFETY: by the caller's word.
        std::array::from_fn(|row| unsafe {
            _mm256_set1_epi32(256 * self.word(step, Word::High, row) + self.word(step, Word::Low, row))
        })
    }

    /// Four bytes of the activations of a row, from byte `at` of the 128 bytes of `first`'s 64 inputs.
    ///
    /// # Safety
    /// The inputs exist in the tile.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn quad(self, first: usize, at: usize) -> __m256i {
        // SAFETY: inside the digits of the tile.
        let quad = unsafe { self.digits.add(first / STRIDE * 2 * M * STRIDE + at).cast::<i32>() };
        // SAFETY: as above.
        _mm256_set1_epi32(unsafe { quad.read_unaligned() })
    }

    /// Adds the products of vectors of codes with whole activations, inputs `first..`, to the sums of each row.
    ///
    /// # Safety
    /// The inputs exist in the tile.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn dot(self, codes: &[__m256i], first: usize, sums: &mut [__m256i; M]) {
        for (quad, code) in codes.iter().enumerate() {
            let even = _mm256_and_si256(*code, _mm256_set1_epi16(0xff));
            let odd = _mm256_srli_epi16::<8>(*code);
            for (row, sum) in sums.iter_mut().enumerate() {
                let at = (row * STRIDE + first % STRIDE + 4 * quad) * 2;
                // SAFETY: by the caller's word.
                let (x02, x13) = unsafe { (self.quad(first, at), self.quad(first, at + 4)) };
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(even, x02));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(odd, x13));
            }
        }
    }
}

/// One block of outputs for a tile of M rows, a format with plain scales.
///
/// # Safety
/// As [`matmul`]; the layout is of [`Kind::Plain`], CODE its code and STEP its step.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain<const CODE: u8, const STEP: usize, const M: usize>(
    weight: &QuantMatrix,
    tile: &Tile<'_>,
    block: usize,
    out: Out,
) {
    let layout = weight.layout();
    let input = Input::<M>::new(tile);
    let (steps, steps_a_unit) = (weight.cols() / STEP, layout.unit / STEP);
    let mut acc = [[_mm256_setzero_ps(); M]; 2];
    let mut unit = weight.strip(block);
    for first in (0..steps).step_by(const { SPAN / STEP }) {
        let span = first..steps.min(first + const { SPAN / STEP });
        let mut sums = [[_mm256_setzero_ps(); M]; 2];
        for first in span.clone().step_by(steps_a_unit) {
            fetch_ahead(unit, layout.block);
            let steps = first..span.end.min(first + steps_a_unit);
            for (half, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the unit is one of the block and of the tile.
                unsafe { plain_unit::<CODE, STEP, M>(layout, input, unit, half, steps.clone(), sums) };
            }
            unit = unit.wrapping_add(layout.block);
        }
        for (acc, sums) in acc.iter_mut().zip(sums) {
            for (row, (acc, sum)) in acc.iter_mut().zip(sums).enumerate() {
                // SAFETY: a step of the tile.
                *acc = _mm256_fmadd_ps(unsafe { input.float(first, Word::Scale, row) }, sum, *acc);
            }
        }
    }
    // SAFETY: the tile's rows, and a block of this thread.
    unsafe { store(tile, block, out, &acc) };
}

/// Adds the steps of a unit, for half of its outputs, to the sums of their span.
///
/// # Safety
/// The unit exists, and the steps in the tile; CODE, STEP and M as in [`plain`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn plain_unit<const CODE: u8, const STEP: usize, const M: usize>(
    layout: &Layout,
    input: Input<M>,
    unit: *const u8,
    half: usize,
    steps: Range<usize>,
    acc: &mut [__m256; M],
) {
    // Both steps of a group of 128 have the same scale.
    let scale_bytes = if layout.group > STEP { 0 } else { LANES * layout.scale.bytes() };
    let mut at = unit.wrapping_add(half * 32);
    let mut scale = half * HALF * layout.scale.bytes();
    for step in steps.clone() {
        // SAFETY: by the caller's word; scales are where the layout says.
        unsafe {
            let mut sums = input.start(step);
            if STEP < CHUNK {
                let codes = decode::<CODE>(at);
                let second = (step - steps.start) % 2 == 1;
                input.dot(if second { &codes[4..] } else { &codes[..4] }, step * STEP, &mut sums);
                at = at.add(if second { const { 64 * code::bits(CODE) } } else { 0 });
            } else {
                for chunk in 0..STEP / CHUNK {
                    let codes = decode::<CODE>(at);
                    input.dot(&codes, step * STEP + chunk * CHUNK, &mut sums);
                    at = at.add(const { 64 * code::bits(CODE) });
                }
            }
            let s = scales::<CODE>(layout, unit.add(layout.scales_at + scale));
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = _mm256_fmadd_ps(s, _mm256_cvtepi32_ps(sums[row]), *acc);
            }
            if layout.affine {
                let b = scales::<CODE>(layout, unit.add(layout.biases_at + scale));
                let c = _mm256_fmadd_ps(_mm256_set1_ps(layout.zero as f32), s, b);
                for (row, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm256_fmadd_ps(c, input.float(step, Word::Sum, row), *acc);
                }
            }
            scale += scale_bytes;
        }
    }
}

/// One block of outputs for a tile of M rows, a format with super-blocks.
///
/// # Safety
/// As [`matmul`]; the layout is of [`Kind::Super`] and CODE its code.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn super_blocks<const CODE: u8, const M: usize>(
    weight: &QuantMatrix,
    tile: &Tile<'_>,
    block: usize,
    out: Out,
) {
    let layout = weight.layout();
    let input = Input::<M>::new(tile);
    let mut acc = [[_mm256_setzero_ps(); M]; 2];
    for unit in 0..weight.units() {
        let packed = weight.strip(block).wrapping_add(unit * layout.block);
        fetch_ahead(packed, layout.block);
        for (half, acc) in acc.iter_mut().enumerate() {
            // SAFETY: super-blocks are whole; everything is where the layout says.
            unsafe {
                let [high, low, mins] = super_sums::<CODE, M>(layout, packed, half, input, unit);
                let d = packed.add(layout.d_at + half * 2 * HALF);
                for (row, acc) in acc.iter_mut().enumerate() {
                    let a = input.float(unit * layout.unit / layout.step, Word::Scale, row);
                    let [high, low, mins] =
                        [high[row], low[row], mins[row]].map(|sum| _mm256_cvtepi32_ps(sum));
                    let sum = _mm256_fmadd_ps(high, _mm256_set1_ps(256.0), low);
                    *acc = _mm256_fmadd_ps(_mm256_mul_ps(halves(d), a), sum, *acc);
                    if const { code::mins(CODE) } {
                        *acc = _mm256_fnmadd_ps(_mm256_mul_ps(halves(d.add(2 * LANES)), a), mins, *acc);
                    }
                }
            }
        }
    }
    // SAFETY: the tile's rows, and a block of this thread.
    unsafe { store(tile, block, out, &acc) };
}

/// H, L and M of one super-block, for 8 outputs and each row.
///
/// # Safety
/// `packed` is super-block `unit` of a block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn super_sums<const CODE: u8, const M: usize>(
    layout: &Layout,
    packed: *const u8,
    half: usize,
    input: Input<M>,
    unit: usize,
) -> [[__m256i; M]; 3] {
    let affine = const { code::mins(CODE) };
    let groups = const { code::groups_a_chunk(CODE) };
    let [mut high, mut low, mut mins] = [[_mm256_setzero_si256(); M]; 3];
    for chunk in 0..layout.unit / CHUNK {
        // SAFETY: chunks, groups and inputs of this super-block.
        unsafe {
            let codes = decode::<CODE>(packed.add(chunk * const { 64 * code::bits(CODE) } + half * 32));
            for (i, codes) in codes.chunks_exact(CHUNK / 4 / groups).enumerate() {
                let group = chunk * groups + i;
                let first = unit * layout.unit + group * layout.group;
                let step = first / layout.step;
                let lane = group * LANES + half * HALF;
                let sub = packed.add(layout.scales_at + lane);
                let sc = if affine { bytes(sub) } else { _mm256_cvtepi8_epi32(_mm_loadl_epi64(sub.cast())) };
                let pairs = _mm256_blend_epi16::<0xaa>(sc, _mm256_slli_epi32::<16>(sc));
                let m = if affine { bytes(packed.add(layout.biases_at + lane)) } else { sc };
                // (m, 512·m) for the two parts of the sum.
                let m = _mm256_or_si256(m, _mm256_slli_epi32::<25>(m));
                for row in 0..M {
                    for (quad, code) in codes.iter().enumerate() {
                        let at = row * STRIDE + first % STRIDE + 4 * quad;
                        let x = (input.quad(first, at), input.quad(first, at + M * STRIDE));
                        let h = _mm256_madd_epi16(_mm256_maddubs_epi16(*code, x.0), pairs);
                        let l = _mm256_madd_epi16(_mm256_maddubs_epi16(*code, x.1), pairs);
                        high[row] = _mm256_add_epi32(high[row], h);
                        low[row] = _mm256_add_epi32(low[row], l);
                    }
                    let word = |word| _mm256_set1_epi32(input.word(step, word, row));
                    if affine {
                        mins[row] = _mm256_add_epi32(mins[row], _mm256_madd_epi16(m, word(Word::Sum)));
                    } else {
                        high[row] = _mm256_add_epi32(high[row], _mm256_mullo_epi32(sc, word(Word::High)));
                        low[row] = _mm256_add_epi32(low[row], _mm256_mullo_epi32(sc, word(Word::Low)));
                    }
                }
            }
        }
    }
    [high, low, mins]
}

/// # Safety
/// As [`Out::store`], for the rows of the tile.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn store<const M: usize>(tile: &Tile<'_>, block: usize, out: Out, acc: &[[__m256; M]; 2]) {
    let [left, right] = acc;
    for (row, (left, right)) in left.iter().zip(right).take(tile.rows).enumerate() {
        let mut values = [0.0; LANES];
        // SAFETY: two times 8 floats; the rest by the caller's word.
        unsafe {
            _mm256_storeu_ps(values.as_mut_ptr(), *left);
            _mm256_storeu_ps(values.as_mut_ptr().add(HALF), *right);
            out.store(tile.first + row, block, &values);
        }
    }
}
