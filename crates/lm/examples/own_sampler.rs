//! A sampler and a logits processor of one's own.
//!
//!     cargo run --release --example own_sampler -- MODEL "Once upon a time"

use lmx::engine::{Engine, EngineOptions, Request};
use lmx::sample::{Key, LogitsProcessor, SampleError, Sampler};
use lmx::{Device, Isa, LoadOptions};

/// Always takes the second most likely token.
struct SecondBest;

impl Sampler for SecondBest {
    fn sample(&mut self, logprobs: &[f32], _key: Key) -> u32 {
        let (mut best, mut second) = (0, 0);
        for (id, &logprob) in logprobs.iter().enumerate() {
            if logprob > logprobs[best] {
                (best, second) = (id, best);
            } else if id != best && (second == best || logprob > logprobs[second]) {
                second = id;
            }
        }
        second as u32
    }
}

/// Never the same token twice in a row.
struct NoEcho;

impl LogitsProcessor for NoEcho {
    fn process(&mut self, history: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
        if let Some(&last) = history.last()
            && let Some(logit) = logits.get_mut(last as usize)
        {
            *logit = f32::NEG_INFINITY;
        }
        Ok(())
    }

    // It looks at the history that it is given and remembers nothing.
    fn accept(&mut self, _token: u32) {}
    fn rollback(&mut self, _tokens: usize) {}
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(prompt)) = (arguments.next(), arguments.next()) else {
        return Err("usage: own_sampler MODEL PROMPT".into());
    };
    let loaded = lmx::load(&model, &LoadOptions::new(Device::cpu(Isa::best(), 2)))?;
    let request = Request {
        sampler: Some(Box::new(SecondBest)),
        logits_processors: vec![Box::new(NoEcho)],
        ..Request::new(loaded.tokenizer.encode(&prompt, true)?, 40)
    };
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, EngineOptions::default())?;
    for event in engine.generate(request)? {
        print!("{}", event?.text);
    }
    println!();
    Ok(())
}
