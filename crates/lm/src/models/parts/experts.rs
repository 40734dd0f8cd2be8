//! Experts: each row goes through the few blocks that its router chooses, and through a shared one.
//!
//! The rows of a step are gathered by expert, so that an expert's weights are read once for all its rows and those of
//! experts that nobody chose are not read. A row's sum runs over its experts in ascending order, whatever the others
//! chose.

use super::mlp::Mlp;
use crate::checkpoint::{Checkpoint, CheckpointError, ExpertPlace};
use crate::models::{DecoderConfig, ExpertsConfig};
use lmx_tensor::kernels::vector::sigmoid;
use lmx_tensor::ops;
use lmx_tensor::{Device, Linear, OpError, Tensor};

#[derive(Debug)]
pub(in crate::models) struct Experts {
    router: Linear,
    experts: Vec<Mlp>,
    shared: Mlp,
    per_token: usize,
}

/// The rows that an expert is to compute, with the factors on them.
#[derive(Clone, Debug, Default)]
struct Chosen {
    rows: Vec<usize>,
    factors: Vec<f32>,
}

impl Experts {
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        model: &DecoderConfig,
        config: ExpertsConfig,
        module: &str,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let exec = device.exec();
        let (hidden, width, count) = (model.hidden, config.expert.intermediate, config.count);
        let names = model.names.projections;
        let [gate, up, down] = names.map(|name| format!("{module}.experts.{name}"));
        // transformers stacks the matrices transposed, with gate and up in one; mlx-lm stacks them as they are used.
        let fused = format!("{module}.experts.gate_up_proj");
        let transposed = checkpoint.has(&fused);
        let expert = |index: usize| -> Result<Mlp, CheckpointError> {
            let place = ExpertPlace { index, count };
            let (gate, up, down) = if transposed {
                let cut = |rows| checkpoint.expert_transposed(&fused, place, rows, 2 * width, hidden);
                let down = checkpoint.expert_transposed(&down, place, 0..hidden, hidden, width)?;
                (cut(0..width)?, cut(width..2 * width)?, down)
            } else {
                let stacked = |name: &str, out, inp| checkpoint.expert(exec, name, place, out, inp);
                (stacked(&gate, width, hidden)?, stacked(&up, width, hidden)?, stacked(&down, hidden, width)?)
            };
            Ok(Mlp::new(gate, up, down, config.expert.activation, names))
        };
        Ok(Self {
            router: checkpoint.linear(exec, &format!("{module}.router"), count, hidden, false)?,
            experts: (0..count).map(expert).collect::<Result<_, _>>()?,
            shared: Mlp::load(checkpoint, model, config.expert, &format!("{module}.shared_expert"), device)?,
            per_token: config.per_token,
        })
    }

    pub(in crate::models) fn forward(&self, x: &Tensor) -> Result<Tensor, OpError> {
        let logits = ops::linear(x, &self.router)?;
        let mut out = self.shared.forward(x)?;
        for (expert, chosen) in self.experts.iter().zip(self.choose(&logits)) {
            if chosen.rows.is_empty() {
                continue;
            }
            let mut rows = ops::select_rows(x, &chosen.rows)?;
            ops::scale_rows(&mut rows, &chosen.factors)?;
            ops::add_rows(&mut out, &chosen.rows, &expert.forward(&rows)?)?;
        }
        Ok(out)
    }

    /// For each expert the rows that have it among their greatest logits; of equal ones the first.
    fn choose(&self, logits: &Tensor) -> Vec<Chosen> {
        let mut chosen = vec![Chosen::default(); self.experts.len()];
        for (row, logits) in logits.data().chunks_exact(logits.cols().max(1)).enumerate() {
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            for &expert in &order[..self.per_token.min(order.len())] {
                chosen[expert].rows.push(row);
                chosen[expert].factors.push(sigmoid(logits[expert]));
            }
        }
        chosen
    }

    /// [`ops::read_ahead`] of what [`Experts::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.router]);
    }

    pub(in crate::models) fn visit_linears(&self, module: &str, visit: &mut dyn FnMut(&str, &Linear)) {
        visit(&format!("{module}.router"), &self.router);
        self.shared.visit_linears(&format!("{module}.shared_expert"), visit);
        for expert in &self.experts {
            expert.visit_linears(&format!("{module}.experts"), visit);
        }
    }
}
