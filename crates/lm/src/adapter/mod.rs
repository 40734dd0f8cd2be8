//! Adapters at inference: LoRA and DoRA in mlx-lm's format, over base weights of any storage.
//!
//! [`AdapterFiles`] reads a folder of `adapter_config.json` and `adapters.safetensors`, [`AdapterFiles::fit`] compares it
//! with a model, and [`Request::adapter`](crate::engine::Request::adapter) runs a request with the result. The model's
//! weights are not changed: requests with different adapters, and without, run in the same batch. Read as strictly as a
//! checkpoint: the tensors are exactly those that the configuration names, and every name is one of the model's.

mod error;
mod files;
mod fit;

pub use error::AdapterError;
pub use files::AdapterFiles;

use crate::models::Model;
use lmx_tensor::adapter::AdapterWeights;
use std::fmt;
use std::sync::Arc;

/// How an adapter changes matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// By adding one of low rank.
    Lora,
    /// By that, and by giving each row a length.
    Dora,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Lora => "LoRA",
            Method::Dora => "DoRA",
        })
    }
}

/// A loaded adapter of one model. Clones share it; it is given back when the last one and the last request are.
#[derive(Clone)]
pub struct Adapter(Arc<Loaded>);

struct Loaded {
    name: String,
    method: Method,
    rank: usize,
    modules: usize,
    layers: usize,
    fingerprint: u64,
    weights: Arc<AdapterWeights>,
}

impl Adapter {
    /// Its name, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How it changes matrices.
    #[must_use]
    pub fn method(&self) -> Method {
        self.0.method
    }

    /// The rank of what it adds.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many modules it changes.
    #[must_use]
    pub fn modules(&self) -> usize {
        self.0.modules
    }

    /// How many layers have such modules.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.0.layers
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.weights.bytes()
    }

    /// What it adds, for [`StepInputs::adapt`](crate::models::StepInputs::adapt).
    #[must_use]
    pub fn weights(&self) -> &Arc<AdapterWeights> {
        &self.0.weights
    }

    /// Follows from all that it changes, and is the same for the same files: from 1 to 2^62 - 1.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.0.fingerprint
    }

    /// Whether it was made for `model`.
    pub(crate) fn fits(&self, model: &dyn Model) -> bool {
        let Some(first) = self.0.weights.matrices().next() else { return false };
        let mut found = false;
        model.visit_linears(&mut |_, _, linear| found |= linear.id() == first);
        found
    }
}

/// Two are equal if they do the same.
impl PartialEq for Adapter {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint() == other.fingerprint()
    }
}

impl Eq for Adapter {}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loaded { method, rank, modules, layers, .. } = &*self.0;
        let (s, in_layers) =
            (if *modules == 1 { "" } else { "s" }, if *layers == 1 { "layer" } else { "layers" });
        write!(f, "{method} of rank {rank} on {modules} module{s}, {layers} {in_layers} changed")
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter")
            .field("name", &self.0.name)
            .field("rank", &self.0.rank)
            .finish_non_exhaustive()
    }
}
