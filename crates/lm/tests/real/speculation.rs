//! Guesses on the two real models change no bit, and a model that guesses for itself is always right.
//!
//! In the suite there are few. `bench/speculation` asks for all and prints a line for each comparison.

use crate::schedules::{asked, drafted};
use lmx::engine::{
    DraftSpeculation, Engine, EngineOptions, Event, NgramSpeculation, Request, RequestId, Speculation, Update,
};
use lmx::grammar::{Form, Grammar};
use lmx::sample::{ProcessorParams, SamplingParams};
use serde_json::json;
use std::collections::BTreeMap;

/// Texts and numbers in a list that is longer than any reply here.
fn form(engine: &Engine) -> Grammar {
    let item = json!({"anyOf": [{"type": "string", "minLength": 4, "maxLength": 30}, {"type": "integer"}]});
    let schema = json!({"type": "array", "items": item, "minItems": 400, "maxItems": 500});
    engine.grammars().unwrap().compile(&Form::JsonSchema(schema)).unwrap()
}

/// Greedy, and temperature 1 with seeds from 1 on; each plain, with penalties, and with a form.
fn requests(engine: &Engine, grammar: &Grammar, speculation: Option<Speculation>) -> Vec<Request> {
    let (seeds, most) = (asked("LMX_TEST_SEEDS", 1) as u64, asked("LMX_TEST_TOKENS", 12));
    let penalties = ProcessorParams {
        repetition_penalty: 1.2,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        ..ProcessorParams::default()
    };
    let mut all = Vec::new();
    for seed in 0..=seeds {
        for kind in 0..3 {
            let text = format!("One, two, three, four. One, two, three, four. {} animals:", seed + 3);
            let temperature = if seed == 0 { 0.0 } else { 1.0 };
            all.push(Request {
                sampling: SamplingParams { temperature, ..SamplingParams::default() },
                processors: if kind == 1 { penalties.clone() } else { ProcessorParams::default() },
                grammar: (kind == 2).then(|| grammar.clone()),
                seed: Some(seed),
                ignore_eos: true,
                speculation,
                ..Request::new(engine.tokenizer().encode(&text, true).unwrap(), most)
            });
        }
    }
    all
}

fn replies(engine: &mut Engine, requests: Vec<Request>) -> BTreeMap<usize, Vec<Event>> {
    let ids = requests.into_iter().map(|request| engine.submit(request).unwrap());
    let ids: BTreeMap<RequestId, usize> = ids.collect::<Vec<_>>().into_iter().zip(0..).collect();
    let mut replies: BTreeMap<usize, Vec<Event>> = BTreeMap::new();
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            match update {
                Update::Token(event) => replies.entry(ids[&id]).or_default().push(event),
                Update::Failed(error) => panic!("{error}"),
                Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
            }
        }
    }
    replies
}

fn bits(events: &[Event]) -> Vec<(Option<u32>, u32)> {
    events.iter().map(|event| (event.token, event.logprob.to_bits())).collect()
}

fn check(name: &str) {
    let depths = asked("LMX_TEST_DEPTHS", 1);
    for batch in [1, 8] {
        let mut engine = drafted(name, usize::MAX, &|base| EngineOptions { max_running: batch, ..base });
        let grammar = form(&engine);
        let plain = requests(&engine, &grammar, None);
        let plain = replies(&mut engine, plain);
        // In the suite there is one depth, which is not the least.
        for depth in (1..=depths).map(|depth| if depths == 1 { 4 } else { depth }) {
            let ways = [
                ("itself", DraftSpeculation { draft_tokens: depth, adaptive: false }.into()),
                ("itself if it pays", DraftSpeculation { draft_tokens: depth, adaptive: true }.into()),
                ("the text", NgramSpeculation { ngram: 2, draft_tokens: depth }.into()),
            ];
            for (way, speculation) in ways {
                let guessed = requests(&engine, &grammar, Some(speculation));
                let guessed = replies(&mut engine, guessed);
                let (mut drafted, mut accepted) = (0, 0);
                for (index, events) in &guessed {
                    assert_eq!(bits(events), bits(&plain[index]), "{name}, {way}, {depth}: reply {index}");
                    let stats = &events.last().unwrap().stats;
                    drafted += stats.drafted_tokens;
                    accepted += stats.accepted_tokens;
                }
                println!(
                    "{name}, {batch} at a time, {depth} guesses by {way}: {} replies, {accepted} of {drafted}: OK",
                    guessed.len()
                );
                assert!(way == "the text" || accepted == drafted, "a model knows itself");
                assert!(way != "itself" || accepted > 0);
            }
        }
    }
}

#[test]
fn smollm2_guesses() {
    check("SmolLM2-135M-Instruct.Q4_1.gguf");
}

#[test]
fn gemma3_guesses() {
    check("gemma-3-270m-q4_k_m.gguf");
}
