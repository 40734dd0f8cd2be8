//! [`Simd`] by AVX-512 F, BW, VL and DQ: one register holds the 16 lanes.

use super::Simd;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, VL, DQ and what [`Avx2`](super::Avx2) proves.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has these features, and the code that uses the value is compiled with them.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// Where numbers of some bits lie: the bytes to take, how far to shift them, and what belongs to the number.
#[derive(Clone, Copy)]
pub(crate) struct Codes(__m512i, __m512i, __m512i);

impl Simd for Avx512 {
    type V = __m512;
    type Codes = Codes;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn select_less(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }

    #[inline(always)]
    fn select_bits(self, mask: u16, a: __m512, other: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_mask_blend_ps(mask, other, a) }
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_abs_ps(a) }
    }

    #[inline(always)]
    fn copysign(self, size: __m512, sign: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let bit = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(bit, size), _mm512_and_ps(bit, sign))
        }
    }

    #[inline(always)]
    fn times_power_of_two(self, a: __m512, n: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_scalef_ps(a, n) }
    }

    #[inline(always)]
    fn low_bits_to_exponent(self, a: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))) }
    }

    #[inline(always)]
    fn greatest(self, a: __m512) -> f32 {
        // SAFETY: `self` proves AVX-512, which includes AVX2.
        unsafe {
            let v = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            super::avx2::greatest(v)
        }
    }

    #[inline(always)]
    fn sums(self, v: [__m512; 4]) -> [f32; 4] {
        // SAFETY: `self` proves AVX-512, which includes AVX2.
        unsafe {
            let [a, b, c, d] = v;
            let (a, b) = (halves_added(a), halves_added(b));
            let (c, d) = (halves_added(c), halves_added(d));
            super::avx2::sums([a, b, c, d])
        }
    }

    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> __m512 {
        // SAFETY: readable by this function's contract; `self` proves AVX-512.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, at: *const u16) -> __m512 {
        // The form without "suppress all exceptions", which could not take its operand from memory: that saves one
        // of two steps in the units that also do the fma.
        // SAFETY: readable by this function's contract; `self` proves AVX-512.
        unsafe { _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u16) -> __m512 {
        // SAFETY: readable by this function's contract; `self` proves AVX-512.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, at: *const u8) -> __m512 {
        // SAFETY: readable by this function's contract; `self` proves AVX-512.
        unsafe {
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast()));
            let half = super::avx2::e4m3_to_f16(wide);
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(self, at: *const u8) -> __m512 {
        // SAFETY: readable by this function's contract; `self` proves AVX-512.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()))) }
    }

    #[inline(always)]
    fn codes(self, bits: usize) -> Codes {
        let (bytes, shifts) = super::code_places(bits);
        // SAFETY: the arrays hold 64 bytes and 16 numbers; `self` proves AVX-512.
        unsafe {
            let bytes = _mm512_loadu_si512(bytes.as_ptr().cast());
            let shifts = _mm512_loadu_si512(shifts.as_ptr().cast());
            Codes(bytes, shifts, _mm512_set1_epi32((1 << bits) - 1))
        }
    }

    #[inline(always)]
    unsafe fn load_codes(self, codes: Codes, at: *const u8) -> __m512 {
        // SAFETY: readable by this function's contract; `self` proves AVX-512.
        unsafe {
            let Codes(places, shifts, mask) = codes;
            let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(at.cast()));
            let codes = _mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, places), shifts);
            _mm512_cvtepi32_ps(_mm512_and_si512(codes, mask))
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32, v: __m512) {
        // SAFETY: writable by this function's contract; `self` proves AVX-512.
        unsafe { _mm512_storeu_ps(at, v) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// Lanes j + lanes j + 8.
///
/// # Safety
/// The CPU has AVX-512 F and DQ.
#[inline(always)]
unsafe fn halves_added(v: __m512) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)) }
}
