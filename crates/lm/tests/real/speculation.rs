//! Guesses on the two real models change no bit, and a model that guesses for itself is always right.
//!
//! In the suite there are few. `bench/speculation` asks for all and prints a line for each comparison.

use crate::common::running::{essence, together};
use crate::schedules::{asked, drafted};
use lmx::engine::{DraftSpeculation, Engine, EngineOptions, NgramSpeculation, Request, Speculation};
use lmx::grammar::{Form, Grammar};
use lmx::sample::{ProcessorParams, SamplingParams};
use serde_json::json;
use std::time::Instant;

/// Texts and numbers in a list that is longer than any reply here.
fn form(engine: &Engine) -> Grammar {
    let item = json!({"anyOf": [{"type": "string", "minLength": 4, "maxLength": 30}, {"type": "integer"}]});
    let schema = json!({"type": "array", "items": item, "minItems": 400, "maxItems": 500});
    engine.grammars().unwrap().compile(&Form::JsonSchema(schema)).unwrap()
}

/// A reply, and how many tokens are guessed at once for it.
#[derive(Clone, Copy)]
struct Ask {
    /// 0 is greedy, the others are at temperature 1.
    seed: u64,
    /// Plain, with penalties, or with a form.
    kind: usize,
    depth: usize,
}

/// Greedy replies with all depths, and those of seeds from 1 on with one depth each, another one in each round.
fn asks(round: usize) -> Vec<Ask> {
    let (seeds, depths) = (asked("LMX_TEST_SEEDS", 1) as u64, asked("LMX_TEST_DEPTHS", 1));
    // In the suite there is one depth, which is not the least.
    let depth = |place: usize| if depths == 1 { 4 } else { 1 + place % depths };
    let kinds = |seed| (0..3).map(move |kind| (seed, kind));
    let greedy = kinds(0)
        .flat_map(|(seed, kind)| (0..depths).map(move |place| Ask { seed, kind, depth: depth(place) }));
    let drawn = (1..=seeds).flat_map(kinds);
    let drawn = drawn.map(|(seed, kind)| Ask { seed, kind, depth: depth(3 * seed as usize + kind + round) });
    greedy.chain(drawn).collect()
}

/// Where guesses come from: an eighth of those of a model depend on whether they pay.
fn speculation(way: &str, Ask { seed, kind, depth: draft_tokens }: Ask) -> Option<Speculation> {
    match way {
        "itself" => Some(DraftSpeculation { draft_tokens, adaptive: kind == 0 && seed % 2 == 1 }.into()),
        "the text" => Some(NgramSpeculation { ngram: 2, draft_tokens }.into()),
        _ => None,
    }
}

fn request(engine: &Engine, grammar: &Grammar, way: &str, ask: Ask) -> Request {
    let Ask { seed, kind, .. } = ask;
    let penalties = ProcessorParams {
        repetition_penalty: 1.2,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        ..ProcessorParams::default()
    };
    // Some go on from beyond a window.
    let times = if (seed, kind) == (0, 0) { asked("LMX_TEST_TIMES", 1) } else { 1 };
    let count = "One, two, three, four. One, two, three, four. ".repeat(times);
    let text = format!("{count}{} animals:", seed + 3);
    let temperature = if seed == 0 { 0.0 } else { 1.0 };
    Request {
        sampling: SamplingParams { temperature, ..SamplingParams::default() },
        processors: if kind == 1 { penalties } else { ProcessorParams::default() },
        grammar: (kind == 2).then(|| grammar.clone()),
        seed: Some(seed),
        ignore_eos: true,
        speculation: speculation(way, ask),
        ..Request::new(engine.tokenizer().encode(&text, true).unwrap(), asked("LMX_TEST_TOKENS", 12))
    }
}

fn check(name: &str) {
    let drafted = |batch| drafted(name, usize::MAX, &|base| EngineOptions { max_running: batch, ..base });
    let mut engine = drafted(8);
    let grammar = form(&engine);
    // Each once: what it is does not depend on guesses.
    let mut plain = asks(0);
    plain.dedup_by_key(|ask| (ask.seed, ask.kind));
    let requests = plain.iter().map(|&ask| request(&engine, &grammar, "nothing", ask)).collect();
    let started = Instant::now();
    let expected: Vec<_> = together(&mut engine, requests).iter().map(|events| essence(events)).collect();
    println!("{name}, without guesses: {} replies, {:.0} s", expected.len(), started.elapsed().as_secs_f64());
    for batch in [8, 1] {
        let mut engine = drafted(batch);
        for (round, way) in (0..asked("LMX_TEST_ROUNDS", 1)).flat_map(|r| [(r, "itself"), (r, "the text")]) {
            let (asks, started) = (asks(round), Instant::now());
            let requests = asks.iter().map(|&ask| request(&engine, &grammar, way, ask)).collect();
            let [mut drafted, mut accepted] = [0, 0];
            for (ask, events) in asks.iter().zip(together(&mut engine, requests)) {
                let place = plain.iter().position(|p| (p.seed, p.kind) == (ask.seed, ask.kind)).unwrap();
                let Ask { seed, kind, depth } = ask;
                assert_eq!(
                    essence(&events),
                    expected[place],
                    "{name}, {batch} at a time: seed {seed}, kind {kind}, {depth} guesses by {way}"
                );
                let stats = &events.last().unwrap().stats;
                drafted += stats.drafted_tokens;
                accepted += stats.accepted_tokens;
            }
            println!(
                "{name}, {batch} at a time, guesses by {way}: {} replies, {accepted} of {drafted} right, {:.0} s: OK",
                asks.len(),
                started.elapsed().as_secs_f64()
            );
            assert!(way == "the text" || accepted == drafted && accepted > 0, "a model knows itself");
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
