//! Llama folders of a few kilobytes with a byte-level tokenizer.
//!
//! * A *script model* says a given text: its attention and MLP weights are zero, so that its last token alone decides
//!   the next; each token of the script has its own direction in the embedding, which the head maps to the next one.
//! * A *random model* has reproducible random weights and says nonsense.

use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Ends a message, and a reply.
pub const END: &str = "<|end|>";
/// Begins a reply; the last token of a rendered prompt, which starts the script.
pub const ASSISTANT: &str = "<|assistant|>";
/// The tools, if there are some, then `<|role|>content<|end|>` and a newline for each message.
pub const TEMPLATE: &str = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n\
    {% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\
    {{ message.tool_calls | tojson if message.tool_calls }}<|end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

const SPECIAL: [&str; 4] = [END, "<|system|>", "<|user|>", ASSISTANT];
const HIDDEN: usize = 64;

/// A model folder that is removed when dropped.
#[derive(Debug)]
pub struct Model {
    dir: TempDir,
}

/// What a script model does after its last piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Says [`END`].
    End,
    /// Begins again.
    Loop,
}

impl Model {
    /// A model that says `pieces`, one token each, after [`ASSISTANT`]. A piece need not be whole characters.
    pub fn script(pieces: &[&[u8]], then: Then) -> Self {
        let vocab = vocabulary(pieces);
        let end = id(&vocab, END);
        let mut chain = vec![id(&vocab, ASSISTANT)];
        chain.extend(pieces.iter().map(|piece| id(&vocab, &spelled(piece))));
        chain.push(if then == Then::Loop { chain[1] } else { end });
        assert!(chain.len() < HIDDEN, "the script is too long for the hidden size");
        let weights = script_weights(vocab.len(), &chain, end);
        Self::write(&vocab, &weights)
    }

    /// A model of two layers with random weights.
    pub fn random() -> Self {
        let vocab = vocabulary(&[]);
        let mut weights = plain_weights(vocab.len(), 2);
        let mut state = 7_u64;
        for (_, shape, data) in &mut weights {
            if shape.len() == 2 {
                let scale = 1.0 / (shape[1] as f32).sqrt();
                data.iter_mut().for_each(|x| *x = scale * uniform(&mut state));
            }
        }
        Self::write(&vocab, &weights)
    }

    /// A model with recurrent state: a short convolution, and zeros for weights.
    pub fn recurrent() -> Self {
        let vocab = vocabulary(&[]);
        let matrix = |name: &str, shape: &[usize]| {
            (format!("model.{name}.weight"), shape.to_vec(), vec![0.0; shape.iter().product()])
        };
        let (square, layer) = ([HIDDEN, HIDDEN], "layers.0");
        let mut weights = vec![
            matrix("embed_tokens", &[vocab.len(), HIDDEN]),
            matrix(&format!("{layer}.conv.conv"), &[HIDDEN, 1, 3]),
            matrix(&format!("{layer}.conv.in_proj"), &[3 * HIDDEN, HIDDEN]),
            matrix(&format!("{layer}.conv.out_proj"), &square),
        ];
        weights
            .extend(["w1", "w2", "w3"].map(|part| matrix(&format!("{layer}.feed_forward.{part}"), &square)));
        let norms =
            ["embedding_norm".to_owned(), format!("{layer}.operator_norm"), format!("{layer}.ffn_norm")];
        weights.extend(norms.map(|name| matrix(&name, &[HIDDEN])));
        let model = Self::write(&vocab, &weights);
        model.edit("config.json", |config| {
            let own = json!({"model_type": "lfm2", "num_hidden_layers": 1, "layer_types": ["conv"], "norm_eps": 1e-5,
                "conv_L_cache": 3, "block_auto_adjust_ff_dim": false, "tie_word_embeddings": true});
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            // Every key acts: nothing is to be told of them.
            config.as_object_mut().unwrap().remove("rms_norm_eps");
        });
        model
    }

    /// An adapter on the head that has the model say `byte` for ever; in a folder of its own.
    pub fn adapter_saying(byte: u8) -> TempDir {
        let vocab = vocabulary(&[]).len();
        let mut up = vec![0.0; vocab];
        up[usize::from(byte)] = 1.0;
        // Hidden states of script models have one feature above 0, and no other.
        let weights = [
            ("lm_head.lora_a".to_owned(), vec![HIDDEN, 1], vec![1.0; HIDDEN]),
            ("lm_head.lora_b".to_owned(), vec![1, vocab], up),
        ];
        let config = json!({
            "fine_tune_type": "lora", "num_layers": 1,
            "lora_parameters": {"rank": 1, "scale": 20.0, "dropout": 0.0, "keys": ["lm_head"]},
        });
        Self::adapter(&weights, &config)
    }

    /// A LoRA of rank 2 on the attention and the MLP of [`Model::random`], of random weights that `seed` says; in a folder
    /// of its own.
    pub fn random_adapter(seed: u64) -> TempDir {
        let (mut state, mut weights) = (seed, Vec::new());
        let mut matrix = |name: String, shape: [usize; 2]| {
            let data = (0..shape[0] * shape[1]).map(|_| 0.3 * uniform(&mut state)).collect();
            weights.push((name, shape.to_vec(), data));
        };
        let parts = [("self_attn.q_proj", HIDDEN), ("self_attn.v_proj", 32), ("mlp.down_proj", HIDDEN)];
        for layer in 0..2 {
            for (part, rows) in parts {
                matrix(format!("model.layers.{layer}.{part}.lora_a"), [HIDDEN, 2]);
                matrix(format!("model.layers.{layer}.{part}.lora_b"), [2, rows]);
            }
        }
        let config = json!({
            "fine_tune_type": "lora", "num_layers": 2,
            "lora_parameters": {"rank": 2, "scale": 8.0, "dropout": 0.0, "keys": parts.map(|(part, _)| part)},
        });
        Self::adapter(&weights, &config)
    }

    fn adapter(weights: &[Weight], config: &Value) -> TempDir {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("adapters.safetensors"), safetensors(weights)).unwrap();
        std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
        dir
    }

    fn write(vocab: &[String], weights: &[Weight]) -> Self {
        let model = Self { dir: TempDir::new().unwrap() };
        std::fs::write(model.file("model.safetensors"), safetensors(weights)).unwrap();
        let layers = weights.iter().filter(|(name, ..)| name.ends_with("q_proj.weight")).count();
        model.write_json("config.json", &config(vocab.len(), layers));
        model.write_json("tokenizer.json", &tokenizer(vocab));
        model.write_json(
            "tokenizer_config.json",
            &json!({
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "chat_template": TEMPLATE,
                "clean_up_tokenization_spaces": false,
            }),
        );
        model
    }

    /// Changes a JSON file of the folder.
    pub fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let text = std::fs::read_to_string(self.file(file)).unwrap();
        let mut value = serde_json::from_str(&text).unwrap();
        change(&mut value);
        self.write_json(file, &value);
    }

    fn write_json(&self, file: &str, value: &Value) {
        std::fs::write(self.file(file), serde_json::to_string_pretty(value).unwrap()).unwrap();
    }

    /// The path of a file of the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The folder, as the program is given it.
    pub fn path(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }
}

/// Name, shape, values.
type Weight = (String, Vec<usize>, Vec<f32>);

/// The 256 bytes, longer pieces, the special tokens; all in the byte-level alphabet.
fn vocabulary(pieces: &[&[u8]]) -> Vec<String> {
    let bytes = (0..=u8::MAX).map(|b| byte_char(b).to_string());
    let pieces = pieces.iter().filter(|piece| piece.len() > 1).map(|piece| spelled(piece));
    let vocab: Vec<String> = bytes.chain(pieces).chain(SPECIAL.map(str::to_owned)).collect();
    let mut unique = vocab.clone();
    unique.sort();
    unique.dedup();
    assert_eq!(unique.len(), vocab.len(), "two tokens have the same text");
    vocab
}

/// Bytes in the byte-level alphabet.
fn spelled(bytes: &[u8]) -> String {
    bytes.iter().map(|&b| byte_char(b)).collect()
}

fn id(vocab: &[String], token: &str) -> u32 {
    u32::try_from(vocab.iter().position(|t| t == token).unwrap()).unwrap()
}

/// The character that stands for a byte in byte-level BPE files: itself if it is printable, else from U+0100 on.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count();
    char::from_u32(0x100 + u32::try_from(rank).unwrap()).unwrap()
}

fn tokenizer(vocab: &[String]) -> Value {
    let first_special = vocab.len() - SPECIAL.len();
    let ids: Map<String, Value> =
        vocab[..first_special].iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let added: Vec<Value> = (first_special..)
        .zip(SPECIAL)
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids, "merges": []},
    })
}

fn config(vocab: usize, layers: usize) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": vocab, "rope_theta": 10000.0,
        "max_position_embeddings": 131_072, "tie_word_embeddings": false, "hidden_act": "silu",
        "torch_dtype": "float32", "eos_token_id": vocab - SPECIAL.len(),
    })
}

/// Norms of one, all else zero.
fn plain_weights(vocab: usize, layers: usize) -> Vec<Weight> {
    let matrix = |name: String, rows: usize, cols: usize| (name, vec![rows, cols], vec![0.0; rows * cols]);
    let norm = |name: String| (name, vec![HIDDEN], vec![1.0; HIDDEN]);
    let mut weights = vec![
        matrix("model.embed_tokens.weight".into(), vocab, HIDDEN),
        matrix("lm_head.weight".into(), vocab, HIDDEN),
        norm("model.norm.weight".into()),
    ];
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for part in ["input_layernorm", "post_attention_layernorm"] {
            weights.push(norm(name(part)));
        }
        for (part, rows) in [("q_proj", HIDDEN), ("k_proj", 32), ("v_proj", 32), ("o_proj", HIDDEN)] {
            weights.push(matrix(name(&format!("self_attn.{part}")), rows, HIDDEN));
        }
        for part in ["gate_proj", "up_proj", "down_proj"] {
            weights.push(matrix(name(&format!("mlp.{part}")), HIDDEN, HIDDEN));
        }
    }
    weights
}

/// Each token of `chain` leads to the next, every other token to `end`.
fn script_weights(vocab: usize, chain: &[u32], end: u32) -> Vec<Weight> {
    let mut weights = plain_weights(vocab, 1);
    let [embedding, head, ..] = weights.as_mut_slice() else { unreachable!() };
    let other = HIDDEN - 1;
    for token in 0..vocab {
        embedding.2[token * HIDDEN + other] = 1.0;
    }
    head.2[end as usize * HIDDEN + other] = 1.0;
    for (direction, pair) in chain.windows(2).enumerate() {
        let (token, next) = (pair[0] as usize, pair[1] as usize);
        embedding.2[token * HIDDEN + other] = 0.0;
        embedding.2[token * HIDDEN + direction] = 1.0;
        head.2[next * HIDDEN + direction] = 1.0;
    }
    weights
}

fn safetensors(weights: &[Weight]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, values) in weights {
        let start = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let info = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), info);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let length = u64::try_from(header.len()).unwrap().to_le_bytes();
    [length.as_slice(), &header, &data].concat()
}

/// The next number of a linear congruential generator, in [-1, 1).
fn uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 40) as f32 / (1_u64 << 23) as f32) - 1.0
}
