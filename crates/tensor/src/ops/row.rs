//! Row-wise ops: norms, rotary embedding, gates, sums.

use super::OpError;
use crate::Tensor;
use lmx_kernels::vector;

/// An RMS norm's parameters: `x / sqrt(mean(x²) + eps) * (weight + offset)`.
#[derive(Clone, Debug)]
pub struct Norm {
    /// One weight per feature.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the weight: 1 in Gemma, else 0.
    pub offset: f32,
}

/// The function on the gate of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
    /// `x * sigmoid(alpha * x)` of gates up to a limit, times 1 more than what goes through the gate, which is kept
    /// within ± the limit.
    ClampedSilu {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Above 0.
        limit: f32,
    },
}

/// A rotary embedding's angles for the rows of a step.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// Rotated features of each head; the rest pass through.
    pub dims: usize,
    /// Pairs are neighbours `(2i, 2i + 1)` rather than halves `(i, i + dims / 2)`.
    pub traditional: bool,
    /// Cosines, `[rows][dims / 2]`.
    pub cos: &'a [f32],
    /// Sines, `[rows][dims / 2]`.
    pub sin: &'a [f32],
}

/// Normalizes each row.
///
/// # Errors
/// [`OpError`] if the norm has another width.
pub fn rms_norm(x: &Tensor, norm: &Norm) -> Result<Tensor, OpError> {
    OpError::unless(x.cols() == norm.weight.len(), "rms_norm", || {
        format!("{} features, {} weights", x.cols(), norm.weight.len())
    })?;
    norm_groups(x, norm)
}

/// Normalizes each head of each row; heads are as wide as the norm.
///
/// # Errors
/// [`OpError`] if the rows are not whole heads.
pub fn rms_norm_heads(x: &Tensor, norm: &Norm) -> Result<Tensor, OpError> {
    OpError::unless(
        !norm.weight.is_empty() && x.cols().is_multiple_of(norm.weight.len()),
        "rms_norm_heads",
        || format!("{} features are not whole heads of {}", x.cols(), norm.weight.len()),
    )?;
    norm_groups(x, norm)
}

fn norm_groups(x: &Tensor, norm: &Norm) -> Result<Tensor, OpError> {
    let mut out = Tensor::undefined(x.device(), x.rows(), x.cols());
    vector::rms_norm(x.device().exec(), x.data(), &norm.weight, norm.eps, norm.offset, out.data_mut());
    Ok(out)
}

/// Rotates each head of each row in place.
///
/// # Errors
/// [`OpError`] if rows are not whole heads, or the tables are not `[rows][dims / 2]`.
pub fn rope(x: &mut Tensor, head_dim: usize, rope: &Rope<'_>) -> Result<(), OpError> {
    let angles = x.rows() * (rope.dims / 2);
    let fits = head_dim > 0
        && x.cols().is_multiple_of(head_dim)
        && rope.dims <= head_dim
        && rope.dims.is_multiple_of(2)
        && rope.cos.len() == angles
        && rope.sin.len() == angles;
    OpError::unless(fits, "rope", || {
        let (rows, cols, dims) = (x.rows(), x.cols(), rope.dims);
        format!("{rows}x{cols}, heads of {head_dim}, {dims} rotated, {} angles", rope.cos.len())
    })?;
    let heads = x.cols() / head_dim;
    let device = x.device().clone();
    let exec = device.exec();
    vector::rope(exec, x.data_mut(), heads, head_dim, rope.dims, rope.traditional, rope.cos, rope.sin);
    Ok(())
}

/// `function(gate) * up`, element by element; [`Gate::ClampedSilu`] treats `up`, too.
///
/// # Errors
/// [`OpError`] if the shapes differ.
pub fn gated(function: Gate, gate: &Tensor, up: &Tensor) -> Result<Tensor, OpError> {
    same_shape("gated", gate, up)?;
    let mut out = Tensor::undefined(gate.device(), gate.rows(), gate.cols());
    let (exec, gate, up, data) = (gate.device().exec(), gate.data(), up.data(), out.data_mut());
    match function {
        Gate::Silu => vector::swiglu(exec, gate, up, data),
        Gate::GeluTanh => vector::geglu_tanh(exec, gate, up, data),
        Gate::ClampedSilu { alpha, limit } => vector::clamped_swiglu(exec, gate, up, alpha, limit, data),
    }
    Ok(out)
}

/// `a + b`.
///
/// # Errors
/// [`OpError`] if the shapes differ.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor, OpError> {
    same_shape("add", a, b)?;
    let mut out = Tensor::undefined(a.device(), a.rows(), a.cols());
    vector::add(a.device().exec(), a.data(), b.data(), out.data_mut());
    Ok(out)
}

/// `a * b`, element by element.
///
/// # Errors
/// [`OpError`] if the shapes differ.
pub fn multiply(a: &Tensor, b: &Tensor) -> Result<Tensor, OpError> {
    same_shape("multiply", a, b)?;
    let mut out = Tensor::undefined(a.device(), a.rows(), a.cols());
    vector::multiply(a.device().exec(), a.data(), b.data(), out.data_mut());
    Ok(out)
}

/// Multiplies each row with its factor, in place.
///
/// # Errors
/// [`OpError`] unless there is one factor per row.
pub fn scale_rows(x: &mut Tensor, factors: &[f32]) -> Result<(), OpError> {
    OpError::unless(x.rows() == factors.len(), "scale_rows", || {
        format!("{} rows, {} factors", x.rows(), factors.len())
    })?;
    let (device, cols) = (x.device().clone(), x.cols().max(1));
    for (row, &factor) in x.data_mut().chunks_exact_mut(cols).zip(factors) {
        vector::scale(device.exec(), row, factor);
    }
    Ok(())
}

/// Multiplies each feature of all rows with its factor, in place.
///
/// # Errors
/// [`OpError`] unless there is one factor per feature.
pub fn scale_features(x: &mut Tensor, factors: &[f32]) -> Result<(), OpError> {
    OpError::unless(x.cols() == factors.len(), "scale_features", || {
        format!("{} features, {} factors", x.cols(), factors.len())
    })?;
    for row in x.data_mut().chunks_exact_mut(factors.len().max(1)) {
        row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
    }
    Ok(())
}

/// `x[rows[i]] += y[i]`, in place.
///
/// # Errors
/// [`OpError`] if the widths differ, `y` has not `rows.len()` rows, or a row is past the end of `x`.
pub fn add_rows(x: &mut Tensor, rows: &[usize], y: &Tensor) -> Result<(), OpError> {
    let fits = x.cols() == y.cols() && y.rows() == rows.len() && rows.iter().all(|&row| row < x.rows());
    OpError::unless(fits, "add_rows", || {
        format!("{}x{} to {} rows of {}x{}", y.rows(), y.cols(), rows.len(), x.rows(), x.cols())
    })?;
    let cols = x.cols().max(1);
    for (from, &row) in y.data().chunks_exact(cols).zip(rows) {
        let to = &mut x.data_mut()[row * cols..(row + 1) * cols];
        to.iter_mut().zip(from).for_each(|(x, y)| *x += y);
    }
    Ok(())
}

/// `cap * tanh(x / cap)`, in place.
pub fn softcap(x: &mut Tensor, cap: f32) {
    let device = x.device().clone();
    vector::softcap(device.exec(), x.data_mut(), cap);
}

/// The given rows, in the given order.
///
/// # Errors
/// [`OpError`] if a row is past the end.
pub fn select_rows(x: &Tensor, rows: &[usize]) -> Result<Tensor, OpError> {
    let mut out = Tensor::undefined(x.device(), rows.len(), x.cols());
    for (to, &row) in out.data_mut().chunks_exact_mut(x.cols().max(1)).zip(rows) {
        let from =
            x.row(row).ok_or_else(|| OpError::new("select_rows", format!("row {row} of {}", x.rows())))?;
        to.copy_from_slice(from);
    }
    Ok(out)
}

fn same_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<(), OpError> {
    OpError::unless((a.rows(), a.cols()) == (b.rows(), b.cols()), op, || {
        format!("{}x{} and {}x{}", a.rows(), a.cols(), b.rows(), b.cols())
    })
}
