//! Recurrent state: rewinds to its snapshots, forks and chunks change no bit of what follows, and the store says what
//! it holds.

use crate::common::tiny::model;
use lmx::cache::{KvError, KvStore, SNAPSHOT, SequenceId};
use lmx::models::{Decoder, Model, StepInputs, kv_spec};
use lmx_tensor::RowAdapters;
use lmx_tensor::kernels::attention::KvType;

const LENGTH: usize = 700;

fn store(decoder: &Decoder) -> KvStore {
    KvStore::new(kv_spec(decoder, KvType::F16), usize::MAX)
}

fn tokens() -> Vec<u32> {
    (0..LENGTH as u32).map(|position| (position * position + position * 29 + 7) % 61).collect()
}

/// Runs `tokens` in pieces of `chunk` after what the sequence holds; the bits of each position's logits.
fn advance(
    decoder: &Decoder,
    kv: &mut KvStore,
    id: SequenceId,
    tokens: &[u32],
    chunk: usize,
) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    for piece in tokens.chunks(chunk) {
        let mut step = StepInputs::default();
        step.push(id, kv.len(id), piece, false);
        kv.reserve(id, piece.len()).unwrap();
        let hidden = decoder.hidden(&step, kv).unwrap();
        kv.commit(id, piece.len()).unwrap();
        let head =
            decoder.head(&hidden, &(0..piece.len()).collect::<Vec<_>>(), &RowAdapters::default()).unwrap();
        rows.extend((0..piece.len()).map(|row| head.row(row).unwrap().iter().map(|v| v.to_bits()).collect()));
    }
    rows
}

#[test]
fn the_slots_are_those_of_the_layers() {
    let slots = |case| {
        let decoder = model(case, 1);
        let named = |slot: lmx::cache::StateSlot| (slot.layer, slot.name, slot.floats);
        decoder.states().into_iter().map(named).collect::<Vec<_>>()
    };
    assert_eq!(slots("lfm2-f32"), [(0, "conv", 128), (1, "conv", 128), (3, "conv", 128)]);
    assert_eq!(
        slots("baichuan-m1-f32"),
        [
            (0, "last_k", 32),
            (0, "last_v", 32),
            (1, "last_k", 32),
            (1, "last_v", 32),
            (2, "last_k", 32),
            (2, "last_v", 32)
        ]
    );
    assert_eq!(slots("llama4-f32"), []);
    assert_eq!(model("lfm2-f32", 1).layer_kv().len(), 1, "only the attention layer has keys and values");
}

#[test]
fn chunks_leave_the_same_states() {
    for case in ["lfm2-bias-f32", "baichuan-m1-f32"] {
        let (decoder, tokens) = (model(case, 1), tokens());
        let mut wanted = None;
        for chunk in [LENGTH, 1, 7, SNAPSHOT - 1, SNAPSHOT, SNAPSHOT + 1] {
            let mut kv = store(&decoder);
            let id = kv.add();
            let rows = advance(&decoder, &mut kv, id, &tokens, chunk);
            assert_eq!(kv.states_held(id).unwrap(), [256, 512, LENGTH], "{case} {chunk}");
            assert_eq!(kv.budget().used(), kv.spec().bytes_at(LENGTH), "{case} {chunk}");
            let slots = 0..kv.spec().states.len();
            let states: Vec<_> = slots.map(|slot| kv.state(id, slot).unwrap().unwrap().to_vec()).collect();
            let got = (rows, states);
            assert!(wanted.get_or_insert_with(|| got.clone()) == &got, "{case} in pieces of {chunk}");
        }
    }
}

#[test]
fn after_any_rewind_the_rest_is_that_of_a_cold_run() {
    let (decoder, tokens) = (model("lfm2-f32", 1), tokens());
    let mut cold = store(&decoder);
    let id = cold.add();
    let whole = advance(&decoder, &mut cold, id, &tokens, LENGTH);
    for target in [0, 1, 2, 3, 100, 255, 256, 257, 400, 511, 512, 513, 699, 700] {
        let fork = cold.fork(id).unwrap();
        let resume = cold.resume_point(fork, target);
        let wanted = [0, 256, 512, 700].into_iter().filter(|&point| point <= target).max().unwrap();
        assert_eq!(resume, wanted, "to {target}");
        if resume < target {
            let error = cold.trim(fork, LENGTH - target).unwrap_err();
            assert_eq!(error, KvError::Unreachable { target, reachable: resume });
            assert_eq!(cold.len(fork), LENGTH, "a refused trim changes nothing");
        }
        cold.trim(fork, LENGTH - resume).unwrap();
        // What the original does meanwhile is its own affair.
        let ahead = cold.fork(id).unwrap();
        advance(&decoder, &mut cold, ahead, &[1, 2, 3], 2);
        let again = advance(&decoder, &mut cold, fork, &tokens[resume..], 100);
        assert!(again == whole[resume..], "after a return to {target} by {resume}");
        assert_eq!(cold.states_held(fork).unwrap(), [256, 512, LENGTH]);
        cold.remove(fork);
        cold.remove(ahead);
    }
    let bytes = cold.budget().used();
    assert_eq!(bytes, cold.spec().bytes_at(LENGTH), "what forks took is free again");
}

#[test]
fn a_step_that_was_given_up_leaves_the_state_as_it_was() {
    let (decoder, tokens) = (model("baichuan-m1-f32", 1), tokens());
    let mut kv = store(&decoder);
    let id = kv.add();
    let whole = advance(&decoder, &mut kv, id, &tokens[..60], 60);
    let again = kv.add();
    advance(&decoder, &mut kv, again, &tokens[..20], 20);
    // A forward pass whose tokens are never committed.
    let mut step = StepInputs::default();
    step.push(again, 20, &[5, 6, 7], false);
    kv.reserve(again, 3).unwrap();
    decoder.hidden(&step, &mut kv).unwrap();
    assert!(advance(&decoder, &mut kv, again, &tokens[20..60], 13) == whole[20..]);
}
