//! Packing of a matrix into blocks, and reading rows back.

use super::ShapeError;
use super::format::{CHUNK, Format, Kind, LANES, Layout, SUB_MAX, SUPER, ScaleCode, planes};
use super::scalar;
use crate::simd::Kernel;
use crate::{AlignedBytes, Exec};
use half::{bf16, f16};

/// One row of a quantized matrix, unpacked: what a file format fills and [`QuantMatrix::pack`] reads.
///
/// The buffers have their full length already, those that the format lacks are empty.
#[derive(Clone, Debug, Default)]
pub struct RowBuf {
    /// A code for each input.
    pub codes: Vec<u8>,
    /// s of each group, or d of each 256 inputs.
    pub scales: Vec<f32>,
    /// b of each group, or dmin of each 256 inputs.
    pub biases: Vec<f32>,
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
        Self {
            codes: vec![0; cols],
            scales: vec![0.0; scales],
            biases: vec![0.0; if layout.affine { scales } else { 0 }],
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
    /// Codes are cut to the format's bits; scales are rounded to its scale type.
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
        let mut matrix = Self { rows, cols, format, layout, data: AlignedBytes::zeroed(bytes) };
        let data = Strips { start: matrix.data.as_mut_ptr(), strip };
        exec.pool.for_ranges(blocks, 1, &|blocks| {
            let mut lanes = vec![RowBuf::new(cols, &layout); LANES];
            for block in blocks {
                // SAFETY: `for_ranges` gives each block to one thread.
                let strip = unsafe { data.strip(block) };
                let count = LANES.min(rows - block * LANES);
                for (lane, row) in lanes.iter_mut().take(count).enumerate() {
                    fill(block * LANES + lane, row);
                }
                exec.isa.run(PackStrip { layout: &layout, rows: &lanes[..count], strip });
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

/// Packs up to 16 rows into their strip, which is zero before. A kernel, so that the compiler vectorizes it for
/// each level.
struct PackStrip<'a> {
    layout: &'a Layout,
    rows: &'a [RowBuf],
    strip: &'a mut [u8],
}

impl Kernel for PackStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        match self.layout.bits {
            2 => self.pack::<2>(),
            3 => self.pack::<3>(),
            4 => self.pack::<4>(),
            5 => self.pack::<5>(),
            6 => self.pack::<6>(),
            _ => self.pack::<8>(),
        }
    }
}

impl PackStrip<'_> {
    #[inline(always)]
    fn pack<const BITS: usize>(self) {
        let Self { layout, rows, strip } = self;
        for (unit, out) in strip.chunks_exact_mut(layout.block.max(1)).enumerate() {
            pack_block::<BITS>(layout, rows, unit * layout.unit, out);
        }
    }
}

/// Packs inputs `first..first + unit` (as far as they exist) of up to 16 rows.
#[inline(always)]
fn pack_block<const BITS: usize>(layout: &Layout, rows: &[RowBuf], first: usize, out: &mut [u8]) {
    let cols = rows.first().map_or(0, |row| row.codes.len());
    let end = cols.min(first + layout.unit);
    let chunk_bytes = 64 * BITS;
    for (chunk, out) in out[..layout.scales_at].chunks_exact_mut(chunk_bytes).enumerate() {
        let start = first + chunk * CHUNK;
        if start < end {
            pack_chunk::<BITS>(rows, start..end.min(start + CHUNK), out);
        }
    }
    for (lane, row) in rows.iter().enumerate() {
        for (i, group) in (first / layout.group..end / layout.group).enumerate() {
            let at = i * LANES + lane;
            match layout.kind {
                Kind::Super => {
                    out[layout.scales_at + at] = row.sub_scales[group];
                    if layout.affine {
                        assert!(
                            row.sub_scales[group] <= SUB_MAX && row.sub_mins[group] <= SUB_MAX,
                            "pack: sub-scales with mins have 6 bits"
                        );
                        out[layout.biases_at + at] = row.sub_mins[group];
                    }
                }
                Kind::Plain => {
                    put_scale(layout.scale, row, group, &mut out[layout.scales_at..], at);
                    if layout.affine {
                        put(layout.scale, row.biases[group], &mut out[layout.biases_at..], at);
                    }
                }
            }
        }
        if layout.kind == Kind::Super {
            put(ScaleCode::F16, row.scales[first / SUPER], &mut out[layout.d_at..], lane);
            if layout.affine {
                put(ScaleCode::F16, row.biases[first / SUPER], &mut out[layout.d_at..], LANES + lane);
            }
        }
    }
}

#[inline(always)]
fn put_scale(code: ScaleCode, row: &RowBuf, group: usize, out: &mut [u8], at: usize) {
    match code {
        ScaleCode::E8m0 | ScaleCode::E4m3 => out[at] = row.sub_scales[group],
        _ => put(code, row.scales[group], out, at),
    }
}

/// Writes `value` as element `at` of an array of `code`, a float type.
#[inline(always)]
fn put(code: ScaleCode, value: f32, out: &mut [u8], at: usize) {
    match code {
        ScaleCode::F32 => out[4 * at..][..4].copy_from_slice(&value.to_le_bytes()),
        ScaleCode::Bf16 => out[2 * at..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        _ => out[2 * at..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
    }
}

/// Transposes 32 inputs of the rows into vectors of 64 codes and cuts those into bit planes.
#[inline(always)]
fn pack_chunk<const BITS: usize>(rows: &[RowBuf], inputs: std::ops::Range<usize>, out: &mut [u8]) {
    let mut vectors = [[0u8; 64]; CHUNK / 4];
    for (lane, row) in rows.iter().enumerate() {
        for (quad, vector) in row.codes[inputs.clone()].chunks_exact(4).zip(&mut vectors) {
            vector[4 * lane..][..4].copy_from_slice(quad);
        }
    }
    let (mut at, mut low) = (0, 0);
    for &width in const { planes(BITS) } {
        let (mask, per_vector) = (((1u32 << width) - 1) as u8, 8 / width);
        for (j, vector) in vectors.iter().enumerate() {
            let shift = j % per_vector * width;
            let plane = &mut out[at + j / per_vector * 64..][..64];
            for (to, code) in plane.iter_mut().zip(vector) {
                *to |= (code >> low & mask) << shift;
            }
        }
        at += 64 * width;
        low += width;
    }
}
