//! The codes, scales and biases of one token, as files keep them: rows of their own, whatever the order of a block.

use super::quantized::{put_column, put_row};
use super::{BLOCK, KvQuant, KvShape};

/// What quantization makes of the key of one token in one layer, or of its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCodes {
    /// `[kv_heads][head_dim * bits / 8]`: for each head a stream of codes, the first in the lowest bits.
    pub codes: Vec<u8>,
    /// `[kv_heads][head_dim / group]` in the block's float type, little-endian.
    pub scales: Vec<u8>,
    /// As the scales.
    pub biases: Vec<u8>,
}

impl KvCodes {
    /// As long as `shape` and `quant` say, all zero.
    #[must_use]
    pub fn zeroed(shape: &KvShape, quant: KvQuant) -> Self {
        let factors = shape.kv_heads * shape.head_dim / quant.group() * shape.ty.bytes();
        let codes = vec![0; shape.kv_heads * code_bytes(shape, quant)];
        Self { codes, scales: vec![0; factors], biases: vec![0; factors] }
    }

    fn check(&self, shape: &KvShape, quant: KvQuant, slab: &[u8], slot: usize) {
        assert!(slot < BLOCK, "slot {slot}");
        assert!(quant.fits(shape.head_dim), "{quant:?} of {} dimensions", shape.head_dim);
        assert_eq!(slab.len(), quant.slab_bytes(shape), "bytes of a block");
        assert_eq!(self.codes.len(), shape.kv_heads * code_bytes(shape, quant), "bytes of the codes");
        let factors = shape.kv_heads * shape.head_dim / quant.group() * shape.ty.bytes();
        assert_eq!((self.scales.len(), self.biases.len()), (factors, factors), "bytes of scales and biases");
    }
}

/// Bytes of the codes of one head and token.
fn code_bytes(shape: &KvShape, quant: KvQuant) -> usize {
    shape.head_dim / 8 * quant.bits()
}

/// Reads the codes, scales and biases that slot `slot` of a slab of [`KvQuant::slab_bytes`] holds.
///
/// # Panics
/// If a length does not fit the shape, the heads are not whole groups, or `slot` is not below [`BLOCK`].
pub fn read_codes(
    shape: &KvShape,
    quant: KvQuant,
    slab: &[u8],
    slot: usize,
    k: &mut KvCodes,
    v: &mut KvCodes,
) {
    k.check(shape, quant, slab, slot);
    v.check(shape, quant, slab, slot);
    let row = code_bytes(shape, quant);
    let (keys, values) = slab.split_at(slab.len() / 2);
    let mut codes = vec![0; shape.head_dim];
    for (head, to) in heads(shape, quant, keys).zip(k.codes.chunks_exact_mut(row)) {
        for (d, code) in codes.iter_mut().enumerate() {
            *code = quant.code(head, d * BLOCK + slot);
        }
        put_row(to, quant.bits(), &codes);
    }
    for (head, to) in heads(shape, quant, values).zip(v.codes.chunks_exact_mut(row)) {
        to.copy_from_slice(&head[slot * row..][..row]);
    }
    for (side, to) in [(keys, k), (values, v)] {
        for (which, to) in [&mut to.scales, &mut to.biases].into_iter().enumerate() {
            let places = factors(shape, quant, which, slot);
            for (to, at) in to.chunks_exact_mut(shape.ty.bytes()).zip(places) {
                to.copy_from_slice(&side[at..][..shape.ty.bytes()]);
            }
        }
    }
}

/// Writes what [`read_codes`] reads to slot `slot` of a slab.
///
/// # Panics
/// As [`read_codes`].
pub fn write_codes(shape: &KvShape, quant: KvQuant, slab: &mut [u8], slot: usize, k: &KvCodes, v: &KvCodes) {
    k.check(shape, quant, slab, slot);
    v.check(shape, quant, slab, slot);
    let (row, head_bytes) = (code_bytes(shape, quant), quant.head_bytes(shape));
    let (keys, values) = slab.split_at_mut(shape.kv_heads * head_bytes);
    for (head, from) in keys.chunks_exact_mut(head_bytes).zip(k.codes.chunks_exact(row)) {
        let codes: Vec<u8> = (0..shape.head_dim).map(|d| quant.code(from, d)).collect();
        let lanes = head[..shape.head_dim * 4 * quant.bits()].chunks_exact_mut(4 * quant.bits());
        put_column(lanes.zip(&codes), quant.bits(), slot);
    }
    for (head, from) in values.chunks_exact_mut(head_bytes).zip(v.codes.chunks_exact(row)) {
        head[slot * row..][..row].copy_from_slice(from);
    }
    for (side, from) in [(keys, k), (values, v)] {
        for (which, from) in [&from.scales, &from.biases].into_iter().enumerate() {
            let places = factors(shape, quant, which, slot);
            for (from, at) in from.chunks_exact(shape.ty.bytes()).zip(places) {
                side[at..][..shape.ty.bytes()].copy_from_slice(from);
            }
        }
    }
}

/// Each head's keys, or its values.
fn heads<'a>(shape: &KvShape, quant: KvQuant, side: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    side.chunks_exact(quant.head_bytes(shape))
}

/// Where a token's scales (`which` 0) or biases (1) are among the keys of all heads, or among the values.
fn factors(shape: &KvShape, quant: KvQuant, which: usize, slot: usize) -> impl Iterator<Item = usize> {
    let (shape, groups) = (*shape, shape.head_dim / quant.group());
    (0..shape.kv_heads * groups).map(move |index| {
        let head = index / groups * quant.head_bytes(&shape);
        head + quant.factor_at(&shape, which, index % groups) + slot * shape.ty.bytes()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]
    use super::super::{KvType, write_quantized};
    use super::*;

    #[test]
    fn what_was_quantized_is_read_and_written_as_it_is() {
        for (ty, bits, group) in [KvType::F32, KvType::F16, KvType::Bf16]
            .into_iter()
            .flat_map(|ty| KvQuant::BITS.into_iter().map(move |bits| (ty, bits)))
            .flat_map(|(ty, bits)| KvQuant::GROUPS.into_iter().map(move |group| (ty, bits, group)))
        {
            let shape = KvShape { ty, kv_heads: 2, head_dim: 128 };
            let quant = KvQuant::new(bits, group).unwrap();
            let token =
                |t: usize| -> Vec<f32> { (0..256).map(|d| ((d * 7 + t * 31) % 61) as f32 - 29.0).collect() };
            let mut slab = vec![0; quant.slab_bytes(&shape)];
            (0..BLOCK).for_each(|t| write_quantized(&shape, quant, &mut slab, t, &token(t), &token(t + 1)));
            let mut copy = vec![0xFF; slab.len()];
            for t in (0..BLOCK).rev() {
                let (mut k, mut v) = (KvCodes::zeroed(&shape, quant), KvCodes::zeroed(&shape, quant));
                read_codes(&shape, quant, &slab, t, &mut k, &mut v);
                write_codes(&shape, quant, &mut copy, t, &k, &v);
                // What a row says is what attention reads.
                let width = shape.ty.bytes();
                for d in 0..256 {
                    let (head, d) = (d / 128, d % 128);
                    let row = head * 128 / group + d / group;
                    let stands_for = |codes: &KvCodes| {
                        let code = quant.code(&codes.codes[head * code_bytes(&shape, quant)..], d);
                        let factor = |bytes: &[u8]| shape.ty.element(&bytes[row * width..], 0);
                        f32::from(code).mul_add(factor(&codes.scales), factor(&codes.biases))
                    };
                    let keys = shape.keys(&slab, head, Some(quant));
                    let values = shape.values(&slab, head, Some(quant));
                    assert_eq!(stands_for(&k), quant.key(&shape, keys, d, t));
                    assert_eq!(stands_for(&v), quant.value(&shape, values, d, t));
                }
            }
            assert!(slab == copy, "{ty:?} {bits} {group}");
        }
    }
}
