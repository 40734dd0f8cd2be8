//! How keys and values lie in a block.

use super::{BLOCK, KvQuant};
use half::slice::HalfFloatSliceExt;
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

    /// Element `index` of `data`.
    #[inline(always)]
    pub(super) fn element(self, data: &[u8], index: usize) -> f32 {
        let wide = |n: usize| &data[index * n..][..n];
        match self {
            KvType::F32 => f32::from_le_bytes(wide(4).try_into().unwrap_or_default()),
            KvType::F16 => f16::from_le_bytes(wide(2).try_into().unwrap_or_default()).to_f32(),
            KvType::Bf16 => bf16::from_le_bytes(wide(2).try_into().unwrap_or_default()).to_f32(),
        }
    }
}

/// Where one layer's keys and values lie in a block's bytes: first the keys `[kv_heads][head_dim][BLOCK]`
/// (tokens in lanes), then the values `[kv_heads][BLOCK][head_dim]`. [`KvQuant::slab_bytes`] says where they lie if they
/// are quantized.
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
    /// Bytes of one layer's keys and values in one block of floats.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slab_bytes(None)
    }

    /// Bytes of one layer's keys and values in one block of floats, or quantized.
    #[must_use]
    pub fn slab_bytes(&self, quant: Option<KvQuant>) -> usize {
        2 * self.kv_heads * self.head_bytes(quant)
    }

    fn head_bytes(&self, quant: Option<KvQuant>) -> usize {
        match quant {
            None => self.head_dim * BLOCK * self.ty.bytes(),
            Some(quant) => quant.head_bytes(self),
        }
    }

    /// The keys of one head: `[head_dim][BLOCK]`, or what `quant` makes of them.
    #[inline(always)]
    pub(super) fn keys<'a>(&self, slab: &'a [u8], head: usize, quant: Option<KvQuant>) -> &'a [u8] {
        let bytes = self.head_bytes(quant);
        &slab[head * bytes..][..bytes]
    }

    /// The values of one head: `[BLOCK][head_dim]`, or what `quant` makes of them.
    #[inline(always)]
    pub(super) fn values<'a>(&self, slab: &'a [u8], head: usize, quant: Option<KvQuant>) -> &'a [u8] {
        self.keys(slab, self.kv_heads + head, quant)
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
    let (keys, values) = slab.split_at_mut(shape.bytes() / 2);
    let size = shape.ty.bytes();
    let head_bytes = shape.head_bytes(None);
    let (keys, values) = (keys.chunks_exact_mut(head_bytes), values.chunks_exact_mut(head_bytes));
    let heads = k.chunks_exact(shape.head_dim).zip(v.chunks_exact(shape.head_dim));
    for ((keys, values), (k, v)) in keys.zip(values).zip(heads) {
        let values = &mut values[slot * shape.head_dim * size..][..shape.head_dim * size];
        match shape.ty {
            KvType::F32 => write(keys, values, slot, k, v, |k, to| {
                to.iter_mut().zip(k).for_each(|(to, k)| *to = k.to_le_bytes());
            }),
            KvType::F16 => write(keys, values, slot, k, v, |k, to| {
                let mut narrow = [f16::ZERO; PIECE];
                // Sixteen at a time as the processor does it: one by one costs a call for each.
                narrow[..k.len()].convert_from_f32_slice(k);
                to.iter_mut().zip(narrow).for_each(|(to, k)| *to = k.to_le_bytes());
            }),
            KvType::Bf16 => write(keys, values, slot, k, v, |k, to| {
                to.iter_mut().zip(k).for_each(|(to, &k)| *to = bf16::from_f32(k).to_le_bytes());
            }),
        }
    }
}

/// Reads back what [`write_kv`] wrote to slot `slot` of a block's slab: a key and a value `[kv_heads][head_dim]`,
/// widened.
///
/// # Panics
/// If a length does not fit the shape, or `slot` is not below [`BLOCK`].
pub fn read_kv(shape: &KvShape, slab: &[u8], slot: usize, k: &mut [f32], v: &mut [f32]) {
    assert!(slot < BLOCK, "slot {slot}");
    assert_eq!(slab.len(), shape.bytes(), "bytes of a block");
    assert_eq!(k.len(), shape.kv_heads * shape.head_dim, "length of the key");
    assert_eq!(v.len(), k.len(), "length of the value");
    let heads = k.chunks_exact_mut(shape.head_dim).zip(v.chunks_exact_mut(shape.head_dim));
    for (head, (k, v)) in heads.enumerate() {
        let (keys, values) = (shape.keys(slab, head, None), shape.values(slab, head, None));
        match shape.ty {
            KvType::F32 => read(keys, values, slot, k, v, f32::from_le_bytes),
            KvType::F16 => read(keys, values, slot, k, v, |x| f16::from_le_bytes(x).to_f32()),
            KvType::Bf16 => read(keys, values, slot, k, v, |x| bf16::from_le_bytes(x).to_f32()),
        }
    }
}

/// Reads one head's key from `slot` of `keys` `[head_dim][BLOCK]` and its value from that row of `values`.
fn read<const N: usize>(
    keys: &[u8],
    values: &[u8],
    slot: usize,
    k: &mut [f32],
    v: &mut [f32],
    widen: impl Fn([u8; N]) -> f32,
) {
    let (keys, values) = (keys.as_chunks::<N>().0, values.as_chunks::<N>().0);
    for (to, lanes) in k.iter_mut().zip(keys.chunks_exact(BLOCK)) {
        *to = widen(lanes[slot]);
    }
    for (to, &from) in v.iter_mut().zip(&values[slot * k.len()..]) {
        *to = widen(from);
    }
}

/// Elements that are narrowed at a time.
const PIECE: usize = 64;

/// Writes one head's key to `slot` of `keys` `[head_dim][BLOCK]` and its value to the row `values`.
#[inline(always)]
fn write<const N: usize>(
    keys: &mut [u8],
    values: &mut [u8],
    slot: usize,
    k: &[f32],
    v: &[f32],
    narrow: impl Fn(&[f32], &mut [[u8; N]]),
) {
    let (keys, values) = (keys.as_chunks_mut::<N>().0, values.as_chunks_mut::<N>().0);
    for (lanes, k) in keys.chunks_mut(PIECE * BLOCK).zip(k.chunks(PIECE)) {
        let mut row = [[0; N]; PIECE];
        narrow(k, &mut row);
        for (lanes, k) in lanes.chunks_exact_mut(BLOCK).zip(row) {
            lanes[slot] = k;
        }
    }
    for (row, v) in values.chunks_mut(PIECE).zip(v.chunks(PIECE)) {
        narrow(v, row);
    }
}
