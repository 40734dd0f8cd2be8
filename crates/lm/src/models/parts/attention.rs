//! Multi-head attention with grouped keys and values over the KV blocks.

use super::rotary::Rotary;
use crate::cache::{KvStore, LayerKv, Policy};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{AttentionConfig, DecoderConfig, ForwardError, StepInputs};
use lmx_tensor::kernels::attention::{AttentionShape, Sequence};
use lmx_tensor::ops::{self, Norm};
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
}

impl AttentionConfig {
    /// What a layer with this attention caches.
    #[must_use]
    pub fn layer_kv(&self) -> LayerKv {
        let policy = Policy::of_layer(self.window);
        LayerKv { kv_heads: self.kv_heads, head_dim: self.head_dim, policy }
    }
}

impl Attention {
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        model: &DecoderConfig,
        config: &AttentionConfig,
        layer: &str,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let exec = device.exec();
        let (q_rows, kv_rows) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let module = |name: &str| format!("{layer}.self_attn.{name}");
        let linear = |name: &str, rows: usize| {
            checkpoint.linear(exec, &module(name), rows, model.hidden, config.qkv_bias)
        };
        let (q, k, v) = if config.fused_qkv {
            let total = q_rows + 2 * kv_rows;
            let cut = |rows| {
                let (name, bias) = (module("qkv_proj"), config.qkv_bias);
                checkpoint.linear_rows(exec, &name, rows, total, model.hidden, bias)
            };
            (cut(0..q_rows)?, cut(q_rows..q_rows + kv_rows)?, cut(q_rows + kv_rows..total)?)
        } else {
            (linear("q_proj", q_rows)?, linear("k_proj", kv_rows)?, linear("v_proj", kv_rows)?)
        };
        let output = checkpoint.linear(exec, &module("o_proj"), model.hidden, q_rows, config.output_bias)?;
        let norm = |name: &str| -> Result<Norm, CheckpointError> {
            let weight = checkpoint.vector(&format!("{}.weight", module(name)), config.head_dim)?;
            Ok(Norm { weight, eps: model.norm.eps, offset: model.norm.offset })
        };
        let qk_norm = if config.qk_norm { Some((norm("q_norm")?, norm("k_norm")?)) } else { None };
        Ok(Self { config: config.clone(), q, k, v, output, qk_norm })
    }

    pub(in crate::models) fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        step: &StepInputs,
        rotary: &Rotary,
        kv: &mut KvStore,
    ) -> Result<Tensor, ForwardError> {
        let [mut q, mut k, v] = ops::linears(x, [&self.q, &self.k, &self.v])?;
        ops::read_ahead(x.device(), [&self.output]);
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            q = ops::rms_norm_heads(&q, q_norm)?;
            k = ops::rms_norm_heads(&k, k_norm)?;
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
        let width = k.cols();
        for sequence in &step.sequences {
            let range = sequence.rows.start * width..sequence.rows.end * width;
            kv.write(sequence.id, layer, &k.data()[range.clone()], &v.data()[range])?;
        }
        let attended = self.attend(&q, layer, step, kv)?;
        Ok(ops::linear(&attended, &self.output)?)
    }

    /// [`ops::read_ahead`] of what [`Attention::forward`] reads first.
    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        ops::read_ahead(device, [&self.q, &self.k, &self.v]);
    }

    fn attend(
        &self,
        q: &Tensor,
        layer: usize,
        step: &StepInputs,
        kv: &KvStore,
    ) -> Result<Tensor, ForwardError> {
        // The cache knows what queries see: the layer's own window, or one that the user set.
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
            .map(|(s, blocks)| Sequence { rows: s.rows.clone(), first_position: s.first_position, blocks })
            .collect();
        Ok(ops::attention(&shape, q, &sequences)?)
    }

    pub(in crate::models) fn visit_linears(&self, name: &str, visit: &mut dyn FnMut(&str, &Linear)) {
        visit(&format!("{name}.q_proj"), &self.q);
        visit(&format!("{name}.k_proj"), &self.k);
        visit(&format!("{name}.v_proj"), &self.v);
        visit(&format!("{name}.o_proj"), &self.output);
    }
}
