//! A short convolution whose last inputs are recurrent state.

use crate::cache::KvStore;
use crate::models::{ForwardError, StepInputs};
use lmx_tensor::Tensor;
use lmx_tensor::ops::{self, Conv};

/// A convolution of each feature with itself in the tokens before, and the slot that holds those tokens' inputs.
#[derive(Debug)]
pub(in crate::models) struct CausalConv {
    conv: Conv,
    /// Its place among the slots of the cache.
    slot: usize,
}

impl CausalConv {
    pub(in crate::models) fn new(conv: Conv, slot: usize) -> Self {
        Self { conv, slot }
    }

    /// Convolves the rows of each sequence with those before them, and leaves the last ones for the rows to come.
    pub(in crate::models) fn forward(
        &self,
        x: &Tensor,
        step: &StepInputs,
        kv: &mut KvStore,
    ) -> Result<Tensor, ForwardError> {
        let mut parts = Vec::with_capacity(step.sequences.len());
        for sequence in &step.sequences {
            let state = kv.state(sequence.id, self.slot)?;
            let history = state.map_or_else(|| vec![0.0; self.conv.history()], <[f32]>::to_vec);
            parts.push((sequence.rows.clone(), history));
        }
        let out = ops::causal_conv(x, &parts, &self.conv)?;
        let width = x.cols();
        for (sequence, (rows, history)) in step.sequences.iter().zip(&parts) {
            let rows = &x.data()[rows.start * width..rows.end * width];
            for position in kv.state_points(sequence.id)? {
                // The last inputs up to there: all of the step's, or some that the state held before.
                let end = (position - sequence.first_position) * width;
                let state = match end.checked_sub(history.len()) {
                    Some(start) => rows[start..end].to_vec(),
                    None => [&history[end..], &rows[..end]].concat(),
                };
                kv.write_state(sequence.id, self.slot, position, &state)?;
            }
        }
        Ok(out)
    }
}
