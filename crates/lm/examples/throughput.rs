//! Tokens per second of one model, for `bench/compare`; prints a JSON object.
//!
//!     cargo run --release --example throughput -- MODEL --threads 2 --prompt 512
//!     cargo run --release --example throughput -- MODEL --threads 2 --generate 64 --depth 512
//!     cargo run --release --example throughput -- MODEL --threads 2 --generate 32 --depth 32 --batch 8
//!
//! The first form measures prefill of that many tokens, the second one decode after `--depth` tokens, the third one
//! decode of several sequences at once, all their tokens counted. `--kv-bits N` quantizes keys and values from the start.

use lmx::cache::KvQuantization;
use lmx::engine::{Engine, EngineOptions, Request, Stats, Update};
use lmx::{Device, Isa, LoadOptions};
use std::time::Instant;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("usage: throughput MODEL [--FLAG NUMBER]...")?;
    let (mut threads, mut prompt, mut generate, mut depth, mut batch, mut kv_bits) = (1, 0, 0, 0, 1, 0);
    while let (Some(flag), Some(value)) = (arguments.next(), arguments.next()) {
        let target = match flag.as_str() {
            "--threads" => &mut threads,
            "--prompt" => &mut prompt,
            "--generate" => &mut generate,
            "--depth" => &mut depth,
            "--batch" => &mut batch,
            "--kv-bits" => &mut kv_bits,
            _ => return Err(format!("unknown flag {flag}").into()),
        };
        *target = value.parse::<usize>()?;
    }

    let loaded = lmx::load(&model, &LoadOptions::new(Device::cpu(Isa::best(), threads)))?;
    let kv_quantization = match kv_bits {
        0 => None,
        bits => Some(KvQuantization::new(bits, KvQuantization::GROUP, 0)?),
    };
    let options = EngineOptions { max_running: batch.max(1), kv_quantization, ..EngineOptions::default() };
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options)?;
    // A generated token needs one before it.
    let known = if generate > 0 { depth.max(1) } else { prompt };
    run(&mut engine, known, 1)?; // brings weights and buffers into memory
    let speed = if batch > 1 {
        run_batch(&mut engine, known, generate, batch)?
    } else {
        let stats = run(&mut engine, known, 1 + generate)?;
        if generate > 0 { stats.generation_tps() } else { stats.prompt_tps() }
    };
    println!("{{\"tokens_per_second\": {speed}}}");
    Ok(())
}

/// A prompt of `known` arbitrary tokens, and then `max_tokens`, whatever they are.
fn request(engine: &Engine, known: usize, max_tokens: usize) -> Request {
    let vocab = engine.model().vocab();
    let tokens = (0..known).map(|position| (position * 7919 % vocab) as u32).collect();
    Request { ignore_eos: true, ..Request::new(tokens, max_tokens) }
}

fn run(engine: &mut Engine, known: usize, max_tokens: usize) -> Result<Stats, Error> {
    let request = request(engine, known, max_tokens);
    let mut stats = Stats::default();
    for event in engine.generate(request)? {
        stats = event?.stats;
    }
    Ok(stats)
}

/// Tokens per second of `batch` sequences that generate `generate` tokens each, once all prompts have been run.
fn run_batch(engine: &mut Engine, known: usize, generate: usize, batch: usize) -> Result<f64, Error> {
    for _ in 0..batch {
        engine.submit(request(engine, known, 1 + generate))?;
    }
    // The prompts give the first token of each.
    let mut tokens = 0;
    while tokens < batch {
        tokens += step(engine)?;
    }
    let (start, first) = (Instant::now(), tokens);
    while !engine.is_idle() {
        tokens += step(engine)?;
    }
    Ok((tokens - first) as f64 / start.elapsed().as_secs_f64())
}

/// Runs a step; how many tokens it gave.
fn step(engine: &mut Engine) -> Result<usize, Error> {
    let mut tokens = 0;
    for (_, update) in engine.step() {
        match update {
            Update::Token(_) => tokens += 1,
            Update::Failed(error) => return Err(error.into()),
            Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
        }
    }
    Ok(tokens)
}
