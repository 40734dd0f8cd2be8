//! A tensor of a file.

use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};

use super::{Bytes, DType, FileError, TensorProblem};

/// Bytes of a block of mxfp4 codes: 32 of 4 bits.
const BLOCK_BYTES: usize = 16;

/// A tensor that a file lends. It knows its origin, so that whoever finds fault with it can say where it is.
///
/// The data is always exactly what type and shape take, little-endian, rows of the last dimension contiguous.
#[derive(Clone, Debug)]
pub struct FileTensor {
    file: Arc<Path>,
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    data: Bytes,
}

impl FileTensor {
    /// A tensor over `data`. `file` and `name` are for messages.
    ///
    /// # Errors
    /// [`TensorProblem::Size`] if `data` is not as long as type and shape say.
    pub fn new(
        file: Arc<Path>,
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        data: Bytes,
    ) -> Result<Self, FileError> {
        let tensor = Self { file, name: name.into(), dtype, shape, data };
        let expected = bytes_of(dtype, &tensor.shape).ok_or_else(|| {
            let shape = tensor.shape.iter().map(|&d| d as u64).collect();
            tensor.error(TensorProblem::Overflow { shape, dtype })
        })?;
        if expected != tensor.data.len() {
            return Err(tensor.error(TensorProblem::Size {
                found: tensor.data.len() as u64,
                shape: tensor.shape.clone(),
                dtype,
                expected: expected as u64,
            }));
        }
        Ok(tensor)
    }

    /// The file that it is from.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Its name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How its elements are stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its data as it lies in the file.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// The error that this tensor has a problem.
    #[must_use]
    pub fn error(&self, problem: TensorProblem) -> FileError {
        FileError::tensor(&self.file, &self.name, problem)
    }

    /// Checks the shape.
    ///
    /// # Errors
    /// [`TensorProblem::Shape`], which tells both shapes.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<(), FileError> {
        if self.shape == expected {
            return Ok(());
        }
        Err(self.error(TensorProblem::Shape { expected: expected.to_vec(), found: self.shape.clone() }))
    }

    /// The `count` matrices of a stack `[count, rows, columns]` below one another: `[count * rows, columns]`.
    ///
    /// # Errors
    /// Another shape.
    pub fn stacked(mut self, count: usize) -> Result<Self, FileError> {
        if let &[stack, rows, columns] = self.shape.as_slice()
            && stack == count
        {
            // All dimensions together fit, so two of them do.
            self.shape = vec![count * rows, columns];
            return Ok(self);
        }
        Err(self.error(TensorProblem::Value {
            what: "its shape",
            found: format!("{:?}", self.shape),
            allowed: format!("a stack of {count} matrices"),
        }))
    }

    /// A stack `[count, rows, blocks, 16]` of matrices whose codes are stored in blocks of 16 bytes, as the matrix of 32-bit
    /// words `[count * rows, 4 * blocks]` that MLX makes of the same bytes.
    ///
    /// # Errors
    /// Another shape or type.
    pub fn stacked_blocks(mut self, count: usize) -> Result<Self, FileError> {
        if self.dtype != DType::U8 {
            return Err(self.error(TensorProblem::DType { found: self.dtype, allowed: "U8" }));
        }
        if let &[stack, rows, blocks, BLOCK_BYTES] = self.shape.as_slice()
            && stack == count
        {
            // All dimensions together fit, so parts of them do.
            self.shape = vec![count * rows, blocks * BLOCK_BYTES / size_of::<u32>()];
            self.dtype = DType::U32;
            return Ok(self);
        }
        Err(self.error(TensorProblem::Value {
            what: "its shape",
            found: format!("{:?}", self.shape),
            allowed: format!("a stack of {count} matrices in blocks of {BLOCK_BYTES} bytes"),
        }))
    }

    /// The elements of an F32, F16 or BF16 tensor, widened.
    ///
    /// # Errors
    /// Another shape than `shape`, or another type.
    pub fn to_f32(&self, shape: &[usize]) -> Result<Vec<f32>, FileError> {
        self.expect_shape(shape)?;
        let mut values = vec![0.0; shape.iter().product()];
        if widen(self.dtype, &self.data, &mut values) {
            return Ok(values);
        }
        Err(self.error(TensorProblem::DType { found: self.dtype, allowed: "F32, F16 or BF16" }))
    }
}

/// Bytes of a tensor; `None` if the last dimension does not fill whole blocks, or if the number of bytes or the
/// product of any of the dimensions overflows.
fn bytes_of(dtype: DType, shape: &[usize]) -> Option<usize> {
    let product =
        |least: usize| shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(least)));
    // Not even beside a zero: or else it would matter in which order dimensions are multiplied.
    product(1)?;
    let whole_blocks = shape.last().is_none_or(|last| last.is_multiple_of(dtype.block_elements()));
    if whole_blocks { dtype.bytes_of(product(0)?) } else { None }
}

/// Bytes and shape of a tensor from the dimensions that a file tells, with the `None` of [`bytes_of`].
pub(super) fn sized(dtype: DType, dims: &[u64]) -> Option<(usize, Vec<usize>)> {
    let shape: Vec<usize> = dims.iter().map(|&dim| dim.try_into().ok()).collect::<Option<_>>()?;
    Some((bytes_of(dtype, &shape)?, shape))
}

/// Widens elements of a float type, as many as both sides have; false for another type.
pub(crate) fn widen(dtype: DType, data: &[u8], out: &mut [f32]) -> bool {
    match dtype {
        DType::F32 => each(data, out, f32::from_le_bytes),
        DType::F16 => each(data, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        DType::Bf16 => each(data, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => return false,
    }
    true
}

fn each<const N: usize>(data: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (value, &bytes) in out.iter_mut().zip(data.as_chunks().0) {
        *value = decode(bytes);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::{Bytes, DType, FileError, FileTensor};

    fn tensor(dtype: DType, shape: &[usize], data: &[u8]) -> Result<FileTensor, FileError> {
        let file: Arc<Path> = Path::new("m.safetensors").into();
        FileTensor::new(file, "norm.weight", dtype, shape.to_vec(), Bytes::from(data.to_vec()))
    }

    #[test]
    fn widens_float_types() {
        let f32s = tensor(DType::F32, &[2], &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]).unwrap();
        assert_eq!(f32s.to_f32(&[2]).unwrap(), [1.0, -2.0]);
        let f16s = tensor(DType::F16, &[2], &[0, 0x3c, 1, 0]).unwrap();
        assert_eq!(f16s.to_f32(&[2]).unwrap(), [1.0, 2f32.powi(-24)]);
        let bf16s = tensor(DType::Bf16, &[1, 2], &[0x80, 0x3f, 0, 0xc0]).unwrap();
        assert_eq!(bf16s.to_f32(&[1, 2]).unwrap(), [1.0, -2.0]);
    }

    #[test]
    fn errors_name_file_tensor_and_both_sides() {
        let message = tensor(DType::F32, &[2], &[0; 7]).unwrap_err().to_string();
        assert_eq!(
            message,
            "m.safetensors: tensor \"norm.weight\": its data is 7 bytes, but shape [2] of type F32 takes 8"
        );
        let message = tensor(DType::F32, &[2], &[0; 8]).unwrap().to_f32(&[3]).unwrap_err().to_string();
        assert_eq!(message, "m.safetensors: tensor \"norm.weight\": expected shape [3], found [2]");
        let message = tensor(DType::I32, &[2], &[0; 8]).unwrap().to_f32(&[2]).unwrap_err().to_string();
        assert_eq!(
            message,
            "m.safetensors: tensor \"norm.weight\": type I32 cannot be used here; allowed is F32, F16 or BF16"
        );
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let message = tensor(DType::F32, &[usize::MAX, 4], &[]).unwrap_err().to_string();
        assert!(message.contains("more bytes than can be counted"), "{message}");
        let message = tensor(DType::F32, &[usize::MAX, 4, 0], &[]).unwrap_err().to_string();
        assert!(message.contains("more bytes than can be counted"), "{message}");
        assert!(tensor(DType::F32, &[4, 0], &[]).unwrap().to_f32(&[4, 0]).unwrap().is_empty());
        let message = tensor(DType::Q4_0, &[4, 33], &[0; 72]).unwrap_err().to_string();
        assert!(message.contains("[4, 33]"), "{message}");
    }
}
