//! [`Simd`] by AVX2, FMA and F16C: two registers hold the 16 lanes.

use super::Simd;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has these features, and the code that uses the value is compiled with them.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// Lanes 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Two(__m256, __m256);

/// Where numbers of some bits lie: for each half of the lanes the bytes to take and how far to shift them; then what
/// belongs to the number.
#[derive(Clone, Copy)]
pub(crate) struct Codes([(__m256i, __m256i); 2], __m256i);

impl Simd for Avx2 {
    type V = Two;
    type Codes = Codes;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Two {
        // SAFETY: `self` proves AVX2.
        let v = unsafe { _mm256_set1_ps(x) };
        Two(v, v)
    }

    #[inline(always)]
    fn add(self, a: Two, b: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn sub(self, a: Two, b: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn mul(self, a: Two, b: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn div(self, a: Two, b: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn fma(self, a: Two, b: Two, c: Two) -> Two {
        // SAFETY: `self` proves FMA.
        unsafe { Two(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }

    #[inline(always)]
    fn max(self, a: Two, b: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn min(self, a: Two, b: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn select_less(self, a: Two, b: Two, yes: Two, no: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe {
            Two(
                _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
                _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
            )
        }
    }

    #[inline(always)]
    fn select_bits(self, mask: u16, a: Two, other: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let [low, high] = mask.to_le_bytes();
            Two(_mm256_blendv_ps(other.0, a.0, bits(low)), _mm256_blendv_ps(other.1, a.1, bits(high)))
        }
    }

    #[inline(always)]
    fn abs(self, a: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let bit = _mm256_set1_ps(-0.0);
            Two(_mm256_andnot_ps(bit, a.0), _mm256_andnot_ps(bit, a.1))
        }
    }

    #[inline(always)]
    fn copysign(self, size: Two, sign: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let bit = _mm256_set1_ps(-0.0);
            let size = self.abs(size);
            Two(
                _mm256_or_ps(size.0, _mm256_and_ps(bit, sign.0)),
                _mm256_or_ps(size.1, _mm256_and_ps(bit, sign.1)),
            )
        }
    }

    #[inline(always)]
    fn times_power_of_two(self, a: Two, n: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe { Two(times_power_of_two(a.0, n.0), times_power_of_two(a.1, n.1)) }
    }

    #[inline(always)]
    fn low_bits_to_exponent(self, a: Two) -> Two {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let shift = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(v)));
            Two(shift(a.0), shift(a.1))
        }
    }

    #[inline(always)]
    fn greatest(self, a: Two) -> f32 {
        // SAFETY: `self` proves AVX2.
        unsafe { greatest(_mm256_max_ps(a.0, a.1)) }
    }

    #[inline(always)]
    fn sums(self, v: [Two; 4]) -> [f32; 4] {
        let [a, b, c, d] = v;
        // SAFETY: `self` proves AVX2.
        unsafe {
            sums([
                _mm256_add_ps(a.0, a.1),
                _mm256_add_ps(b.0, b.1),
                _mm256_add_ps(c.0, c.1),
                _mm256_add_ps(d.0, d.1),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> Two {
        // SAFETY: readable by this function's contract; `self` proves AVX2.
        unsafe { Two(_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, at: *const u16) -> Two {
        // SAFETY: readable by this function's contract; `self` proves F16C.
        unsafe {
            let (low, high) = (_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(8).cast()));
            Two(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u16) -> Two {
        // SAFETY: readable by this function's contract; `self` proves AVX2.
        unsafe {
            let (low, high) = (_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(8).cast()));
            let widen = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v)));
            Two(widen(low), widen(high))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, at: *const u8) -> Two {
        // SAFETY: readable by this function's contract; `self` proves AVX2 and F16C.
        unsafe {
            let half = e4m3_to_f16(_mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast())));
            let factor = _mm256_set1_ps(256.0);
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            let high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half));
            Two(_mm256_mul_ps(low, factor), _mm256_mul_ps(high, factor))
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(self, at: *const u8) -> Two {
        // SAFETY: readable by this function's contract; `self` proves AVX2.
        unsafe {
            let bytes = _mm_loadu_si128(at.cast());
            let widen = |v| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
            Two(widen(bytes), widen(_mm_srli_si128::<8>(bytes)))
        }
    }

    #[inline(always)]
    fn codes(self, bits: usize) -> Codes {
        let (bytes, shifts) = super::code_places(bits);
        // SAFETY: the arrays hold 64 bytes and 16 numbers; `self` proves AVX2.
        unsafe {
            let half = |i: usize| {
                let bytes = _mm256_loadu_si256(bytes.as_ptr().cast::<__m256i>().add(i));
                (bytes, _mm256_loadu_si256(shifts.as_ptr().cast::<__m256i>().add(i)))
            };
            Codes([half(0), half(1)], _mm256_set1_epi32((1 << bits) - 1))
        }
    }

    #[inline(always)]
    unsafe fn load_codes(self, codes: Codes, at: *const u8) -> Two {
        // SAFETY: readable by this function's contract; `self` proves AVX2.
        unsafe {
            let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(at.cast()));
            let Codes([low, high], mask) = codes;
            let take = |(places, shifts)| {
                let codes = _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, places), shifts);
                _mm256_cvtepi32_ps(_mm256_and_si256(codes, mask))
            };
            Two(take(low), take(high))
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32, v: Two) {
        // SAFETY: writable by this function's contract; `self` proves AVX2.
        unsafe {
            _mm256_storeu_ps(at, v.0);
            _mm256_storeu_ps(at.add(8), v.1);
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// All ones in the lanes whose bit is set.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn bits(mask: u8) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let set = _mm256_and_si256(_mm256_set1_epi32(i32::from(mask)), each);
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each))
    }
}

/// a * 2^n in two factors, as in `vector::exp`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn times_power_of_two(a: __m256, n: __m256) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        let n = _mm256_cvtps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        let bias = _mm256_set1_epi32(127);
        let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, bias)));
        _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(n, half)))
    }
}

/// The greatest of eight lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn greatest(v: __m256) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
}

/// The sums of the lanes of four vectors: lanes 4, then 2, then 1 apart.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn sums(v: [__m256; 4]) -> [f32; 4] {
    // SAFETY: by this function's contract; the array holds four floats.
    unsafe {
        let [a, b, c, d] = v;
        // [a0..a3 | b0..b3] and [a4..a7 | b4..b7]; the same of c and d.
        let ab = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
        let cd = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
        // [a0 a1 c0 c1 | b0 b1 d0 d1] and [a2 a3 c2 c3 | b2 b3 d2 d3].
        let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        let pairs = _mm256_add_ps(
            _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
            _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)),
        );
        let sums = _mm256_add_ps(pairs, _mm256_permute_ps::<0b10_11_00_01>(pairs));
        // [a a c c | b b d d] to [a b c d].
        let sums = _mm_blend_ps::<0b1010>(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
}

/// From E4M3 codes in 16-bit lanes to binary16 of the value / 256: the exponent's bias is 7 in one, 15 in the other.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn e4m3_to_f16(codes: __m256i) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        // The sign goes to bit 15 (and 14), the other seven bits to 13..=7.
        let shifted = _mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(codes));
        let nan = _mm256_set1_epi16(0x3F80);
        let is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(shifted, nan), nan);
        let half = _mm256_and_si256(shifted, _mm256_set1_epi16(0xBF80_u16 as i16));
        _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7E00)))
    }
}
