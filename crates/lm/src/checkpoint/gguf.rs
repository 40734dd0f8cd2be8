//! A GGUF file's metadata as the keys of a `config.json`, and what llama.cpp's converters did to the tensors.

use lmx_tensor::Rows;
use lmx_tensor::files::gguf::{Array, Value as Metadatum};
use lmx_tensor::files::{FileError, GgufFile};
use serde_json::{Map, Value, json};

use super::error::CheckpointError;
use crate::models::families::LAYERS_MAX;
use crate::models::rope::DIVISORS;

/// Architectures and the `model_type` of the family that computes them.
const ARCHITECTURES: &[(&str, &str)] = &[
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("llama", "llama"),
    ("phi3", "phi3"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("smollm3", "smollm3"),
];

/// Metadata keys after `ARCHITECTURE.`, and the configuration's keys.
const KEYS: &[(&str, &str)] = &[
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("expert_count", "num_local_experts"),
    ("feed_forward_length", "intermediate_size"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("rope.scaling.original_context_length", "original_max_position_embeddings"),
];

/// Metadata keys after `ARCHITECTURE.` that are read on their own, or that change nothing.
const READ_APART: &[&str] = &[
    "attention.sliding_window_pattern",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
];

/// The architecture of a file, which must be one that lmx has.
pub(super) fn architecture(file: &GgufFile) -> Result<&str, FileError> {
    let key = "general.architecture";
    let found = file.metadata().get_str(key)?.ok_or_else(|| file.metadata().missing_error(key))?;
    if ARCHITECTURES.iter().any(|(name, _)| *name == found) {
        return Ok(found);
    }
    let known: Vec<&str> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
    Err(file.metadata().value_error(key, format!("{found:?}"), known.join(", ")))
}

/// The configuration that a file's metadata and tensors amount to.
pub(super) fn config_values(file: &GgufFile) -> Result<Map<String, Value>, CheckpointError> {
    let reader = Reader { file, architecture: architecture(file)? };
    if let Some(parts) = file.metadata().get_u32("split.count")?.filter(|parts| *parts > 1) {
        let allowed = "1: join the parts with llama-gguf-split --merge".to_owned();
        return Err(file.metadata().value_error("split.count", parts.to_string(), allowed).into());
    }
    let mut values = Map::new();
    let mut set = |key: &str, value: Value| drop(values.insert(key.to_owned(), value));
    let model_type =
        ARCHITECTURES.iter().find(|(name, _)| *name == reader.architecture).map(|(_, family)| *family);
    set("model_type", json!(model_type));
    // llama.cpp's base where a file has none, whatever the family's own default.
    set("rope_theta", json!(10_000.0));
    for (key, name) in KEYS {
        if let Some(value) = reader.value(key) {
            set(name, value);
        }
    }
    for (key, value) in reader.unknown() {
        set(&key, value);
    }
    // The embedding has the final word: some converters drop its rows beyond the last token.
    let embedding = file.tensor("token_embd.weight")?;
    set("vocab_size", json!(embedding.shape().first()));
    set("tie_word_embeddings", json!(!file.contains("output.weight")));
    set("attention_bias", json!(file.contains("blk.0.attn_output.bias")));
    set("mlp_bias", json!(file.contains("blk.0.ffn_down.bias")));
    for token in ["bos", "eos", "padding"] {
        if let Some(id) = file.metadata().get_u32(&format!("tokenizer.ggml.{token}_token_id"))? {
            set(&format!("{}_token_id", if token == "padding" { "pad" } else { token }), json!(id));
        }
    }
    reader.heads(&mut values)?;
    reader.windows(&mut values)?;
    reader.rope(&mut values)?;
    Ok(values)
}

/// A file and the prefix of its architecture's keys.
struct Reader<'a> {
    file: &'a GgufFile,
    architecture: &'a str,
}

impl Reader<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn value(&self, key: &str) -> Option<Value> {
        // Some converters repeat one number for every layer.
        self.file.metadata().get(&self.key(key)).map(|value| match value {
            Metadatum::Array(Array::Uint(list)) if all_same(list) => json!(list.first()),
            Metadatum::Array(Array::Int(list)) if all_same(list) => json!(list.first()),
            value => to_json(value),
        })
    }

    fn number(&self, key: &str) -> Result<Option<f64>, FileError> {
        Ok(self.file.metadata().get_f32(&self.key(key))?.map(f64::from))
    }

    fn size(&self, key: &str) -> Result<Option<u32>, FileError> {
        self.file.metadata().get_u32(&self.key(key))
    }

    /// Keys of the architecture that are not known here: they pass under their own names, to be noticed as unread.
    fn unknown(&self) -> Vec<(String, Value)> {
        let prefix = self.key("");
        let known = |key: &str| KEYS.iter().any(|(known, _)| *known == key) || READ_APART.contains(&key);
        let entries =
            self.file.metadata().iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
        // Dots would make the name a path into an object.
        entries
            .filter(|(key, _)| !known(key))
            .map(|(key, value)| (key.replace('.', "_"), to_json(value)))
            .collect()
    }

    /// Heads of one width; Gemma's scale, which no key holds.
    fn heads(&self, values: &mut Map<String, Value>) -> Result<(), FileError> {
        let (key_length, value_length) =
            (self.size("attention.key_length")?, self.size("attention.value_length")?);
        if let (Some(keys), Some(others)) = (key_length, value_length)
            && keys != others
        {
            let key = self.key("attention.value_length");
            return Err(self.file.metadata().value_error(
                &key,
                others.to_string(),
                format!("{keys}, the key_length"),
            ));
        }
        let size = |name: &str| values.get(name).and_then(Value::as_u64);
        let (hidden, heads) = (size("hidden_size").unwrap_or(0), size("num_attention_heads").unwrap_or(0));
        let head_dim = size("head_dim").or_else(|| hidden.checked_div(heads));
        let Some(head_dim) = head_dim.filter(|width| *width > 0) else { return Ok(()) };
        values.insert("head_dim".to_owned(), json!(head_dim));
        // llama.cpp tells the 27B models by their depth.
        let layers = values.get("num_hidden_layers").and_then(Value::as_u64);
        let scalar = match (self.architecture, layers) {
            ("gemma2", Some(46)) | ("gemma3", Some(62)) => hidden.checked_div(heads),
            ("gemma2" | "gemma3", _) => Some(head_dim),
            _ => None,
        };
        if let Some(scalar) = scalar {
            values.insert("query_pre_attn_scalar".to_owned(), json!(scalar));
        }
        // A quarter more, so that the division's rounding cannot lose a dimension.
        let rotated =
            self.size("rope.dimension_count")?.map(u64::from).filter(|rotated| *rotated != head_dim);
        if let Some(rotated) = rotated {
            values
                .insert("partial_rotary_factor".to_owned(), json!((rotated as f64 + 0.25) / head_dim as f64));
        }
        Ok(())
    }

    /// Gemma's layer types: a list of flags, or every how many layers one is global. A window of 0 is none.
    fn windows(&self, values: &mut Map<String, Value>) -> Result<(), FileError> {
        let window = self.size("attention.sliding_window")?;
        if window == Some(0) {
            values.insert("sliding_window".to_owned(), Value::Null);
        }
        let default = match self.architecture {
            "gemma2" => 2,
            "gemma3" => 6,
            _ => return Ok(()),
        };
        let layers =
            values.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(LAYERS_MAX as u64);
        let key = "attention.sliding_window_pattern";
        let none = window == Some(0) || (window.is_none() && self.architecture == "gemma3");
        let slides: Vec<bool> = match self.file.metadata().get(&self.key(key)) {
            _ if none => (0..layers).map(|_| false).collect(),
            Some(Metadatum::Array(Array::Bool(flags))) => flags.clone(),
            _ => {
                let pattern = u64::from(self.size(key)?.unwrap_or(default)).max(1);
                (1..=layers).map(|layer| layer % pattern != 0).collect()
            }
        };
        let name = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
        values.insert("layer_types".to_owned(), slides.into_iter().map(name).collect());
        Ok(())
    }

    /// The rotary scaling: named by metadata, or stored as divisors in tensors.
    fn rope(&self, values: &mut Map<String, Value>) -> Result<(), FileError> {
        let factor = self.number("rope.scaling.factor")?.or(self.number("rope.scale_linear")?);
        let named = self.file.metadata().get_str(&self.key("rope.scaling.type"))?;
        let divisors = self.divisors("rope_freqs.weight")?;
        let scaling = match (named, divisors) {
            (Some("longrope"), _) => {
                let long = self.divisors("rope_factors_long.weight")?;
                let short = self.divisors("rope_factors_short.weight")?;
                let attention = self.number("rope.scaling.attn_factor")?;
                json!({"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention})
            }
            (Some("yarn"), None) => json!({
                "rope_type": "yarn",
                "factor": factor,
                "attention_factor": self.number("rope.scaling.yarn_attn_factor")?,
                "beta_fast": self.number("rope.scaling.yarn_beta_fast")?,
                "beta_slow": self.number("rope.scaling.yarn_beta_slow")?,
            }),
            (Some("none"), None) => Value::Null,
            (None | Some("linear" | "none"), Some(divisors)) => {
                let factor = factor.filter(|factor| *factor != 0.0 && named != Some("none")).unwrap_or(1.0);
                let divisors: Vec<f64> =
                    divisors.iter().map(|divisor| f64::from(*divisor) * factor).collect();
                json!({"rope_type": DIVISORS, DIVISORS: divisors})
            }
            (None | Some("linear"), None) => match factor {
                Some(factor) if factor != 0.0 && factor != 1.0 => {
                    json!({"rope_type": "linear", "factor": factor})
                }
                _ => Value::Null,
            },
            (Some(other), _) => {
                let key = self.key("rope.scaling.type");
                let allowed = "none, linear, longrope, or yarn without rope_freqs.weight";
                return Err(self.file.metadata().value_error(&key, format!("{other:?}"), allowed.to_owned()));
            }
        };
        values.insert("rope_scaling".to_owned(), scaling);
        Ok(())
    }

    /// A vector of floats, if the file has it.
    fn divisors(&self, name: &str) -> Result<Option<Vec<f32>>, FileError> {
        if !self.file.contains(name) {
            return Ok(None);
        }
        let tensor = self.file.tensor(name)?;
        tensor.to_f32(&[tensor.shape().iter().product()]).map(Some)
    }
}

/// Tensors that are part of the configuration.
pub(super) fn is_configuration(name: &str) -> bool {
    matches!(name, "rope_freqs.weight" | "rope_factors_long.weight" | "rope_factors_short.weight")
}

/// The stored rows of a matrix of heads, in Hugging Face's order. For Llama's rotary encoding over neighbouring
/// dimensions, llama.cpp's converters place rows `j` and `j + head_dim/2` of each head of q and k next to each other.
pub(super) fn neighbours_apart(rows: usize, head_dim: usize) -> Rows {
    let half = head_dim / 2;
    let stored = |row: usize| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + 2 * (within % half) + within / half
    };
    Rows::reordered((0..rows).map(stored).collect(), rows)
}

fn all_same<T: PartialEq>(list: &[T]) -> bool {
    list.windows(2).all(|pair| pair.first() == pair.last())
}

fn to_json(value: &Metadatum) -> Value {
    match value {
        Metadatum::Uint(number) => json!(number),
        Metadatum::Int(number) => json!(number),
        Metadatum::F32(number) => json!(number),
        Metadatum::F64(number) => json!(number),
        Metadatum::Bool(flag) => json!(flag),
        Metadatum::Text(text) => json!(text),
        Metadatum::Array(Array::Uint(list)) => json!(list),
        Metadatum::Array(Array::Int(list)) => json!(list),
        Metadatum::Array(Array::F32(list)) => json!(list),
        Metadatum::Array(Array::F64(list)) => json!(list),
        Metadatum::Array(Array::Bool(list)) => json!(list),
        Metadatum::Array(Array::Text(list)) => json!(list),
    }
}
