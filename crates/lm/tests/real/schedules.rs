//! Random schedules on the two real models: every finished reply is, bit for bit, what the request gets alone.
//!
//! In the suite they are short. `bench/schedules` asks for long ones and prints a line for each.

use crate::common::schedule_requests::{Limits, Requests, run_schedule, solo, tight};
use lmx::engine::{DraftModel, Engine, EngineOptions};
use lmx::{Device, Isa, LoadOptions, Loaded};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn load(name: &str) -> Loaded {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let models = std::env::var_os("LMX_TEST_MODELS").map_or(workspace.join("models"), PathBuf::from);
    let path = models.join(name);
    assert!(path.exists(), "{} is missing: run scripts/test, which fetches it", path.display());
    lmx::load(path.to_str().unwrap(), &LoadOptions::new(Device::cpu(Isa::best(), 2))).unwrap()
}

fn engine(name: &str, options: &dyn Fn(EngineOptions) -> EngineOptions) -> Engine {
    let loaded = load(name);
    let base = EngineOptions { kv_type: loaded.kv_type, ..EngineOptions::default() };
    Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options(base)).unwrap()
}

/// The model guesses for itself, in as much room.
pub(crate) fn drafted(
    name: &str,
    kv_memory: usize,
    options: &dyn Fn(EngineOptions) -> EngineOptions,
) -> Engine {
    let engine = engine(name, &|base| EngineOptions { kv_memory, ..options(base) });
    let Loaded { model, tokenizer, kv_type, .. } = load(name);
    engine.with_draft(DraftModel { model, tokenizer, kv_type, kv_memory }).unwrap()
}

pub(crate) fn asked(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |number| number.parse().unwrap())
}

fn check(name: &str) {
    let schedules = asked("LMX_TEST_SCHEDULES", 1) as u64;
    let count = asked("LMX_TEST_REQUESTS", 4);
    let limits = Limits {
        count,
        at_once: count,
        longest: asked("LMX_TEST_LONGEST", 150),
        // More than the block that admission leaves for each, so that the room runs out.
        most_new: 200,
        speculates: true,
    };
    let mut roomy = engine(name, &|options| options);
    let requests = Requests::new(&roomy, limits);
    let started = Instant::now();
    let expected = solo(&mut roomy, &requests);
    println!("{name}, alone: {} requests, {:.0} s", limits.count, started.elapsed().as_secs_f64());
    for seed in 0..schedules {
        let started = Instant::now();
        // These replies are shorter beside their prompts: less room, and more of them at a time.
        let kv_memory = roomy.kv().spec().peak_bytes(requests.longest() + 80);
        let more = |options| tight(options, &roomy, &requests, seed + 1, schedules + 1);
        let mut engine = drafted(name, kv_memory, &more);
        let tally = run_schedule(&mut engine, &requests, &expected, seed, name);
        println!(
            "{name}, schedule {seed}: {} requests, {} cancelled, {} preemptions, {} tokens compared, {:.0} s: OK",
            limits.count,
            tally.cancelled,
            tally.preemptions,
            tally.tokens,
            started.elapsed().as_secs_f64()
        );
    }
}

#[test]
fn smollm2() {
    check("SmolLM2-135M-Instruct.Q4_1.gguf");
}

#[test]
fn gemma3() {
    check("gemma-3-270m-q4_k_m.gguf");
}
