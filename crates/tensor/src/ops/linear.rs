//! Products with weight matrices, and the embedding lookup.

use super::OpError;
use crate::linear::Weight;
use crate::{Device, Linear, RowAdapters, Tensor};
use lmx_kernels::float::{self, FloatProduct};
use lmx_kernels::quant::{self, Product};
use std::sync::{Mutex, PoisonError};

/// `x · wᵀ + bias`: `[rows, in_features]` to `[rows, out_features]`, with what `adapters` change for their rows.
///
/// # Errors
/// [`OpError`] if the widths differ.
pub fn linear(x: &Tensor, weight: &Linear, adapters: &RowAdapters) -> Result<Tensor, OpError> {
    let [out] = linears(x, [weight], adapters)?;
    Ok(out)
}

/// [`linear`] with several matrices over the same input, which is prepared once for all of them.
///
/// # Errors
/// [`OpError`] if the widths differ.
pub fn linears<const N: usize>(
    x: &Tensor,
    weights: [&Linear; N],
    adapters: &RowAdapters,
) -> Result<[Tensor; N], OpError> {
    for weight in weights {
        OpError::unless(weight.in_features() == x.cols(), "linear", || {
            let (out, inp) = (weight.out_features(), weight.in_features());
            format!("a {out}x{inp} matrix over {} features", x.cols())
        })?;
    }
    let (exec, rows) = (x.device().exec(), x.rows());
    let mut outs = weights.map(|w| Tensor::undefined(x.device(), rows, w.out_features()));
    let mut quantized = Vec::with_capacity(N);
    let mut dense = Vec::with_capacity(N);
    for (weight, out) in weights.into_iter().zip(&mut outs) {
        let out = out.data_mut();
        match weight.weight() {
            Weight::Quant(weight) => quantized.push(Product { weight, out }),
            Weight::Dense(weight) => dense.push(FloatProduct { weight: weight.view(), out }),
        }
    }
    if !quantized.is_empty() {
        quant::matmul(exec, x.data(), rows, &mut quantized);
    }
    if !dense.is_empty() {
        float::matmul(exec, x.data(), rows, &mut dense);
    }
    adapters.apply(x, weights, &mut outs)?;
    for (weight, out) in weights.into_iter().zip(&mut outs) {
        if let Some(bias) = weight.bias() {
            for row in out.data_mut().chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
    Ok(outs)
}

/// Says that the next [`linears`] will be over `weights`: threads that wait until then fetch them into their caches.
pub fn read_ahead<const N: usize>(device: &Device, weights: [&Linear; N]) {
    device.exec().pool.read_ahead(&weights.map(Linear::stored));
}

/// The rows of `table` for `tokens`, with what `adapters` change for their rows, times `scale`.
///
/// # Errors
/// [`OpError`] if a token has no row.
pub fn embed(
    device: &Device,
    table: &Linear,
    tokens: &[u32],
    scale: f32,
    adapters: &RowAdapters,
) -> Result<Tensor, OpError> {
    for &token in tokens {
        OpError::unless((token as usize) < table.out_features(), "embed", || {
            format!("token {token} of {}", table.out_features())
        })?;
    }
    let mut out = Tensor::undefined(device, tokens.len(), table.in_features());
    let rows = out.data_mut().chunks_exact_mut(table.in_features().max(1));
    let rows: Vec<_> = rows.zip(tokens).map(Mutex::new).collect();
    device.exec().pool.for_each(rows.len(), &|index| {
        let (row, token) = &mut *rows[index].lock().unwrap_or_else(PoisonError::into_inner);
        table.dequantize_row(**token as usize, row);
    });
    drop(rows);
    adapters.apply_to_embeddings(tokens, table, &mut out)?;
    if scale != 1.0 {
        out.data_mut().iter_mut().for_each(|v| *v *= scale);
    }
    Ok(out)
}
