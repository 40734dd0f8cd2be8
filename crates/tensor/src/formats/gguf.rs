//! The block types of GGUF.
//!
//! A row is a sequence of blocks; a block has one or two half-precision scales and the codes of 32 weights, or
//! of 256 with a scale for each 16 or 32 of them (the K types). Byte offsets below are within a block.
//!
//! | type | weights | layout | w |
//! |---|---|---|---|
//! | Q4_0 | 32 | d, 16 bytes: code j in the low half of byte j, code 16 + j in the high half | d·(q - 8) |
//! | Q4_1 | 32 | d, m, codes as in Q4_0 | d·q + m |
//! | Q5_0 | 32 | d, 4 bytes with the fifth bit of code j at bit j, codes as in Q4_0 | d·(q - 16) |
//! | Q5_1 | 32 | d, m, then as Q5_0 | d·q + m |
//! | Q8_0 | 32 | d, 32 signed bytes | d·q |
//! | Q2_K | 256 | 16 bytes of sc (low half) and m (high half), 64 bytes of codes, d, dmin | d·sc·q - dmin·m |
//! | Q3_K | 256 | 32 bytes with each third bit, 64 bytes of low bits, 12 bytes of 6-bit sc, d | d·(sc - 32)·(q - 4) |
//! | Q4_K | 256 | d, dmin, 12 bytes of 6-bit sc and m, 128 bytes of codes | d·sc·q - dmin·m |
//! | Q5_K | 256 | as Q4_K, with 32 bytes of fifth bits before the codes | d·sc·q - dmin·m |
//! | Q6_K | 256 | 128 bytes of low halves, 64 bytes of high bits, 16 signed bytes of sc, d | d·sc·(q - 32) |

use lmx_kernels::quant::{Codes, Format, RowBuf, ScaleType, Scales};

use super::unpack::add_bits;
use crate::files::DType;

/// A block type: its kernel format, and the function that unpacks a row of it.
pub(crate) struct BlockType {
    pub(crate) format: Format,
    pub(crate) unpack_row: fn(&[u8], &mut RowBuf),
}

impl BlockType {
    /// The block type of a dtype; `None` for plain types.
    #[rustfmt::skip]
    pub(crate) const fn of(dtype: DType) -> Option<Self> {
        const SYMMETRIC: Scales = Scales::Symmetric(ScaleType::F16);
        const AFFINE: Scales = Scales::Affine(ScaleType::F16);
        const fn new(bits: u8, zero: u8, group: usize, scales: Scales, unpack_row: fn(&[u8], &mut RowBuf)) -> BlockType {
            BlockType { format: Format { codes: Codes::Uint { bits, zero }, group, scales }, unpack_row }
        }
        Some(match dtype {
            DType::Q4_0 => new(4, 8, 32, SYMMETRIC, q4_0),
            DType::Q4_1 => new(4, 0, 32, AFFINE, q4_1),
            DType::Q5_0 => new(5, 16, 32, SYMMETRIC, q5_0),
            DType::Q5_1 => new(5, 0, 32, AFFINE, q5_1),
            DType::Q8_0 => new(8, 128, 32, SYMMETRIC, q8_0),
            DType::Q2K => new(2, 0, 16, Scales::SuperAffine, q2_k),
            DType::Q3K => new(3, 4, 16, Scales::SuperSymmetric, q3_k),
            DType::Q4K => new(4, 0, 32, Scales::SuperAffine, q4_k),
            DType::Q5K => new(5, 0, 32, Scales::SuperAffine, q5_k),
            DType::Q6K => new(6, 32, 16, Scales::SuperSymmetric, q6_k),
            _ => return None,
        })
    }
}

fn q4_0(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<18>().0.iter().zip(out.codes.as_chunks_mut::<32>().0);
    for ((block, codes), d) in blocks.zip(halves_of(&mut out.scales)) {
        *d = half(block, 0);
        halves(&block[2..], codes);
    }
}

fn q4_1(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<20>().0.iter().zip(out.codes.as_chunks_mut::<32>().0);
    for ((block, codes), (d, m)) in blocks.zip(halves_of(&mut out.scales).zip(halves_of(&mut out.biases))) {
        (*d, *m) = (half(block, 0), half(block, 2));
        halves(&block[4..], codes);
    }
}

fn q5_0(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<22>().0.iter().zip(out.codes.as_chunks_mut::<32>().0);
    for ((block, codes), d) in blocks.zip(halves_of(&mut out.scales)) {
        *d = half(block, 0);
        halves(&block[6..], codes);
        add_bits(&block[2..6], 4, codes);
    }
}

fn q5_1(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<24>().0.iter().zip(out.codes.as_chunks_mut::<32>().0);
    for ((block, codes), (d, m)) in blocks.zip(halves_of(&mut out.scales).zip(halves_of(&mut out.biases))) {
        (*d, *m) = (half(block, 0), half(block, 2));
        halves(&block[8..], codes);
        add_bits(&block[4..8], 4, codes);
    }
}

fn q8_0(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<34>().0.iter().zip(out.codes.as_chunks_mut::<32>().0);
    for ((block, codes), d) in blocks.zip(halves_of(&mut out.scales)) {
        *d = half(block, 0);
        for (code, byte) in codes.iter_mut().zip(&block[2..]) {
            *code = byte ^ 0x80;
        }
    }
}

fn q2_k(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<84>().0.iter().zip(out.codes.as_chunks_mut::<256>().0);
    let supers = halves_of(&mut out.scales).zip(halves_of(&mut out.biases));
    let subs = out.sub_scales.as_chunks_mut::<16>().0.iter_mut().zip(out.sub_mins.as_chunks_mut::<16>().0);
    for (((block, codes), (d, dmin)), (scales, mins)) in blocks.zip(supers).zip(subs) {
        (*d, *dmin) = (half(block, 80), half(block, 82));
        for ((byte, scale), min) in block[..16].iter().zip(scales).zip(mins) {
            (*scale, *min) = (byte & 15, byte >> 4);
        }
        quarters(&block[16..80], codes);
    }
}

fn q3_k(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<110>().0.iter().zip(out.codes.as_chunks_mut::<256>().0);
    let scales = halves_of(&mut out.scales).zip(out.sub_scales.as_chunks_mut::<16>().0);
    for ((block, codes), (d, scales)) in blocks.zip(scales) {
        *d = half(block, 108);
        quarters(&block[32..96], codes);
        // Weight 32·i + l has its third bit at bit i of byte l.
        for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(&block[..32]) {
                *code |= (byte >> i & 1) << 2;
            }
        }
        // Scale 4·i + j: its low half in byte 4·(i % 2) + j, its two high bits in byte 8 + j.
        let bytes = &block[96..108];
        for (i, scales) in scales.chunks_exact_mut(4).enumerate() {
            for (j, scale) in scales.iter_mut().enumerate() {
                let low = bytes[i % 2 * 4 + j] >> (i / 2 * 4) & 15;
                let high = bytes[8 + j] >> (2 * i) & 3;
                *scale = (low | high << 4).wrapping_sub(32);
            }
        }
    }
}

fn q4_k(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<144>().0.iter().zip(out.codes.as_chunks_mut::<256>().0);
    let supers = halves_of(&mut out.scales).zip(halves_of(&mut out.biases));
    let subs = out.sub_scales.as_chunks_mut::<8>().0.iter_mut().zip(out.sub_mins.as_chunks_mut::<8>().0);
    for (((block, codes), (d, dmin)), (scales, mins)) in blocks.zip(supers).zip(subs) {
        (*d, *dmin) = (half(block, 0), half(block, 2));
        scales_and_mins(&block[4..16], scales, mins);
        for (bytes, codes) in block[16..].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            halves(bytes, codes);
        }
    }
}

fn q5_k(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<176>().0.iter().zip(out.codes.as_chunks_mut::<256>().0);
    let supers = halves_of(&mut out.scales).zip(halves_of(&mut out.biases));
    let subs = out.sub_scales.as_chunks_mut::<8>().0.iter_mut().zip(out.sub_mins.as_chunks_mut::<8>().0);
    for (((block, codes), (d, dmin)), (scales, mins)) in blocks.zip(supers).zip(subs) {
        (*d, *dmin) = (half(block, 0), half(block, 2));
        scales_and_mins(&block[4..16], scales, mins);
        for (bytes, codes) in block[48..].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            halves(bytes, codes);
        }
        // Weight 32·i + l has its fifth bit at bit i of byte l.
        for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(&block[16..48]) {
                *code |= (byte >> i & 1) << 4;
            }
        }
    }
}

fn q6_k(row: &[u8], out: &mut RowBuf) {
    let blocks = row.as_chunks::<210>().0.iter().zip(out.codes.as_chunks_mut::<256>().0);
    let scales = halves_of(&mut out.scales).zip(out.sub_scales.as_chunks_mut::<16>().0);
    for ((block, codes), (d, scales)) in blocks.zip(scales) {
        *d = half(block, 208);
        scales.copy_from_slice(&block[192..208]);
        let parts = block[..128].chunks_exact(64).zip(block[128..192].chunks_exact(32));
        for ((low, high), codes) in parts.zip(codes.chunks_exact_mut(128)) {
            // Low halves lie as in Q4_K but 64 bytes at a time, the two high bits as in Q2_K.
            halves(low, codes);
            for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
                for (code, byte) in codes.iter_mut().zip(high) {
                    *code |= (byte >> (2 * i) & 3) << 4;
                }
            }
        }
    }
}

/// The half-precision number at byte `at`, as it is stored.
fn half(block: &[u8], at: usize) -> [u8; 2] {
    [block[at], block[at + 1]]
}

/// The half-precision numbers of a buffer.
fn halves_of(bytes: &mut [u8]) -> impl Iterator<Item = &mut [u8; 2]> {
    bytes.as_chunks_mut().0.iter_mut()
}

/// The low halves of all bytes, then the high halves.
fn halves(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// For each 32 bytes: their lowest two bits, then the next two, and so on.
fn quarters(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (2 * i) & 3;
            }
        }
    }
}

/// The eight 6-bit scales and mins of Q4_K and Q5_K: the first four of each in the low 6 bits of bytes 0..8; of
/// the others the low halves in bytes 8..12, the high bits in the top bits of bytes 0..8.
fn scales_and_mins(bytes: &[u8], scales: &mut [u8; 8], mins: &mut [u8; 8]) {
    for j in 0..4 {
        let (scale, min, low) = (bytes[j], bytes[4 + j], bytes[8 + j]);
        (scales[j], mins[j]) = (scale & 63, min & 63);
        (scales[4 + j], mins[4 + j]) = (low & 15 | scale >> 6 << 4, low >> 4 | min >> 6 << 4);
    }
}
