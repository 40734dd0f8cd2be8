//! The logits of tiny models of every family, in every kind of storage, against those of mlx-lm or transformers.
//!
//! tests/gen/models_golden.py, hybrid_golden.py and models_gguf.py wrote the data; docs/reference-differences.md says where the reference
//! is transformers.

use crate::common::golden_cases::Case;
use lmx::cache::KvStore;
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx_tensor::Device;
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::Isa;
use lmx_tensor::kernels::attention::KvType;

/// The largest difference of a row of logits, relative to its largest logit.
const FLOAT_TOLERANCE: f32 = 1e-4;
const QUANTIZED_TOLERANCE: f32 = 2e-4;
/// LFM 2 multiplies the results of three quantized projections: rounding their inputs to 16 bits moves the tiny model's
/// logits by up to 2.6e-4 in transformers, too.
const QUANTIZED_LFM2_TOLERANCE: f32 = 5e-4;

fn load(case: &Case, device: &Device) -> Decoder {
    let on_disk = case.on_disk();
    let checkpoint = Checkpoint::open(&on_disk.path, &OpenOptions::default()).unwrap();
    let decoder = Decoder::load(&checkpoint, checkpoint.describe().unwrap(), device, &mut |_, _| {}).unwrap();
    checkpoint.expect_all_used().unwrap();
    assert!(checkpoint.notices().is_empty(), "{}: {:?}", case.name, checkpoint.notices());
    decoder
}

/// The logits of every position of a prompt that is run in pieces of `chunk` tokens.
fn logits(decoder: &Decoder, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut kv = KvStore::new(kv_spec(decoder, KvType::F32), usize::MAX);
    let id = kv.add();
    let long_context = decoder.original_context().is_some_and(|original| tokens.len() > original);
    let mut rows = Vec::new();
    for (i, piece) in tokens.chunks(chunk).enumerate() {
        let mut step = StepInputs::default();
        step.push(id, i * chunk, piece, long_context);
        kv.reserve(id, piece.len()).unwrap();
        let hidden = decoder.hidden(&step, &mut kv).unwrap();
        kv.commit(id, piece.len()).unwrap();
        let all: Vec<usize> = (0..piece.len()).collect();
        let head = decoder.head(&hidden, &all, &RowAdapters::default()).unwrap();
        rows.extend(all.iter().map(|row| head.row(*row).unwrap().to_vec()));
    }
    rows
}

fn difference(row: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(row.len(), wanted.len());
    let largest = |values: &mut dyn Iterator<Item = f32>| {
        // A NaN must not be lost in the maximum.
        values
            .fold(0.0, |largest: f32, value| if value > largest || value.is_nan() { value } else { largest })
    };
    largest(&mut row.iter().zip(wanted).map(|(a, b)| (a - b).abs()))
        / largest(&mut wanted.iter().map(|b| b.abs()))
}

#[test]
fn logits_are_the_references() {
    let device = Device::cpu(Isa::best(), 1);
    let mut wrong = Vec::new();
    for case in crate::common::golden_cases::all() {
        let decoder = load(&case, &device);
        let tolerance = match (case.is_quantized(), case.name.starts_with("lfm2")) {
            (true, true) => QUANTIZED_LFM2_TOLERANCE,
            (true, false) => QUANTIZED_TOLERANCE,
            (false, _) => FLOAT_TOLERANCE,
        };
        let mut worst = 0.0;
        for prompt in &case.prompts {
            let rows = logits(&decoder, &prompt.tokens, prompt.tokens.len());
            for (position, wanted) in &prompt.logits {
                worst = difference(&rows[*position], wanted).max(worst);
            }
        }
        println!("{:30} {worst:.1e} of {tolerance:.0e}", case.name);
        if worst.is_nan() || worst > tolerance {
            wrong.push(format!("{} {worst:.1e}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn pieces_give_the_bits_of_the_whole() {
    let device = Device::cpu(Isa::best(), 1);
    for case in crate::common::golden_cases::all() {
        let decoder = load(&case, &device);
        let tokens = &case.prompts.last().unwrap().tokens;
        let whole = logits(&decoder, tokens, tokens.len());
        for chunk in [1, 7, 8, 9] {
            assert!(logits(&decoder, tokens, chunk) == whole, "{} in pieces of {chunk}", case.name);
        }
    }
}
