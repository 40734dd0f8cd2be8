//! Packing of a matrix into blocks, and reading rows back.

use super::ShapeError;
use super::format::{CHUNK, Format, Kind, LANES, Layout, SUB_MAX, SUPER, ScaleCode, planes};
use super::scalar;
use crate::simd::Kernel;
use crate::{AlignedBytes, Exec};

/// Blocks of outputs that a thread packs at a time.
const PART: usize = 4;

/// One row of a quantized matrix, unpacked: what a file format fills and [`QuantMatrix::pack`] reads.
///
/// The buffers have their full length already, those that the format lacks are empty. They may hold an earlier row.
#[derive(Clone, Debug, Default)]
pub struct RowBuf {
    /// A code for each input.
    pub codes: Vec<u8>,
    /// s of each group in the format's scale type, little-endian; or d of each 256 inputs in f16.
    pub scales: Vec<u8>,
    /// b of each group, or dmin of each 256 inputs, stored like the scales.
    pub biases: Vec<u8>,
    /// sc of each group (an i8's bits for `SuperSymmetric`), or its E8M0 or E4M3 byte.
    pub sub_scales: Vec<u8>,
    /// m of each group.
    pub sub_mins: Vec<u8>,
}

impl RowBuf {
    fn new(cols: usize, layout: &Layout) -> Self {
        let groups = cols / layout.group;
        let bytes = matches!(layout.scale, ScaleCode::E8m0 | ScaleCode::E4m3);
        let (scales, sub_scales) = match layout.kind {
            Kind::Super => (cols / SUPER, groups),
            Kind::Plain if bytes => (0, groups),
            Kind::Plain => (groups, 0),
        };
        let scales = scales * layout.scale.bytes();
        Self {
            codes: vec![0; cols],
            scales: vec![0; scales],
            biases: vec![0; if layout.affine { scales } else { 0 }],
            sub_scales: vec![0; sub_scales],
            sub_mins: vec![0; if layout.affine { sub_scales } else { 0 }],
        }
    }
}

/// A quantized matrix w of [outputs, inputs], in memory at the bit width of its format, in blocks of 16 outputs.
#[derive(Debug)]
pub struct QuantMatrix {
    rows: usize,
    cols: usize,
    format: Format,
    layout: Layout,
    data: AlignedBytes,
}

impl QuantMatrix {
    /// Packs a matrix of `rows` outputs and `cols` inputs. `fill` is called once for each row, from several threads.
    ///
    /// Codes are cut to the format's bits.
    ///
    /// # Errors
    /// If the format is not supported, `cols` is no multiple of its group (256 for super-blocks), or the matrix
    /// is too large.
    ///
    /// # Panics
    /// If `fill` resizes a buffer, or gives a sub-scale or sub-min above 63 to a `SuperAffine` matrix.
    pub fn pack(
        exec: &Exec,
        rows: usize,
        cols: usize,
        format: Format,
        fill: &(dyn Fn(usize, &mut RowBuf) + Sync),
    ) -> Result<Self, ShapeError> {
        let layout = Layout::new(&format)?;
        let multiple = layout.cols_multiple();
        if !cols.is_multiple_of(multiple) {
            return Err(ShapeError::Cols { cols, multiple });
        }
        let (blocks, units) = (rows.div_ceil(LANES), cols.div_ceil(layout.unit));
        // Half the address space leaves room for every product of sizes in the kernels.
        let too_large = ShapeError::Size { rows, cols };
        let strip = units.checked_mul(layout.block).ok_or(too_large)?;
        let bytes = blocks.checked_mul(strip).filter(|b| *b < isize::MAX as usize / 2).ok_or(too_large)?;
        let mut matrix = Self { rows, cols, format, layout, data: exec.arena.zeroed(bytes) };
        let data = Strips { start: matrix.data.as_mut_ptr(), strip };
        // Handed out in small parts: loading has other threads beside these.
        exec.pool.for_each(blocks.div_ceil(PART), &|part| {
            let mut packer = Packer::new(cols, &layout);
            for block in part * PART..blocks.min((part + 1) * PART) {
                // SAFETY: `for_each` gives each part, and so each block, to one thread.
                let strip = unsafe { data.strip(block) };
                let lanes = LANES.min(rows - block * LANES);
                for lane in 0..lanes {
                    fill(block * LANES + lane, &mut packer.row);
                    exec.isa.run(PutRow { packer: &mut packer, lane, strip });
                }
                packer.words[lanes * packer.stride..].fill(0);
                exec.isa.run(PutWords { packer: &packer, strip });
            }
        });
        Ok(matrix)
    }

    /// Number of outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The format given to [`QuantMatrix::pack`].
    #[must_use]
    pub fn format(&self) -> &Format {
        &self.format
    }

    /// Bytes of memory that the packed matrix takes, and that a matmul reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// The packed matrix, as a matmul reads it from start to end.
    #[must_use]
    pub fn packed(&self) -> &[u8] {
        &self.data
    }

    /// Writes the weights of one output to `out`, for example an embedding.
    ///
    /// # Panics
    /// If `row` is not a row or `out` has not `cols` elements.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "dequantize_row: row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "dequantize_row: out is not one row");
        for (unit, out) in out.chunks_mut(self.layout.unit).enumerate() {
            scalar::dequantize(&self.layout, self.unit(row / LANES, unit), row % LANES, out);
        }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of blocks of 16 outputs.
    pub(super) fn blocks(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Number of units of inputs; the last may be part empty.
    pub(super) fn units(&self) -> usize {
        self.cols.div_ceil(self.layout.unit)
    }

    /// Where the packed units of a block of outputs begin.
    pub(super) fn strip(&self, block: usize) -> *const u8 {
        self.data[block * self.units() * self.layout.block..].as_ptr()
    }

    /// The packed bytes of one block of outputs and unit of inputs.
    pub(super) fn unit(&self, block: usize, unit: usize) -> &[u8] {
        let at = (block * self.units() + unit) * self.layout.block;
        &self.data[at..at + self.layout.block]
    }
}

/// The packed matrix while threads fill its strips, one for each block of outputs.
#[derive(Clone, Copy)]
struct Strips {
    start: *mut u8,
    strip: usize,
}

// SAFETY: points into the matrix under construction, which outlives the region; strips are disjoint.
unsafe impl Send for Strips {}
// SAFETY: as above.
unsafe impl Sync for Strips {}

impl Strips {
    /// # Safety
    /// `block` is a block of the matrix, and no one else holds its strip.
    unsafe fn strip<'a>(self, block: usize) -> &'a mut [u8] {
        // SAFETY: inside the allocation and unique, by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(block * self.strip), self.strip) }
    }
}

/// What a thread packs with: one unpacked row, and the codes of a block of 16 as the words that go to memory.
struct Packer<'a> {
    layout: &'a Layout,
    row: RowBuf,
    /// `layout.bits` words for each chunk of each row: what a lane has of the chunk's vectors.
    words: Vec<u32>,
    /// Words of a row, and the distance to those of the next.
    len: usize,
    stride: usize,
}

impl<'a> Packer<'a> {
    fn new(cols: usize, layout: &'a Layout) -> Self {
        let len = cols.div_ceil(CHUNK) * layout.bits;
        // A row's end is a cache line away from the next one's start, or else rows of 2^n words, read side by side,
        // would push each other out of the cache.
        let stride = len.next_multiple_of(LANES) + LANES;
        Self { layout, row: RowBuf::new(cols, layout), words: vec![0; LANES * stride], len, stride }
    }
}

/// Cuts the codes of a row into words and puts its scales to their places. A kernel, as [`PutWords`], so that the
/// compiler vectorizes it for each level.
struct PutRow<'a, 'b> {
    packer: &'a mut Packer<'b>,
    lane: usize,
    strip: &'a mut [u8],
}

impl Kernel for PutRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { packer, lane, strip } = self;
        let words = &mut packer.words[lane * packer.stride..][..packer.len];
        match packer.layout.bits {
            2 => cut::<2>(&packer.row.codes, words),
            3 => cut::<3>(&packer.row.codes, words),
            4 => cut_halves(&packer.row.codes, words),
            5 => cut::<5>(&packer.row.codes, words),
            6 => cut::<6>(&packer.row.codes, words),
            _ => cut::<8>(&packer.row.codes, words),
        }
        put_scales(packer.layout, &packer.row, lane, strip);
    }
}

#[inline(always)]
fn cut<const BITS: usize>(codes: &[u8], words: &mut [u32]) {
    let (chunks, rest) = codes.as_chunks::<CHUNK>();
    let (words, _) = words.as_chunks_mut::<BITS>();
    for (codes, words) in chunks.iter().zip(&mut *words) {
        *words = cut_chunk(codes);
    }
    if let (false, Some(words)) = (rest.is_empty(), words.last_mut()) {
        let mut codes = [0; CHUNK];
        codes[..rest.len()].copy_from_slice(rest);
        *words = cut_chunk(&codes);
    }
}

/// [`cut`] for 4 bits, where words follow from eight codes each, in a form that the compiler vectorizes well.
#[inline(always)]
fn cut_halves(codes: &[u8], words: &mut [u32]) {
    for (codes, word) in codes.as_chunks().0.iter().zip(words) {
        let codes = u64::from_le_bytes(*codes);
        *word = (codes & 0x0f0f_0f0f | codes >> 28 & 0xf0f0_f0f0) as u32;
    }
}

/// Cuts 32 codes into bit planes ([`Layout`]): the word of each of their vectors.
#[inline(always)]
fn cut_chunk<const BITS: usize>(codes: &[u8; CHUNK]) -> [u32; BITS] {
    let quads = codes.as_chunks::<4>().0;
    let mut words = [0; BITS];
    let (mut at, mut low) = (0, 0);
    for &width in const { planes(BITS) } {
        let (mask, per_vector) = (((1u32 << width) - 1) * 0x0101_0101, 8 / width);
        for (j, quad) in quads.iter().enumerate() {
            words[at + j / per_vector] |=
                (u32::from_le_bytes(*quad) >> low & mask) << (j % per_vector * width);
        }
        at += width;
        low += width;
    }
    words
}

/// Puts the scales of the row of output `lane` to their places in the strip.
#[inline(always)]
fn put_scales(layout: &Layout, row: &RowBuf, lane: usize, strip: &mut [u8]) {
    let groups = layout.unit / layout.group;
    let mut put = |values: &[u8], per_unit: usize, bytes: usize, at: usize| {
        let units = values.chunks(per_unit * bytes).zip(strip.chunks_exact_mut(layout.block));
        let first = at + lane * bytes;
        match bytes {
            1 => units.for_each(|(values, unit)| put_each::<1>(values, &mut unit[first..])),
            2 => units.for_each(|(values, unit)| put_each::<2>(values, &mut unit[first..])),
            _ => units.for_each(|(values, unit)| put_each::<4>(values, &mut unit[first..])),
        }
    };
    let size = layout.scale.bytes();
    match (layout.kind, size) {
        (Kind::Super, size) => {
            let fits = |values: &[u8]| values.iter().fold(0, |all, value| all | value) <= SUB_MAX;
            let allowed = !layout.affine || fits(&row.sub_scales) && fits(&row.sub_mins);
            assert!(allowed, "pack: sub-scales with mins have 6 bits");
            put(&row.sub_scales, groups, 1, layout.scales_at);
            put(&row.sub_mins, groups, 1, layout.biases_at);
            put(&row.scales, 1, size, layout.d_at);
            put(&row.biases, 1, size, layout.d_at + LANES * size);
        }
        (Kind::Plain, 1) => put(&row.sub_scales, groups, 1, layout.scales_at),
        (Kind::Plain, size) => {
            put(&row.scales, groups, size, layout.scales_at);
            put(&row.biases, groups, size, layout.biases_at);
        }
    }
}

/// Puts values of `N` bytes to every 16th place of `to`.
#[inline(always)]
fn put_each<const N: usize>(values: &[u8], to: &mut [u8]) {
    for (value, to) in values.as_chunks::<N>().0.iter().zip(to.chunks_mut(LANES * N)) {
        to[..N].copy_from_slice(value);
    }
}

/// Puts the words of 16 rows side by side into their strip.
struct PutWords<'a, 'b> {
    packer: &'a Packer<'b>,
    strip: &'a mut [u8],
}

impl Kernel for PutWords<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { packer: Packer { layout, words, len, stride, .. }, strip } = self;
        let rows: [_; LANES] =
            std::array::from_fn(|lane| words[lane * stride..][..*stride].as_chunks::<LANES>().0);
        let codes = layout.scales_at;
        let vectors =
            strip.chunks_exact_mut(layout.block).flat_map(|unit| unit[..codes].as_chunks_mut::<64>().0);
        let mut vectors = vectors.take(*len);
        // Tiles of 16 words of each row: of a fixed size, so that no index need be checked.
        let mut tile = [[0; LANES]; LANES];
        for at in 0..len.div_ceil(LANES) {
            for (row, to) in rows.iter().zip(&mut tile) {
                *to = row[at];
            }
            for (word, vector) in (0..LANES).zip(&mut vectors) {
                for (row, to) in tile.iter().zip(vector.as_chunks_mut::<4>().0) {
                    *to = row[word].to_le_bytes();
                }
            }
        }
    }
}
