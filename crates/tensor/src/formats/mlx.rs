//! MLX's quantized tensors: `weight` (codes in 32-bit words), `scales`, and in affine mode `biases`.
//!
//! The codes of a row are one little-endian bit stream. What they mean follows from the tensors:
//!
//! | mode | bits | group | `scales` | w |
//! |---|---|---|---|---|
//! | affine | 2, 3, 4, 5, 6, 8 | 32, 64, 128 | F32, F16 or BF16 | scale·q + bias |
//! | mxfp4 | 4 | 32 | U8, E8M0 | 2^(scale - 127)·e2m1 |
//! | nvfp4 | 4 | 16 | U8, E4M3 | e4m3(scale)·e2m1, times `global_scale` / 2688 if there is one |
//! | mxfp8 | 8 | 32 | U8, E8M0 | 2^(scale - 127)·e4m3 |

use std::fmt;

use lmx_kernels::quant::{Codes, Format, RowBuf, ScaleType, Scales};

use super::unpack::unpack;
use crate::files::{DType, FileError, FileTensor, TensorProblem, widen};

/// The tensors of a quantized layer.
#[derive(Clone, Debug)]
pub struct MlxTensors {
    /// Codes: U32 `[rows, cols · bits / 32]`.
    pub weight: FileTensor,
    /// Scales: `[rows, cols / group]`.
    pub scales: FileTensor,
    /// Biases of the groups, shaped as `scales`; affine mode only.
    pub biases: Option<FileTensor>,
    /// The scale of the whole tensor: one F32; nvfp4 mode only.
    pub global_scale: Option<FileTensor>,
}

/// How a layer is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// Kind of codes and scales.
    pub mode: Mode,
    /// Bits of a code.
    pub bits: u8,
    /// Weights of a row that share a scale.
    pub group: usize,
}

/// Kind of codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the module's table says it")]
pub enum Mode {
    Affine,
    Mxfp4,
    Nvfp4,
    Mxfp8,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
        })
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}-bit group {}", self.mode, self.bits, self.group)
    }
}

const ALLOWED: &str = "affine 2, 3, 4, 5, 6 or 8 bits with groups of 32, 64 or 128; \
    mxfp4 4 bits with groups of 32; nvfp4 4 bits with groups of 16; mxfp8 8 bits with groups of 32";

/// What `global_scale` is divided by: the largest E4M3 times the largest E2M1.
const GLOBAL_SCALE_UNIT: f32 = 448.0 * 6.0;

impl MlxTensors {
    /// Finds out how the layer is quantized, knowing that the matrix is `[rows, cols]`, and checks that all its
    /// tensors agree with that.
    ///
    /// # Errors
    /// A tensor whose type or shape fits no format, or that does not fit the others.
    pub fn quantization(&self, rows: usize, cols: usize) -> Result<Quantization, FileError> {
        if self.weight.dtype() != DType::U32 {
            return Err(self
                .weight
                .error(TensorProblem::DType { found: self.weight.dtype(), allowed: "U32" }));
        }
        let words = second_dimension(&self.weight, rows)?;
        let groups = second_dimension(&self.scales, rows)?;
        let quantization = infer(words, groups, cols, self.scales.dtype()).ok_or_else(|| {
            let found = format!(
                "{words} words and {groups} scales of type {} for {cols} inputs",
                self.scales.dtype()
            );
            self.weight.error(TensorProblem::Value {
                what: "the quantization",
                found,
                allowed: ALLOWED.to_owned(),
            })
        })?;
        let only_in = |tensor: &Option<FileTensor>, mode: Mode| match tensor {
            Some(tensor) if quantization.mode != mode => Err(tensor.error(TensorProblem::Value {
                what: "the quantization of its layer",
                found: quantization.to_string(),
                allowed: mode.to_string(),
            })),
            _ => Ok(()),
        };
        only_in(&self.biases, Mode::Affine)?;
        only_in(&self.global_scale, Mode::Nvfp4)?;
        if quantization.mode == Mode::Affine {
            let no_biases =
                TensorProblem::DType { found: self.scales.dtype(), allowed: "U8 where there are no biases" };
            let biases = self.biases.as_ref().ok_or_else(|| self.scales.error(no_biases))?;
            biases.expect_shape(&[rows, groups])?;
            if scale_type(biases.dtype()).is_none() {
                return Err(
                    biases.error(TensorProblem::DType { found: biases.dtype(), allowed: "F32, F16 or BF16" })
                );
            }
        }
        Ok(quantization)
    }

    /// The format for the kernels. mxfp8, whose codes are floats, has none.
    pub(crate) fn format(&self, quantization: Quantization) -> Result<Option<Format>, FileError> {
        let scales = match quantization.mode {
            Mode::Affine => Scales::Affine(self.stored_scale_type()),
            Mode::Mxfp4 => Scales::E8m0,
            Mode::Nvfp4 => Scales::E4m3 { global: self.global()? },
            Mode::Mxfp8 => return Ok(None),
        };
        let codes = match quantization.mode {
            Mode::Affine => Codes::Uint { bits: quantization.bits, zero: 0 },
            _ => Codes::E2m1,
        };
        Ok(Some(Format { codes, group: quantization.group, scales }))
    }

    /// Unpacks row `row` of the stored matrix, which has been checked by [`quantization`](Self::quantization).
    pub(crate) fn unpack_row(&self, bits: u8, row: usize, out: &mut RowBuf) {
        unpack(bits, row_of(&self.weight, row), &mut out.codes);
        match &self.biases {
            Some(biases) => {
                copy_or_widen(&self.scales, row, &mut out.scales);
                copy_or_widen(biases, row, &mut out.biases);
            }
            None => out.sub_scales.copy_from_slice(row_of(&self.scales, row)),
        }
    }

    /// The type in which scales and biases are both exact.
    fn stored_scale_type(&self) -> ScaleType {
        let scales = scale_type(self.scales.dtype());
        let biases = self.biases.as_ref().and_then(|biases| scale_type(biases.dtype()));
        scales.filter(|_| scales == biases).unwrap_or(ScaleType::F32)
    }

    /// The factor on all E4M3 scales.
    fn global(&self) -> Result<f32, FileError> {
        let Some(tensor) = &self.global_scale else { return Ok(1.0) };
        // A scalar, or an array of one.
        let value = tensor.to_f32(if tensor.shape().is_empty() { &[] } else { &[1] })?;
        let value = value.first().copied().unwrap_or(f32::NAN);
        if !(value.is_finite() && value > 0.0) {
            return Err(tensor.error(TensorProblem::Value {
                what: "the global scale",
                found: value.to_string(),
                allowed: "a finite number above 0".to_owned(),
            }));
        }
        Ok(value / GLOBAL_SCALE_UNIT)
    }
}

/// The format that `words` 32-bit words and `groups` scales for `cols` weights tell; `None` if it is none of MLX's.
fn infer(words: usize, groups: usize, cols: usize, scales: DType) -> Option<Quantization> {
    let stream = words.checked_mul(32)?;
    if cols == 0 || groups == 0 || !stream.is_multiple_of(cols) || !cols.is_multiple_of(groups) {
        return None;
    }
    let (bits, group) = (u8::try_from(stream / cols).ok()?, cols / groups);
    let mode = match (scales, bits, group) {
        (DType::F32 | DType::F16 | DType::Bf16, 2..=6 | 8, 32 | 64 | 128) => Mode::Affine,
        (DType::U8, 4, 32) => Mode::Mxfp4,
        (DType::U8, 4, 16) => Mode::Nvfp4,
        (DType::U8, 8, 32) => Mode::Mxfp8,
        _ => return None,
    };
    Some(Quantization { mode, bits, group })
}

fn scale_type(dtype: DType) -> Option<ScaleType> {
    match dtype {
        DType::F32 => Some(ScaleType::F32),
        DType::F16 => Some(ScaleType::F16),
        DType::Bf16 => Some(ScaleType::Bf16),
        _ => None,
    }
}

/// The second dimension of a matrix that has `rows` rows.
fn second_dimension(tensor: &FileTensor, rows: usize) -> Result<usize, FileError> {
    match *tensor.shape() {
        [found, columns] if found == rows => Ok(columns),
        _ => Err(tensor.error(TensorProblem::Rows { expected: rows, found: tensor.shape().to_vec() })),
    }
}

/// A row of a matrix of floats, in its own type or as F32, whichever `out` has the length of.
fn copy_or_widen(tensor: &FileTensor, row: usize, out: &mut [u8]) {
    let stored = row_of(tensor, row);
    if stored.len() == out.len() {
        return out.copy_from_slice(stored);
    }
    let mut wide = vec![0.0; out.len() / size_of::<f32>()];
    widen(tensor.dtype(), stored, &mut wide);
    for (to, value) in out.as_chunks_mut().0.iter_mut().zip(wide) {
        *to = f32::to_le_bytes(value);
    }
}

/// The bytes of a row of a matrix.
fn row_of(tensor: &FileTensor, row: usize) -> &[u8] {
    let bytes = tensor.data().len() / tensor.shape().first().map_or(1, |&rows| rows.max(1));
    &tensor.data()[row * bytes..][..bytes]
}
