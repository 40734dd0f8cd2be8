//! Activations as two int8 digits and one scale a span (module documentation of [`super`]).

use super::format::{Kind, Layout, SUPER};
use crate::isa::Level;
use crate::{AlignedBytes, Exec};
use std::cell::RefCell;

/// Largest |t|: 127 in the high digit, 0 in the low one.
const TOP: f32 = 32512.0;
/// Spans whose largest magnitude is below this are taken as zero; its scale is still a normal number.
const TINY: f32 = 1e-30;
/// Inputs of one scale: as many as a super-block has, whatever the format.
pub(super) const SPAN: usize = SUPER;
/// Digits are stored in strides of 64 inputs.
pub(super) const STRIDE: usize = 64;

/// How activations are prepared for a format; formats of equal form share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) kind: Kind,
    pub(super) affine: bool,
    /// Inputs of one integer sum.
    pub(super) step: usize,
    /// Code of zero, whose share of the sums is prepared.
    pub(super) zero: i32,
}

impl Form {
    pub(super) fn of(layout: &Layout) -> Self {
        Self { kind: layout.kind, affine: layout.affine, step: layout.step, zero: layout.zero }
    }
}

/// What the kernels need of one step and row besides the digits, in four 32-bit words.
#[derive(Clone, Copy)]
pub(super) enum Word {
    /// f32: a of the step's span.
    Scale = 0,
    /// Plain: f32 Σt. Super: Σt as two i16, `Σt >> 9` above `Σt & 511`.
    Sum = 1,
    /// i32: -zero·Σhi.
    High = 2,
    /// i32: -zero·Σlo.
    Low = 3,
}

pub(super) const WORDS: usize = 4;

/// Quantized rows in tiles.
///
/// For each tile of R rows and each 64 inputs: digits `hi[R][64]`, `lo[R][64]`; for each step: words `[WORDS][R]`.
/// Inputs past the end, up to a multiple of 64, are zero, and so are the words of their steps.
pub(super) struct Activations {
    form: Form,
    rows: usize,
    cols: usize,
    /// Rows of a tile; the last may have fewer.
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
    /// Rows in memory, R above; those past `rows` are zero.
    pub(super) padded: usize,
    pub(super) digits: &'a [u8],
    pub(super) words: &'a [u8],
}

/// Rows in memory of a tile with `rows` of at most `tile` rows: the sizes that kernels are compiled for.
fn padded(rows: usize, tile: usize) -> usize {
    if tile <= 4 { rows.next_power_of_two() } else { rows.next_multiple_of(4) }
}

/// Bytes of the digits and the words of a row.
fn row_bytes(cols: usize, form: Form) -> [usize; 2] {
    let padded = cols.next_multiple_of(STRIDE);
    [padded * 2, padded / form.step * WORDS * 4]
}

impl Activations {
    /// Quantizes `rows` rows, 1 or more, in tiles of `tile`: 1, 2, 4 or 16.
    pub(super) fn quantize(exec: &Exec, x: &[f32], rows: usize, tile: usize, form: Form) -> Self {
        let cols = x.len() / rows;
        let [row_digits, row_words] = row_bytes(cols, form);
        let all = rows / tile * tile + padded(rows % tile, tile).min(tile);
        let mut digits = take(all * row_digits);
        let mut words = take(all * row_words);
        let tiles = Parts { start: digits.as_mut_ptr(), part: tile * row_digits, len: all * row_digits };
        let tile_words = Parts { start: words.as_mut_ptr(), part: tile * row_words, len: all * row_words };
        let quantize_tile = match exec.isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => |form, x: &[f32], digits: &mut [u8], words: &mut [u8], rows| {
                // SAFETY: the level was checked.
                unsafe { super::avx512::quantize_tile(form, x, digits, words, rows) }
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => |form, x: &[f32], digits: &mut [u8], words: &mut [u8], rows| {
                // SAFETY: the level was checked.
                unsafe { super::avx2::quantize_tile(form, x, digits, words, rows) }
            },
            _ => quantize_tile,
        };
        exec.pool.for_ranges(rows.div_ceil(tile), 1, &|range| {
            for index in range {
                let first = index * tile;
                let count = tile.min(rows - first);
                // SAFETY: each tile is visited by one thread, once.
                let (digits, words) = unsafe { (tiles.part(index), tile_words.part(index)) };
                quantize_tile(form, &x[first * cols..][..count * cols], digits, words, count);
            }
        });
        Self { form, rows, cols, tile, digits, words }
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Rows of a tile that is not the last.
    pub(super) fn tile_rows(&self) -> usize {
        self.tile
    }

    /// Bytes of the digits and words of such a tile.
    pub(super) fn tile_bytes(&self) -> usize {
        self.tile * row_bytes(self.cols, self.form).iter().sum::<usize>()
    }

    pub(super) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.tile)
    }

    pub(super) fn tile(&self, index: usize) -> Tile<'_> {
        let first = index * self.tile;
        let rows = self.tile.min(self.rows - first);
        let padded = padded(rows, self.tile);
        let [row_digits, row_words] = row_bytes(self.cols, self.form);
        Tile {
            first,
            rows,
            padded,
            digits: &self.digits[first * row_digits..][..padded * row_digits],
            words: &self.words[first * row_words..][..padded * row_words],
        }
    }
}

thread_local! {
    /// Buffers of past activations: a matmul needs no fresh memory.
    static SPARE: RefCell<Vec<AlignedBytes>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of at least `len` bytes with any content.
fn take(len: usize) -> AlignedBytes {
    let spare = SPARE.with_borrow_mut(Vec::pop);
    spare.filter(|buffer| buffer.len() >= len).unwrap_or_else(|| AlignedBytes::zeroed(len))
}

impl Drop for Activations {
    fn drop(&mut self) {
        let none = || AlignedBytes::zeroed(0);
        let buffers = [&mut self.words, &mut self.digits].map(|buffer| std::mem::replace(buffer, none()));
        SPARE.with_borrow_mut(|spare| spare.extend(buffers));
    }
}

/// A buffer in parts of equal size, the last perhaps shorter, that threads fill.
#[derive(Clone, Copy)]
struct Parts {
    start: *mut u8,
    part: usize,
    len: usize,
}

// SAFETY: points into a buffer that outlives the parallel region; no part is lent twice.
unsafe impl Send for Parts {}
// SAFETY: as above.
unsafe impl Sync for Parts {}

impl Parts {
    /// # Safety
    /// `index` is a part of the buffer and is lent to no one else.
    unsafe fn part<'a>(self, index: usize) -> &'a mut [u8] {
        let at = index * self.part;
        // SAFETY: inside the buffer, and unique by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), self.part.min(self.len - at)) }
    }
}

impl Tile<'_> {
    /// The digits hi and lo of one input.
    pub(super) fn digits(&self, row: usize, input: usize) -> (i32, i32) {
        let at = (input / STRIDE * 2 * self.padded + row) * STRIDE + input % STRIDE;
        let digit = |at: usize| i32::from(self.digits[at].cast_signed());
        (digit(at), digit(at + self.padded * STRIDE))
    }

    /// One word of a step, as bits.
    pub(super) fn word(&self, row: usize, step: usize, word: Word) -> u32 {
        let at = ((step * WORDS + word as usize) * self.padded + row) * 4;
        self.words[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}

/// Quantizes the `count` rows of a tile into its digits and words, and zeroes what pads them.
#[inline(always)]
pub(super) fn quantize_tile(form: Form, x: &[f32], digits: &mut [u8], words: &mut [u8], count: usize) {
    let cols = x.len() / count;
    if cols == 0 {
        return;
    }
    let rows = digits.len() / (cols.next_multiple_of(STRIDE) * 2);
    if rows > count {
        digits.fill(0);
        words.fill(0);
    } else if !cols.is_multiple_of(STRIDE) {
        let last = digits.len() - rows * 2 * STRIDE;
        digits[last..].fill(0);
        words[cols / form.step * WORDS * rows * 4..].fill(0);
    }
    for (row, x) in x.chunks_exact(cols).enumerate() {
        let mut out = Row { form, digits: &mut *digits, words: &mut *words, row, rows };
        match form.step {
            16 => out.quantize::<16>(x),
            32 => out.quantize::<32>(x),
            _ => out.quantize::<64>(x),
        }
    }
}

/// Row `row` of a tile of `rows` rows.
struct Row<'a> {
    form: Form,
    digits: &'a mut [u8],
    words: &'a mut [u8],
    row: usize,
    rows: usize,
}

impl Row<'_> {
    #[inline(always)]
    fn quantize<const STEP: usize>(&mut self, x: &[f32]) {
        for (i, span) in x.chunks(SPAN).enumerate() {
            self.span::<STEP>(span, i * SPAN);
        }
    }

    /// The inputs of one span, from `first` on.
    #[inline(always)]
    fn span<const STEP: usize>(&mut self, x: &[f32], first: usize) {
        // Without the sign bit, floats compare like their bits; NaN is above all.
        let max_bits = x.iter().fold(0, |max, v| max.max(v.to_bits() & 0x7fff_ffff));
        let (scale, inverse) = span_scale(max_bits);
        for (i, x) in x.as_chunks::<STEP>().0.iter().enumerate() {
            let input = first + i * STEP;
            let at = (input / STRIDE * 2 * self.rows + self.row) * STRIDE + input % STRIDE;
            let (high, low) = self.digits[at..].split_at_mut(self.rows * STRIDE);
            let (high, low) = (&mut high[..STEP], &mut low[..STEP]);
            let (mut sum_high, mut sum) = (0, 0);
            for ((x, high), low) in x.iter().zip(high).zip(low) {
                let (t, h, l) = if inverse == 0.0 { (0, 0, 0) } else { split(x * inverse) };
                *high = h as u8;
                *low = l as u8;
                sum_high += h;
                sum += t;
            }
            let sum_word = match self.form.kind {
                Kind::Plain => (sum as f32).to_bits(),
                Kind::Super => (sum >> 9 << 16 | sum & 511).cast_unsigned(),
            };
            let zero = self.form.zero;
            let [high, low] = [-zero * sum_high, -zero * (sum - 256 * sum_high)].map(i32::cast_unsigned);
            let words = &mut self.words[input / STEP * WORDS * self.rows * 4..][..WORDS * self.rows * 4];
            for (words, value) in
                words.chunks_exact_mut(self.rows * 4).zip([scale.to_bits(), sum_word, high, low])
            {
                words[self.row * 4..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
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

/// t = rint(v), |v| < 2^15, and its digits: v + 1.5·2^23 holds rint(v) in its low bits, as no float lies between integers
/// there.
#[inline(always)]
fn split(v: f32) -> (i32, i32, i32) {
    const MAGIC: f32 = 12_582_912.0;
    let t = (v + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()).cast_signed();
    let high = (t + 128) >> 8;
    (t, high, t - (high << 8))
}
