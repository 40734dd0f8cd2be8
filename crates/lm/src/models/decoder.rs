//! The forward pass of a decoder-only transformer, top to bottom.

use super::description::{Activation, DecoderConfig, LayerConfig, NormPlacement};
use super::model::{ForwardError, Model, StepInputs};
use super::parts::attention::Attention;
use super::parts::mlp::Mlp;
use super::parts::rotary::Rotary;
use crate::cache::{KvStore, LayerKv};
use crate::checkpoint::{Checkpoint, CheckpointError};
use lmx_tensor::ops::{self, Norm};
use lmx_tensor::{Device, Linear, Tensor};

/// A decoder with its weights.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Norm,
    /// `None` where the embedding is the head.
    head: Option<Linear>,
    device: Device,
}

#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    attention: Attention,
    attention_output_norm: Option<Norm>,
    mlp_norm: Norm,
    mlp: Mlp,
    mlp_output_norm: Option<Norm>,
}

impl Decoder {
    /// Reads the weights that `config` describes.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the tensor and the file.
    pub fn load(
        checkpoint: &Checkpoint,
        config: DecoderConfig,
        device: &Device,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, CheckpointError> {
        let total = config.layers.len() + 1;
        progress(0, total);
        let exec = device.exec();
        let embedding = checkpoint.linear(exec, "model.embed_tokens", config.vocab, config.hidden, false)?;
        let head = if config.tied_head {
            None
        } else {
            Some(checkpoint.linear(exec, "lm_head", config.vocab, config.hidden, false)?)
        };
        let norm = load_norm(checkpoint, &config, "model.norm")?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            progress(i + 1, total);
            layers.push(Layer::load(checkpoint, &config, layer, &format!("model.layers.{i}"), device)?);
        }
        progress(total, total);
        Ok(Self { config, embedding, layers, norm, head, device: device.clone() })
    }

    fn head_weight(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// The description that it was built from.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }
}

fn load_norm(checkpoint: &Checkpoint, config: &DecoderConfig, module: &str) -> Result<Norm, CheckpointError> {
    let weight = checkpoint.vector(&format!("{module}.weight"), config.hidden)?;
    Ok(Norm { weight, eps: config.norm.eps, offset: config.norm.offset })
}

impl Layer {
    fn load(
        checkpoint: &Checkpoint,
        config: &DecoderConfig,
        layer: &LayerConfig,
        name: &str,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let norm = |suffix: &str| load_norm(checkpoint, config, &format!("{name}.{suffix}"));
        let (attention_output_norm, mlp_norm, mlp_output_norm) = match layer.norms {
            NormPlacement::Pre => (None, norm("post_attention_layernorm")?, None),
            NormPlacement::PreAndPost => (
                Some(norm("post_attention_layernorm")?),
                norm("pre_feedforward_layernorm")?,
                Some(norm("post_feedforward_layernorm")?),
            ),
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(checkpoint, config, &layer.attention, name, device)?,
            attention_output_norm,
            mlp_norm,
            mlp: Mlp::load(checkpoint, config.hidden, layer.mlp, name, device)?,
            mlp_output_norm,
        })
    }
}

impl Model for Decoder {
    fn hidden(&self, step: &StepInputs, kv: &mut KvStore) -> Result<Tensor, ForwardError> {
        if let Some(&token) = step.tokens.iter().find(|&&t| t as usize >= self.config.vocab) {
            return Err(ForwardError::Token { token, vocab: self.config.vocab });
        }
        let rotary = Rotary::for_step(&self.config.ropes, step);
        let mut x = ops::embed(&self.device, &self.embedding, &step.tokens, self.config.embedding_scale)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let normed = ops::rms_norm(&x, &layer.input_norm)?;
            let attended = layer.attention.forward(&normed, i, step, &rotary, kv)?;
            layer.mlp.read_ahead(&self.device);
            x = ops::add(&x, &post_norm(attended, layer.attention_output_norm.as_ref())?)?;
            let normed = ops::rms_norm(&x, &layer.mlp_norm)?;
            let fed = layer.mlp.forward(&normed)?;
            match self.layers.get(i + 1) {
                Some(next) => next.attention.read_ahead(&self.device),
                None => ops::read_ahead(&self.device, [self.head_weight()]),
            }
            x = ops::add(&x, &post_norm(fed, layer.mlp_output_norm.as_ref())?)?;
        }
        Ok(x)
    }

    fn head(&self, hidden: &Tensor, rows: &[usize]) -> Result<Tensor, ForwardError> {
        // The final norm belongs here, so that it runs for the wanted rows only.
        let picked = ops::rms_norm(&ops::select_rows(hidden, rows)?, &self.norm)?;
        let mut logits = ops::linear(&picked, self.head_weight())?;
        if let Some(cap) = self.config.logit_softcap {
            ops::softcap(&mut logits, cap);
        }
        Ok(logits)
    }

    fn layer_kv(&self) -> Vec<LayerKv> {
        self.config.layers.iter().map(|l| l.attention.layer_kv()).collect()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn visit_linears(&self, visit: &mut dyn FnMut(&str, &Linear)) {
        visit("model.embed_tokens", &self.embedding);
        for (i, layer) in self.layers.iter().enumerate() {
            layer.attention.visit_linears(&format!("model.layers.{i}.self_attn"), visit);
            layer.mlp.visit_linears(&format!("model.layers.{i}.mlp"), visit);
        }
        if let Some(head) = &self.head {
            visit("lm_head", head);
        }
    }

    fn context_length(&self) -> usize {
        self.config.context_length
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn original_context(&self) -> Option<usize> {
        self.config.ropes.iter().find_map(super::rope::Rope::original_context)
    }
}

fn post_norm(x: Tensor, norm: Option<&Norm>) -> Result<Tensor, ForwardError> {
    match norm {
        Some(norm) => Ok(ops::rms_norm(&x, norm)?),
        None => Ok(x),
    }
}

impl Activation {
    /// The op that applies this activation to the gate.
    #[must_use]
    pub(super) fn op(self) -> ops::Gate {
        match self {
            Activation::Silu => ops::Gate::Silu,
            Activation::GeluTanh => ops::Gate::GeluTanh,
        }
    }
}
