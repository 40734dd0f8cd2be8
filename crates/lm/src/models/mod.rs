//! Model families over one decoder.

mod description;
pub mod families;
pub mod rope;

pub use description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, NormConfig, NormPlacement,
};
