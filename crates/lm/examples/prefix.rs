//! What a prefix hit and a fork cost with one model; prints a JSON object.
//!
//!     cargo run --release --example prefix -- MODEL --threads 2 --prompt 4000

use lmx::engine::{Engine, EngineOptions, Request, Stats};
use lmx::{Device, Isa, LoadOptions};
use std::time::Instant;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("usage: prefix MODEL [--FLAG NUMBER]...")?;
    let (mut threads, mut prompt) = (1, 4000);
    while let (Some(flag), Some(value)) = (arguments.next(), arguments.next()) {
        match flag.as_str() {
            "--threads" => threads = value.parse()?,
            "--prompt" => prompt = value.parse::<usize>()?,
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let loaded = lmx::load(&model, &LoadOptions::new(Device::cpu(Isa::best(), threads)))?;
    let options = EngineOptions {
        kv_type: loaded.kv_type,
        prefix_cache: Some(lmx::cache::PrefixCacheOptions::default()),
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options)?;
    let vocab = engine.model().vocab();
    let mut tokens: Vec<u32> = (0..prompt).map(|position| (position * 7919 % vocab) as u32).collect();
    let cold = run(&mut engine, tokens.clone())?;
    let mut warm = Vec::new();
    for last in 0..9 {
        tokens.truncate(prompt);
        tokens.extend([1, 2, last]);
        let stats = run(&mut engine, tokens.clone())?;
        if stats.cached_tokens < prompt {
            return Err(format!("only {} tokens were cached", stats.cached_tokens).into());
        }
        warm.push(stats.first_token_seconds * 1e3);
    }
    warm.sort_by(f64::total_cmp);

    let cache = engine.prompt_cache(&tokens[..prompt], None)?;
    let (before, mut fork) = (cache.memory_used(), Vec::new());
    for _ in 0..99 {
        let start = Instant::now();
        let copy = cache.fork()?;
        fork.push(start.elapsed().as_secs_f64() * 1e6);
        drop(copy);
    }
    fork.sort_by(f64::total_cmp);
    let mut copy = cache.fork()?;
    copy.extend(engine.model(), &[1])?;
    println!(
        "{{\"prompt\": {prompt}, \"cold_ms\": {:.1}, \"warm_ms_median\": {:.1}, \"warm_ms_best\": {:.1}, \
         \"fork_us_median\": {:.1}, \"fork_us_worst\": {:.1}, \"fork_and_write_bytes\": {}, \"block_bytes\": {}, \
         \"kv_bytes\": {}}}",
        cold.first_token_seconds * 1e3,
        warm[warm.len() / 2],
        warm[0],
        fork[fork.len() / 2],
        fork[fork.len() - 1],
        cache.memory_used() - before,
        engine.kv().spec().bytes_at(1),
        cache.bytes(),
    );
    Ok(())
}

/// Generates one token.
fn run(engine: &mut Engine, tokens: Vec<u32>) -> Result<Stats, Error> {
    let last = engine.generate(Request::new(tokens, 1))?.last().ok_or("no token")??;
    Ok(last.stats)
}
