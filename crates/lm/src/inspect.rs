//! What a model is and what it will need, without loading its weights.

use crate::cache::{BLOCK, KvQuantization, KvSpec, LayerGroup, Policy};
use crate::checkpoint::{Checkpoint, CheckpointError, OpenOptions};
use crate::load::{LoadError, eos_set, kv_type, read_tokenizer};
use crate::models::rope::{Rope, RopeScaling};
use crate::models::{
    AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, MlpConfig, NormPlacement,
    QkNorm,
};
use crate::text::{EosSet, Tokenizer};
use lmx_tensor::kernels::attention::KvType;
use serde::Serialize;

/// A model whose files are open and checked, and whose weights are not loaded.
pub struct Opened {
    /// The files and their configuration.
    pub checkpoint: Checkpoint,
    /// The decoder.
    pub decoder: DecoderConfig,
    /// Text to tokens and back, and the chat template.
    pub tokenizer: Tokenizer,
    /// The tokens that end a reply, each with its source.
    pub eos: EosSet,
    /// The checkpoint's own float type, in which keys and values are stored unless told otherwise.
    pub kv_type: KvType,
}

impl Opened {
    /// Opens a folder, a `.gguf` file, or a hub id that is in one of the given caches.
    ///
    /// # Errors
    /// [`LoadError`] naming the file and the key or token.
    pub fn open(source: &str, options: &OpenOptions) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(source, options)?;
        let decoder = checkpoint.describe()?;
        let tokenizer = read_tokenizer(&checkpoint)?;
        let eos = eos_set(&checkpoint, &tokenizer, &[])?;
        let kv_type = kv_type(&checkpoint)?;
        Ok(Self { checkpoint, decoder, tokenizer, eos, kv_type })
    }

    /// What the layers keep, stored as `ty`.
    #[must_use]
    pub fn kv_spec(&self, ty: KvType) -> KvSpec {
        KvSpec::new(&self.decoder.layer_kv(), ty).with_states(self.decoder.states())
    }
}

/// A checkpoint's architecture and size.
#[derive(Clone, Debug, Serialize)]
pub struct Architecture {
    /// The family.
    pub model_type: String,
    /// Number of weights; quantized ones count as what they stand for.
    pub parameters: u64,
    /// Bits in the files for each parameter, scales and biases of the quantization included.
    pub bits_per_weight: f64,
    /// The longest sequence that the model was made for, in tokens.
    pub context_length: usize,
    /// The position encodings.
    pub rope: Vec<RopeInfo>,
    /// The layers, first to last.
    pub layers: Vec<LayerInfo>,
}

/// A rotary position encoding.
#[derive(Clone, Debug, Serialize)]
pub struct RopeInfo {
    /// The `rope_type` of a configuration.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The base of the frequencies.
    pub base: f64,
    /// The dimensions of a head that are rotated.
    pub dims: usize,
    /// What divides the frequencies, if it is one number.
    pub factor: Option<f64>,
    /// The context that the model was first trained for, where the scaling depends on it.
    pub original_context: Option<usize>,
}

/// What one layer keeps.
#[derive(Clone, Debug, Serialize)]
pub struct LayerInfo {
    /// `full`, `window` or `chunk` for attention, or `conv`.
    pub kind: &'static str,
    /// Positions that a query sees at most, where it is not all of them.
    pub window: Option<usize>,
    /// Key and value heads; 0 without attention.
    pub kv_heads: usize,
    /// Width of a head; 0 without attention.
    pub head_dim: usize,
    /// Keys and values of one token, in bytes; where they are quantized from a position on, behind that.
    pub bytes_per_token: usize,
    /// Recurrent state, in bytes.
    pub state_bytes: usize,
    /// Experts, beside a shared one; 0 where all tokens go through one block.
    pub experts: usize,
}

/// A forecast of the memory that a run needs, in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Tokens of the one sequence that runs.
    pub context: usize,
    /// The weights.
    pub weights_bytes: u64,
    /// The program itself and its tokenizer, about.
    pub program_bytes: u64,
    /// Keys and values of the sequence: the most that there are at any time.
    pub kv_bytes: u64,
    /// What a step of the prompt computes with.
    pub activations_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

impl Architecture {
    /// Describes a model with keys and values kept as `kv` says.
    ///
    /// # Errors
    /// A damaged file, or a configuration without a model type.
    pub fn of(model: &Opened, kv: &KvSpec) -> Result<Self, CheckpointError> {
        let Opened { checkpoint, decoder, .. } = model;
        let parameters = parameters(decoder);
        let bytes = checkpoint.stored_bytes(decoder)?;
        let mut groups = kv.layers.iter().map(|&(group, _)| &kv.groups[group]);
        let quant = kv.quantization.map(KvQuantization::quant);
        let layer = |layer: &LayerConfig| {
            let group = layer.attention().and_then(|_| groups.next());
            let bytes_per_token = group.map_or(0, |group| group.slab_bytes(quant) / BLOCK);
            LayerInfo { bytes_per_token, ..LayerInfo::of(layer, decoder.hidden, group) }
        };
        Ok(Self {
            model_type: checkpoint.config().model_type()?.to_owned(),
            parameters,
            bits_per_weight: bytes as f64 * 8.0 / parameters as f64,
            context_length: decoder.context_length,
            rope: decoder.ropes.iter().map(RopeInfo::of).collect(),
            layers: decoder.layers.iter().map(layer).collect(),
        })
    }
}

impl LayerInfo {
    /// Without the bytes of a token.
    fn of(layer: &LayerConfig, hidden: usize, group: Option<&LayerGroup>) -> Self {
        let (kind, window) = match group.map(|group| group.policy) {
            None => ("conv", None),
            Some(Policy::Full) => ("full", None),
            Some(Policy::Window(window)) => ("window", Some(window.size())),
            Some(Policy::Chunk(size)) => ("chunk", Some(size.get())),
        };
        let (kv_heads, head_dim) = group.map_or((0, 0), |group| (group.shape.kv_heads, group.shape.head_dim));
        let state: usize = layer.states(hidden).iter().map(|(_, floats)| floats).sum();
        Self {
            kind,
            window,
            kv_heads,
            head_dim,
            bytes_per_token: 0,
            state_bytes: state * size_of::<f32>(),
            experts: match layer.feed_forward {
                FeedForwardConfig::Dense(_) => 0,
                FeedForwardConfig::Experts(experts) => experts.count,
            },
        }
    }
}

impl RopeInfo {
    fn of(rope: &Rope) -> Self {
        let (kind, factor, original_context) = match rope.scaling() {
            RopeScaling::Default => ("default", None, None),
            RopeScaling::Linear { factor } => ("linear", Some(*factor), None),
            RopeScaling::Dynamic { factor, original_context } => {
                ("dynamic", Some(*factor), Some(*original_context))
            }
            RopeScaling::Llama3 { factor, original_context, .. } => {
                ("llama3", Some(*factor), Some(*original_context))
            }
            RopeScaling::Yarn { factor, original_context, .. } => {
                ("yarn", Some(*factor), Some(*original_context))
            }
            RopeScaling::LongRope { original_context, .. } => ("longrope", None, Some(*original_context)),
            RopeScaling::Divisors(_) => ("divisors", None, None),
        };
        Self { kind, base: rope.base(), dims: rope.dims(), factor, original_context }
    }
}

impl Memory {
    /// The forecast for one sequence of `context` tokens, whose prompt is run `prefill_step_size` tokens at a time.
    ///
    /// # Errors
    /// A damaged file.
    pub fn forecast(
        model: &Opened,
        kv: &KvSpec,
        context: usize,
        prefill_step_size: usize,
    ) -> Result<Self, CheckpointError> {
        let Opened { checkpoint, decoder, .. } = model;
        let weights_bytes = checkpoint.stored_bytes(decoder)?;
        let kv_bytes = kv.peak_bytes(context) as u64;
        let activations_bytes = activation_bytes(decoder, context.min(prefill_step_size));
        let program_bytes = PROGRAM_BYTES + TOKEN_BYTES * decoder.vocab as u64;
        let total_bytes = weights_bytes + program_bytes + kv_bytes + activations_bytes;
        Ok(Self { context, weights_bytes, program_bytes, kv_bytes, activations_bytes, total_bytes })
    }
}

/// What the program takes without a model, and its tokenizer for each token of the vocabulary: measured.
const PROGRAM_BYTES: u64 = 10_000_000;
const TOKEN_BYTES: u64 = 150;

/// The buffers of a step of `rows` tokens: what one layer holds at once, which the next ones reuse, and the logits.
fn activation_bytes(decoder: &DecoderConfig, rows: usize) -> u64 {
    let f32s = |count: usize| size_of::<f32>() * count;
    let widest = |l: &LayerConfig| {
        // q, k, v and the result, or the parts of a convolution.
        let mixer = match &l.mixer {
            MixerConfig::Attention(a) => f32s(2 * (a.heads + a.kv_heads) * a.head_dim),
            MixerConfig::ShortConv(_) => f32s(6 * decoder.hidden),
        };
        // gate, up, their product, and its two int8 digits with scales. An expert's come beside the rows that it
        // takes and gives.
        let mlp = |mlp: &MlpConfig| f32s(3 * mlp.intermediate) + 5 * mlp.intermediate / 2;
        let fed = match &l.feed_forward {
            FeedForwardConfig::Dense(config) => mlp(config),
            FeedForwardConfig::Experts(experts) => f32s(2 * decoder.hidden) + mlp(&experts.expert),
        };
        // The residual stream, its norm, the block's output.
        f32s(3 * decoder.hidden) + mixer.max(fed)
    };
    let row = decoder.layers.iter().map(widest).max().unwrap_or_default();
    (rows * row + f32s(decoder.vocab)) as u64
}

/// The number of weights, from the description; equal to what the files hold.
fn parameters(decoder: &DecoderConfig) -> u64 {
    let embeddings = if decoder.tied_head { 1 } else { 2 } * decoder.vocab * decoder.hidden;
    let layers = decoder.layers.iter().map(|layer| layer_parameters(decoder.hidden, layer) as u64);
    (embeddings + decoder.hidden) as u64 + layers.sum::<u64>()
}

fn layer_parameters(hidden: usize, layer: &LayerConfig) -> usize {
    let mixer = match &layer.mixer {
        MixerConfig::Attention(attention) => attention_parameters(hidden, attention),
        MixerConfig::ShortConv(conv) => {
            hidden * (4 * hidden + conv.taps) + if conv.bias { 5 * hidden } else { 0 }
        }
    };
    let feed_forward = match &layer.feed_forward {
        FeedForwardConfig::Dense(mlp) => mlp_parameters(hidden, mlp),
        FeedForwardConfig::Experts(experts) => {
            let router = experts.count * (hidden + usize::from(experts.router_bias));
            let blocks = experts.count + usize::from(experts.shared);
            router + blocks * mlp_parameters(hidden, &experts.expert)
        }
    };
    let norms = match layer.norms {
        NormPlacement::Pre => 2,
        NormPlacement::PreAndPost => 4,
    };
    mixer + feed_forward + norms * hidden
}

fn attention_parameters(hidden: usize, attention: &AttentionConfig) -> usize {
    let AttentionConfig { heads, kv_heads, head_dim, .. } = *attention;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let mut count = hidden * (2 * q + 2 * kv);
    if attention.qkv_bias {
        count += q + 2 * kv;
    }
    if attention.output_bias {
        count += hidden;
    }
    if attention.qk_norm == QkNorm::Weighted {
        count += 2 * head_dim;
    }
    if attention.sinks {
        count += heads;
    }
    if attention.kv_conv {
        count += 4 * kv_heads;
    }
    count
}

fn mlp_parameters(hidden: usize, mlp: &MlpConfig) -> usize {
    3 * hidden * mlp.intermediate + if mlp.bias { 2 * mlp.intermediate + hidden } else { 0 }
}
