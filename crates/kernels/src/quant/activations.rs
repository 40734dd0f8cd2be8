//! Activations as two int8 digits and one scale a span (module documentation of [`super`]).

use super::format::{Kind, Layout, SUPER};
use crate::{AlignedBytes, Exec};

/// Largest |t|: 127 in the high digit, 0 in the low one.
const TOP: f32 = 32512.0;
/// Spans whose largest magnitude is below this are taken as zero; its scale is still a normal number.
const TINY: f32 = 1e-30;
/// Digits are stored in strides of 64 inputs.
pub(super) const STRIDE: usize = 64;

/// How activations are prepared for a format; formats of equal form share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) kind: Kind,
    pub(super) affine: bool,
    /// Inputs of one scale.
    pub(super) span: usize,
    /// Inputs of one integer sum.
    pub(super) step: usize,
    /// Code of zero, whose share of the sums is prepared.
    pub(super) zero: i32,
}

impl Form {
    pub(super) fn of(layout: &Layout) -> Self {
        let span = match layout.kind {
            Kind::Super => SUPER,
            Kind::Plain => layout.step.max(32),
        };
        Self { kind: layout.kind, affine: layout.affine, span, step: layout.step, zero: layout.zero }
    }
}

/// What the kernels need of one step and row besides the digits, in four 32-bit words.
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "High and Low are read by the SIMD levels")]
pub(super) enum Word {
    /// f32: a.
    Scale = 0,
    /// Plain: f32 a·Σt. Super: Σt as two i16, `Σt >> 9` above `Σt & 511`.
    Sum = 1,
    /// i32: -zero·Σhi.
    High = 2,
    /// i32: -zero·Σlo.
    Low = 3,
}

pub(super) const WORDS: usize = 4;

/// Quantized rows in tiles of at most `tile` rows.
///
/// For each tile of R rows and each 64 inputs: digits `hi[R][64]`, `lo[R][64]`; inputs past the end are zero.
/// For each tile and step: words `[WORDS][R]`.
pub(super) struct Activations {
    form: Form,
    rows: usize,
    cols: usize,
    tile: usize,
    digits: AlignedBytes,
    words: AlignedBytes,
}

/// One tile of [`Activations`].
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// First row of the tile, and their number.
    pub(super) first: usize,
    pub(super) rows: usize,
    digits: &'a [u8],
    words: &'a [u8],
}

impl Activations {
    pub(super) fn quantize(_exec: &Exec, x: &[f32], rows: usize, form: Form) -> Self {
        let tile = 1;
        let cols = x.len() / rows;
        let (strides, steps) = (cols.div_ceil(STRIDE), cols / form.step);
        let mut digits = AlignedBytes::zeroed(rows * strides * 2 * STRIDE);
        let mut words = AlignedBytes::zeroed(rows * steps * WORDS * 4);
        for (row, x) in x.chunks_exact(cols.max(1)).enumerate() {
            let digits = &mut digits[row * strides * 2 * STRIDE..][..strides * 2 * STRIDE];
            let words = &mut words[row * steps * WORDS * 4..][..steps * WORDS * 4];
            quantize_row(form, x, digits, words, 0, tile);
        }
        Self { form, rows, cols, tile, digits, words }
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.tile)
    }

    pub(super) fn tile(&self, index: usize) -> Tile<'_> {
        let first = index * self.tile;
        let rows = self.tile.min(self.rows - first);
        let row_digits = self.cols.div_ceil(STRIDE) * 2 * STRIDE;
        let row_words = self.cols / self.form.step * WORDS * 4;
        Tile {
            first,
            rows,
            digits: &self.digits[first * row_digits..][..rows * row_digits],
            words: &self.words[first * row_words..][..rows * row_words],
        }
    }
}

impl Tile<'_> {
    /// The digits hi and lo of one input.
    pub(super) fn digits(&self, row: usize, input: usize) -> (i32, i32) {
        let at = (input / STRIDE * 2 * self.rows + row) * STRIDE + input % STRIDE;
        let digit = |at: usize| i32::from(self.digits[at].cast_signed());
        (digit(at), digit(at + self.rows * STRIDE))
    }

    /// One word of a step, as bits.
    pub(super) fn word(&self, row: usize, step: usize, word: Word) -> u32 {
        let at = ((step * WORDS + word as usize) * self.rows + row) * 4;
        self.words[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}

/// a and 1/a of a span, from the bits of its largest magnitude.
#[inline(always)]
fn span_scale(max_bits: u32) -> (f32, f32) {
    let max = f32::from_bits(max_bits);
    if !max.is_finite() {
        (f32::NAN, 0.0)
    } else if max <= TINY {
        (0.0, 0.0)
    } else {
        (max / TOP, TOP / max)
    }
}

/// Quantizes row `row` of a tile of `rows` rows into the tile's digits and words.
#[inline(always)]
fn quantize_row(form: Form, x: &[f32], digits: &mut [u8], words: &mut [u8], row: usize, rows: usize) {
    for (s, x) in x.chunks_exact(form.span).enumerate() {
        // Without the sign bit, floats compare like their bits; NaN is above all.
        let max_bits = x.iter().fold(0, |max, v| max.max(v.to_bits() & 0x7fff_ffff));
        let (scale, inverse) = span_scale(max_bits);
        for (i, x) in x.chunks_exact(form.step).enumerate() {
            let first = s * form.span + i * form.step;
            let at = (first / STRIDE * 2 * rows + row) * STRIDE + first % STRIDE;
            let (high, low) = digits[at..].split_at_mut(rows * STRIDE);
            let (mut sum_high, mut sum_low) = (0, 0);
            for ((x, high), low) in x.iter().zip(high).zip(low) {
                let (h, l) = if inverse == 0.0 { (0, 0) } else { split(x * inverse) };
                *high = h as u8;
                *low = l as u8;
                sum_high += h;
                sum_low += l;
            }
            let sum = 256 * sum_high + sum_low;
            let sum_word = match form.kind {
                Kind::Plain => (scale * sum as f32).to_bits(),
                Kind::Super => (sum >> 9 << 16 | sum & 511).cast_unsigned(),
            };
            let values = [
                scale.to_bits(),
                sum_word,
                (-form.zero * sum_high).cast_unsigned(),
                (-form.zero * sum_low).cast_unsigned(),
            ];
            for (word, value) in values.into_iter().enumerate() {
                let at = ((first / form.step * WORDS + word) * rows + row) * 4;
                words[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// The digits of rint(v), |v| < 2^15: v + 1.5·2^23 holds rint(v) in its low bits, as no float lies between integers
/// there.
#[inline(always)]
fn split(v: f32) -> (i32, i32) {
    const MAGIC: f32 = 12_582_912.0;
    let t = (v + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()).cast_signed();
    let high = (t + 128) >> 8;
    (high, t - (high << 8))
}
