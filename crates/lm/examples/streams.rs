//! The library's side of `bench/server`: generates as many streams at once as it is told.
//!
//!     cargo run --release --example streams -- MODEL --threads 2
//!
//! Each line of standard input, `TOKENS PROMPT PROMPT...`, is answered by `done` once a greedy reply of that many tokens
//! to each prompt, token ids with commas between them, has been generated, all at once.

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
        let (tokens, prompts) = line.split_once(' ').ok_or("a line is TOKENS PROMPT PROMPT...")?;
        run(&mut engine, tokens.parse()?, prompts)?;
        println!("done");
    }
    Ok(())
}

fn run(engine: &mut Engine, tokens: usize, prompts: &str) -> Result<(), Error> {
    for prompt in prompts.split(' ') {
        let prompt = prompt.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
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
