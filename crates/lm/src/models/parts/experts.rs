//! Experts: each row goes through the few blocks that its router chooses, and through a shared one if there is one.
//!
//! The rows of a step are gathered by expert, so that an expert's weights are read once for all its rows and those of
//! experts that nobody chose are not read. A row's sum runs over its experts in ascending order, whatever the others
//! chose.

use super::mlp::Mlp;
use crate::checkpoint::{Checkpoint, CheckpointError, ExpertPlace};
use crate::models::{DecoderConfig, ExpertsConfig, LinearRole, LinearVisitor, Routing};
use lmx_tensor::kernels::vector::{exp, sigmoid};
use lmx_tensor::ops;
use lmx_tensor::{Device, Linear, OpError, RowAdapters, Tensor};

#[derive(Debug)]
pub(in crate::models) struct Experts {
    router: Linear,
    experts: Vec<Mlp>,
    shared: Option<Mlp>,
    per_token: usize,
    routing: Routing,
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
        let (exec, router) = (device.exec(), format!("{module}.router"));
        let shared = match config.shared {
            true => {
                let module = format!("{module}.shared_expert");
                Some(Mlp::load(checkpoint, model, config.expert, &module, device)?)
            }
            false => None,
        };
        Ok(Self {
            router: checkpoint.linear(exec, &router, config.count, model.hidden, config.router_bias)?,
            experts: load_experts(checkpoint, model, config, &format!("{module}.experts"), device)?,
            shared,
            per_token: config.per_token,
            routing: config.routing,
        })
    }

    pub(in crate::models) fn forward(&self, x: &Tensor, adapters: &RowAdapters) -> Result<Tensor, OpError> {
        let logits = ops::linear(x, &self.router, adapters)?;
        let mut out = match &self.shared {
            Some(shared) => shared.forward(x, adapters)?,
            None => Tensor::zeros(x.device(), x.rows(), x.cols()),
        };
        for (expert, chosen) in self.experts.iter().zip(self.choose(&logits)) {
            if chosen.rows.is_empty() {
                continue;
            }
            let mut rows = ops::select_rows(x, &chosen.rows)?;
            let adapters = &adapters.select(&chosen.rows);
            let fed = match self.routing {
                Routing::SigmoidOnInput => {
                    ops::scale_rows(&mut rows, &chosen.factors)?;
                    expert.forward(&rows, adapters)?
                }
                Routing::SoftmaxOfChosen => {
                    let mut fed = expert.forward(&rows, adapters)?;
                    ops::scale_rows(&mut fed, &chosen.factors)?;
                    fed
                }
            };
            ops::add_rows(&mut out, &chosen.rows, &fed)?;
        }
        Ok(out)
    }

    /// For each expert the rows that have it among their greatest logits; of equal ones the first.
    fn choose(&self, logits: &Tensor) -> Vec<Chosen> {
        let mut chosen = vec![Chosen::default(); self.experts.len()];
        for (row, logits) in logits.data().chunks_exact(logits.cols().max(1)).enumerate() {
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            order.truncate(self.per_token);
            let factors: Vec<f32> = match self.routing {
                Routing::SigmoidOnInput => order.iter().map(|&expert| sigmoid(logits[expert])).collect(),
                Routing::SoftmaxOfChosen => softmax(order.iter().map(|&expert| logits[expert]).collect()),
            };
            for (expert, factor) in order.into_iter().zip(factors) {
                chosen[expert].rows.push(row);
                chosen[expert].factors.push(factor);
            }
        }
        chosen
    }

    /// [`ops::read_ahead`] of what [`Experts::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.router]);
    }

    pub(in crate::models) fn visit_linears<'a>(&'a self, module: &str, visit: &mut LinearVisitor<'_, 'a>) {
        visit(&format!("{module}.router"), LinearRole::Whole, &self.router);
        if let Some(shared) = &self.shared {
            shared.visit_linears(&format!("{module}.shared_expert"), LinearRole::Whole, visit);
        }
        let count = self.experts.len();
        for (index, expert) in self.experts.iter().enumerate() {
            let role = LinearRole::Expert(ExpertPlace { index, count });
            expert.visit_linears(&format!("{module}.experts"), role, visit);
        }
    }
}

/// The softmax of values in descending order.
fn softmax(mut values: Vec<f32>) -> Vec<f32> {
    let max = values.first().copied().unwrap_or_default();
    values.iter_mut().for_each(|value| *value = exp(*value - max));
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|value| *value /= sum);
    values
}

/// The experts of `module`. mlx-lm stacks the matrices as they are used; transformers stacks them transposed, with gate
/// and up in one, and so do the original files of gpt-oss, but as blocks of mxfp4 and not transposed.
fn load_experts(
    checkpoint: &Checkpoint,
    model: &DecoderConfig,
    config: ExpertsConfig,
    module: &str,
    device: &Device,
) -> Result<Vec<Mlp>, CheckpointError> {
    let exec = device.exec();
    let (hidden, width, count) = (model.hidden, config.expert.intermediate, config.count);
    let names = model.names.projections;
    let [gate, up, down] = names.map(|name| format!("{module}.{name}"));
    let fused = format!("{module}.gate_up_proj");
    let transposed = checkpoint.has(&fused);
    // Only gpt-oss has blocks, and only there is the order of their rows known.
    let blocks = config.rows_take_turns && checkpoint.has(&format!("{fused}_blocks"));
    let joined = (transposed || blocks).then(|| (gate_up_rows(config), (0..hidden).collect::<Vec<_>>()));
    let biases = load_biases(checkpoint, config, [&gate, &up, &down], &fused, hidden)?;
    let expert = |index: usize| -> Result<Mlp, CheckpointError> {
        let place = ExpertPlace { index, count };
        let cut = |name: &str, rows: &[usize], total, inp| match transposed {
            true => checkpoint.expert_transposed(name, place, rows, total, inp),
            false => checkpoint.expert_blocks(exec, name, place, rows, total, inp),
        };
        let matrices = match &joined {
            Some(([gate, up], all)) => {
                let both = |rows: &[usize]| cut(&fused, rows, 2 * width, hidden);
                [both(gate)?, both(up)?, cut(&down, all, hidden, width)?]
            }
            None => {
                let stacked = |name: &str, out, inp| checkpoint.expert(exec, name, place, out, inp);
                [stacked(&gate, width, hidden)?, stacked(&up, width, hidden)?, stacked(&down, hidden, width)?]
            }
        };
        let mut biases = biases.iter().map(|biases| biases[index].clone());
        let [gate, up, down] = matrices.map(|matrix| match biases.next() {
            Some(bias) => matrix.with_bias_values(bias),
            None => matrix,
        });
        Ok(Mlp::new(gate, up, down, config.expert.activation, names))
    };
    (0..count).map(expert).collect()
}

/// The rows of gate and those of up where both are in one matrix.
fn gate_up_rows(config: ExpertsConfig) -> [Vec<usize>; 2] {
    let width = config.expert.intermediate;
    match config.rows_take_turns {
        true => [0, 1].map(|first| (0..width).map(|row| 2 * row + first).collect()),
        false => [0, width].map(|first| (first..first + width).collect()),
    }
}

/// The biases of gate, up and down, of each expert, if there are any; stored in the ways that the matrices are.
fn load_biases(
    checkpoint: &Checkpoint,
    config: ExpertsConfig,
    [gate, up, down]: [&str; 3],
    fused: &str,
    hidden: usize,
) -> Result<Vec<Vec<Vec<f32>>>, CheckpointError> {
    let (width, count) = (config.expert.intermediate, config.count);
    let by_expert = |name: &str, len: usize| -> Result<Vec<Vec<f32>>, CheckpointError> {
        Ok(checkpoint.values(name, &[count, len])?.chunks_exact(len).map(<[f32]>::to_vec).collect())
    };
    if !config.expert.bias {
        return Ok(Vec::new());
    }
    let fused = format!("{fused}_bias");
    if !checkpoint.has(&fused) {
        let named = |name: &str, len| by_expert(&format!("{name}.bias"), len);
        return Ok(vec![named(gate, width)?, named(up, width)?, named(down, hidden)?]);
    }
    let both = by_expert(&fused, 2 * width)?;
    let [gate, up] = gate_up_rows(config)
        .map(|rows| both.iter().map(|both| rows.iter().map(|&row| both[row]).collect()).collect());
    Ok(vec![gate, up, by_expert(&format!("{down}_bias"), hidden)?])
}
