//! Model families over one decoder.

mod config;
mod decoder;
mod description;
pub mod families;
mod model;
mod parts;
pub mod rope;

pub use config::{Config, ConfigError};
pub use decoder::Decoder;
pub use description::{
    Activation, AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, LayerConfig, MixerConfig,
    MlpConfig, Names, NormConfig, NormPlacement, QkNorm, Routing, ShortConvConfig, Temperature,
};
pub use model::{ForwardError, LinearRole, LinearVisitor, Model, StepInputs, StepSequence, kv_spec};
