//! Model families over one decoder.

mod config;
mod description;
pub mod families;
pub mod rope;

pub use config::{Config, ConfigError};
pub use description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, NormConfig, NormPlacement,
};
