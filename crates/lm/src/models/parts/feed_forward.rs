//! The feed-forward block of a layer: one MLP, or experts.

use super::experts::Experts;
use super::mlp::Mlp;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{DecoderConfig, FeedForwardConfig};
use lmx_tensor::{Device, Linear, OpError, Tensor};

#[derive(Debug)]
pub(in crate::models) enum FeedForward {
    Dense(Box<Mlp>),
    Experts(Box<Experts>),
}

impl FeedForward {
    pub(in crate::models) fn load(
        checkpoint: &Checkpoint,
        model: &DecoderConfig,
        config: FeedForwardConfig,
        layer: &str,
        device: &Device,
    ) -> Result<Self, CheckpointError> {
        let module = format!("{layer}.{}", model.names.feed_forward);
        Ok(match config {
            FeedForwardConfig::Dense(config) => {
                Self::Dense(Box::new(Mlp::load(checkpoint, model, config, &module, device)?))
            }
            FeedForwardConfig::Experts(config) => {
                Self::Experts(Box::new(Experts::load(checkpoint, model, config, &module, device)?))
            }
        })
    }

    pub(in crate::models) fn forward(&self, x: &Tensor) -> Result<Tensor, OpError> {
        match self {
            Self::Dense(mlp) => mlp.forward(x),
            Self::Experts(experts) => experts.forward(x),
        }
    }

    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        match self {
            Self::Dense(mlp) => mlp.read_ahead(device),
            Self::Experts(experts) => experts.read_ahead(device),
        }
    }

    /// Visits the matrices by the checkpoint's names; `module` is the block's.
    pub(in crate::models) fn visit_linears(&self, module: &str, visit: &mut dyn FnMut(&str, &Linear)) {
        match self {
            Self::Dense(mlp) => mlp.visit_linears(module, visit),
            Self::Experts(experts) => experts.visit_linears(module, visit),
        }
    }
}
