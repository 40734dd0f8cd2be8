//! Engines over the tiny models.

use crate::common::golden_cases::Case;
use crate::common::text_data::small;
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{Engine, EngineOptions};
use lmx::models::Decoder;
use lmx::text::{EosSet, Tokenizer};
use lmx::{Device, Isa};
use std::sync::Arc;

/// Any tokenizer will do: a tiny model's text means nothing.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(small("byte_level"))
}

/// The model of the case of a name, run by `threads` threads.
pub(crate) fn model(case: &str, threads: usize) -> Decoder {
    model_of(&Case::read(case), threads)
}

/// The model of a case, run by `threads` threads.
pub(crate) fn model_of(case: &Case, threads: usize) -> Decoder {
    let disk = case.on_disk();
    let checkpoint = Checkpoint::open(&disk.path, &OpenOptions::default()).unwrap();
    let device = Device::cpu(Isa::best(), threads);
    Decoder::load(&checkpoint, checkpoint.describe().unwrap(), &device, &mut |_, _| {}).unwrap()
}

/// An engine over the case of a name, whose replies end by their length only.
pub(crate) fn engine(case: &str, threads: usize, options: EngineOptions) -> Engine {
    engine_ending_at(case, threads, EosSet::default(), options)
}

/// An engine over the case of a name, whose replies end at `eos`.
pub(crate) fn engine_ending_at(case: &str, threads: usize, eos: EosSet, options: EngineOptions) -> Engine {
    Engine::new(Box::new(model(case, threads)), tokenizer(), eos, options).unwrap()
}
