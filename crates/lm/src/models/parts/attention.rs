//! Multi-head attention with grouped keys and values over the KV blocks.

use super::conv::CausalConv;
use super::mixer::CachePlace;
use super::rotary::Rotary;
use crate::cache::KvStore;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{
    AttentionConfig, DecoderConfig, ForwardError, LinearRole, LinearVisitor, Names, QkNorm, StepInputs,
    Temperature,
};
use lmx_tensor::kernels::attention::{AttentionShape, Sequence};
use lmx_tensor::ops::{self, Conv, Norm};
use lmx_tensor::{Device, Linear, Tensor};

#[derive(Debug)]
pub(in crate::models) struct Attention {
    config: AttentionConfig,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    /// Norms over each head of q and k.
    qk_norm: Option<(Norm, Norm)>,
    /// A logit for each query head that takes part in its softmaxes without a value.
    sinks: Option<Vec<f32>>,
    /// What mixes k and v with those of the token before.
    kv_conv: Option<(CausalConv, CausalConv)>,
    /// Its place among the layers that have keys and values.
    layer: usize,
    names: Names,
}

impl Attention {
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        model: &DecoderConfig,
        config: &AttentionConfig,
        layer: &str,
        place: CachePlace,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let (exec, names) = (device.exec(), model.names);
        let (q_rows, kv_rows) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let module = |name: &str| format!("{layer}.self_attn.{name}");
        let linear = |name: &str, rows: usize| {
            checkpoint.linear(exec, &module(name), rows, model.hidden, config.qkv_bias)
        };
        let (q, k, v) = if config.fused_qkv {
            let total = q_rows + 2 * kv_rows;
            let cut = |rows| {
                let (name, bias) = (module(names.fused_qkv), config.qkv_bias);
                checkpoint.linear_rows(exec, &name, rows, total, model.hidden, bias)
            };
            (cut(0..q_rows)?, cut(q_rows..q_rows + kv_rows)?, cut(q_rows + kv_rows..total)?)
        } else {
            (linear("q_proj", q_rows)?, linear("k_proj", kv_rows)?, linear("v_proj", kv_rows)?)
        };
        let output = module(names.attention_output);
        let output = checkpoint.linear(exec, &output, model.hidden, q_rows, config.output_bias)?;
        let qk_norm = load_qk_norm(checkpoint, model, config, layer)?;
        let sinks = match config.sinks {
            true => Some(checkpoint.vector(&module("sinks"), config.heads)?),
            false => None,
        };
        let conv = |name: &str, slot| load_kv_conv(checkpoint, config, &module(name), slot);
        let kv_conv = match config.kv_conv {
            true => Some((conv("conv_k", place.slot)?, conv("conv_v", place.slot + 1)?)),
            false => None,
        };
        let config = config.clone();
        Ok(Self { config, q, k, v, output, qk_norm, sinks, kv_conv, layer: place.kv, names })
    }

    pub(in crate::models) fn forward(
        &self,
        x: &Tensor,
        step: &StepInputs,
        rotary: &Rotary,
        kv: &mut KvStore,
    ) -> Result<Tensor, ForwardError> {
        let [mut q, mut k, mut v] = ops::linears(x, [&self.q, &self.k, &self.v], &step.adapters)?;
        ops::read_ahead(x.device(), [&self.output]);
        if let Some((k_conv, v_conv)) = &self.kv_conv {
            k = k_conv.forward(&k, step, kv)?;
            v = v_conv.forward(&v, step, kv)?;
        }
        if self.config.qk_norm == QkNorm::Weighted {
            self.normalize(&mut q, &mut k)?;
        }
        if let Some(rope) = self.config.rope {
            let table = rotary.table(rope);
            let rope = ops::Rope {
                dims: table.dims,
                traditional: table.traditional,
                cos: &table.cos,
                sin: &table.sin,
            };
            ops::rope(&mut q, self.config.head_dim, &rope)?;
            ops::rope(&mut k, self.config.head_dim, &rope)?;
        }
        if self.config.qk_norm == QkNorm::Plain {
            self.normalize(&mut q, &mut k)?;
        }
        if let Some(temperature) = self.config.temperature {
            let factors: Vec<f32> = step.positions.iter().map(|&p| temperature.factor(p)).collect();
            ops::scale_rows(&mut q, &factors)?;
        }
        let rows: Vec<_> = step.sequences.iter().map(|s| (s.id, s.rows.clone())).collect();
        kv.write(x.device().exec(), self.layer, &rows, k.data(), v.data())?;
        let attended = self.attend(&q, step, kv)?;
        Ok(ops::linear(&attended, &self.output, &step.adapters)?)
    }

    fn normalize(&self, q: &mut Tensor, k: &mut Tensor) -> Result<(), ForwardError> {
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            *q = ops::rms_norm_heads(q, q_norm)?;
            *k = ops::rms_norm_heads(k, k_norm)?;
        }
        Ok(())
    }

    /// [`ops::read_ahead`] of what [`Attention::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.q, &self.k, &self.v]);
    }

    fn attend(&self, q: &Tensor, step: &StepInputs, kv: &KvStore) -> Result<Tensor, ForwardError> {
        // The cache knows what queries see: the layer's own window, or one that the user set.
        let layer = self.layer;
        let group = &kv.spec().groups[kv.spec().layers[layer].0];
        let shape = AttentionShape {
            heads: self.config.heads,
            kv: group.shape,
            scale: self.config.scale,
            softcap: self.config.softcap,
            window: group.policy.window(),
        };
        let slabs = step.sequences.iter().map(|s| kv.slabs(s.id, layer)).collect::<Result<Vec<_>, _>>()?;
        let sequences: Vec<Sequence<'_>> = step
            .sequences
            .iter()
            .zip(&slabs)
            .map(|(s, blocks)| Sequence {
                rows: s.rows.clone(),
                first_position: s.first_position,
                blocks,
                quant: kv.quant(s.id),
            })
            .collect();
        Ok(ops::attention(&shape, q, self.sinks.as_deref(), &sequences)?)
    }

    pub(in crate::models) fn visit_linears<'a>(&'a self, layer: &str, visit: &mut LinearVisitor<'_, 'a>) {
        let (q, kv) = (self.q.out_features(), self.k.out_features());
        let part = |name, first| match self.config.fused_qkv {
            true => (self.names.fused_qkv, LinearRole::Outputs { first, of: q + 2 * kv }),
            false => (name, LinearRole::Whole),
        };
        let matrices = [
            (part("q_proj", 0), &self.q),
            (part("k_proj", q), &self.k),
            (part("v_proj", q + kv), &self.v),
            ((self.names.attention_output, LinearRole::Whole), &self.output),
        ];
        for ((name, role), linear) in matrices {
            visit(&format!("{layer}.self_attn.{name}"), role, linear);
        }
    }
}

impl Temperature {
    /// What a query at `position` is multiplied with.
    fn factor(self, position: u32) -> f32 {
        let steps = (u64::from(position) + 1) / self.floor.max(1) as u64;
        (1.0 + self.scale * (steps as f64).ln_1p()) as f32
    }
}

fn load_qk_norm(
    checkpoint: &Checkpoint,
    model: &DecoderConfig,
    config: &AttentionConfig,
    layer: &str,
) -> Result<Option<(Norm, Norm)>, CheckpointError> {
    let eps = model.norm.eps;
    let weighted = |name: &str| -> Result<Norm, CheckpointError> {
        let weight = checkpoint.vector(&format!("{layer}.self_attn.{name}.weight"), config.head_dim)?;
        Ok(Norm { weight, eps, offset: model.norm.offset })
    };
    let plain = || Norm { weight: vec![1.0; config.head_dim], eps, offset: 0.0 };
    let [q, k] = model.names.qk_norms;
    Ok(match config.qk_norm {
        QkNorm::None => None,
        QkNorm::Weighted => Some((weighted(q)?, weighted(k)?)),
        QkNorm::Plain => Some((plain(), plain())),
    })
}

/// The two taps of each head, for each of its features.
fn load_kv_conv(
    checkpoint: &Checkpoint,
    config: &AttentionConfig,
    name: &str,
    slot: usize,
) -> Result<CausalConv, CheckpointError> {
    let taps = checkpoint.values(name, &[1, 1, config.kv_heads, 1, 2])?;
    let spread = |tap: usize| {
        let heads = taps.iter().skip(tap).step_by(2);
        heads.flat_map(|&weight| std::iter::repeat_n(weight, config.head_dim))
    };
    let weight = spread(0).chain(spread(1)).collect();
    let conv = Conv { weight, bias: vec![0.0; config.kv_heads * config.head_dim] };
    Ok(CausalConv::new(conv, slot))
}
