//! Activations: rows of f32 on a device.

use crate::Device;

/// A row-major matrix `[rows, cols]` of f32. Activations are always f32; weights keep their stored format in
/// [`crate::Linear`].
#[derive(Debug)]
pub struct Tensor {
    data: Vec<f32>,
    rows: usize,
    cols: usize,
    device: Device,
}

impl Tensor {
    /// A matrix whose content is undefined until an op has written it.
    pub(crate) fn undefined(device: &Device, rows: usize, cols: usize) -> Self {
        Self { data: device.take(rows * cols), rows, cols, device: device.clone() }
    }

    /// A matrix of zeros.
    #[must_use]
    pub fn zeros(device: &Device, rows: usize, cols: usize) -> Self {
        let mut tensor = Self::undefined(device, rows, cols);
        tensor.data.fill(0.0);
        tensor
    }

    /// A matrix with the given values, `rows * cols` of them.
    ///
    /// # Errors
    /// [`crate::OpError`] if there are more or fewer values.
    pub fn from_slice(
        device: &Device,
        rows: usize,
        cols: usize,
        values: &[f32],
    ) -> Result<Self, crate::OpError> {
        if rows.checked_mul(cols) != Some(values.len()) {
            return Err(crate::OpError::new("from_slice", format!("{rows}x{cols} from {}", values.len())));
        }
        let mut tensor = Self::undefined(device, rows, cols);
        tensor.data.copy_from_slice(values);
        Ok(tensor)
    }

    /// Number of rows: tokens, in a forward pass.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: features, in a forward pass.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The device that it lives on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All values, row after row.
    #[must_use]
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// All values, row after row.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// Row `row`, or `None` past the end.
    #[must_use]
    pub fn row(&self, row: usize) -> Option<&[f32]> {
        let start = row.checked_mul(self.cols)?;
        self.data.get(start..start.checked_add(self.cols)?)
    }

    /// Row `row`, which there must be.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.device.give(std::mem::take(&mut self.data));
    }
}
