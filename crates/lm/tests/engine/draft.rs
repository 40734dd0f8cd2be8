//! A draft model's guesses change how fast a reply comes, never what it is.

use crate::common::golden_cases::Case;
use crate::common::running::{essence, together};
use crate::common::text_data::{golden, small};
use crate::common::tiny;
use lmx::KvType;
use lmx::cache::{KvQuantization, KvWindow, PrefixCacheOptions};
use lmx::engine::{
    DraftError, DraftModel, DraftSpeculation, DraftStop, Engine, EngineOptions, Event, FinishReason,
    NgramSpeculation, Reply, Request, RequestError, Speculation, Stats,
};
use lmx::grammar::{Form, Grammar};
use lmx::models::Model;
use lmx::sample::{LogitsProcessor, ProcessorParams, SampleError, SamplingParams};
use lmx::text::{EosSet, EosSource, Tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;

/// A tiny model with a context of 1,024 tokens.
fn model(case: &str) -> Box<dyn Model> {
    model_with_context(case, 1024)
}

fn model_with_context(case: &str, context: usize) -> Box<dyn Model> {
    let mut case = Case::read(case);
    case.config["max_position_embeddings"] = json!(context);
    Box::new(tiny::model_of(&case, 1))
}

/// Any tokenizer will do: the model's text means nothing.
fn tokenizer(name: &str) -> Arc<Tokenizer> {
    Arc::new(small(name))
}

/// The tokenizer of the tests with a changed file.
fn changed(change: impl FnOnce(&mut Value)) -> Arc<Tokenizer> {
    let (from, to) = (golden().join("byte_level"), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("tokenizer_config.json"), to.path().join("tokenizer_config.json")).unwrap();
    let text = std::fs::read_to_string(from.join("tokenizer.json")).unwrap();
    let mut tokenizer = serde_json::from_str(&text).unwrap();
    change(&mut tokenizer);
    std::fs::write(to.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Arc::new(Tokenizer::from_folder(to.path()).unwrap())
}

fn plain(case: &str, options: EngineOptions) -> Engine {
    let mut eos = EosSet::default();
    eos.insert(33, EosSource::Config);
    let options = EngineOptions { kv_type: KvType::F32, ..options };
    Engine::new(model(case), tokenizer("byte_level"), eos, options).unwrap()
}

fn draft(case: &str) -> DraftModel {
    DraftModel {
        model: model(case),
        tokenizer: tokenizer("byte_level"),
        kv_type: KvType::F32,
        kv_memory: usize::MAX,
    }
}

fn drafted(case: &str, by: &str, options: EngineOptions) -> Engine {
    plain(case, options).with_draft(draft(by)).unwrap()
}

/// Always so many guesses.
fn fixed(draft_tokens: usize) -> Option<Speculation> {
    Some(DraftSpeculation { draft_tokens, adaptive: false }.into())
}

fn prompt(index: u64) -> Vec<u32> {
    (0..12 + index * 7 % 30).map(|i| ((i * i + index) % 61) as u32 + 1).collect()
}

fn request(index: u64, temperature: f64, speculation: Option<Speculation>) -> Request {
    Request {
        sampling: SamplingParams { temperature, ..SamplingParams::default() },
        seed: Some(index),
        ignore_eos: true,
        top_logprobs: 2,
        speculation,
        ..Request::new(prompt(index), 200)
    }
}

fn penalized(request: Request) -> Request {
    let processors = ProcessorParams {
        repetition_penalty: 1.2,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        ..ProcessorParams::default()
    };
    Request { processors, ..request }
}

/// The events of requests that run together, in their order.
fn events(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<Event>> {
    let events = together(engine, requests);
    engine.clear_prefixes();
    assert_eq!(engine.kv().budget().used(), 0, "nothing is left behind");
    let left = engine.draft_kv().map_or(0, |kv| kv.budget().used());
    assert_eq!(left, 0, "nothing is left behind for the draft");
    events
}

/// Compares replies with and without guesses; returns how many tokens were guessed, and rightly.
fn compare(engine: &mut Engine, expected: &[Vec<Event>], requests: Vec<Request>, name: &str) -> [usize; 2] {
    let mut sums = [0, 0];
    for (index, (got, expected)) in events(engine, requests).iter().zip(expected).enumerate() {
        assert_eq!(essence(got), essence(expected), "{name}, request {index}");
        let stats = &got.last().unwrap().stats;
        assert_eq!(got.iter().filter(|event| event.from_draft).count(), stats.accepted_tokens);
        sums = [sums[0] + stats.drafted_tokens, sums[1] + stats.accepted_tokens];
    }
    sums
}

/// Greedy, and temperature 1 with seeds 1 to 20, without and with penalties.
fn make(speculation: Option<Speculation>) -> Vec<Request> {
    let seeds = (1..=20).map(|seed| request(seed, 1.0, speculation));
    let all =
        [request(3, 0.0, speculation), penalized(request(4, 0.0, speculation))].into_iter().chain(seeds);
    let every_third = |(i, request)| if i % 3 == 2 { penalized(request) } else { request };
    all.enumerate().map(every_third).collect()
}

#[test]
fn a_model_that_guesses_for_itself_is_always_right() {
    for max_running in [1, 8] {
        let options = EngineOptions { max_running, ..EngineOptions::default() };
        let expected = events(&mut plain("llama-f32", options), make(None));
        let mut engine = drafted("llama-f32", "llama-f32", options);
        for depth in 1..=8 {
            let [guesses, right] =
                compare(&mut engine, &expected, make(fixed(depth)), &format!("depth {depth}"));
            assert_eq!(guesses, right, "depth {depth}");
            assert!(right * (depth + 2) >= 22 * 190 * depth, "depth {depth}: {right} of {}", 22 * 200);
        }
    }
}

#[test]
fn other_models_guess_less_well_and_the_reply_is_the_same() {
    for (by, max_running, depths) in
        [("llama-q4", 8, 1..=8), ("llama-q4", 1, 1..=8), ("gemma3-f32", 1, 3..=3)]
    {
        let options = EngineOptions { max_running, ..EngineOptions::default() };
        let expected = events(&mut plain("llama-f32", options), make(None));
        let mut engine = drafted("llama-f32", by, options);
        let mut sums = [0, 0];
        for depth in depths {
            let [guesses, right] =
                compare(&mut engine, &expected, make(fixed(depth)), &format!("{by}, depth {depth}"));
            sums = [sums[0] + guesses, sums[1] + right];
        }
        assert!(sums[1] > 100 && sums[1] < sums[0], "{by}: {sums:?}");
    }
}

fn ngram(ngram: usize, draft_tokens: usize) -> Option<Speculation> {
    Some(NgramSpeculation { ngram, draft_tokens }.into())
}

#[test]
fn the_text_guesses_any_number_of_tokens() {
    for max_running in [1, 8] {
        let options = EngineOptions { max_running, ..EngineOptions::default() };
        let mut engine = plain("llama-f32", options);
        let expected = events(&mut engine, make(None));
        let mut sums = [0, 0];
        for depth in 1..=8 {
            let requests = make(ngram(1 + depth % 2, depth));
            let [guesses, right] = compare(&mut engine, &expected, requests, &format!("depth {depth}"));
            sums = [sums[0] + guesses, sums[1] + right];
        }
        assert!(sums[1] > 500 && sums[1] < sums[0], "{sums:?}");
    }
}

#[test]
fn the_text_and_a_draft_guess_beside_each_other() {
    let options = EngineOptions { max_running: 8, ..EngineOptions::default() };
    let expected = events(&mut plain("llama-f32", options), make(None));
    let mut engine = drafted("llama-f32", "llama-q4", options);
    let ways = [fixed(4), None, ngram(1, 8)];
    let mut mixed = make(None);
    mixed.iter_mut().zip(ways.iter().cycle()).for_each(|(request, &way)| request.speculation = way);
    compare(&mut engine, &expected, mixed, "mixed");
    let adaptive = Some(DraftSpeculation { draft_tokens: 6, adaptive: true }.into());
    compare(&mut engine, &expected, make(adaptive), "adaptive");
}

#[test]
fn under_every_policy_of_keys_and_values_and_with_little_room() {
    let window = |size, keep| Some(KvWindow::new(size, keep).unwrap());
    let quantized = Some(KvQuantization::new(8, 32, 75).unwrap());
    let kinds = [
        ("llama-f32", window(40, 4), None, false),
        ("gemma3-f32", None, quantized, false),
        ("llama-f32", None, None, true),
        ("gemma3-f32", None, None, true),
    ];
    for (case, kv_window, kv_quantization, small) in kinds {
        let roomy = EngineOptions { kv_window, kv_quantization, max_running: 8, ..EngineOptions::default() };
        let name = format!("{case} {kv_window:?} {kv_quantization:?} {small}");
        let mut engine = plain(case, roomy);
        let expected = events(&mut engine, make(None));
        let kv_memory = if small { engine.kv().spec().peak_bytes(260) * 3 } else { usize::MAX };
        for prefix_cache in [None, Some(PrefixCacheOptions::default())] {
            let options = EngineOptions { kv_memory, prefix_cache, prefill_step_size: 32, ..roomy };
            let mut engine = drafted(case, case, options);
            let got = events(&mut engine, make(fixed(5)));
            let stats = |events: &[Event]| events.last().unwrap().stats.clone();
            for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert_eq!(essence(got), essence(expected), "{name}, request {index}");
                let stats = stats(got);
                assert_eq!(stats.accepted_tokens, stats.drafted_tokens, "{name}, request {index}");
                assert!(stats.accepted_tokens > 100, "{name}, request {index}: {stats:?}");
            }
            let preempted = got.iter().any(|events| stats(events).preemptions > 0);
            assert_eq!(preempted, small, "{name}");
        }
    }
}

/// Lists of bounded texts and numbers, in the few signs of the tiny model's vocabulary: it has no brackets but round ones.
/// With `items` or more of them.
fn form(items: usize) -> Grammar {
    let item = "(\"A[A-Z0-9]{0,6}\"|[1-9][0-9]{0,2})";
    let form = Form::Regex(format!("\\({item}(,{item}){{{items},{}}}\\)", items + 7));
    plain("llama-f32", EngineOptions::default()).grammars().unwrap().compile(&form).unwrap()
}

#[test]
fn guesses_follow_the_grammar() {
    // Short ones end by themselves, long ones after 200 tokens.
    for (items, finish) in [(2, FinishReason::Stop), (100, FinishReason::Length)] {
        let grammar = form(items);
        let make = |speculation| -> Vec<Request> {
            make(speculation).into_iter().map(|r| Request { grammar: Some(grammar.clone()), ..r }).collect()
        };
        let expected = events(&mut plain("llama-f32", EngineOptions::default()), make(None));
        assert!(expected.iter().all(|e| e.last().unwrap().finish == Some(finish)));
        for max_running in [1, 8] {
            let options = EngineOptions { max_running, ..EngineOptions::default() };
            // All depths once: every other way has fewer.
            let all = items == 100 && max_running == 8;
            let own: &[usize] = if all { &[1, 2, 3, 4, 5, 6, 7, 8] } else { &[1, 8] };
            for (by, depths) in [("llama-f32", own), ("gemma3-f32", &[3])] {
                let mut engine = drafted("llama-f32", by, options);
                for &depth in depths {
                    let [guesses, right] = compare(&mut engine, &expected, make(fixed(depth)), by);
                    assert!(
                        right > 50 && (by == "gemma3-f32" || right == guesses),
                        "{by}: {right} of {guesses}"
                    );
                }
            }
            let mut engine = plain("llama-f32", options);
            for depth in [1, 8] {
                let [_, right] = compare(&mut engine, &expected, make(ngram(1, depth)), "the text");
                assert!(right > 0, "depth {depth}");
            }
        }
    }
}

#[test]
fn a_reply_that_ends_among_guesses_leaves_what_a_plain_one_leaves() {
    let ending = |index: u64, speculation| Request {
        return_cache: true,
        ignore_eos: !index.is_multiple_of(3),
        stop: if index % 3 == 1 { vec!["7".to_owned(), "A".to_owned()] } else { Vec::new() },
        max_tokens: Some(10 + index as usize),
        ..request(index, 1.0, speculation)
    };
    for (speculation, least) in [(fixed(5), 20), (ngram(1, 5), 3)] {
        let mut accepted = 0;
        let mut left = |mut engine: Engine, speculation| -> Vec<_> {
            let alone = |engine: &mut Engine, request| {
                engine.batch_generate([request], &mut |_| {}).remove(0).unwrap()
            };
            let one = |index| {
                let reply = alone(&mut engine, ending(index, speculation));
                accepted += reply.stats.accepted_tokens;
                let cache = reply.cache.unwrap();
                let held = cache.tokens().unwrap().to_vec();
                let tokens = [&held[..], &reply.token_ids[reply.token_ids.len() - 1..], &[5, 6]].concat();
                let next = alone(&mut engine, Request { cache: Some(cache), ..Request::new(tokens, 4) });
                (reply.token_ids, held, next.token_ids, next.logprobs, next.stats.cached_tokens)
            };
            (1..=30).map(one).collect()
        };
        let options = EngineOptions::default();
        let expected = left(plain("llama-f32", options), None);
        assert_eq!(left(drafted("llama-f32", "llama-f32", options), speculation), expected);
        assert!(accepted > least, "{accepted}");
    }
}

/// Keeps its own history, as a caller's processor may.
struct Watcher(Vec<u32>, usize);

impl LogitsProcessor for Watcher {
    fn process(&mut self, history: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
        assert_eq!(history[self.1..], self.0, "what was accepted is what came");
        // What it does depends on its state.
        logits[1 + self.0.iter().sum::<u32>() as usize % 60] += 3.0;
        Ok(())
    }

    fn accept(&mut self, token: u32) {
        self.0.push(token);
    }

    fn rollback(&mut self, tokens: usize) {
        self.0.truncate(self.0.len() - tokens);
    }
}

#[test]
fn processors_see_the_accepted_history() {
    let make = |speculation| -> Vec<Request> {
        let watched = |index| {
            let request = request(index, 1.0, speculation);
            let watcher = Box::new(Watcher(Vec::new(), request.tokens.len()));
            Request { logits_processors: vec![watcher], ..request }
        };
        (1..=6).map(watched).collect()
    };
    let options = EngineOptions::default();
    let expected = events(&mut plain("llama-f32", options), make(None));
    for by in ["llama-f32", "llama-q4"] {
        let [guesses, right] = compare(&mut drafted("llama-f32", by, options), &expected, make(fixed(4)), by);
        assert_eq!(guesses == right, by == "llama-f32", "{by}: {right} of {guesses}");
    }
}

#[test]
fn what_cannot_guess_is_refused_by_name() {
    let options = EngineOptions::default();
    let with = |case: &str, draft| plain(case, options).with_draft(draft).map(drop).unwrap_err();
    assert!(matches!(with("lfm2-f32", draft("llama-f32")), DraftError::TargetState));
    assert!(matches!(with("llama-f32", draft("lfm2-f32")), DraftError::DraftState));
    let other = DraftModel { tokenizer: tokenizer("metaspace"), ..draft("llama-f32") };
    let error = with("llama-f32", other).to_string();
    assert!(error.starts_with("the draft model's tokenizer differs: id 0 is"), "{error}");
    assert!(error.contains("the control token \"<|endoftext|>\""), "{error}");
    // As many tokens, but two ids are swapped, or one marks structure in one of them only.
    let swapped = DraftModel {
        tokenizer: changed(|tokenizer| {
            let vocab = &mut tokenizer["model"]["vocab"];
            let (a, b) = (vocab["A"].take(), vocab["B"].take());
            (vocab["A"], vocab["B"]) = (b, a);
        }),
        ..draft("llama-f32")
    };
    let error = with("llama-f32", swapped).to_string();
    assert!(error.ends_with("is \"B\", but in the model's it is \"A\""), "{error}");
    let marked = DraftModel {
        tokenizer: changed(|tokenizer| tokenizer["added_tokens"][3]["special"] = json!(true)),
        ..draft("llama-f32")
    };
    let error = with("llama-f32", marked).to_string();
    assert!(error.contains("id 420 is the control token \"<think>\""), "{error}");
    let error = plain("llama-f32", options).submit(request(1, 0.0, fixed(3))).unwrap_err();
    assert!(matches!(error, RequestError::NoDraft), "{error}");
    let error = drafted("llama-f32", "llama-f32", options).submit(request(1, 0.0, fixed(65))).unwrap_err();
    assert!(error.to_string().starts_with("draft_tokens must be an integer from 1 to 64"), "{error}");
}

#[test]
fn a_draft_that_cannot_go_on_says_why_and_the_reply_goes_on() {
    let options = EngineOptions::default();
    let requests = |speculation| (1..=4).map(|index| request(index, 1.0, speculation)).collect::<Vec<_>>();
    let expected = events(&mut plain("llama-f32", options), requests(None));
    let bytes = drafted("llama-f32", "llama-f32", options).draft_kv().unwrap().spec().bytes_at(100);
    let cases = [
        (DraftModel { kv_memory: 2 * bytes, ..draft("llama-f32") }, DraftStop::OutOfMemory),
        (DraftModel { model: model_with_context("llama-f32", 90), ..draft("llama-f32") }, DraftStop::Context),
    ];
    for (draft, why) in cases {
        let mut engine = plain("llama-f32", options).with_draft(draft).unwrap();
        let got = events(&mut engine, requests(fixed(4)));
        for (got, expected) in got.iter().zip(&expected) {
            assert_eq!(essence(got), essence(expected), "{why}");
        }
        let stats = |events: &[Event]| events.last().unwrap().stats.clone();
        let stopped = got.iter().map(|events| stats(events)).filter(|stats| stats.draft_stop == Some(why));
        assert!(stopped.count() > 0, "{why}: {:?}", got.iter().map(|e| stats(e)).collect::<Vec<_>>());
        assert!(got.iter().any(|events| stats(events).accepted_tokens > 0), "{why}");
    }
}

/// Request `seed` of those that have one prompt.
fn alike(seed: u64, speculation: Option<Speculation>) -> Request {
    let tokens = (0..ALIKE as u32).map(|i| i * i % 61 + 1).collect();
    Request { max_tokens: Some(20), tokens, ..request(seed, 1.0, speculation) }
}

/// Tokens of their prompt.
const ALIKE: usize = 320;

/// An engine whose draft has room for that prompt once, and a little for each of eight replies.
fn narrow(case: &str, options: EngineOptions) -> Engine {
    let spec = drafted(case, case, options).draft_kv().unwrap().spec().clone();
    let little = spec.bytes_at(ALIKE + 32) - spec.bytes_at(ALIKE);
    // Of a layer with a window a reply holds a block of its own too.
    let kv_memory = spec.bytes_at(ALIKE) + 8 * 2 * little.max(spec.bytes_at(32));
    plain(case, options).with_draft(DraftModel { kv_memory, ..draft(case) }).unwrap()
}

fn guessed_well(stats: &Stats) -> bool {
    stats.draft_stop.is_none() && stats.accepted_tokens >= 10 && stats.draft_seconds > 0.0
}

#[test]
fn several_replies_cost_the_draft_model_one_prompt() {
    let window = Some(KvWindow::new(300, 4).unwrap());
    for (case, kv_window) in [("llama-f32", None), ("llama-f32", window), ("gemma3-f32", None)] {
        let options = EngineOptions { kv_window, ..EngineOptions::default() };
        let expected = plain(case, options).choices(8, 5, &mut |seed| alike(seed, None)).unwrap();
        let mut engine = narrow(case, options);
        let got = engine.choices(8, 5, &mut |seed| alike(seed, fixed(4))).unwrap();
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let bits = |reply: &Reply| (reply.token_ids.clone(), reply.logprobs.clone());
            assert_eq!(bits(got), bits(expected), "{case} {kv_window:?}, reply {index}");
            assert!(guessed_well(&got.stats), "{case} {kv_window:?}, reply {index}: {:?}", got.stats);
        }
        assert_eq!(engine.draft_kv().unwrap().budget().used(), 0, "{case} {kv_window:?}");
    }
}

#[test]
fn a_draft_model_goes_on_from_what_it_runs_for_others() {
    let prefix_cache = Some(PrefixCacheOptions::default());
    let mut engine = narrow("llama-f32", EngineOptions { prefix_cache, ..EngineOptions::default() });
    let first = engine.submit(alike(1, fixed(4))).unwrap();
    while engine.stats(first).unwrap().accepted_tokens == 0 {
        engine.step();
    }
    for events in events(&mut engine, (2..=8).map(|seed| alike(seed, fixed(4))).collect()) {
        let stats = &events.last().unwrap().stats;
        assert!(guessed_well(stats), "{stats:?}");
    }
}

#[test]
fn a_hundred_thousand_draws_follow_the_model() {
    const BINS: usize = 100;
    let options = EngineOptions::default();
    for speculation in [None, fixed(2)] {
        let mut engine = drafted("llama-f32", "llama-q4", options);
        let requests = (1..=500).map(|seed| Request { top_logprobs: 64, ..request(seed, 1.0, speculation) });
        let (mut counts, mut accepted) = ([0.0; BINS], 0);
        for (index, events) in events(&mut engine, requests.collect()).into_iter().enumerate() {
            accepted += events.last().unwrap().stats.accepted_tokens;
            for (place, event) in events.iter().enumerate() {
                // Where the draw lies in the distribution, likely tokens first, and where within the token by another
                // number: if draws follow the distribution this is uniform, whatever came before.
                let p = |&(_, logprob): &(u32, f32)| f64::from(logprob).exp();
                let rank = event.top.iter().position(|&(id, _)| Some(id) == event.token).unwrap();
                let within = (place as f64 * 0.618_033_988_75 + index as f64 * 0.414_213_562).fract();
                let u = event.top[..rank].iter().map(p).sum::<f64>() + within * p(&event.top[rank]);
                counts[((u * BINS as f64) as usize).min(BINS - 1)] += 1.0;
            }
        }
        assert_eq!(accepted > 1000, speculation.is_some(), "{accepted}");
        let expected = counts.iter().sum::<f64>() / BINS as f64;
        assert!((expected - 1000.0).abs() < 1e-6, "100,000 draws");
        let statistic: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
        // The quantile for 99 degrees of freedom and p = 0.001.
        assert!(statistic < 148.23, "{speculation:?}: {statistic}");
    }
}
