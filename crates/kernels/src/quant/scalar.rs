//! The definition of the quantized matmul in plain Rust, and the reading of packed blocks.

use super::activations::{Activations, SPAN, Tile, Word};
use super::format::{CHUNK, Kind, LANES, Layout, ScaleCode, planes};
use super::{Blocks, Out, QuantMatrix};
use half::{bf16, f16};
use std::ops::Range;

/// A decoded E2M1 code: 2·value + 12.
pub(super) const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The codes of one chunk: byte 4·lane + i of vector j is the decoded code of output `lane`, input 4·j + i.
type Vectors = [[u8; 64]; CHUNK / 4];

fn decode(layout: &Layout, packed: &[u8]) -> Vectors {
    let mut vectors = [[0; 64]; CHUNK / 4];
    let (mut at, mut low) = (0, 0);
    for &width in planes(layout.bits) {
        let (mask, per_vector) = (((1u32 << width) - 1) as u8, 8 / width);
        for (j, vector) in vectors.iter_mut().enumerate() {
            let shift = j % per_vector * width;
            for (code, byte) in vector.iter_mut().zip(&packed[at + j / per_vector * 64..]) {
                *code |= (byte >> shift & mask) << low;
            }
        }
        at += 64 * width;
        low += width;
    }
    if layout.e2m1 {
        for code in vectors.as_flattened_mut() {
            *code = E2M1[usize::from(*code & 15)];
        }
    }
    vectors
}

/// Element `at` of an array of scales.
fn scale(layout: &Layout, scales: &[u8], at: usize) -> f32 {
    match layout.scale {
        ScaleCode::F32 => scales[4 * at..].first_chunk().map_or(0.0, |b| f32::from_le_bytes(*b)),
        ScaleCode::F16 => half_scale(scales, at),
        ScaleCode::Bf16 => scales[2 * at..].first_chunk().map_or(0.0, |b| bf16::from_le_bytes(*b).to_f32()),
        ScaleCode::E8m0 => e8m0(scales[at]) * layout.factor,
        ScaleCode::E4m3 => e4m3(scales[at]) * layout.factor,
    }
}

fn half_scale(scales: &[u8], at: usize) -> f32 {
    scales[2 * at..].first_chunk().map_or(0.0, |b| f16::from_le_bytes(*b).to_f32())
}

/// 2^(byte - 127); 255 is NaN.
fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// The OCP 8-bit float E4M3: bias 7, no infinities, all ones is NaN.
fn e4m3(byte: u8) -> f32 {
    if byte & 0x7f == 0x7f {
        return f32::NAN;
    }
    // The same exponent and mantissa in an f16, whose bias is 8 more.
    f16::from_bits(u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7f) << 7).to_f32() * 256.0
}

/// The weights of one output in one packed block.
pub(super) fn dequantize(layout: &Layout, packed: &[u8], lane: usize, out: &mut [f32]) {
    let zero = if layout.affine { 0 } else { layout.zero };
    for (g, out) in out.chunks_mut(layout.group).enumerate() {
        let at = g * LANES + lane;
        let scales = &packed[layout.scales_at..];
        let (s, b) = match layout.kind {
            Kind::Plain if layout.affine => {
                (scale(layout, scales, at), scale(layout, &packed[layout.biases_at..], at))
            }
            Kind::Plain => (scale(layout, scales, at), 0.0),
            Kind::Super => {
                let d = &packed[layout.d_at..];
                if layout.affine {
                    let m = f32::from(packed[layout.biases_at + at]);
                    (half_scale(d, lane) * f32::from(scales[at]), -(half_scale(d, LANES + lane) * m))
                } else {
                    (half_scale(d, lane) * f32::from(scales[at].cast_signed()), 0.0)
                }
            }
        };
        for (i, out) in out.iter_mut().enumerate() {
            let v = code(layout, packed, g * layout.group + i, lane) - zero;
            *out = s * v as f32 + b;
        }
    }
}

/// One decoded code of a packed block.
fn code(layout: &Layout, packed: &[u8], input: usize, lane: usize) -> i32 {
    let (mut at, mut low, mut code) = (input / CHUNK * 64 * layout.bits, 0, 0u8);
    let (vector, byte) = (input % CHUNK / 4, 4 * lane + input % 4);
    for &width in planes(layout.bits) {
        let (mask, per_vector) = (((1u32 << width) - 1) as u8, 8 / width);
        let shift = vector % per_vector * width;
        code |= (packed[at + vector / per_vector * 64 + byte] >> shift & mask) << low;
        at += 64 * width;
        low += width;
    }
    i32::from(if layout.e2m1 { E2M1[usize::from(code & 15)] } else { code })
}

/// All rows of the result for the given blocks of outputs.
pub(super) fn matmul(weight: &QuantMatrix, input: &Activations, blocks: Blocks, out: Out) {
    let layout = weight.layout();
    let mut codes = vec![[[0; 64]; CHUNK / 4]; layout.unit / CHUNK];
    let mut acc = vec![Sums::default(); input.rows()];
    for block in blocks {
        acc.fill(Sums::default());
        for unit in 0..weight.units() {
            let packed = weight.unit(block, unit);
            for (chunk, packed) in codes.iter_mut().zip(packed.chunks_exact(64 * layout.bits)) {
                *chunk = decode(layout, packed);
            }
            let end = weight.cols().min((unit + 1) * layout.unit);
            let steps = unit * layout.unit / layout.step..end / layout.step;
            let ends_span = end.is_multiple_of(SPAN) || end == weight.cols();
            for tile in (0..input.tiles()).map(|t| input.tile(t)) {
                for row in 0..tile.rows {
                    let block = Block { layout, packed, codes: &codes };
                    let acc = &mut acc[tile.first + row];
                    match layout.kind {
                        Kind::Plain => block.plain(&tile, row, steps.clone(), ends_span, acc),
                        Kind::Super => block.super_block(&tile, row, steps.start, &mut acc.total),
                    }
                }
            }
        }
        for (row, acc) in acc.iter().enumerate() {
            // SAFETY: rows of the result, and a block of this thread's range.
            unsafe { out.store(row, block, &acc.total) };
        }
    }
}

/// What a row has for a block so far.
#[derive(Clone, Default)]
struct Sums {
    /// Of all spans that have ended.
    total: [f32; LANES],
    /// Of the steps of the present one, of a plain format, without its scale.
    span: [f32; LANES],
}

struct Block<'a> {
    layout: &'a Layout,
    packed: &'a [u8],
    codes: &'a [Vectors],
}

impl Block<'_> {
    /// Σ v·hi and Σ v·lo of `step` of the block, which is step `input_step` of the input.
    fn sums(&self, tile: &Tile<'_>, row: usize, step: usize, input_step: usize) -> [[i32; LANES]; 2] {
        let width = self.layout.step;
        let mut sums = [[0; LANES]; 2];
        for i in 0..width {
            let input = step * width + i;
            let (high, low) = tile.digits(row, input_step * width + i);
            let vector = &self.codes[input / CHUNK][input % CHUNK / 4];
            for lane in 0..LANES {
                let v = i32::from(vector[4 * lane + input % 4]) - self.layout.zero;
                sums[0][lane] += v * high;
                sums[1][lane] += v * low;
            }
        }
        sums
    }

    fn plain(&self, tile: &Tile<'_>, row: usize, steps: Range<usize>, ends_span: bool, acc: &mut Sums) {
        let layout = self.layout;
        let a = f32::from_bits(tile.word(row, steps.start, Word::Scale));
        for (step, input_step) in steps.enumerate() {
            let [high, low] = self.sums(tile, row, step, input_step);
            let inputs = f32::from_bits(tile.word(row, input_step, Word::Sum));
            let first = step * layout.step / layout.group * LANES;
            for lane in 0..LANES {
                let sum = 256 * high[lane] + low[lane];
                let s = scale(layout, &self.packed[layout.scales_at..], first + lane);
                acc.span[lane] = s.mul_add(sum as f32, acc.span[lane]);
                if layout.affine {
                    let b = scale(layout, &self.packed[layout.biases_at..], first + lane);
                    let c = (layout.zero as f32).mul_add(s, b);
                    acc.span[lane] = c.mul_add(inputs, acc.span[lane]);
                }
            }
        }
        if ends_span {
            for (total, span) in acc.total.iter_mut().zip(std::mem::take(&mut acc.span)) {
                *total = a.mul_add(span, *total);
            }
        }
    }

    fn super_block(&self, tile: &Tile<'_>, row: usize, first_step: usize, acc: &mut [f32; LANES]) {
        let layout = self.layout;
        let (mut high, mut low, mut mins) = ([0; LANES], [0; LANES], [0; LANES]);
        for group in 0..layout.unit / layout.group {
            let sums = self.sums(tile, row, group, first_step + group);
            let packed_sum = tile.word(row, first_step + group, Word::Sum).cast_signed();
            let sum = (packed_sum >> 16 << 9) + (packed_sum & 511);
            for lane in 0..LANES {
                let at = group * LANES + lane;
                let byte = self.packed[layout.scales_at + at];
                let sc = if layout.affine { i32::from(byte) } else { i32::from(byte.cast_signed()) };
                high[lane] += sc * sums[0][lane];
                low[lane] += sc * sums[1][lane];
                if layout.affine {
                    mins[lane] += i32::from(self.packed[layout.biases_at + at]) * sum;
                }
            }
        }
        let a = f32::from_bits(tile.word(row, first_step, Word::Scale));
        let d = &self.packed[layout.d_at..];
        for lane in 0..LANES {
            let sum = (high[lane] as f32).mul_add(256.0, low[lane] as f32);
            acc[lane] = (half_scale(d, lane) * a).mul_add(sum, acc[lane]);
            if layout.affine {
                let dmin = half_scale(d, LANES + lane);
                acc[lane] = (-(dmin * a)).mul_add(mins[lane] as f32, acc[lane]);
            }
        }
    }
}
