//! Short causal convolutions.

use super::OpError;
use crate::Tensor;
use lmx_kernels::vector;
use std::ops::Range;

/// A convolution of each feature with itself in the rows before.
#[derive(Clone, Debug)]
pub struct Conv {
    /// `[taps][features]`; the last tap meets the row itself.
    pub weight: Vec<f32>,
    /// One per feature.
    pub bias: Vec<f32>,
}

impl Conv {
    /// Floats of the rows before a row that it depends on: `[taps - 1][features]`.
    #[must_use]
    pub fn history(&self) -> usize {
        self.weight.len().saturating_sub(self.bias.len())
    }
}

/// Convolves the rows of each sequence; `sequences` are their rows in `x`, and the inputs before them,
/// [`Conv::history`] floats. Rows that no sequence has are undefined.
///
/// # Errors
/// [`OpError`] if the widths, the rows or a history do not fit.
pub fn causal_conv(
    x: &Tensor,
    sequences: &[(Range<usize>, Vec<f32>)],
    conv: &Conv,
) -> Result<Tensor, OpError> {
    let width = conv.bias.len();
    OpError::unless(
        width > 0 && x.cols() == width && !conv.weight.is_empty() && conv.weight.len().is_multiple_of(width),
        "causal_conv",
        || format!("{} features, {} weights for {width}", x.cols(), conv.weight.len()),
    )?;
    let mut out = Tensor::undefined(x.device(), x.rows(), width);
    for (rows, history) in sequences {
        let fits = rows.start <= rows.end && rows.end <= x.rows() && history.len() == conv.history();
        OpError::unless(fits, "causal_conv", || {
            format!("rows {rows:?} of {} after {} floats, not {}", x.rows(), history.len(), conv.history())
        })?;
        let range = rows.start * width..rows.end * width;
        let (exec, out) = (x.device().exec(), &mut out.data_mut()[range.clone()]);
        vector::causal_conv(exec, &x.data()[range], history, &conv.weight, &conv.bias, out);
    }
    Ok(out)
}
