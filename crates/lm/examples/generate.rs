//! Load a model, answer a question, stream the text.
//!
//!     cargo run --release --example generate -- MODEL "Why is the sky blue?"

use lmx::engine::{Engine, EngineOptions, Request};
use lmx::text::{RenderOptions, SpecialContent};
use lmx::{Device, Isa, LoadOptions};
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(question)) = (arguments.next(), arguments.next()) else {
        return Err("usage: generate MODEL QUESTION".into());
    };
    let loaded = lmx::load(&model, &LoadOptions::new(Device::cpu(Isa::best(), 2)))?;

    let template = loaded.tokenizer.chat_template()?;
    let messages = [serde_json::json!({"role": "user", "content": question})];
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let prompt = loaded.tokenizer.encode_chat(&template, &messages, &options, SpecialContent::Plain)?;

    let options = EngineOptions { kv_type: loaded.kv_type, ..EngineOptions::default() };
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options)?;
    for event in engine.generate(Request::new(prompt.ids, 200))? {
        print!("{}", event?.text);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
