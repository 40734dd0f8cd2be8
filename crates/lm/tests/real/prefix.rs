//! Prefixes of the two real models: warm is cold bit for bit, and Gemma's prefix is found after its window has wrapped.

use lmx::cache::{BLOCK, PrefixCacheOptions};
use lmx::engine::{Engine, EngineOptions, Request};
use lmx::{Device, Isa, LoadOptions};
use std::path::{Path, PathBuf};

/// Pairs for each model; each takes about half a second. `LMX_TEST_PAIRS` asks for another number.
const PAIRS: usize = 8;

fn engine(name: &str, prefix_cache: Option<PrefixCacheOptions>) -> Engine {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let models = std::env::var_os("LMX_TEST_MODELS").map_or(workspace.join("models"), PathBuf::from);
    let path = models.join(name);
    assert!(path.exists(), "{} is missing: run scripts/test, which fetches it", path.display());
    let options = LoadOptions::new(Device::cpu(Isa::best(), 2));
    let loaded = lmx::load(path.to_str().unwrap(), &options).unwrap();
    let options = EngineOptions { kv_type: loaded.kv_type, prefix_cache, ..EngineOptions::default() };
    Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options).unwrap()
}

/// Tokens with the bits of their log-probabilities, and the prompt tokens that were held.
fn reply(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> (Vec<(Option<u32>, u32)>, usize) {
    let request = Request { ignore_eos: true, ..Request::new(prompt.to_vec(), max_tokens) };
    let events: Vec<_> = engine.generate(request).unwrap().map(Result::unwrap).collect();
    let held = events.last().unwrap().stats.cached_tokens;
    (events.iter().map(|event| (event.token, event.logprob.to_bits())).collect(), held)
}

fn text(engine: &Engine) -> Vec<u32> {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/real/text.txt");
    engine.tokenizer().encode(&std::fs::read_to_string(text).unwrap(), true).unwrap()
}

#[test]
fn warm_is_cold_on_real_models() {
    for name in ["SmolLM2-135M-Instruct", "gemma-3-270m-q4_k_m.gguf"] {
        let mut warm = engine(name, Some(PrefixCacheOptions::default()));
        let mut cold = engine(name, None);
        let text = text(&warm);
        let pairs = std::env::var("LMX_TEST_PAIRS").map_or(PAIRS, |pairs| pairs.parse().unwrap());
        for pair in 0..pairs {
            let (from, length) = (pair * 37 % 1500, 2 + pair * 29 % 150);
            let stored = &text[from..from + length];
            let parts_at = 1 + pair * 17 % length;
            let new = match pair % 4 {
                0 => stored.to_vec(),
                1 => stored[..parts_at].to_vec(),
                2 => [&stored[..parts_at], &text[..9]].concat(),
                _ => [stored, &text[..20]].concat(),
            };
            reply(&mut warm, stored, 2);
            let (got, held) = reply(&mut warm, &new, 3);
            assert_eq!(got, reply(&mut cold, &new, 3).0, "{name}: pair {pair}, {held} of {} held", new.len());
            let shared = stored.iter().zip(&new).take_while(|(a, b)| a == b).count();
            assert!(held >= shared.min(new.len() - 1));
        }
    }
}

#[test]
fn gemma_finds_a_long_prefix_behind_its_window() {
    const PREFIX: usize = 1500;
    let mut warm = engine("gemma-3-270m", Some(PrefixCacheOptions::default()));
    let mut cold = engine("gemma-3-270m", None);
    let text = text(&warm);
    let questions = ["What is this about?", "How does it end?"];
    for (number, question) in questions.into_iter().enumerate() {
        let question = warm.tokenizer().encode(question, false).unwrap();
        let prompt = [&text[..PREFIX], &question].concat();
        let (got, held) = reply(&mut warm, &prompt, 6);
        assert_eq!(got, reply(&mut cold, &prompt, 6).0, "question {number}");
        println!("question {number}: {held} of {} prompt tokens were cached", prompt.len());
        assert!(if number == 0 { held == 0 } else { held >= PREFIX - BLOCK }, "{held}");
    }
}
