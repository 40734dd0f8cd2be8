//! Experts: only those that a row chose are computed, and stacks of them that do not fit are refused by name.

use crate::common::golden_cases::{Case, Stored, Tensors, read_safetensors, write_safetensors};
use lmx::cache::KvStore;
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx_tensor::Device;
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::Isa;
use lmx_tensor::kernels::attention::KvType;

/// Loads a case whose tensors were changed.
fn load(case: &str, edit: impl Fn(&mut Tensors)) -> Result<Decoder, String> {
    let folder = Case::read(case).folder();
    let weights = folder.path().join("model.safetensors");
    let mut tensors = read_safetensors(&weights);
    edit(&mut tensors);
    write_safetensors(&weights, &tensors);
    let checkpoint = Checkpoint::open(&folder.path().display().to_string(), &OpenOptions::default()).unwrap();
    let config = checkpoint.describe().unwrap();
    Decoder::load(&checkpoint, config, &Device::cpu(Isa::best(), 1), &mut |_, _| {})
        .map_err(|error| error.to_string())
}

/// The bits of the logits after one token, for every token, in one batch.
fn logits(decoder: &Decoder) -> Vec<Vec<u32>> {
    let mut kv = KvStore::new(kv_spec(decoder, KvType::F32), usize::MAX);
    let mut step = StepInputs::default();
    for token in 0..decoder.vocab() as u32 {
        let id = kv.add();
        kv.reserve(id, 1).unwrap();
        step.push(id, 0, &[token], false);
    }
    let hidden = decoder.hidden(&step, &mut kv).unwrap();
    let all: Vec<usize> = (0..decoder.vocab()).collect();
    let head = decoder.head(&hidden, &all, &RowAdapters::default()).unwrap();
    all.iter().map(|&row| head.row(row).unwrap().iter().map(|v| v.to_bits()).collect()).collect()
}

/// The first tensor whose name ends so.
fn find<'a>(tensors: &'a mut Tensors, end: &str) -> &'a mut Stored {
    tensors.iter_mut().find(|(name, _)| name.ends_with(end)).unwrap().1
}

#[test]
fn an_expert_that_a_row_did_not_choose_does_not_touch_it() {
    for (case, end) in [
        ("llama4-f32", "experts.down_proj.weight"),
        ("llama4-top2-f32", "experts.down_proj"),
        ("gpt-oss-f32", "experts.down_proj.bias"),
        ("gpt-oss-clamped-f32", "experts.down_proj"),
    ] {
        let clean = logits(&load(case, |_| {}).unwrap());
        let poisoned = load(case, |tensors| {
            // Expert 1 of the first layer that has experts.
            let stack = find(tensors, end);
            let expert = stack.bytes.len() / stack.shape[0];
            let poison = f32::NAN.to_le_bytes();
            stack.bytes[expert..2 * expert].chunks_exact_mut(4).for_each(|v| v.copy_from_slice(&poison));
        });
        let poisoned = logits(&poisoned.unwrap());
        let nan = |row: &[u32]| row.iter().all(|&bits| f32::from_bits(bits).is_nan());
        let touched = poisoned.iter().filter(|row| nan(row)).count();
        assert!((1..clean.len()).contains(&touched), "{case}: {touched} of {} rows", clean.len());
        for (poisoned, clean) in poisoned.iter().zip(&clean) {
            assert!(nan(poisoned) || poisoned == clean, "{case}");
        }
    }
}

#[test]
fn stacks_that_do_not_fit_are_named() {
    let refused = |case: &str, end: &str, edit: fn(&mut Stored), parts: &[&str]| {
        let error = load(case, |tensors| edit(find(tensors, end))).map(|_| ()).unwrap_err();
        for part in [end, "model.safetensors"].iter().chain(parts) {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    };
    let (stacked, fused) = ("experts.gate_proj.weight", "experts.gate_up_proj");
    refused(
        "llama4-f32",
        stacked,
        |s| s.shape = vec![2, 128, 64],
        &["a stack of 4 matrices", "[2, 128, 64]"],
    );
    refused("llama4-f32", stacked, |s| s.shape = vec![256, 64], &["a stack of 4 matrices", "[256, 64]"]);
    refused("llama4-f32", stacked, |s| s.shape = vec![4, 128, 32], &["[256, 64]", "[512, 32]"]);
    refused("llama4-top2-f32", fused, |s| s.shape = vec![4, 128, 64], &["[4, 64, 128]", "[4, 128, 64]"]);
    let eight_bits = |s: &mut Stored| {
        s.dtype = "F8_E4M3".to_owned();
        s.bytes.truncate(s.bytes.len() / 4);
    };
    refused("llama4-top2-f32", fused, eight_bits, &["F8_E4M3", "F32, F16 or BF16 where transposed"]);
    let (blocks, scales) = ("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales");
    let case = "gpt-oss-blocks-mxfp4";
    let stack = "a stack of 4 matrices in blocks of 16 bytes";
    refused(case, blocks, |s| s.shape = vec![4, 256, 32], &[stack, "[4, 256, 32]"]);
    refused(case, blocks, |s| s.shape = vec![2, 512, 2, 16], &[stack, "[2, 512, 2, 16]"]);
    refused(case, blocks, |s| s.dtype = "I8".to_owned(), &["I8", "U8"]);
    refused(case, scales, |s| s.shape = vec![4, 128, 4], &["1024", "[512, 4]"]);
    refused(case, scales, |s| s.shape = vec![1024, 2], &["a stack of 4 matrices"]);
    refused(case, "experts.gate_up_proj_bias", |s| s.shape = vec![2, 512], &["[4, 256]", "[2, 512]"]);
    refused("gpt-oss-f32", "experts.up_proj.bias", |s| s.shape = vec![512], &["[4, 128]", "[512]"]);
    refused("gpt-oss-f32", "self_attn.sinks", |s| s.shape = vec![2, 2], &["[4]", "[2, 2]"]);
    refused("llama4-q4", "experts.gate_proj.scales", |s| s.shape = vec![4, 64], &["a stack of 4 matrices"]);
}
