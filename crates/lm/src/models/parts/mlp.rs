//! The gated feed-forward block: `down(activation(gate(x)) * up(x))`.

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::MlpConfig;
use lmx_tensor::ops::{self, Gate};
use lmx_tensor::{Device, Linear, OpError, Tensor};

#[derive(Debug)]
pub(in crate::models) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Gate,
}

impl Mlp {
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        hidden: usize,
        config: MlpConfig,
        layer: &str,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let (exec, width) = (device.exec(), config.intermediate);
        let linear = |name: &str, out: usize, inp: usize| {
            checkpoint.linear(exec, &format!("{layer}.mlp.{name}"), out, inp, config.bias)
        };
        let (gate, up) = if config.fused_gate_up {
            let fused = format!("{layer}.mlp.gate_up_proj");
            let cut = |rows| checkpoint.linear_rows(exec, &fused, rows, 2 * width, hidden, config.bias);
            (cut(0..width)?, cut(width..2 * width)?)
        } else {
            (linear("gate_proj", width, hidden)?, linear("up_proj", width, hidden)?)
        };
        let down = linear("down_proj", hidden, width)?;
        Ok(Self { gate, up, down, activation: config.activation.op() })
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

    pub(in crate::models) fn visit_linears(&self, name: &str, visit: &mut dyn FnMut(&str, &Linear)) {
        visit(&format!("{name}.gate_proj"), &self.gate);
        visit(&format!("{name}.up_proj"), &self.up);
        visit(&format!("{name}.down_proj"), &self.down);
    }
}
