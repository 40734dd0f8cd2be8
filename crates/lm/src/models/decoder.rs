//! The forward pass of a decoder-only transformer, top to bottom.

use super::description::{Activation, DecoderConfig, LayerConfig, NormPlacement};
use super::model::{ForwardError, LinearRole, LinearVisitor, Model, StepInputs};
use super::parts::feed_forward::FeedForward;
use super::parts::mixer::{CachePlace, Mixer};
use super::parts::rotary::Rotary;
use crate::cache::{KvStore, LayerKv, StateSlot};
use crate::checkpoint::{Checkpoint, CheckpointError};
use lmx_tensor::ops::{self, Norm};
use lmx_tensor::{Device, Linear, RowAdapters, Tensor};

/// A decoder with its weights.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Norm,
    /// `None` where the embedding is the head.
    head: Option<Linear>,
    /// Factors on the logits, where the head's rows are to have length 1.
    head_scales: Option<Vec<f32>>,
    device: Device,
}

#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    mixer: Mixer,
    mixer_output_norm: Option<Norm>,
    feed_forward_norm: Norm,
    feed_forward: FeedForward,
    feed_forward_output_norm: Option<Norm>,
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
        let unquantized = config.normed_head && !checkpoint.has("lm_head.scales");
        let head_scales = head.as_ref().filter(|_| unquantized).map(row_scales);
        let norm = load_norm(checkpoint, &config, config.names.final_norm)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        let mut place = CachePlace::default();
        for (i, layer) in config.layers.iter().enumerate() {
            progress(i + 1, total);
            layers.push(Layer::load(
                checkpoint,
                &config,
                layer,
                &format!("model.layers.{i}"),
                place,
                device,
            )?);
            place = place.after(layer, config.hidden);
        }
        progress(total, total);
        Ok(Self { config, embedding, layers, norm, head, head_scales, device: device.clone() })
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

/// What divides each row of a matrix by its length, which is kept from 0 as mlx-lm does.
fn row_scales(weight: &Linear) -> Vec<f32> {
    let mut row = vec![0.0; weight.in_features()];
    let mut scale = |index: usize| {
        weight.dequantize_row(index, &mut row);
        let square: f64 = row.iter().map(|&w| f64::from(w) * f64::from(w)).sum();
        (1.0 / (square.sqrt() + 1e-7)) as f32
    };
    (0..weight.out_features()).map(&mut scale).collect()
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
        place: CachePlace,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let norm = |suffix: &str| load_norm(checkpoint, config, &format!("{name}.{suffix}"));
        let [input, feed_forward] = config.names.pre_norms;
        let (input_norm, mixer_output_norm, feed_forward_norm, feed_forward_output_norm) = match layer.norms {
            NormPlacement::Pre => (norm(input)?, None, norm(feed_forward)?, None),
            NormPlacement::PreAndPost => (
                norm("input_layernorm")?,
                Some(norm("post_attention_layernorm")?),
                norm("pre_feedforward_layernorm")?,
                Some(norm("post_feedforward_layernorm")?),
            ),
        };
        Ok(Self {
            input_norm,
            mixer: Mixer::load(checkpoint, config, &layer.mixer, name, place, device)?,
            mixer_output_norm,
            feed_forward_norm,
            feed_forward: FeedForward::load(checkpoint, config, layer.feed_forward, name, device)?,
            feed_forward_output_norm,
        })
    }
}

impl Model for Decoder {
    fn hidden(&self, step: &StepInputs, kv: &mut KvStore) -> Result<Tensor, ForwardError> {
        if let Some(&token) = step.tokens.iter().find(|&&t| t as usize >= self.config.vocab) {
            return Err(ForwardError::Token { token, vocab: self.config.vocab });
        }
        let rotary = Rotary::for_step(&self.config.ropes, step);
        let (scale, adapters) = (self.config.embedding_scale, &step.adapters);
        let mut x = ops::embed(&self.device, &self.embedding, &step.tokens, scale, adapters)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let normed = ops::rms_norm(&x, &layer.input_norm)?;
            let mixed = layer.mixer.forward(&normed, step, &rotary, kv)?;
            layer.feed_forward.read_ahead(&self.device);
            x = ops::add(&x, &post_norm(mixed, layer.mixer_output_norm.as_ref())?)?;
            let normed = ops::rms_norm(&x, &layer.feed_forward_norm)?;
            let fed = layer.feed_forward.forward(&normed, adapters)?;
            match self.layers.get(i + 1) {
                Some(next) => next.mixer.read_ahead(&self.device),
                None => ops::read_ahead(&self.device, [self.head_weight()]),
            }
            x = ops::add(&x, &post_norm(fed, layer.feed_forward_output_norm.as_ref())?)?;
        }
        Ok(x)
    }

    fn final_norm(&self, hidden: &Tensor, rows: &[usize]) -> Result<Tensor, ForwardError> {
        Ok(ops::rms_norm(&ops::select_rows(hidden, rows)?, &self.norm)?)
    }

    fn head(&self, hidden: &Tensor, rows: &[usize], adapters: &RowAdapters) -> Result<Tensor, ForwardError> {
        // The final norm belongs here, so that it runs for the wanted rows only.
        let picked = self.final_norm(hidden, rows)?;
        let mut logits = ops::linear(&picked, self.head_weight(), &adapters.select(rows))?;
        if let Some(scales) = &self.head_scales {
            ops::scale_features(&mut logits, scales)?;
        }
        if let Some(cap) = self.config.logit_softcap {
            ops::softcap(&mut logits, cap);
        }
        Ok(logits)
    }

    fn layer_kv(&self) -> Vec<LayerKv> {
        self.config.layer_kv()
    }

    fn states(&self) -> Vec<StateSlot> {
        self.config.states()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn visit_linears<'a>(&'a self, visit: &mut LinearVisitor<'_, 'a>) {
        visit("model.embed_tokens", LinearRole::Embedding, &self.embedding);
        for (i, layer) in self.layers.iter().enumerate() {
            let (name, feed_forward) = (format!("model.layers.{i}"), self.config.names.feed_forward);
            layer.mixer.visit_linears(&name, visit);
            layer.feed_forward.visit_linears(&format!("{name}.{feed_forward}"), visit);
        }
        if let Some(head) = &self.head {
            let role = if self.head_scales.is_some() { LinearRole::Normed } else { LinearRole::Whole };
            visit("lm_head", role, head);
        }
    }

    fn context_length(&self) -> usize {
        self.config.context_length
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn width(&self) -> usize {
        self.config.hidden
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
            Activation::ClampedSilu { alpha, limit } => ops::Gate::ClampedSilu { alpha, limit },
        }
    }
}
