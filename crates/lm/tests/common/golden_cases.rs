//! The tiny models of tests/golden/models, which tests/gen/models_golden.py wrote, as checkpoint folders.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A tiny model and what its logits must be.
pub struct Case {
    pub name: String,
    pub prompts: Vec<Prompt>,
    /// Null for GGUF files.
    pub config: Value,
    weights: Value,
    /// What norm weights lie around.
    norm_center: f64,
}

/// A model on disk, as long as this lives.
pub struct OnDisk {
    pub path: String,
    folder: Option<TempDir>,
}

pub struct Prompt {
    pub tokens: Vec<u32>,
    /// Logits by position.
    pub logits: BTreeMap<usize, Vec<f32>>,
}

pub fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models")
}

/// Every case, by name.
pub fn all() -> Vec<Case> {
    let mut names: Vec<String> = std::fs::read_dir(golden_folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.strip_suffix(".json").map(str::to_owned))
        .collect();
    names.sort();
    assert!(names.len() > 40, "the golden data is incomplete");
    names.iter().map(|name| Case::read(name)).collect()
}

impl Case {
    pub fn read(name: &str) -> Self {
        let text = std::fs::read_to_string(golden_folder().join(format!("{name}.json"))).unwrap();
        let mut case: Value = serde_json::from_str(&text).unwrap();
        let prompts = case["prompts"].as_array().unwrap().iter().map(Prompt::read).collect();
        Self {
            name: name.to_owned(),
            config: case["config"].take(),
            prompts,
            weights: case["weights"].take(),
            norm_center: case["norm_center"].as_f64().unwrap_or(1.0),
        }
    }

    /// The model with heads of `head_dim` dimensions, a multiple of what it has. There is no reference for it.
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        let times = head_dim as u64 / self.config["head_dim"].as_u64().unwrap();
        self.config["head_dim"] = json!(head_dim);
        for (name, shape) in self.weights.as_object_mut().unwrap() {
            let is = |words: &[&str]| words.iter().any(|word| name.contains(word));
            let dimension = match () {
                () if is(&["q_proj", "k_proj", "v_proj", "q_norm", "k_norm"]) => 0,
                () if is(&["o_proj"]) => 1,
                () => continue,
            };
            shape[dimension] = json!(shape[dimension].as_u64().unwrap() * times);
        }
        self
    }

    /// Whether weights are stored in less than their full precision.
    pub fn is_quantized(&self) -> bool {
        let blocks = ["quantization", "quantization_config"];
        self.config.is_null() || blocks.iter().any(|key| self.config.get(key).is_some())
    }

    /// The model as a checkpoint.
    pub fn on_disk(&self) -> OnDisk {
        if self.config.is_null() {
            let path = golden_folder().join(format!("{}.gguf", self.name));
            return OnDisk { path: path.display().to_string(), folder: None };
        }
        let folder = self.folder();
        OnDisk { path: folder.path().display().to_string(), folder: Some(folder) }
    }

    /// Writes the model as a folder.
    pub fn folder(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let weights = folder.path().join("model.safetensors");
        match &self.weights {
            Value::String(file) => drop(std::fs::copy(golden_folder().join(file), weights).unwrap()),
            _ => write_safetensors(&weights, &self.rule_tensors()),
        }
        folder
    }

    fn rule_tensors(&self) -> Tensors {
        let tensors = self.weights.as_object().unwrap().iter();
        tensors
            .map(|(name, shape)| {
                let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
                let values = rule_values(name, shape.iter().product(), self.norm_center);
                (name.clone(), Stored::f32(shape, &values))
            })
            .collect()
    }
}

/// Tensors as a safetensors file holds them.
pub type Tensors = BTreeMap<String, Stored>;

#[derive(Clone)]
pub struct Stored {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Stored {
    pub fn f32(shape: Vec<usize>, values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { dtype: "F32".to_owned(), shape, bytes }
    }
}

impl Prompt {
    fn read(prompt: &Value) -> Self {
        let logits = prompt["logits"].as_object().unwrap().iter();
        Self {
            tokens: serde_json::from_value(prompt["tokens"].clone()).unwrap(),
            logits: logits
                .map(|(position, row)| {
                    (position.parse().unwrap(), serde_json::from_value(row.clone()).unwrap())
                })
                .collect(),
        }
    }
}

/// The generator's `rule_values`.
fn rule_values(name: &str, len: usize, norm_center: f64) -> Vec<f32> {
    let seed = name.bytes().map(u64::from).sum::<u64>() * 97;
    let value = |i: u64| {
        let mut h = (i * 2_654_435_761 + seed) & 0xFFFF_FFFF;
        h ^= h >> 15;
        h = (h * 2_246_822_519) & 0xFFFF_FFFF;
        h ^= h >> 13;
        let u = h as f64 / 2f64.powi(31) - 1.0;
        let convolution = ["conv.conv.weight", "conv_k", "conv_v"].iter().any(|end| name.ends_with(end));
        let value = match (name.ends_with("norm.weight"), convolution) {
            (true, _) => norm_center + 0.1 * u,
            (false, true) => 1.0 + 0.1 * u,
            (false, false) => 0.15 * u,
        };
        value as f32
    };
    (1..=len as u64).map(value).collect()
}

/// Writes a safetensors file.
pub fn write_safetensors(path: &Path, tensors: &Tensors) {
    let mut header = Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, tensor) in tensors {
        let offsets = [data.len(), data.len() + tensor.bytes.len()];
        data.extend(&tensor.bytes);
        header.insert(
            name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}

/// Reads a safetensors file.
pub fn read_safetensors(path: &Path) -> Tensors {
    let file = lmx_tensor::files::SafetensorsFile::open(path).unwrap();
    let stored = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        Stored {
            dtype: tensor.dtype().name().to_owned(),
            shape: tensor.shape().to_vec(),
            bytes: tensor.data().to_vec(),
        }
    };
    file.names().map(|name| (name.to_owned(), stored(name))).collect()
}
