//! From stored elements to f32. Every conversion is exact.

use super::{FloatMatrix, FloatType, SCALE_GROUP};
use half::{bf16, f16};

/// Writes row `row` of `weight` to `out`, which is one row long.
#[inline(always)]
pub(super) fn row(weight: &FloatMatrix<'_>, row: usize, out: &mut [f32]) {
    let bytes = weight.cols * weight.ty.bytes();
    let data = &weight.data[row * bytes..][..bytes];
    match weight.ty {
        FloatType::F32 => {
            for (out, bytes) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        FloatType::F16 => {
            for (out, bytes) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        FloatType::Bf16 => {
            for (out, bytes) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *out = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        FloatType::E4m3 => {
            let groups = weight.cols / SCALE_GROUP;
            let scales = &weight.scales[row * groups..][..groups];
            let codes = data.as_chunks::<SCALE_GROUP>().0;
            for ((out, codes), &scale) in
                out.as_chunks_mut::<SCALE_GROUP>().0.iter_mut().zip(codes).zip(scales)
            {
                let scale = E8M0[usize::from(scale)];
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = e4m3(code) * scale;
                }
            }
        }
    }
}

/// The value of an OCP E4M3 (fn) byte: no infinities, 0x7F and 0xFF are NaN.
pub(super) fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (u32::from(code >> 3 & 0xF), u32::from(code & 7));
    sign * match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, _) => fraction as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    }
}

/// The values of the E8M0 bytes: 2^(byte - 127), NaN for 255.
pub(super) static E8M0: [f32; 256] = {
    let mut values = [f32::NAN; 256];
    values[0] = f32::from_bits(1 << 22);
    let mut byte = 1;
    while byte < 255 {
        values[byte as usize] = f32::from_bits(byte << 23);
        byte += 1;
    }
    values
};
