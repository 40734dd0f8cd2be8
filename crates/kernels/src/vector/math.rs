//! The elementary functions, built from IEEE operations only, so that all levels give the same bits.
//!
//! The polynomials are minimax fits made for this crate (relative error, over the ranges named below).

use constants::*;

/// What these functions and their twins in 16 lanes (`crate::simd`) are made of.
pub(crate) mod constants {
    /// log2(e), and ln(2) in two parts whose first has trailing zeros, so that `n * LN2_HIGH` is exact.
    pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
    pub(crate) const LN2_HIGH: f32 = 355.0 / 512.0;
    pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5 * 2^23: adding it rounds a small number to an integer, which then stands in the low bits.
    pub(crate) const ROUND: f32 = 12_582_912.0;
    /// exp is 0 below: there its result would be subnormal, which costs much and means nothing.
    pub(crate) const EXP_MIN: f32 = -87.336_54;
    /// exp is infinite from here on.
    pub(crate) const EXP_MAX: f32 = 89.0;
    /// exp(r) = 1 + r + r^2 * P(r) for |r| <= ln(2)/2; error 3e-9. Highest power first.
    pub(crate) const EXP_P: [f32; 5] =
        [1.381_459_9e-3, 8.368_717e-3, 4.166_839e-2, 0.166_665_21, 0.499_999_94];
    /// tanh(x) = x + x^3 * P(x^2) for |x| <= 0.625; error 4e-9. Highest power first.
    pub(crate) const TANH_P: [f32; 5] =
        [-5.704_986_4e-3, 2.063_908_6e-2, -5.373_971_5e-2, 0.133_314_42, -0.333_332_8];
    pub(crate) const TANH_SMALL: f32 = 0.625;
}

/// e^x within 1 ulp; 0 where the result would be subnormal, NaN for NaN.
#[must_use]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let limited = if x > EXP_MAX { EXP_MAX } else { x };
    let rounded = limited.mul_add(LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, limited));
    let p = polynomial(r, &EXP_P);
    let e = (r * r).mul_add(p, r) + 1.0;
    // 2^n in two factors, since 2^128 (whose product overflows, as it should) has no f32.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let value = e * power_of_two(half) * power_of_two(n.wrapping_sub(half));
    if x < EXP_MIN { 0.0 } else { value }
}

/// tanh within 2 ulp; NaN for NaN.
#[must_use]
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let square = x * x;
    let small = (square * x).mul_add(polynomial(square, &TANH_P), x);
    let large = 1.0 - 2.0 / (exp(size + size) + 1.0);
    // The sign is set last, so that -0 stays -0.
    (if size < TANH_SMALL { small } else { large }).copysign(x)
}

/// x * sigmoid(x), also called swish.
#[must_use]
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// 1 / (1 + e^-x).
#[must_use]
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The tanh form of GELU: x/2 * (1 + tanh(u)), u = sqrt(2/pi) * (x + 0.044715 x^3), written as x * sigmoid(2u).
#[must_use]
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    let u = x * (x * x).mul_add(0.044_715, 1.0);
    x / (1.0 + exp(u * -TWO_SQRT_2_OVER_PI))
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
fn polynomial(x: f32, coefficients: &[f32; 5]) -> f32 {
    let [a, b, c, d, e] = *coefficients;
    a.mul_add(x, b).mul_add(x, c).mul_add(x, d).mul_add(x, e)
}

/// The sum of 16 lanes in the order that every kernel uses: lane j + lane j + 8, then 4, 2, 1 apart.
#[inline(always)]
pub(crate) fn sum16<T: Copy + std::ops::Add<Output = T>>(lanes: &[T; 16]) -> T {
    let mut v = *lanes;
    for step in [8, 4, 2, 1] {
        for j in 0..step {
            v[j] = v[j] + v[j + step];
        }
    }
    v[0]
}
