//! Sixteen f32 lanes in the registers of one instruction set, for the kernels that the compiler cannot vectorize
//! well by itself. Such a kernel is one generic function over [`Simd`], beside a plain scalar definition.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
pub(crate) use {avx2::Avx2, avx512::Avx512};

use half::{bf16, f16};

use crate::vector::constants::{
    EXP_MAX, EXP_MIN, EXP_P, LN2_HIGH, LN2_LOW, LOG2_E, ROUND, TANH_P, TANH_SMALL,
};

/// Proof that the CPU has an instruction set, and its operations on 16 f32 lanes.
///
/// Every operation is the IEEE one, lane by lane, unless its line says more.
pub(crate) trait Simd: Copy {
    /// Sixteen lanes.
    type V: Copy;
    /// Where [`Simd::load_codes`] finds its numbers.
    type Codes: Copy;
    /// Whether there are 32 registers of 16 lanes, not 8: says how large a tile may be.
    const WIDE: bool;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a > b ? a : b.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// a < b ? a : b.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a < b ? yes : no.
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Lanes whose bit is set, else `other`.
    fn select_bits(self, mask: u16, a: Self::V, other: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// `size` with the sign of `sign`.
    fn copysign(self, size: Self::V, sign: Self::V) -> Self::V;
    /// a * 2^n for integers n in -126..=128.
    fn times_power_of_two(self, a: Self::V, n: Self::V) -> Self::V;
    /// The bits of each lane shifted left by 23: what stood in its low bits becomes its exponent.
    fn low_bits_to_exponent(self, a: Self::V) -> Self::V;
    /// The greatest lane, by [`Simd::max`] in some order.
    fn greatest(self, a: Self::V) -> f32;
    /// The sums of the lanes of four vectors, each in the order of `vector::sum16`.
    fn sums(self, v: [Self::V; 4]) -> [f32; 4];

    /// # Safety
    /// 16 elements are readable at `at`; any alignment. The same holds for the loads below.
    unsafe fn load(self, at: *const f32) -> Self::V;
    /// # Safety
    /// As for `load`, of binary16.
    unsafe fn load_f16(self, at: *const u16) -> Self::V;
    /// # Safety
    /// As for `load`, of bfloat16.
    unsafe fn load_bf16(self, at: *const u16) -> Self::V;
    /// # Safety
    /// As for `load`, of OCP E4M3.
    unsafe fn load_e4m3(self, at: *const u8) -> Self::V;
    /// 16 numbers of 8 bits.
    ///
    /// # Safety
    /// As for `load`.
    unsafe fn load_bytes(self, at: *const u8) -> Self::V;
    /// For numbers of `bits` bits, 1 to 8.
    fn codes(self, bits: usize) -> Self::Codes;
    /// 16 numbers one after the other, the first in the lowest bits.
    ///
    /// # Safety
    /// 16 bytes are readable at `at`, whatever the numbers take; any alignment.
    unsafe fn load_codes(self, codes: Self::Codes, at: *const u8) -> Self::V;
    /// # Safety
    /// 16 elements are writable at `at`; any alignment.
    unsafe fn store(self, at: *mut f32, v: Self::V);
    /// Asks for the cache line of `at`, which need not be readable.
    fn prefetch(self, at: *const u8);
}

/// For each of 16 numbers of `bits` bits one after the other: the bytes that it lies in (0x80 for none), as a shuffle
/// takes them, and how far from the lowest bit it begins.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn code_places(bits: usize) -> ([[u8; 4]; 16], [i32; 16]) {
    let (mut bytes, mut shifts) = ([[0x80; 4]; 16], [0; 16]);
    for (i, (bytes, shift)) in bytes.iter_mut().zip(&mut shifts).enumerate() {
        let (first, last) = (i * bits / 8, (i * bits + bits - 1) / 8);
        bytes[0] = first as u8;
        if last > first {
            bytes[1] = last as u8;
        }
        *shift = (i * bits % 8) as i32;
    }
    (bytes, shifts)
}

/// A stored element type that 16 lanes are widened from.
pub(crate) trait Element: Copy + Default {
    /// # Safety
    /// 16 elements are readable at `at`; any alignment.
    unsafe fn load<S: Simd>(simd: S, at: *const Self) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, at: *const Self) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { simd.load(at) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, at: *const Self) -> S::V {
        // SAFETY: by this function's contract; `f16` is a transparent `u16`.
        unsafe { simd.load_f16(at.cast()) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, at: *const Self) -> S::V {
        // SAFETY: by this function's contract; `bf16` is a transparent `u16`.
        unsafe { simd.load_bf16(at.cast()) }
    }
}

/// `count` elements, then zeros. Out of line, so that the loops around it stay small.
///
/// # Safety
/// `count` elements, at most 16, are readable at `at`; any alignment.
#[inline(always)]
pub(crate) unsafe fn load_tail<S: Simd, E: Element>(simd: S, at: *const E, count: usize) -> S::V {
    // SAFETY: by this function's contract; the array holds 16.
    unsafe { E::load(simd, tail(at, count).as_ptr()) }
}

/// # Safety
/// As for `load_tail`.
#[inline(never)]
unsafe fn tail<E: Element>(at: *const E, count: usize) -> [E; 16] {
    let mut all = [E::default(); 16];
    for (i, element) in all.iter_mut().enumerate().take(count) {
        // SAFETY: by this function's contract.
        *element = unsafe { at.add(i).read_unaligned() };
    }
    all
}

/// A kernel: its definition in plain Rust, and its form over 16 lanes.
///
/// Both are compiled once for each instruction set, so they must be `#[inline(always)]` all the way down. The
/// compiler may vectorize the definition, but it never reorders IEEE operations: all levels give the same bits.
pub(crate) trait Kernel: Sized {
    type Output;

    fn scalar(self) -> Self::Output;

    /// The definition itself, unless the compiler needs help to make it fast.
    #[inline(always)]
    fn simd<S: Simd>(self, _simd: S) -> Self::Output {
        self.scalar()
    }
}

/// `vector::exp` in 16 lanes, the same operations.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // NaN is the second operand, which `min` gives back.
    let limited = s.min(s.splat(EXP_MAX), x);
    let rounded = s.fma(limited, s.splat(LOG2_E), s.splat(ROUND));
    let n = s.sub(rounded, s.splat(ROUND));
    let r = s.fma(n, s.splat(-LN2_LOW), s.fma(n, s.splat(-LN2_HIGH), limited));
    let e = s.add(s.fma(s.mul(r, r), polynomial(s, r, &EXP_P), r), s.splat(1.0));
    s.select_less(x, s.splat(EXP_MIN), s.splat(0.0), s.times_power_of_two(e, n))
}

/// `vector::tanh` in 16 lanes, the same operations.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (size, square, one) = (s.abs(x), s.mul(x, x), s.splat(1.0));
    let small = s.fma(s.mul(square, x), polynomial(s, square, &TANH_P), x);
    let large = s.sub(one, s.div(s.splat(2.0), s.add(exp(s, s.add(size, size)), one)));
    s.copysign(s.select_less(size, s.splat(TANH_SMALL), small, large), x)
}

#[inline(always)]
fn polynomial<S: Simd>(s: S, x: S::V, coefficients: &[f32; 5]) -> S::V {
    let [a, b, c, d, e] = *coefficients;
    let high = s.fma(s.fma(s.splat(a), x, s.splat(b)), x, s.splat(c));
    s.fma(s.fma(high, x, s.splat(d)), x, s.splat(e))
}
