//! From scores to weights: scores count in units of log2, so that a weight is a power of two.
//!
//! Against `exp` of the difference this spares the multiplication with log2(e), which goes into the scale, and the
//! care for what is too large: a score is never above the greatest one.

use super::AttentionShape;
use crate::simd::{self, Simd};
use crate::vector::softcapped;
use std::f32::consts::LOG2_E;

/// 2^x is taken as 0 from here down; its rounding to an exponent of -127, the bits of which are 0, does that.
const LOWEST: f32 = -127.0;
/// 1.5 * 2^23 + 127: added to a number it leaves the nearest integer n as n + 127, an exponent, in the low bits.
const ROUND: f32 = 12_582_912.0 + 127.0;
/// 2^r = 1 + r * P(r) for |r| <= 1/2; error 2e-8. Highest power first.
const P: [f32; 6] =
    [1.559_467_8e-4, 1.340_664_3e-3, 9.617_693e-3, 5.550_310_4e-2, 0.240_226_52, 0.693_147_24];

/// 2^x for x <= 0; NaN for NaN.
#[inline(always)]
pub(super) fn weight(x: f32) -> f32 {
    // NaN is the operand that is given back.
    let x = if LOWEST > x { LOWEST } else { x };
    let rounded = x + ROUND;
    let r = x - (rounded - ROUND);
    let [a, b, c, d, e, f] = P;
    let p = a.mul_add(r, b).mul_add(r, c).mul_add(r, d).mul_add(r, e).mul_add(r, f).mul_add(r, 1.0);
    p * f32::from_bits(rounded.to_bits() << 23)
}

/// [`weight`] in 16 lanes, the same operations.
#[inline(always)]
pub(super) fn weights<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(LOWEST), x);
    let rounded = s.add(x, s.splat(ROUND));
    let r = s.sub(x, s.sub(rounded, s.splat(ROUND)));
    let mut p = s.splat(P[0]);
    for coefficient in [P[1], P[2], P[3], P[4], P[5], 1.0] {
        p = s.fma(p, r, s.splat(coefficient));
    }
    s.mul(p, s.low_bits_to_exponent(rounded))
}

/// What a dot product is multiplied with, after which [`capped`] makes it a score.
#[inline(always)]
pub(super) fn factor(shape: &AttentionShape) -> f32 {
    if shape.softcap.is_some() { shape.scale } else { shape.scale * LOG2_E }
}

/// The score of a scaled dot product.
#[inline(always)]
pub(super) fn capped(shape: &AttentionShape, scaled: f32) -> f32 {
    shape.softcap.map_or(scaled, |cap| softcapped(scaled, cap) * LOG2_E)
}

/// [`capped`] in 16 lanes, where there is a cap.
#[inline(always)]
pub(super) fn caps<S: Simd>(s: S, scaled: S::V, cap: f32) -> S::V {
    let cap = s.splat(cap);
    s.mul(s.mul(cap, simd::tanh(s, s.div(scaled, cap))), s.splat(LOG2_E))
}

#[cfg(test)]
mod tests {
    use super::weight;

    #[test]
    fn weights_are_powers_of_two() {
        assert_eq!(weight(0.0), 1.0);
        for i in 0..100_000 {
            let x = i as f32 * -0.001_259;
            let exact = f64::from(x).exp2();
            assert!((f64::from(weight(x)) / exact - 1.0).abs() < 1.5e-7, "{x}");
        }
        for x in [-126.6, -127.0, -1e30, f32::NEG_INFINITY] {
            assert_eq!(weight(x), 0.0, "{x}");
        }
        assert!(weight(f32::NAN).is_nan());
    }
}
