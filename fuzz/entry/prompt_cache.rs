//! What `lmx generate --prompt-cache-file` does with a file, up to running a model over it.
#![allow(unreachable_pub, reason = "each user takes what it needs")]

use std::path::Path;

use lmx::cache::{BlockBudget, KvSpec, KvWindow, LayerKv, Policy};
use lmx::prompt_cache::PromptCacheFile;
use lmx_tensor::files::Bytes;
use lmx_tensor::kernels::attention::KvType;

/// Whether the bytes are a prompt cache.
pub fn run(data: &[u8]) -> bool {
    let Ok(file) = PromptCacheFile::parse(Path::new("case"), &Bytes::from(data.to_vec())) else {
        return false;
    };
    if let Some(how) = file.quantization() {
        let layer = LayerKv { kv_heads: 1, head_dim: 32, policy: Policy::Full };
        let Ok(spec) = KvSpec::new(&[layer], file.kv_type()).quantized(how) else { return true };
        if let Ok(mut cache) = file.load(&spec, &BlockBudget::new(1 << 20)) {
            let _ = (cache.can_trim(1), cache.trim(1), cache.to_string(), cache.fork().is_ok());
        }
    }
    let window = KvWindow::new(4, 1).map_or(Policy::Full, Policy::Window);
    for policy in [Policy::Full, window] {
        let layer = LayerKv { kv_heads: 1, head_dim: 2, policy };
        let _ = file.bound(&[layer]);
        for ty in [KvType::F32, KvType::F16, KvType::Bf16] {
            // What does not fit is an error.
            let Ok(mut cache) = file.load(&KvSpec::new(&[layer], ty), &BlockBudget::new(1 << 20)) else {
                continue;
            };
            let _ = (cache.can_trim(1), cache.trim(1), cache.to_string(), cache.fork().is_ok());
        }
    }
    true
}
