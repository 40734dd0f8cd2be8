//! What a family says about a checkpoint. A family only describes: it reads the configuration and fills a
//! [`DecoderConfig`]; the one forward pass in `decoder.rs` computes.

use super::rope::Rope;

/// A decoder-only transformer, described.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of token ids, which is the number of rows of the embedding.
    pub vocab: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
    /// The position encodings that the layers refer to by index.
    pub ropes: Vec<Rope>,
    /// Every RMS norm of the model.
    pub norm: NormConfig,
    /// Factor on the embedding's output (Gemma: the square root of `hidden`).
    pub embedding_scale: f32,
    /// Logits become `cap * tanh(logits / cap)`.
    pub logit_softcap: Option<f32>,
    /// The head is the embedding matrix.
    pub tied_head: bool,
    /// The longest sequence that the model was made for, in tokens.
    pub context_length: usize,
}

/// RMS norm: `x / sqrt(mean(x²) + eps) * (weight + offset)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the weight: 1 in Gemma, else 0.
    pub offset: f32,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct LayerConfig {
    /// The attention block.
    pub attention: AttentionConfig,
    /// The feed-forward block.
    pub mlp: MlpConfig,
    /// Where norms stand around the two blocks.
    pub norms: NormPlacement,
}

/// Where a layer's norms stand, and by that their names in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `input_layernorm` before attention, `post_attention_layernorm` before the MLP.
    Pre,
    /// Gemma 2 and 3: `input_layernorm` and `post_attention_layernorm` around attention,
    /// `pre_feedforward_layernorm` and `post_feedforward_layernorm` around the MLP.
    PreAndPost,
}

/// One layer's attention.
#[derive(Clone, Debug)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on the scores before the softmax.
    pub scale: f32,
    /// Scores become `cap * tanh(scores / cap)`.
    pub softcap: Option<f32>,
    /// A query sees only the last `window` positions, its own included.
    pub window: Option<usize>,
    /// RMS norm over each head of q and k before the rotary embedding (`q_norm`, `k_norm`).
    pub qk_norm: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on the output projection.
    pub output_bias: bool,
    /// q, k and v are stored as one matrix `qkv_proj`, in this order.
    pub fused_qkv: bool,
    /// Index into [`DecoderConfig::ropes`]; `None` means no position encoding (NoPE).
    pub rope: Option<usize>,
}

/// One layer's gated feed-forward block: `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpConfig {
    /// Rows of the gate and up projections.
    pub intermediate: usize,
    /// The function on the gate.
    pub activation: Activation,
    /// Biases on all three projections.
    pub bias: bool,
    /// gate and up are stored as one matrix `gate_up_proj`, gate first.
    pub fused_gate_up: bool,
}

/// The function on an MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}
