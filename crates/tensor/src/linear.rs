//! A weight matrix in its stored format.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use lmx_kernels::Exec;
use lmx_kernels::float::{FloatMatrix, FloatType, widen_row};
use lmx_kernels::quant::QuantMatrix;

use crate::files::{Bytes, DType, FileError, FileTensor, TensorProblem};
use crate::formats::gguf::BlockType;
use crate::formats::mlx::{MlxTensors, Quantization};
use crate::release::Release;

/// A weight matrix `[out_features, in_features]`, and a bias of `out_features` if the layer has one.
#[derive(Debug)]
pub struct Linear {
    id: LinearId,
    weight: Weight,
    bias: Option<Vec<f32>>,
    format: String,
}

/// Tells a [`Linear`] from all others of the process, so that an adapter can say which one it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinearId(u64);

impl LinearId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The matrix of a [`Linear`], by how it is computed with.
#[derive(Debug)]
pub enum Weight {
    /// Floats as they lie in the file.
    Dense(Dense),
    /// Integer or E2M1 codes with scales, packed for the kernels.
    Quant(QuantMatrix),
}

/// A matrix of floats, in the file's map unless its rows had to be reordered.
#[derive(Clone, Debug)]
pub struct Dense {
    data: Bytes,
    scales: Bytes,
    ty: FloatType,
    rows: usize,
    cols: usize,
}

/// Which rows of a stored matrix become a [`Linear`], and in which order.
#[derive(Clone, Debug)]
pub struct Rows {
    stored: usize,
    order: Order,
}

#[derive(Clone, Debug)]
enum Order {
    Range(Range<usize>),
    List(Vec<usize>),
}

impl Rows {
    /// All rows of a matrix that has `stored`.
    #[must_use]
    pub fn all(stored: usize) -> Self {
        Self { stored, order: Order::Range(0..stored) }
    }

    /// A cut out of a matrix that has `stored` rows, as one part of a fused projection.
    ///
    /// # Panics
    /// If `range` is not within `0..stored`.
    #[must_use]
    pub fn range(range: Range<usize>, stored: usize) -> Self {
        assert!(range.start <= range.end && range.end <= stored, "rows {range:?} of {stored}");
        Self { stored, order: Order::Range(range) }
    }

    /// Row i is row `order[i]` of a matrix that has `stored` rows.
    ///
    /// # Panics
    /// If an element of `order` is not within `0..stored`.
    #[must_use]
    pub fn reordered(order: Vec<usize>, stored: usize) -> Self {
        assert!(order.iter().all(|&row| row < stored), "the order has a row beyond {stored}");
        Self { stored, order: Order::List(order) }
    }

    /// How many rows the stored matrix has.
    #[must_use]
    pub fn stored(&self) -> usize {
        self.stored
    }

    /// How many rows are taken.
    #[must_use]
    pub fn count(&self) -> usize {
        match &self.order {
            Order::Range(range) => range.len(),
            Order::List(list) => list.len(),
        }
    }

    /// The stored row that becomes row `row`.
    pub(crate) fn source(&self, row: usize) -> usize {
        match &self.order {
            Order::Range(range) => range.start + row,
            Order::List(list) => list[row],
        }
    }

    /// The bytes of the taken rows: shared where they are contiguous, else copied.
    fn take(&self, data: &Bytes) -> Bytes {
        let row_bytes = data.len() / self.stored.max(1);
        let shared = match &self.order {
            Order::Range(range) => data.slice(range.start * row_bytes..range.end * row_bytes),
            Order::List(_) => None,
        };
        shared.unwrap_or_else(|| {
            let rows = (0..self.count()).map(|row| self.source(row) * row_bytes);
            Bytes::from(rows.flat_map(|start| &data[start..start + row_bytes]).copied().collect::<Vec<u8>>())
        })
    }
}

impl Linear {
    fn new(weight: Weight, format: String) -> Self {
        Self { id: LinearId::next(), weight, bias: None, format }
    }

    /// A matrix `[rows, cols]` of the given values, row after row.
    ///
    /// # Panics
    /// If there are not `rows * cols` values, or none.
    #[must_use]
    pub fn from_values(rows: usize, cols: usize, values: &[f32]) -> Self {
        assert!(!values.is_empty() && rows.checked_mul(cols) == Some(values.len()), "a {rows}x{cols} matrix");
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let (data, scales) = (Bytes::from(data), Bytes::from(Vec::new()));
        Self::new(Weight::Dense(Dense { data, scales, ty: FloatType::F32, rows, cols }), "F32".to_owned())
    }

    /// Builds a matrix from one tensor of shape `[rows.stored(), cols]`: F32, F16 or BF16, which stay in the
    /// file's map, or a block type of GGUF, which is packed and whose pages are given back.
    ///
    /// # Errors
    /// Another shape or type, with the tensor's name and file.
    pub fn from_tensor(
        exec: &Exec,
        tensor: &FileTensor,
        rows: &Rows,
        cols: usize,
    ) -> Result<Self, FileError> {
        tensor.expect_shape(&[rows.stored(), cols])?;
        check_size(tensor, rows, cols)?;
        let dtype = tensor.dtype();
        let weight = match (float_type(dtype), BlockType::of(dtype)) {
            (Some(ty), _) => Weight::Dense(Dense {
                data: rows.take(tensor.data()),
                scales: Bytes::from(Vec::new()),
                ty,
                rows: rows.count(),
                cols,
            }),
            (None, Some(block)) => {
                let row_bytes = tensor.data().len() / rows.stored().max(1);
                let release = Release::new(tensor.data(), rows);
                let packed = QuantMatrix::pack(exec, rows.count(), cols, block.format, &|row, out| {
                    let row = rows.source(row);
                    (block.unpack_row)(&tensor.data()[row * row_bytes..][..row_bytes], out);
                    release.read(row);
                });
                Weight::Quant(packed.map_err(|error| tensor.error(error.into()))?)
            }
            (None, None) => {
                let allowed = "F32, F16, BF16 or a quantized GGUF type";
                return Err(tensor.error(TensorProblem::DType { found: dtype, allowed }));
            }
        };
        Ok(Self::new(weight, dtype.name().to_owned()))
    }

    /// Builds a matrix from matrix `index` of a stack of `count` transposed ones, `[count, cols, columns.stored()]`:
    /// its rows are the given columns. Floats only, which are copied, and whose pages are given back.
    ///
    /// # Errors
    /// Another shape or type, with the tensor's name and file.
    ///
    /// # Panics
    /// If `index` is not below `count`.
    pub fn from_transposed(
        tensor: &FileTensor,
        index: usize,
        count: usize,
        columns: &Rows,
        cols: usize,
    ) -> Result<Self, FileError> {
        assert!(index < count, "matrix {index} of {count}");
        tensor.expect_shape(&[count, cols, columns.stored()])?;
        check_size(tensor, columns, cols)?;
        let dtype = tensor.dtype();
        let ty = float_type(dtype).ok_or_else(|| {
            tensor.error(TensorProblem::DType { found: dtype, allowed: "F32, F16 or BF16 where transposed" })
        })?;
        let (stored, size) = (columns.stored(), tensor.data().len() / (count * cols * columns.stored()));
        let range = index * cols * stored * size..(index + 1) * cols * stored * size;
        let matrix = &tensor.data()[range.clone()];
        let mut data = Vec::with_capacity(columns.count() * cols * size);
        for row in 0..columns.count() {
            let column = columns.source(row) * size;
            matrix.chunks_exact(stored * size).for_each(|of| data.extend(&of[column..column + size]));
        }
        tensor.data().release(range);
        let (data, scales) = (Bytes::from(data), Bytes::from(Vec::new()));
        let dense = Dense { data, scales, ty, rows: columns.count(), cols };
        Ok(Self::new(Weight::Dense(dense), dtype.name().to_owned()))
    }

    /// Builds a matrix from MLX's tensors of a quantized layer of shape `[rows.stored(), cols]`. Mode, bits and
    /// group follow from the tensors; if the configuration `declared` them for this layer they must agree.
    ///
    /// # Errors
    /// Tensors of another shape or type, or of no format that MLX has, or of another than declared, with the
    /// tensor's name and file.
    pub fn from_mlx(
        exec: &Exec,
        tensors: &MlxTensors,
        rows: &Rows,
        cols: usize,
        declared: Option<Quantization>,
    ) -> Result<Self, FileError> {
        check_size(&tensors.weight, rows, cols)?;
        let quantization = tensors.quantization(rows.stored(), cols)?;
        if let Some(declared) = declared.filter(|declared| *declared != quantization) {
            return Err(tensors.weight.error(TensorProblem::Value {
                what: "the quantization",
                found: quantization.to_string(),
                allowed: format!("{declared}, as the configuration says"),
            }));
        }
        let weight = match tensors.format(quantization)? {
            None => Weight::Dense(Dense {
                data: rows.take(tensors.weight.data()),
                scales: rows.take(tensors.scales.data()),
                ty: FloatType::E4m3,
                rows: rows.count(),
                cols,
            }),
            Some(format) => {
                let parts = [Some(&tensors.weight), Some(&tensors.scales), tensors.biases.as_ref()];
                let parts = parts.map(|part| part.map(|part| Release::new(part.data(), rows)));
                let packed = QuantMatrix::pack(exec, rows.count(), cols, format, &|row, out| {
                    let row = rows.source(row);
                    tensors.unpack_row(quantization.bits, row, out);
                    parts.iter().flatten().for_each(|part| part.read(row));
                });
                Weight::Quant(packed.map_err(|error| tensors.weight.error(error.into()))?)
            }
        };
        Ok(Self::new(weight, quantization.to_string()))
    }

    /// Adds the bias: a float tensor of shape `[rows.stored()]`, of which the same rows are taken.
    ///
    /// # Errors
    /// Another shape or type.
    ///
    /// # Panics
    /// If `rows` does not take as many rows as the matrix has.
    pub fn with_bias(mut self, bias: &FileTensor, rows: &Rows) -> Result<Self, FileError> {
        assert_eq!(rows.count(), self.out_features(), "rows of the bias");
        let stored = bias.to_f32(&[rows.stored()])?;
        self.bias = Some((0..rows.count()).map(|row| stored[rows.source(row)]).collect());
        Ok(self)
    }

    /// Adds a bias, one value per row.
    ///
    /// # Panics
    /// If `bias` has not as many values as the matrix has rows.
    #[must_use]
    pub fn with_bias_values(mut self, bias: Vec<f32>) -> Self {
        assert_eq!(bias.len(), self.out_features(), "rows of the bias");
        self.bias = Some(bias);
        self
    }

    /// Which matrix this is.
    #[must_use]
    pub fn id(&self) -> LinearId {
        self.id
    }

    /// The matrix, for the ops.
    #[must_use]
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The bias, `[out_features]`.
    #[must_use]
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Number of outputs.
    #[must_use]
    pub fn out_features(&self) -> usize {
        match &self.weight {
            Weight::Dense(dense) => dense.rows,
            Weight::Quant(quant) => quant.rows(),
        }
    }

    /// Number of inputs.
    #[must_use]
    pub fn in_features(&self) -> usize {
        match &self.weight {
            Weight::Dense(dense) => dense.cols,
            Weight::Quant(quant) => quant.cols(),
        }
    }

    /// Bytes of memory (mapped or owned) that the weights take, scales and bias included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let weight = match &self.weight {
            Weight::Dense(dense) => dense.data.len() + dense.scales.len(),
            Weight::Quant(quant) => quant.bytes(),
        };
        weight + self.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()))
    }

    /// The weights as they lie in memory.
    pub(crate) fn stored(&self) -> &[u8] {
        match &self.weight {
            Weight::Dense(dense) => &dense.data,
            Weight::Quant(quant) => quant.packed(),
        }
    }

    /// The number of parameters: weights and biases, but not the scales of a quantized format (as mlx-lm counts).
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.out_features() * self.in_features() + self.bias.as_ref().map_or(0, Vec::len)
    }

    /// The stored format: the dtype as its file spells it, or MLX's mode, bits and group.
    #[must_use]
    pub fn format_name(&self) -> &str {
        &self.format
    }

    /// Writes the weights of one output, such as a token's embedding, to `out` of `in_features`.
    ///
    /// # Panics
    /// If there is no such row or `out` has another length.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        match &self.weight {
            Weight::Dense(dense) => widen_row(&dense.view(), row, out),
            Weight::Quant(quant) => quant.dequantize_row(row, out),
        }
    }
}

impl Dense {
    /// The matrix for the kernels.
    #[must_use]
    pub fn view(&self) -> FloatMatrix<'_> {
        FloatMatrix { data: &self.data, ty: self.ty, scales: &self.scales, rows: self.rows, cols: self.cols }
    }
}

/// Refuses matrices without weights: no file, however small, bounds their other dimension.
fn check_size(tensor: &FileTensor, rows: &Rows, cols: usize) -> Result<(), FileError> {
    if rows.stored() > 0 && cols > 0 {
        return Ok(());
    }
    Err(tensor.error(TensorProblem::Value {
        what: "the matrix",
        found: format!("{} x {cols}", rows.stored()),
        allowed: "1 x 1 or larger".to_owned(),
    }))
}

fn float_type(dtype: DType) -> Option<FloatType> {
    match dtype {
        DType::F32 => Some(FloatType::F32),
        DType::F16 => Some(FloatType::F16),
        DType::Bf16 => Some(FloatType::Bf16),
        _ => None,
    }
}
