//! The gated feed-forward block: `down(activation(gate(x)) * up(x))`.

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{Activation, DecoderConfig, LinearRole, LinearVisitor, MlpConfig};
use lmx_tensor::ops::{self, Gate};
use lmx_tensor::{Device, Linear, OpError, RowAdapters, Tensor};

#[derive(Debug)]
pub(in crate::models) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Gate,
    /// What the checkpoint calls the three.
    names: [&'static str; 3],
    /// Gate and up are the two halves of one module.
    fused: bool,
}

/// The module of gate and up where they are one.
const FUSED: &str = "gate_up_proj";

impl Mlp {
    pub(in crate::models) fn new(
        gate: Linear,
        up: Linear,
        down: Linear,
        activation: Activation,
        names: [&'static str; 3],
    ) -> Self {
        Self { gate, up, down, activation: activation.op(), names, fused: false }
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
            let fused = format!("{module}.{FUSED}");
            let cut = |rows| checkpoint.linear_rows(exec, &fused, rows, 2 * width, hidden, config.bias);
            (cut(0..width)?, cut(width..2 * width)?)
        } else {
            (linear(names[0], width, hidden)?, linear(names[1], width, hidden)?)
        };
        let down = linear(names[2], hidden, width)?;
        Ok(Self { fused: config.fused_gate_up, ..Self::new(gate, up, down, config.activation, names) })
    }

    pub(in crate::models) fn forward(&self, x: &Tensor, adapters: &RowAdapters) -> Result<Tensor, OpError> {
        let [gate, up] = ops::linears(x, [&self.gate, &self.up], adapters)?;
        ops::read_ahead(x.device(), [&self.down]);
        ops::linear(&ops::gated(self.activation, &gate, &up)?, &self.down, adapters)
    }

    /// [`ops::read_ahead`] of what [`Mlp::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.gate, &self.up]);
    }

    /// Visits the matrices; `role` is what those of this block are of their modules.
    pub(in crate::models) fn visit_linears<'a>(
        &'a self,
        module: &str,
        role: LinearRole,
        visit: &mut LinearVisitor<'_, 'a>,
    ) {
        let width = self.gate.out_features();
        let half = |first| LinearRole::Outputs { first, of: 2 * width };
        let [gate, up, down] = self.names;
        let halves = match self.fused {
            true => [(FUSED, half(0), &self.gate), (FUSED, half(width), &self.up)],
            false => [(gate, role, &self.gate), (up, role, &self.up)],
        };
        for (name, role, linear) in halves.into_iter().chain([(down, role, &self.down)]) {
            visit(&format!("{module}.{name}"), role, linear);
        }
    }
}
