//! LFM 2's gated short convolution: `out_proj(c * conv(b * x))`.

use super::conv::CausalConv;
use crate::cache::KvStore;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{ForwardError, LinearRole, LinearVisitor, ShortConvConfig, StepInputs};
use lmx_tensor::ops::{self, Conv};
use lmx_tensor::{Device, Linear, Tensor};

#[derive(Debug)]
pub(in crate::models) struct ShortConv {
    b: Linear,
    c: Linear,
    x: Linear,
    conv: CausalConv,
    output: Linear,
}

impl ShortConv {
    /// Reads the weights of `{layer}.conv`; `slot` is the place of its state among those of the cache.
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        hidden: usize,
        config: ShortConvConfig,
        layer: &str,
        slot: usize,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let exec = device.exec();
        let module = |name: &str| format!("{layer}.conv.{name}");
        let third = |i: usize| {
            let rows = i * hidden..(i + 1) * hidden;
            checkpoint.linear_rows(exec, &module("in_proj"), rows, 3 * hidden, hidden, config.bias)
        };
        let bias = match config.bias {
            true => checkpoint.vector(&module("conv.bias"), hidden)?,
            false => vec![0.0; hidden],
        };
        let weight = checkpoint.conv_taps(&module("conv.weight"), hidden, config.taps)?;
        Ok(Self {
            b: third(0)?,
            c: third(1)?,
            x: third(2)?,
            conv: CausalConv::new(Conv { weight, bias }, slot),
            output: checkpoint.linear(exec, &module("out_proj"), hidden, hidden, config.bias)?,
        })
    }

    pub(in crate::models) fn forward(
        &self,
        x: &Tensor,
        step: &StepInputs,
        kv: &mut KvStore,
    ) -> Result<Tensor, ForwardError> {
        let [b, c, x] = ops::linears(x, [&self.b, &self.c, &self.x], &step.adapters)?;
        ops::read_ahead(x.device(), [&self.output]);
        let mixed = self.conv.forward(&ops::multiply(&b, &x)?, step, kv)?;
        Ok(ops::linear(&ops::multiply(&c, &mixed)?, &self.output, &step.adapters)?)
    }

    /// [`ops::read_ahead`] of what [`ShortConv::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.b, &self.c, &self.x]);
    }

    pub(in crate::models) fn visit_linears<'a>(&'a self, layer: &str, visit: &mut LinearVisitor<'_, 'a>) {
        for (index, third) in [&self.b, &self.c, &self.x].into_iter().enumerate() {
            let width = third.out_features();
            let role = LinearRole::Outputs { first: index * width, of: 3 * width };
            visit(&format!("{layer}.conv.in_proj"), role, third);
        }
        visit(&format!("{layer}.conv.out_proj"), LinearRole::Whole, &self.output);
    }
}
