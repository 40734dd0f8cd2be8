//! Sequences that see a bounded number of positions, against mlx-lm's rotating cache (tests/gen/kv_golden.py).

use crate::common::tiny::model;
use lmx::cache::{BLOCK, KvStore, KvWindow};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::attention::KvType;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Bounded {
    model: String,
    size: usize,
    keep: usize,
    tokens: Vec<u32>,
    /// By position.
    logits: BTreeMap<usize, Vec<f32>>,
}

fn cases() -> Vec<Bounded> {
    let file = crate::common::golden_cases::golden_folder().join("../kv/bounded.json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Runs `tokens` in pieces of `chunk`; the logits of each position. Checks what is held after each piece.
fn logits(decoder: &Decoder, window: KvWindow, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut kv = KvStore::new(kv_spec(decoder, KvType::F32).bounded(window), usize::MAX);
    let id = kv.add();
    let mut rows = Vec::new();
    for (i, piece) in tokens.chunks(chunk).enumerate() {
        rows.extend(advance(decoder, &mut kv, id, i * chunk, piece));
        let blocks = kv.slabs(id, 0).unwrap().iter().flatten().count();
        let most = window.keep().div_ceil(BLOCK) + (window.size() - window.keep()).div_ceil(BLOCK) + 1;
        assert!(blocks <= most, "{window:?} holds {blocks} blocks");
    }
    rows
}

fn advance(
    decoder: &Decoder,
    kv: &mut KvStore,
    id: lmx::cache::SequenceId,
    first: usize,
    piece: &[u32],
) -> Vec<Vec<f32>> {
    let mut step = StepInputs::default();
    step.push(id, first, piece, false);
    kv.reserve(id, piece.len()).unwrap();
    let hidden = decoder.hidden(&step, kv).unwrap();
    kv.commit(id, piece.len()).unwrap();
    let all: Vec<usize> = (0..piece.len()).collect();
    let head = decoder.head(&hidden, &all, &RowAdapters::default()).unwrap();
    all.iter().map(|row| head.row(*row).unwrap().to_vec()).collect()
}

#[test]
fn bounded_logits_are_mlx_lms_however_the_prompt_is_cut() {
    for case in cases() {
        let decoder = model(&case.model, 1);
        let (window, tokens) = (KvWindow::new(case.size, case.keep).unwrap(), &case.tokens);
        let whole = logits(&decoder, window, tokens, tokens.len());
        for (position, wanted) in &case.logits {
            let largest = wanted.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            for (got, wanted) in whole[*position].iter().zip(wanted) {
                let error = (got - wanted).abs() / largest;
                assert!(error < 1e-4, "{} {window:?} at {position}: {error}", case.model);
            }
        }
        for chunk in [1, 7, (case.size - 1).max(1), case.size, case.size + 1] {
            assert!(logits(&decoder, window, tokens, chunk) == whole, "{window:?} in pieces of {chunk}");
        }
    }
}

#[test]
fn a_trimmed_sequence_goes_on_like_a_fresh_one() {
    let decoder = model("llama-f32", 1);
    let tokens: Vec<u32> = (0..200).map(|position| position * 29 % 61).collect();
    let window = KvWindow::new(70, 36).unwrap();
    let whole = logits(&decoder, window, &tokens, tokens.len());
    for length in [1, 30, 64, 65, 100, 193, 199] {
        let mut kv = KvStore::new(kv_spec(&decoder, KvType::F32).bounded(window), usize::MAX);
        let id = kv.add();
        advance(&decoder, &mut kv, id, 0, &tokens);
        let reachable = kv.can_trim_to(id, length);
        assert_eq!(reachable, kv.trim(id, tokens.len() - length).is_ok());
        assert_eq!(
            kv.len(id),
            if reachable { length } else { tokens.len() },
            "a refused trim changes nothing"
        );
        if reachable {
            let again = advance(&decoder, &mut kv, id, length, &tokens[length..]);
            assert!(again == whole[length..], "after a return to {length}");
        }
        // The first two blocks are held, and all from position 160 on.
        assert_eq!(reachable, length <= 64 || length >= 193, "{length}");
    }
}
