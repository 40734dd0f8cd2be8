//! Tokens per second of one model, for `bench/compare`; prints a JSON object.
//!
//!     cargo run --release --example throughput -- MODEL --threads 2 --prompt 512
//!     cargo run --release --example throughput -- MODEL --threads 2 --generate 64 --depth 512
//!
//! The first form measures prefill of that many tokens, the second one decode after `--depth` tokens.

use lmx::engine::{Engine, EngineOptions, Request, Stats};
use lmx::{Device, Isa, LoadOptions};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("usage: throughput MODEL [--FLAG NUMBER]...")?;
    let (mut threads, mut prompt, mut generate, mut depth) = (1, 0, 0, 0);
    while let (Some(flag), Some(value)) = (arguments.next(), arguments.next()) {
        let target = match flag.as_str() {
            "--threads" => &mut threads,
            "--prompt" => &mut prompt,
            "--generate" => &mut generate,
            "--depth" => &mut depth,
            _ => return Err(format!("unknown flag {flag}").into()),
        };
        *target = value.parse::<usize>()?;
    }

    let loaded = lmx::load(&model, &LoadOptions::new(Device::cpu(Isa::best(), threads)))?;
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, EngineOptions::default());
    // A generated token needs one before it.
    let known = if generate > 0 { depth.max(1) } else { prompt };
    run(&mut engine, known, 1)?; // brings weights and buffers into memory
    let stats = run(&mut engine, known, 1 + generate)?;
    let speed = if generate > 0 { stats.generation_tps() } else { stats.prompt_tps() };
    println!("{{\"tokens_per_second\": {speed}}}");
    Ok(())
}

/// Runs a prompt of `known` arbitrary tokens and generates `max_tokens`, whatever they are.
fn run(engine: &mut Engine, known: usize, max_tokens: usize) -> Result<Stats, Error> {
    let vocab = engine.model().vocab();
    let tokens = (0..known).map(|position| (position * 7919 % vocab) as u32).collect();
    let request = Request { ignore_eos: true, ..Request::new(tokens, max_tokens) };
    let mut stats = Stats::default();
    for event in engine.generate(request)? {
        stats = event?.stats;
    }
    Ok(stats)
}
