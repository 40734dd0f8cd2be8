//! What is said of a model without loading it is what its files hold and its cache will keep.

use crate::common::golden_cases::Case;
use crate::common::text_data;
use lmx::checkpoint::OpenOptions;
use lmx::inspect::{Architecture, LayerInfo, Opened};
use lmx_tensor::kernels::attention::KvType;

fn architecture(case: &str) -> (Architecture, u64) {
    let folder = Case::read(case).folder();
    // Any tokenizer will do.
    let tokenizer = text_data::golden().join("byte_level");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tokenizer.join(name), folder.path().join(name)).unwrap();
    }
    let opened = Opened::open(&folder.path().display().to_string(), &OpenOptions::default()).unwrap();
    let bytes = opened.checkpoint.stored_bytes(&opened.decoder).unwrap();
    (Architecture::of(&opened, &opened.kv_spec(KvType::F16)).unwrap(), bytes)
}

fn summary(layer: &LayerInfo) -> (&'static str, Option<usize>, usize, usize, usize) {
    (layer.kind, layer.window, layer.bytes_per_token, layer.state_bytes, layer.experts)
}

#[test]
fn layers_of_every_kind_are_told_apart() {
    let layers =
        |case: &str| -> Vec<_> { architecture(case).0.layers.iter().map(summary).collect::<Vec<_>>() };
    let chunk = |experts| ("chunk", Some(8), 256, 0, experts);
    assert_eq!(layers("llama4-f32"), [chunk(0), chunk(4), chunk(0), ("full", None, 256, 0, 4)]);
    let conv = ("conv", None, 0, 512, 0);
    assert_eq!(layers("lfm2-f32"), [conv, conv, ("full", None, 128, 0, 0), conv]);
    let full = ("full", None, 128, 256, 0);
    assert_eq!(layers("baichuan-m1-f32"), [full, ("window", Some(8), 128, 256, 0), full]);
}

#[test]
fn parameters_are_those_of_the_files() {
    for case in [
        "llama-f32",
        "llama-biases-f32",
        "gemma3-f32",
        "llama4-f32",
        "llama4-top2-f32",
        "lfm2-f32",
        "lfm2-bias-f32",
        "baichuan-m1-f32",
        "gpt-oss-f32",
        "gpt-oss-clamped-f32",
    ] {
        let (architecture, bytes) = architecture(case);
        assert_eq!(architecture.parameters * 4, bytes, "{case}");
    }
}
