//! The gated feed-forward block: `down(activation(gate(x)) * up(x))`.

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{Activation, DecoderConfig, MlpConfig};
use lmx_tensor::ops::{self, Gate};
use lmx_tensor::{Device, Linear, OpError, Tensor};

#[derive(Debug)]
pub(in crate::models) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Gate,
    /// What the checkpoint calls the three.
    names: [&'static str; 3],
}

impl Mlp {
    pub(in crate::models) fn new(
        gate: Linear,
        up: Linear,
        down: Linear,
        activation: Activation,
        names: [&'static str; 3],
    ) -> Self {
        Self { gate, up, down, activation: activation.op(), names }
    }

    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        model: &DecoderConfig,
        config: MlpConfig,
        module: &str,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let (exec, width, hidden) = (device.exec(), config.intermediate, model.hidden);
        let names = model.names.projections;
        let linear = |name: &str, out: usize, inp: usize| {
            checkpoint.linear(exec, &format!("{module}.{name}"), out, inp, config.bias)
        };
        let (gate, up) = if config.fused_gate_up {
            let fused = format!("{module}.gate_up_proj");
            let cut = |rows| checkpoint.linear_rows(exec, &fused, rows, 2 * width, hidden, config.bias);
            (cut(0..width)?, cut(width..2 * width)?)
        } else {
            (linear(names[0], width, hidden)?, linear(names[1], width, hidden)?)
        };
        let down = linear(names[2], hidden, width)?;
        Ok(Self::new(gate, up, down, config.activation, names))
    }

    pub(in crate::models) fn forward(&self, x: &Tensor) -> Result<Tensor, OpError> {
        let [gate, up] = ops::linears(x, [&self.gate, &self.up])?;
        ops::read_ahead(x.device(), [&self.down]);
        ops::linear(&ops::gated(self.activation, &gate, &up)?, &self.down)
    }

    /// [`ops::read_ahead`] of what [`Mlp::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.gate, &self.up]);
    }

    pub(in crate::models) fn visit_linears(&self, module: &str, visit: &mut dyn FnMut(&str, &Linear)) {
        for (name, linear) in self.names.iter().zip([&self.gate, &self.up, &self.down]) {
            visit(&format!("{module}.{name}"), linear);
        }
    }
}
