//! The library's side of `bench/server`: generates as many streams at once as it is told.
//!
//!     cargo run --release --example streams -- MODEL --threads 2
//!
//! Each line of standard input, `STREAMS TOKENS`, is answered by `done` once that many greedy replies of that length have
//! been generated, to prompts as `bench/server` sends them.

use lmx::engine::{Engine, EngineOptions, Request, Update};
use lmx::{Device, Isa, LoadOptions};
use std::io::BufRead;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, flag, threads] = words.as_slice() else {
        return Err("usage: streams MODEL --threads N".into());
    };
    if flag != "--threads" {
        return Err(format!("unknown flag {flag}").into());
    }
    let loaded = lmx::load(model, &LoadOptions::new(Device::cpu(Isa::best(), threads.parse()?)))?;
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, EngineOptions::default())?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (streams, tokens) = line.split_once(' ').ok_or("a line is STREAMS TOKENS")?;
        run(&mut engine, streams.parse()?, tokens.parse()?)?;
        println!("done");
    }
    Ok(())
}

fn run(engine: &mut Engine, streams: usize, tokens: usize) -> Result<(), Error> {
    for stream in 0..streams {
        let prompt = (0..16).map(|index| (40 + (7 * stream + 3 * index) % 200) as u32).collect();
        engine.submit(Request { ignore_eos: true, ..Request::new(prompt, tokens) })?;
    }
    while !engine.is_idle() {
        for (_, update) in engine.step() {
            if let Update::Failed(error) = update {
                return Err(error.into());
            }
        }
    }
    Ok(())
}
