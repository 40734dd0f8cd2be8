//! How keys and values lie in a block.

use super::BLOCK;
use half::{bf16, f16};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
}

impl KvType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 | KvType::Bf16 => 2,
        }
    }
}

/// Where one layer's keys and values lie in a block's bytes: first the keys `[kv_heads][head_dim][BLOCK]`
/// (tokens in lanes), then the values `[kv_heads][BLOCK][head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// The element type.
    pub ty: KvType,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes of one layer's keys and values in one block.
    #[must_use]
    pub fn bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    fn half_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    fn head_bytes(&self) -> usize {
        self.head_dim * BLOCK * self.ty.bytes()
    }

    /// The keys `[head_dim][BLOCK]` of one head.
    pub(super) fn keys<'a>(&self, slab: &'a [u8], head: usize) -> &'a [u8] {
        &slab[head * self.head_bytes()..][..self.head_bytes()]
    }

    /// The values `[BLOCK][head_dim]` of one head.
    pub(super) fn values<'a>(&self, slab: &'a [u8], head: usize) -> &'a [u8] {
        &slab[self.half_bytes() + head * self.head_bytes()..][..self.head_bytes()]
    }
}

/// Writes the key and the value `[kv_heads][head_dim]` of one token to slot `slot` of a block's slab, rounded to
/// nearest even.
///
/// # Panics
/// If a length does not fit the shape, or `slot` is not below [`BLOCK`].
pub fn write_kv(shape: &KvShape, slab: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
    assert!(slot < BLOCK, "slot {slot}");
    assert_eq!(slab.len(), shape.bytes(), "bytes of a block");
    assert_eq!(k.len(), shape.kv_heads * shape.head_dim, "length of the key");
    assert_eq!(v.len(), k.len(), "length of the value");
    let (keys, values) = slab.split_at_mut(shape.half_bytes());
    match shape.ty {
        KvType::F32 => write(keys, values, shape, slot, k, v, f32::to_le_bytes),
        KvType::F16 => write(keys, values, shape, slot, k, v, |x| f16::from_f32(x).to_le_bytes()),
        KvType::Bf16 => write(keys, values, shape, slot, k, v, |x| bf16::from_f32(x).to_le_bytes()),
    }
}

fn write<const N: usize>(
    keys: &mut [u8],
    values: &mut [u8],
    shape: &KvShape,
    slot: usize,
    k: &[f32],
    v: &[f32],
    narrow: impl Fn(f32) -> [u8; N],
) {
    for (lanes, &k) in keys.chunks_exact_mut(BLOCK * N).zip(k) {
        lanes[slot * N..][..N].copy_from_slice(&narrow(k));
    }
    for (head, v) in values.chunks_exact_mut(shape.head_bytes()).zip(v.chunks_exact(shape.head_dim)) {
        let row = &mut head[slot * shape.head_dim * N..][..shape.head_dim * N];
        for (out, &v) in row.as_chunks_mut::<N>().0.iter_mut().zip(v) {
            *out = narrow(v);
        }
    }
}
