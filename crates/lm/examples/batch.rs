//! Several requests at once, each with its own options; each gets the tokens it would get alone.
//!
//!     cargo run --release --example batch -- MODEL

use lmx::engine::{Engine, EngineOptions, Request, Update};
use lmx::sample::SamplingParams;
use lmx::{Device, Isa, LoadOptions};
use std::collections::BTreeMap;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: batch MODEL")?;
    let loaded = lmx::load(&model, &LoadOptions::new(Device::cpu(Isa::best(), 2)))?;
    let tokenizer = std::sync::Arc::clone(&loaded.tokenizer);
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, EngineOptions::default())?;

    let mut replies = BTreeMap::new();
    for (prompt, temperature) in [("The capital of France is", 0.0), ("Once upon a time", 0.8)] {
        let sampling = SamplingParams { temperature, ..SamplingParams::default() };
        let tokens = tokenizer.encode(prompt, true)?;
        let request = Request { sampling, seed: Some(7), ..Request::new(tokens, 40) };
        replies.insert(engine.submit(request)?, String::from(prompt));
    }
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            match update {
                Update::Token(event) => replies.entry(id).or_default().push_str(&event.text),
                Update::Failed(error) => eprintln!("{id:?}: {error}"),
                Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
            }
        }
    }
    for reply in replies.values() {
        println!("{reply}\n");
    }
    Ok(())
}
