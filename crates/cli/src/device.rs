//! What the words about the machine mean.

use crate::args::model::KvDtype;
use crate::end::End;
use crate::env;
use lmx::{Device, Isa, KvType, Level};
use std::num::NonZeroUsize;

/// The instruction set that kernels use: the best one, or that of `LMX_ISA`.
///
/// # Errors
/// A level that is unknown or that this machine does not have.
pub(crate) fn isa() -> Result<Isa, End> {
    let Some(name) = env::isa() else { return Ok(Isa::best()) };
    let level = Level::ALL.into_iter().find(|level| level.name() == name);
    let isa = level.and_then(Isa::new);
    isa.ok_or_else(|| {
        let here: Vec<&str> = Isa::all().map(|isa| isa.level().name()).collect();
        End::Usage(format!("LMX_ISA is {name:?}, but this machine has {}", here.join(", ")))
    })
}

/// What to say where no one asked for the scalar kernels and yet they are the best.
pub(crate) fn notice() -> Option<&'static str> {
    let scalar = env::isa().is_none() && Isa::best() == Isa::SCALAR;
    scalar
        .then_some("this machine has no AVX2 with FMA and F16C: the kernels run without vector instructions")
}

/// The CPU with as many threads, or with all cores.
///
/// # Errors
/// As [`isa`].
pub(crate) fn open(threads: Option<NonZeroUsize>) -> Result<Device, End> {
    let all = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    Ok(Device::cpu(isa()?, threads.map_or_else(all, NonZeroUsize::get)))
}

/// Most bytes of keys and values where `--kv-memory` does not say: half of the memory that is free now, as Linux
/// tells it; no limit where the system does not tell.
pub(crate) fn default_kv_memory() -> usize {
    free_memory().map_or(usize::MAX, |bytes| bytes / 2)
}

/// Most bytes that loaded models hold together where `--models-memory` does not say.
pub(crate) fn default_models_memory() -> usize {
    free_memory().map_or(usize::MAX, |bytes| bytes / 4 * 3)
}

/// Bytes that are free now, as Linux tells it.
fn free_memory() -> Option<usize> {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    kibibytes.map(|kibibytes| kibibytes * 1024)
}

/// How keys and values are stored; `own` is the model's float type.
pub(crate) fn kv_type(asked: KvDtype, own: KvType) -> KvType {
    match asked {
        KvDtype::Auto => own,
        KvDtype::F32 => KvType::F32,
        KvDtype::F16 => KvType::F16,
        KvDtype::Bf16 => KvType::Bf16,
    }
}

/// The word for `--kv-dtype`.
pub(crate) fn name(kv_type: KvType) -> &'static str {
    match kv_type {
        KvType::F32 => "f32",
        KvType::F16 => "f16",
        KvType::Bf16 => "bf16",
    }
}
