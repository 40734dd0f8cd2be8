//! AVX-512 with VNNI: 16 outputs in the 16 lanes, 1, 2 or 4 rows of the input at a time.
//!
//! `vpdpbusd` adds four products of an unsigned code and a signed digit to a lane; the input's four digits are
//! broadcast, once for two blocks of outputs: on some processors a product that broadcasts its own operand from memory takes
//! the time of three. The zero code's share is in the sum before the first product ([`Word::High`], [`Word::Low`]).

use super::activations::{Activations, Form, SPAN, STRIDE, Tile, WORDS, Word};
use super::code;
use super::format::{CHUNK, Kind, LANES, Layout, ScaleCode, planes};
use super::scalar::E2M1;
use super::{Blocks, KERNEL_BLOCKS, Out, QuantMatrix};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// How far ahead of the reading packed weights are fetched, in bytes. Into the second cache: the first one's few
/// line buffers would hold up the loads.
pub(super) const AHEAD: usize = 8192;

/// Quantizes the rows of one tile (the definition, compiled for AVX-512).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn quantize_tile(form: Form, x: &[f32], digits: &mut [u8], words: &mut [u8], rows: usize) {
    super::activations::quantize_tile(form, x, digits, words, rows);
}

type Kernel = unsafe fn(&QuantMatrix, &Tile<'_>, [usize; KERNEL_BLOCKS], Out);

/// Bytes of digits and words of the tiles that pass over some blocks before the next tiles do: they stay in the second cache.
const PASS: usize = 512 << 10;

/// All rows of the result for the given blocks of outputs. The tiles have 1, 2 or 4 rows.
///
/// # Safety
/// The CPU has AVX-512 F, BW, VL, DQ and VNNI; the blocks exist and belong to this thread.
pub(super) unsafe fn matmul(weight: &QuantMatrix, input: &Activations, blocks: Blocks, out: Out) {
    let tiles_a_pass = (PASS / input.tile_bytes().max(1)).max(1);
    for first in (0..input.tiles()).step_by(tiles_a_pass) {
        for block in blocks.clone().step_by(KERNEL_BLOCKS) {
            // The last one twice where there is no other.
            let pair = std::array::from_fn(|i| (block + i).min(blocks.end - 1));
            for tile in (first..input.tiles().min(first + tiles_a_pass)).map(|t| input.tile(t)) {
                let kernel = kernel(weight.layout(), tile.padded);
                // SAFETY: the caller vouches for the CPU and the blocks; the kernel is the one of this layout and tile.
                unsafe { kernel(weight, &tile, pair, out) };
            }
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

/// Vector `j` of the eight vectors of codes of a packed chunk of 32 inputs: inputs 4j.. of each lane's output.
///
/// # Safety
/// `packed` has the chunk's 64 bytes a bit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn codes<const CODE: u8>(packed: *const u8, j: usize) -> __m512i {
    let mut codes = _mm512_setzero_si512();
    let (mut at, mut low) = (0, 0);
    for &width in const { planes(code::bits(CODE)) } {
        let (mask, per_vector) = (_mm512_set1_epi8((((1u32 << width) - 1) << low) as i8), 8 / width);
        let shift = (j % per_vector * width) as i64 - low as i64;
        // SAFETY: the planes of a chunk take 64 bytes a bit.
        let plane = unsafe { _mm512_loadu_si512(packed.add(at + j / per_vector * 64).cast()) };
        let moved = if shift >= 0 {
            _mm512_srl_epi16(plane, _mm_cvtsi64_si128(shift))
        } else {
            _mm512_sll_epi16(plane, _mm_cvtsi64_si128(-shift))
        };
        codes = if width == 8 { plane } else { _mm512_or_si512(codes, _mm512_and_si512(moved, mask)) };
        at += 64 * width;
        low += width;
    }
    if CODE < code::E2M1_16 {
        return codes;
    }
    let table = const { E2M1 };
    // SAFETY: the table has 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    _mm512_shuffle_epi8(table, codes)
}

/// All eight vectors of [`codes`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn decode<const CODE: u8>(packed: *const u8) -> [__m512i; CHUNK / 4] {
    // SAFETY: by the caller's word.
    std::array::from_fn(|j| unsafe { codes::<CODE>(packed, j) })
}

/// The scales (or biases) of a group as f32.
///
/// # Safety
/// `at` has 16 of them in the layout's encoding; CODE is the layout's.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn scales<const CODE: u8>(layout: &Layout, at: *const u8) -> __m512 {
    let factor = _mm512_set1_ps(layout.factor);
    // SAFETY: the loads read 16 values of the encoding.
    unsafe {
        match (CODE, layout.scale) {
            (code::E2M1_32, _) => {
                let byte = bytes(at);
                // Byte 0 is a subnormal, 255 a NaN; the others are an exponent.
                let bits = _mm512_max_epi32(_mm512_slli_epi32::<23>(byte), _mm512_set1_epi32(0x0040_0000));
                let nan = _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(255));
                let bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc0_0000));
                _mm512_mul_ps(_mm512_castsi512_ps(bits), factor)
            }
            (code::E2M1_16, _) => {
                // The same exponent and mantissa in an f16, whose bias is 8 more.
                let byte = _mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast()));
                let size = _mm256_and_si256(byte, _mm256_set1_epi16(0x7f));
                let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(byte, _mm256_set1_epi16(0x80)));
                let half = _mm256_or_si256(_mm256_slli_epi16::<7>(size), sign);
                let nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
                let value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0));
                _mm512_mul_ps(_mm512_mask_mov_ps(value, nan, _mm512_set1_ps(f32::NAN)), factor)
            }
            (_, ScaleCode::F16) => halves(at),
            (_, ScaleCode::Bf16) => {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            _ => _mm512_loadu_ps(at.cast()),
        }
    }
}

/// # Safety
/// `at` has 16 f16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: 32 bytes, by the caller's word.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
}

/// # Safety
/// `at` has 16 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn bytes(at: *const u8) -> __m512i {
    // SAFETY: 16 bytes, by the caller's word.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(at.cast()) })
}

/// # Safety
/// `at` has 16 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn signed_bytes(at: *const u8) -> __m512i {
    // SAFETY: 16 bytes, by the caller's word.
    _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(at.cast()) })
}

/// m as the two i16 (m, 512·m) that [`Word::Sum`]'s two parts are multiplied with.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) fn min_pairs(m: __m512i) -> __m512i {
    _mm512_or_si512(m, _mm512_slli_epi32::<25>(m))
}

/// The digits and words of a tile of M rows, as broadcast operands.
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
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn word(self, step: usize, word: Word, row: usize) -> __m512i {
        // SAFETY: inside the words of the tile.
        let value = unsafe { self.words.add(((step * WORDS + word as usize) * M + row) * 4).cast::<i32>() };
        // SAFETY: as above.
        _mm512_set1_epi32(unsafe { value.read_unaligned() })
    }

    /// The sums of a step before its first product: what the zero code adds to them.
    ///
    /// # Safety
    /// `step` is a step of the tile.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn start(self, step: usize) -> Sums<M> {
        // SAFETY: by the caller's word.
        unsafe {
            let high = std::array::from_fn(|row| [self.word(step, Word::High, row); KERNEL_BLOCKS]);
            let low = std::array::from_fn(|row| [self.word(step, Word::Low, row); KERNEL_BLOCKS]);
            Sums { high, low }
        }
    }

    /// Adds the products of a chunk of codes at each of `packed`, inputs `first..`, to the sums.
    ///
    /// # Safety
    /// The inputs exist in the tile, and their codes at each of `packed`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn dot<const CODE: u8>(
        self,
        packed: [*const u8; KERNEL_BLOCKS],
        first: usize,
        sums: &mut Sums<M>,
    ) {
        // SAFETY: by the caller's word.
        unsafe {
            self.dot_half::<CODE, 0>(packed, first, sums);
            self.dot_half::<CODE, 4>(packed, first + CHUNK / 2, sums);
        }
    }

    /// Adds the products of half a chunk: vectors `FIRST..FIRST + 4` of its codes.
    ///
    /// # Safety
    /// As [`Self::dot`]; `first` is the first input of the half.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn dot_half<const CODE: u8, const FIRST: usize>(
        self,
        packed: [*const u8; KERNEL_BLOCKS],
        first: usize,
        sums: &mut Sums<M>,
    ) {
        // SAFETY: the stride of `first` is inside the digits of the tile, and the codes are there.
        unsafe {
            let digits = self.digits.add(first / STRIDE * 2 * M * STRIDE + first % STRIDE);
            // Spelled out, since the compiler would not unroll a loop around its own fence.
            self.dot_vector(packed.map(|packed| codes::<CODE>(packed, FIRST)), digits, sums);
            self.dot_vector(packed.map(|packed| codes::<CODE>(packed, FIRST + 1)), digits.add(4), sums);
            self.dot_vector(packed.map(|packed| codes::<CODE>(packed, FIRST + 2)), digits.add(8), sums);
            self.dot_vector(packed.map(|packed| codes::<CODE>(packed, FIRST + 3)), digits.add(12), sums);
        }
    }

    /// Adds the products of four inputs, whose digits of the first row are at `digits`.
    ///
    /// # Safety
    /// The digits are those of a tile of M rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn dot_vector(self, codes: [__m512i; KERNEL_BLOCKS], digits: *const u8, sums: &mut Sums<M>) {
        for row in 0..M {
            let [[h0, h1], [l0, l1]] = [&mut sums.high[row], &mut sums.low[row]];
            let (_h, _l): (__m512i, __m512i);
            // SAFETY: both digits of the row, by the caller's word. In assembly, since the compiler gathers the broadcasts of
            // all rows ahead of the products and spills the sums.
            unsafe {
                asm!(
                    "vpbroadcastd {h}, dword ptr [{digits}]",
                    "vpbroadcastd {l}, dword ptr [{digits} + {low}]",
                    "vpdpbusd {h0}, {c0}, {h}",
                    "vpdpbusd {h1}, {c1}, {h}",
                    "vpdpbusd {l0}, {c0}, {l}",
                    "vpdpbusd {l1}, {c1}, {l}",
                    digits = in(reg) digits.add(row * STRIDE),
                    low = const M * STRIDE,
                    c0 = in(zmm_reg) codes[0],
                    c1 = in(zmm_reg) codes[1],
                    h0 = inout(zmm_reg) *h0,
                    h1 = inout(zmm_reg) *h1,
                    l0 = inout(zmm_reg) *l0,
                    l1 = inout(zmm_reg) *l1,
                    h = out(zmm_reg) _h,
                    l = out(zmm_reg) _l,
                    options(nostack, preserves_flags, readonly),
                );
            }
        }
    }
}

/// The sums of high and low digits of each row and block.
struct Sums<const M: usize> {
    high: [[__m512i; KERNEL_BLOCKS]; M],
    low: [[__m512i; KERNEL_BLOCKS]; M],
}

/// Asks for the packed bytes `ahead` of a range that is about to be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) fn fetch(packed: *const u8, bytes: usize, ahead: usize) {
    for line in 0..bytes.div_ceil(64) {
        _mm_prefetch::<_MM_HINT_T1>(packed.wrapping_add(64 * line + ahead).cast());
    }
}

/// How far on from a place in a strip (all units of a block) what is read [`AHEAD`] bytes later lies: strips that are
/// read beside it lie between it and the next one.
#[derive(Clone, Copy)]
struct Distance {
    /// As long as as many strips follow as [`AHEAD`] bytes have at least.
    near: usize,
    /// From the place on from which one more does.
    far: usize,
    far_from: usize,
}

impl Distance {
    fn of(weight: &QuantMatrix) -> Self {
        let strip = (weight.units() * weight.layout().block).max(1);
        let others = (KERNEL_BLOCKS - 1) * strip;
        let near = AHEAD + AHEAD / strip * others;
        Self { near, far: near + others, far_from: strip - AHEAD % strip }
    }

    /// From `offset` bytes into a strip.
    #[inline(always)]
    fn at(self, offset: usize) -> usize {
        if offset < self.far_from { self.near } else { self.far }
    }
}

/// Some blocks of outputs for a tile of M rows, a format with plain scales.
///
/// # Safety
/// As [`matmul`]; the layout is of [`Kind::Plain`], CODE its code and STEP its step.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn plain<const CODE: u8, const STEP: usize, const M: usize>(
    weight: &QuantMatrix,
    tile: &Tile<'_>,
    blocks: [usize; KERNEL_BLOCKS],
    out: Out,
) {
    let layout = weight.layout();
    let input = Input::<M>::new(tile);
    let (steps, steps_a_unit) = (weight.cols() / STEP, layout.unit / STEP);
    let mut acc = [[_mm512_setzero_ps(); KERNEL_BLOCKS]; M];
    let (mut units, mut offset) = (blocks.map(|block| weight.strip(block)), 0);
    let distance = Distance::of(weight);
    for first in (0..steps).step_by(const { SPAN / STEP }) {
        let span = first..steps.min(first + const { SPAN / STEP });
        let mut sums = [[_mm512_setzero_ps(); KERNEL_BLOCKS]; M];
        for first in span.clone().step_by(steps_a_unit) {
            let steps = first..span.end.min(first + steps_a_unit);
            // SAFETY: the unit is one of the blocks and of the tile.
            unsafe {
                plain_unit::<CODE, STEP, M>(layout, input, units, distance.at(offset), steps, &mut sums)
            };
            units = units.map(|unit| unit.wrapping_add(layout.block));
            offset += layout.block;
        }
        for (row, (acc, sums)) in acc.iter_mut().zip(sums).enumerate() {
            // SAFETY: a step of the tile.
            let a = _mm512_castsi512_ps(unsafe { input.word(first, Word::Scale, row) });
            for (acc, sum) in acc.iter_mut().zip(sums) {
                *acc = _mm512_fmadd_ps(a, sum, *acc);
            }
        }
    }
    // SAFETY: rows of the tile, and blocks of this thread.
    unsafe { store_all(out, tile, blocks, acc) };
}

/// Adds the steps of a unit, which lies at each of `units`, to the sums of their span. What comes `ahead` is asked for.
///
/// # Safety
/// The unit exists there, and the steps in the tile; CODE, STEP and M as in [`plain`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn plain_unit<const CODE: u8, const STEP: usize, const M: usize>(
    layout: &Layout,
    input: Input<M>,
    units: [*const u8; KERNEL_BLOCKS],
    ahead: usize,
    steps: Range<usize>,
    acc: &mut [[__m512; KERNEL_BLOCKS]; M],
) {
    // Both steps of a group of 128 have the same scale.
    let scale_bytes = if layout.group > STEP { 0 } else { LANES * layout.scale.bytes() };
    let mut at = units;
    let mut scale = 0;
    for step in steps.clone() {
        // SAFETY: by the caller's word; scales are where the layout says.
        unsafe {
            let s_at = units.map(|unit| unit.add(layout.scales_at + scale));
            let b_at = units.map(|unit| unit.add(layout.biases_at + scale));
            // All at once: the compiler moves no load across a prefetch.
            for block in 0..KERNEL_BLOCKS {
                fetch(at[block], const { 2 * STEP * code::bits(CODE) }, ahead);
                fetch(s_at[block], 1, ahead);
                fetch(b_at[block], 1, ahead);
            }
            let mut sums = input.start(step);
            if STEP < CHUNK {
                if (step - steps.start).is_multiple_of(2) {
                    input.dot_half::<CODE, 0>(at, step * STEP, &mut sums);
                } else {
                    input.dot_half::<CODE, 4>(at, step * STEP, &mut sums);
                    at = at.map(|at| at.add(const { 64 * code::bits(CODE) }));
                }
            } else {
                for chunk in 0..STEP / CHUNK {
                    input.dot::<CODE>(at, step * STEP + chunk * CHUNK, &mut sums);
                    at = at.map(|at| at.add(const { 64 * code::bits(CODE) }));
                }
            }
            let Sums { high, low } = sums;
            for block in 0..KERNEL_BLOCKS {
                let s = scales::<CODE>(layout, s_at[block]);
                for (row, acc) in acc.iter_mut().enumerate() {
                    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[row][block]), low[row][block]);
                    acc[block] = _mm512_fmadd_ps(s, _mm512_cvtepi32_ps(sum), acc[block]);
                }
                if layout.affine {
                    let b = scales::<CODE>(layout, b_at[block]);
                    let c = _mm512_fmadd_ps(_mm512_set1_ps(layout.zero as f32), s, b);
                    for (row, acc) in acc.iter_mut().enumerate() {
                        let sum = _mm512_castsi512_ps(input.word(step, Word::Sum, row));
                        acc[block] = _mm512_fmadd_ps(c, sum, acc[block]);
                    }
                }
            }
            scale += scale_bytes;
        }
    }
}

/// Some blocks of outputs for a tile of M rows, a format with super-blocks.
///
/// # Safety
/// As [`matmul`]; the layout is of [`Kind::Super`] and CODE its code.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_blocks<const CODE: u8, const M: usize>(
    weight: &QuantMatrix,
    tile: &Tile<'_>,
    blocks: [usize; KERNEL_BLOCKS],
    out: Out,
) {
    let layout = weight.layout();
    let input = Input::<M>::new(tile);
    let chunk_bytes = const { 64 * code::bits(CODE) };
    let groups_a_chunk = const { code::groups_a_chunk(CODE) };
    let affine = const { code::mins(CODE) };
    let mut acc = [[_mm512_setzero_ps(); KERNEL_BLOCKS]; M];
    let distance = Distance::of(weight);
    for unit in 0..weight.units() {
        let packed = blocks.map(|block| weight.strip(block).wrapping_add(unit * layout.block));
        let ahead = distance.at(unit * layout.block);
        let zero = [[_mm512_setzero_si512(); KERNEL_BLOCKS]; M];
        let (mut high, mut low, mut mins) = (zero, zero, zero);
        let first_step = unit * (layout.unit / layout.step);
        for chunk in 0..layout.unit / CHUNK {
            // SAFETY: super-blocks are whole; group scales are where the layout says.
            unsafe {
                let at = packed.map(|packed| packed.add(chunk * chunk_bytes));
                for block in 0..KERNEL_BLOCKS {
                    fetch(at[block], chunk_bytes, ahead);
                    fetch(packed[block].add(layout.scales_at + chunk * CHUNK), 1, ahead);
                }
                for part in 0..groups_a_chunk {
                    let group = chunk * groups_a_chunk + part;
                    let step = first_step + group;
                    let mut sums = input.start(step);
                    let first = unit * layout.unit + chunk * CHUNK;
                    match (groups_a_chunk, part) {
                        (1, _) => input.dot::<CODE>(at, first, &mut sums),
                        (_, 0) => input.dot_half::<CODE, 0>(at, first, &mut sums),
                        _ => input.dot_half::<CODE, 4>(at, first + CHUNK / 2, &mut sums),
                    }
                    let Sums { high: h, low: l } = sums;
                    for block in 0..KERNEL_BLOCKS {
                        let sub = packed[block].add(layout.scales_at + group * LANES);
                        let sc = if affine { bytes(sub) } else { signed_bytes(sub) };
                        for row in 0..M {
                            let (high, low) = (&mut high[row][block], &mut low[row][block]);
                            *high = _mm512_add_epi32(*high, _mm512_mullo_epi32(h[row][block], sc));
                            *low = _mm512_add_epi32(*low, _mm512_mullo_epi32(l[row][block], sc));
                        }
                        if affine {
                            let m = min_pairs(bytes(packed[block].add(layout.biases_at + group * LANES)));
                            for (row, mins) in mins.iter_mut().enumerate() {
                                let sum = input.word(step, Word::Sum, row);
                                mins[block] = _mm512_dpwssd_epi32(mins[block], m, sum);
                            }
                        }
                    }
                }
            }
        }
        // SAFETY: d and dmin are where the layout says.
        unsafe {
            for block in 0..KERNEL_BLOCKS {
                let d = packed[block].add(layout.d_at);
                let d = [halves(d), if affine { halves(d.add(2 * LANES)) } else { _mm512_setzero_ps() }];
                for row in 0..M {
                    let a = _mm512_castsi512_ps(input.word(first_step, Word::Scale, row));
                    let sums = [high[row][block], low[row][block], mins[row][block]];
                    acc[row][block] = finish_super(affine, d, a, sums, acc[row][block]);
                }
            }
        }
    }
    // SAFETY: rows of the tile, and blocks of this thread.
    unsafe { store_all(out, tile, blocks, acc) };
}

/// The float part of one super-block and row: `sums` are H, L and M of the definition, `d` is d and dmin.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) fn finish_super(
    affine: bool,
    d: [__m512; 2],
    a: __m512,
    sums: [__m512i; 3],
    acc: __m512,
) -> __m512 {
    let [high, low, mins] = sums.map(|sum| _mm512_cvtepi32_ps(sum));
    let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), low);
    let acc = _mm512_fmadd_ps(_mm512_mul_ps(d[0], a), sum, acc);
    if affine { _mm512_fnmadd_ps(_mm512_mul_ps(d[1], a), mins, acc) } else { acc }
}

/// Stores what a tile's rows and some blocks got.
///
/// # Safety
/// The blocks belong to this thread.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store_all<const M: usize>(
    out: Out,
    tile: &Tile<'_>,
    blocks: [usize; KERNEL_BLOCKS],
    acc: [[__m512; KERNEL_BLOCKS]; M],
) {
    for (row, acc) in acc.into_iter().enumerate().take(tile.rows) {
        for (block, acc) in blocks.into_iter().zip(acc) {
            // SAFETY: a row of the tile, and a block of this thread.
            unsafe { store(out, tile.first + row, block, acc) };
        }
    }
}

/// [`Out::store`] of a vector.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn store(out: Out, row: usize, block: usize, values: __m512) {
    let count = LANES.min(out.width - block * LANES);
    // SAFETY: the caller vouches for row and block; the mask ends at the row's end.
    unsafe {
        let to = out.start.add(row * out.width + block * LANES);
        _mm512_mask_storeu_ps(to, ((1u32 << count) - 1) as __mmask16, values);
    }
}
