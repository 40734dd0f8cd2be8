//! What a family says about a checkpoint. A family only describes: it reads the configuration and fills a
//! [`DecoderConfig`]; the one forward pass in `decoder.rs` computes.

use super::rope::Rope;
use crate::cache::{LayerKv, Policy, StateSlot};

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
    /// Each row of a head that is not quantized is divided by its length (Baichuan M1); quantized ones were before.
    pub normed_head: bool,
    /// The longest sequence that the model was made for, in tokens.
    pub context_length: usize,
    /// What the checkpoint calls its modules.
    pub names: Names,
}

/// What a family calls the modules that others call by Llama's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The norm after the last layer, from the top.
    pub final_norm: &'static str,
    /// The norms of [`NormPlacement::Pre`], in a layer.
    pub pre_norms: [&'static str; 2],
    /// q, k and v in one matrix, in `self_attn`.
    pub fused_qkv: &'static str,
    /// The output projection, in `self_attn`.
    pub attention_output: &'static str,
    /// The norms on q and k, in `self_attn`.
    pub qk_norms: [&'static str; 2],
    /// The feed-forward block, in a layer.
    pub feed_forward: &'static str,
    /// Its gate, up and down projections.
    pub projections: [&'static str; 3],
}

impl Names {
    /// Llama's, and what most families call the modules that Llama has not.
    pub const LLAMA: Self = Self {
        final_norm: "model.norm",
        pre_norms: ["input_layernorm", "post_attention_layernorm"],
        fused_qkv: "qkv_proj",
        attention_output: "o_proj",
        qk_norms: ["q_norm", "k_norm"],
        feed_forward: "mlp",
        projections: ["gate_proj", "up_proj", "down_proj"],
    };
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
    /// What mixes a token with those before it.
    pub mixer: MixerConfig,
    /// The feed-forward block.
    pub feed_forward: FeedForwardConfig,
    /// Where norms stand around the two blocks.
    pub norms: NormPlacement,
}

/// Where a layer's norms stand, and by that their names in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before the mixer and before the feed-forward block: [`Names::pre_norms`].
    Pre,
    /// Gemma 2 and 3: `input_layernorm` and `post_attention_layernorm` around attention,
    /// `pre_feedforward_layernorm` and `post_feedforward_layernorm` around the MLP.
    PreAndPost,
}

/// What mixes a token with those before it.
#[derive(Clone, Debug)]
pub enum MixerConfig {
    /// Attention over keys and values.
    Attention(AttentionConfig),
    /// A short convolution over the last few tokens.
    ShortConv(ShortConvConfig),
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
    /// Which positions a query sees.
    pub policy: Policy,
    /// Norms on q and k.
    pub qk_norm: QkNorm,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on the output projection.
    pub output_bias: bool,
    /// q, k and v are stored as one matrix, in this order.
    pub fused_qkv: bool,
    /// Index into [`DecoderConfig::ropes`]; `None` means no position encoding (NoPE).
    pub rope: Option<usize>,
    /// Queries grow with their position.
    pub temperature: Option<Temperature>,
    /// Each query head has a learned logit in `sinks` that takes part in its softmaxes without a value (gpt-oss).
    pub sinks: bool,
    /// Before the norms and the rotary embedding, each head of k and of v becomes `w0 * (that of the token before) +
    /// w1 * (its own)`, with `w0`, `w1` of each head in `conv_k` and `conv_v` (Baichuan M1).
    pub kv_conv: bool,
}

/// RMS norms over each head of q and k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// With weights, before the rotary embedding.
    Weighted,
    /// Without weights, after the rotary embedding (Llama 4).
    Plain,
}

/// A query at position p is multiplied by `1 + scale * ln(1 + floor((p + 1) / floor))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Positions from one step to the next.
    pub floor: usize,
    /// How much a query grows.
    pub scale: f64,
}

/// LFM 2's short convolution: `out_proj(c * conv(b * x))`, where `in_proj` gives b, c and x, and each feature is
/// convolved with itself in the `taps - 1` tokens before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvConfig {
    /// Tokens that an output depends on, at least 2.
    pub taps: usize,
    /// Biases on both projections and the convolution.
    pub bias: bool,
}

/// The feed-forward block of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// One block for all tokens.
    Dense(MlpConfig),
    /// A token goes through some of many blocks.
    Experts(ExpertsConfig),
}

/// One gated feed-forward block: `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug, PartialEq)]
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

/// Experts: a token goes through those that have the greatest of its logits, which are those of `router`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts, beside the shared one.
    pub count: usize,
    /// Experts that a token goes through; from 1 to `count`.
    pub per_token: usize,
    /// Each expert, the shared one included.
    pub expert: MlpConfig,
    /// What the logits of a token's experts do.
    pub routing: Routing,
    /// A bias on the router.
    pub router_bias: bool,
    /// All tokens go through `shared_expert`, which is added.
    pub shared: bool,
    /// Where gate and up are stored as one stack, their rows take turns, gate first; else all of gate come first.
    pub rows_take_turns: bool,
}

/// How the logits of the experts that a token goes through enter its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Llama 4: the sum of `expert(x * sigmoid(logit))`.
    SigmoidOnInput,
    /// gpt-oss: the sum of `expert(x) * p`, the p being the softmax of these logits alone.
    SoftmaxOfChosen,
}

/// The function on an MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
    /// gpt-oss: `down((up + 1) * gate * sigmoid(alpha * gate))`, gate being at most `limit` and up within ±`limit`.
    ClampedSilu {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Above 0.
        limit: f32,
    },
}

impl DecoderConfig {
    /// The keys and values of each layer that has them, first to last.
    #[must_use]
    pub fn layer_kv(&self) -> Vec<LayerKv> {
        self.layers.iter().filter_map(|layer| layer.attention()).map(AttentionConfig::layer_kv).collect()
    }

    /// The recurrent state of all layers.
    #[must_use]
    pub fn states(&self) -> Vec<StateSlot> {
        let of_layer = |(layer, config): (usize, &LayerConfig)| {
            let slot = |(name, floats)| StateSlot { layer, name, floats };
            config.states(self.hidden).into_iter().map(slot).collect::<Vec<_>>()
        };
        self.layers.iter().enumerate().flat_map(of_layer).collect()
    }
}

impl LayerConfig {
    /// The layer's attention, if that is its mixer.
    #[must_use]
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match &self.mixer {
            MixerConfig::Attention(attention) => Some(attention),
            MixerConfig::ShortConv(_) => None,
        }
    }

    /// The slots of recurrent state that the layer has: names and sizes in f32.
    #[must_use]
    pub fn states(&self, hidden: usize) -> Vec<(&'static str, usize)> {
        match &self.mixer {
            MixerConfig::ShortConv(conv) => vec![("conv", (conv.taps - 1) * hidden)],
            MixerConfig::Attention(a) if a.kv_conv => {
                let width = a.kv_heads * a.head_dim;
                vec![("last_k", width), ("last_v", width)]
            }
            MixerConfig::Attention(_) => Vec::new(),
        }
    }
}

impl AttentionConfig {
    /// What a layer with this attention caches.
    #[must_use]
    pub fn layer_kv(&self) -> LayerKv {
        LayerKv { kv_heads: self.kv_heads, head_dim: self.head_dim, policy: self.policy }
    }
}

impl From<AttentionConfig> for MixerConfig {
    fn from(attention: AttentionConfig) -> Self {
        Self::Attention(attention)
    }
}

impl From<MlpConfig> for FeedForwardConfig {
    fn from(mlp: MlpConfig) -> Self {
        Self::Dense(mlp)
    }
}
