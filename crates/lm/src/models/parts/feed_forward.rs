//! The feed-forward block of a layer: one MLP, or experts.

use super::experts::Experts;
use super::mlp::Mlp;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::models::{DecoderConfig, FeedForwardConfig, LinearRole, LinearVisitor};
use lmx_tensor::{Device, OpError, RowAdapters, Tensor};

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

    pub(in crate::models) fn forward(&self, x: &Tensor, adapters: &RowAdapters) -> Result<Tensor, OpError> {
        match self {
            Self::Dense(mlp) => mlp.forward(x, adapters),
            Self::Experts(experts) => experts.forward(x, adapters),
        }
    }

    pub(in crate::models) fn read_ahead(&self, device: &Device) {
        match self {
            Self::Dense(mlp) => mlp.read_ahead(device),
            Self::Experts(experts) => experts.read_ahead(device),
        }
    }

    /// Visits the matrices by the checkpoint's names; `module` is the block's.
    pub(in crate::models) fn visit_linears<'a>(&'a self, module: &str, visit: &mut LinearVisitor<'_, 'a>) {
        match self {
            Self::Dense(mlp) => mlp.visit_linears(module, LinearRole::Whole, visit),
            Self::Experts(experts) => experts.visit_linears(module, visit),
        }
    }
}
