//! What mixes a token with those before it.

use super::attention::Attention;
use super::rotary::Rotary;
use super::short_conv::ShortConv;
use crate::cache::KvStore;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{DecoderConfig, ForwardError, LayerConfig, LinearVisitor, MixerConfig, StepInputs};
use lmx_tensor::{Device, Tensor};

#[derive(Debug)]
pub(in crate::models) enum Mixer {
    Attention(Box<Attention>),
    ShortConv(Box<ShortConv>),
}

/// Where a layer's memory is in the cache: how many layers before it have keys and values, and how many slots of
/// recurrent state they have.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::models) struct CachePlace {
    pub(in crate::models) kv: usize,
    pub(in crate::models) slot: usize,
}

impl CachePlace {
    /// The place of the layer after `layer`, which is here.
    pub(in crate::models) fn after(self, layer: &LayerConfig, hidden: usize) -> Self {
        let (kv, slots) = (usize::from(layer.attention().is_some()), layer.states(hidden).len());
        Self { kv: self.kv + kv, slot: self.slot + slots }
    }
}

impl Mixer {
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        model: &DecoderConfig,
        config: &MixerConfig,
        layer: &str,
        place: CachePlace,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        Ok(match config {
            MixerConfig::Attention(config) => {
                let attention = Attention::load(checkpoint, model, config, layer, place, device)?;
                Self::Attention(Box::new(attention))
            }
            MixerConfig::ShortConv(config) => {
                let conv = ShortConv::load(checkpoint, model.hidden, *config, layer, place.slot, device)?;
                Self::ShortConv(Box::new(conv))
            }
        })
    }

    pub(in crate::models) fn forward(
        &self,
        x: &Tensor,
        step: &StepInputs,
        rotary: &Rotary,
        kv: &mut KvStore,
    ) -> Result<Tensor, ForwardError> {
        match self {
            Self::Attention(attention) => attention.forward(x, step, rotary, kv),
            Self::ShortConv(conv) => conv.forward(x, step, kv),
        }
    }

    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        match self {
            Self::Attention(attention) => attention.read_ahead(device),
            Self::ShortConv(conv) => conv.read_ahead(device),
        }
    }

    /// Visits the matrices by their names in the checkpoint; `layer` is the layer's.
    pub(in crate::models) fn visit_linears<'a>(&'a self, layer: &str, visit: &mut LinearVisitor<'_, 'a>) {
        match self {
            Self::Attention(attention) => attention.visit_linears(layer, visit),
            Self::ShortConv(conv) => conv.visit_linears(layer, visit),
        }
    }
}
