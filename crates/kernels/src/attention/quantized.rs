//! Keys and values in a block as small integers with a scale and a bias for each group of dimensions.
//!
//! The arithmetic is that of mlx's affine quantization, the group being consecutive dimensions of one head of one
//! token. What is quantized is what a block of floats would hold, so first the values are rounded to its type.

use super::{BLOCK, KvShape, KvType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// How keys and values are quantized: the bits of a code, and the dimensions that share a scale and a bias, which
/// have the block's float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvQuant {
    bits: usize,
    group: usize,
}

/// The longest group.
const GROUP_MAX: usize = 128;

impl KvQuant {
    /// Bits that a code may have.
    pub const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
    /// Dimensions that a group may have.
    pub const GROUPS: [usize; 3] = [32, 64, GROUP_MAX];

    /// `bits` and `group`, if both are among those above.
    #[must_use]
    pub fn new(bits: usize, group: usize) -> Option<Self> {
        (Self::BITS.contains(&bits) && Self::GROUPS.contains(&group)).then_some(Self { bits, group })
    }

    /// Bits of a code.
    #[must_use]
    pub fn bits(self) -> usize {
        self.bits
    }

    /// Dimensions of a group.
    #[must_use]
    pub fn group(self) -> usize {
        self.group
    }

    /// Whether heads of `head_dim` dimensions are whole groups.
    #[must_use]
    pub fn fits(self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(self.group)
    }

    /// Bytes of one layer's keys and values in one block: for each key-value head the keys, then for each the
    /// values. Either are a stream of codes, the first in the lowest bits, in the order of a block of floats (keys
    /// `[head_dim][BLOCK]`, values `[BLOCK][head_dim]`); then the scales `[groups][BLOCK]`; then the biases alike.
    #[must_use]
    pub fn slab_bytes(self, shape: &KvShape) -> usize {
        2 * shape.kv_heads * self.head_bytes(shape)
    }

    pub(super) fn head_bytes(self, shape: &KvShape) -> usize {
        self.factor_at(shape, 2, 0)
    }

    /// Where the scales (`which` 0) or the biases (1) of group `group` begin within a head's keys or values.
    #[inline(always)]
    pub(super) fn factor_at(self, shape: &KvShape, which: usize, group: usize) -> usize {
        let groups = shape.head_dim / self.group;
        BLOCK * shape.head_dim * self.bits / 8 + (which * groups + group) * BLOCK * shape.ty.bytes()
    }

    /// Dimension `d` of the key of token `t`, from the keys of a head.
    #[inline(always)]
    pub(super) fn key(self, shape: &KvShape, keys: &[u8], d: usize, t: usize) -> f32 {
        self.value_at(shape, keys, d * BLOCK + t, d, t)
    }

    /// Dimension `d` of the value of token `t`, from the values of a head.
    #[inline(always)]
    pub(super) fn value(self, shape: &KvShape, values: &[u8], d: usize, t: usize) -> f32 {
        self.value_at(shape, values, t * shape.head_dim + d, d, t)
    }

    /// The definition of what a code stands for: scale * code + bias, rounded once.
    #[inline(always)]
    fn value_at(self, shape: &KvShape, data: &[u8], index: usize, d: usize, t: usize) -> f32 {
        let factor = |which| {
            let at = self.factor_at(shape, which, d / self.group);
            shape.ty.element(&data[at..], t)
        };
        f32::from(self.code(data, index)).mul_add(factor(0), factor(1))
    }

    /// Code `index` of a stream.
    #[inline(always)]
    pub(super) fn code(self, stream: &[u8], index: usize) -> u8 {
        let (byte, shift) = (index * self.bits / 8, index * self.bits % 8);
        // The last code ends with its byte.
        let next = stream.get(byte + 1).copied().unwrap_or(0);
        let two = u16::from(stream[byte]) | u16::from(next) << 8;
        (two >> shift) as u8 & ((1_u16 << self.bits) - 1) as u8
    }
}

/// Writes the key and the value `[kv_heads][head_dim]` of one token, quantized, to slot `slot` of a slab of
/// [`KvQuant::slab_bytes`].
///
/// A group that holds an infinity or a NaN becomes NaN.
///
/// # Panics
/// If a length does not fit the shape, the heads are not whole groups, or `slot` is not below [`BLOCK`].
pub fn write_quantized(shape: &KvShape, quant: KvQuant, slab: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
    assert!(slot < BLOCK, "slot {slot}");
    assert!(quant.fits(shape.head_dim), "{quant:?} of {} dimensions", shape.head_dim);
    assert_eq!(slab.len(), quant.slab_bytes(shape), "bytes of a block");
    assert_eq!(k.len(), shape.kv_heads * shape.head_dim, "length of the key");
    assert_eq!(v.len(), k.len(), "length of the value");
    let (bits, head_dim, head_bytes) = (quant.bits, shape.head_dim, quant.head_bytes(shape));
    let (keys, values) = slab.split_at_mut(shape.kv_heads * head_bytes);
    for (head, k) in keys.chunks_exact_mut(head_bytes).zip(k.chunks_exact(head_dim)) {
        each_group(shape, quant, head, slot, k, |head, group, codes| {
            let start = group * quant.group * 4 * bits;
            let rows = head[start..][..codes.len() * 4 * bits].chunks_exact_mut(4 * bits);
            put_column(rows.zip(codes), bits, slot);
        });
    }
    for (head, v) in values.chunks_exact_mut(head_bytes).zip(v.chunks_exact(head_dim)) {
        each_group(shape, quant, head, slot, v, |head, group, codes| {
            let start = (slot * head_dim + group * quant.group) / 8 * bits;
            put_row(&mut head[start..][..codes.len() / 8 * bits], bits, codes);
        });
    }
}

/// Quantizes the first `count` tokens of a slab of floats into another slab, as [`write_quantized`] does.
///
/// # Panics
/// If a length does not fit the shape, the heads are not whole groups, or `count` is above [`BLOCK`].
pub fn quantize_slab(shape: &KvShape, quant: KvQuant, from: &[u8], count: usize, to: &mut [u8]) {
    assert_eq!(from.len(), shape.bytes(), "bytes of a block of floats");
    let width = shape.kv_heads * shape.head_dim;
    let (mut k, mut v) = (vec![0.0; width], vec![0.0; width]);
    for slot in 0..count {
        let heads = k.chunks_exact_mut(shape.head_dim).zip(v.chunks_exact_mut(shape.head_dim));
        for (head, (k, v)) in heads.enumerate() {
            let (keys, values) = (shape.keys(from, head, None), shape.values(from, head, None));
            for (d, (k, v)) in k.iter_mut().zip(v).enumerate() {
                *k = shape.ty.element(keys, d * BLOCK + slot);
                *v = shape.ty.element(values, slot * shape.head_dim + d);
            }
        }
        write_quantized(shape, quant, to, slot, &k, &v);
    }
}

/// Quantizes one head of one token: stores the scales and biases, and hands out each group's number and codes.
#[inline(always)]
fn each_group(
    shape: &KvShape,
    quant: KvQuant,
    head: &mut [u8],
    slot: usize,
    values: &[f32],
    mut put: impl FnMut(&mut [u8], usize, &[u8]),
) {
    let (mut rounded, mut codes) = ([0.0; GROUP_MAX], [0; GROUP_MAX]);
    let (rounded, codes) = (&mut rounded[..quant.group], &mut codes[..quant.group]);
    for (group, values) in values.chunks_exact(quant.group).enumerate() {
        round(shape.ty, values, rounded);
        let (scale, bias) = quantize(rounded, ((1 << quant.bits) - 1) as f32, codes);
        for (which, factor) in [scale, bias].into_iter().enumerate() {
            let at = quant.factor_at(shape, which, group) + slot * shape.ty.bytes();
            let to = &mut head[at..][..shape.ty.bytes()];
            match shape.ty {
                KvType::F32 => to.copy_from_slice(&factor.to_le_bytes()),
                KvType::F16 => to.copy_from_slice(&f16::from_f32(factor).to_le_bytes()),
                KvType::Bf16 => to.copy_from_slice(&bf16::from_f32(factor).to_le_bytes()),
            }
        }
        put(head, group, codes);
    }
}

/// What a block of type `ty` would hold.
fn round(ty: KvType, values: &[f32], rounded: &mut [f32]) {
    match ty {
        KvType::F32 => rounded.copy_from_slice(values),
        KvType::F16 => {
            let mut narrow = [f16::ZERO; GROUP_MAX];
            let narrow = &mut narrow[..values.len()];
            narrow.convert_from_f32_slice(values);
            narrow.convert_to_f32_slice(rounded);
        }
        KvType::Bf16 => {
            rounded.iter_mut().zip(values).for_each(|(to, &v)| *to = bf16::from_f32(v).to_f32());
        }
    }
}

/// Below this no scale is.
const SCALE_MIN: f32 = 1e-7;
/// 1.5 * 2^23: added to a number of up to 2^22 it leaves the nearest integer, ties to even, in the low bits.
const ROUND: f32 = 12_582_912.0;

/// The codes of a group, 0 to `most`, its scale and its bias: mlx's rule, all in f32.
///
/// The bias is the end of the range that is further from 0, and the scale is turned so that 0 is a code too.
fn quantize(values: &[f32], most: f32, codes: &mut [u8]) -> (f32, f32) {
    let (low, high) = range(values);
    let from_low = low.abs() > high.abs();
    let mut scale = (high - low) / most;
    if scale < SCALE_MIN {
        scale = SCALE_MIN;
    }
    let (mut scale, edge) = if from_low { (scale, low) } else { (-scale, high) };
    let steps = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    // Not if it is NaN either: then all is.
    if steps != 0.0 {
        (scale, bias) = (edge / steps, edge);
    }
    for (code, &value) in codes.iter_mut().zip(values) {
        let exact = (value - bias) / scale;
        let exact = if exact > 0.0 { exact } else { 0.0 };
        let exact = if exact < most { exact } else { most };
        *code = (exact + ROUND).to_bits() as u8;
    }
    (scale, bias)
}

/// The least and the greatest of values whose number is a multiple of 16; NaN if one is infinite or NaN.
fn range(values: &[f32]) -> (f32, f32) {
    // In lanes, so that the compiler can use vectors.
    let (mut low, mut high, mut poison) = ([f32::INFINITY; 16], [f32::NEG_INFINITY; 16], [0.0; 16]);
    for values in values.as_chunks::<16>().0 {
        for (lane, &value) in values.iter().enumerate() {
            low[lane] = if value < low[lane] { value } else { low[lane] };
            high[lane] = if value > high[lane] { value } else { high[lane] };
            poison[lane] += value * 0.0;
        }
    }
    let poison: f32 = poison.iter().sum();
    let (low, high) =
        (low.into_iter().fold(f32::INFINITY, f32::min), high.into_iter().fold(f32::NEG_INFINITY, f32::max));
    (low + poison, high + poison)
}

/// Puts one code into each row of 32 of them, at `slot`.
#[inline(always)]
pub(super) fn put_column<'a>(rows: impl Iterator<Item = (&'a mut [u8], &'a u8)>, bits: usize, slot: usize) {
    let (byte, shift) = (slot * bits / 8, slot * bits % 8);
    let mask = ((1_u16 << bits) - 1) << shift;
    let [low, high] = mask.to_le_bytes();
    for (row, &code) in rows {
        let [code_low, code_high] = (u16::from(code) << shift).to_le_bytes();
        row[byte] = row[byte] & !low | code_low;
        if high != 0 {
            row[byte + 1] = row[byte + 1] & !high | code_high;
        }
    }
}

/// Puts codes one after the other, eight at a time: they fill `bits` bytes.
#[inline(always)]
pub(super) fn put_row(to: &mut [u8], bits: usize, codes: &[u8]) {
    for (to, codes) in to.chunks_exact_mut(bits).zip(codes.as_chunks::<8>().0) {
        let word = codes.iter().rev().fold(0_u64, |word, &code| word << bits | u64::from(code));
        to.copy_from_slice(&word.to_le_bytes()[..bits]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]
    use super::*;

    #[test]
    fn unsupported_numbers_are_refused() {
        assert!(KvQuant::new(8, 64).is_some_and(|q| q.fits(128) && !q.fits(96)));
        for (bits, group) in [(1, 64), (7, 64), (9, 64), (0, 32), (8, 16), (8, 0), (8, 256)] {
            assert_eq!(KvQuant::new(bits, group), None, "{bits} {group}");
        }
    }

    #[test]
    fn groups_that_are_constant_or_broken() {
        let mut codes = [9; 32];
        assert_eq!(quantize(&[0.0; 32], 15.0, &mut codes), (-SCALE_MIN, 0.0));
        assert_eq!(codes, [0; 32]);
        let (_, bias) = quantize(&[3.0; 32], 15.0, &mut codes);
        assert_eq!((bias, codes), (3.0, [0; 32]));
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; 32];
            values[7] = broken;
            let (scale, bias) = quantize(&values, 15.0, &mut codes);
            assert!(scale.is_nan() && bias.is_nan());
        }
    }

    #[test]
    fn a_slot_is_written_alone() {
        let shape = KvShape { ty: KvType::F16, kv_heads: 2, head_dim: 64 };
        for bits in KvQuant::BITS {
            let quant = KvQuant::new(bits, 32).unwrap();
            let token =
                |t: usize| -> Vec<f32> { (0..128).map(|d| ((d * 7 + t * 31) % 23) as f32 - 9.0).collect() };
            let mut forwards = vec![0; quant.slab_bytes(&shape)];
            let mut backwards = vec![0xFF; quant.slab_bytes(&shape)];
            for t in 0..BLOCK {
                write_quantized(&shape, quant, &mut forwards, t, &token(t), &token(t + 1));
            }
            for t in (0..BLOCK).rev() {
                write_quantized(&shape, quant, &mut backwards, t, &token(t), &token(t + 1));
            }
            assert_eq!(forwards, backwards, "{bits}");
        }
    }
}
