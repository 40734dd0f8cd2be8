//! What is told of a prompt: the same as of a reply, however the prompt is cut, and whatever runs beside it.

use crate::common::tiny::engine;
use lmx::cache::PrefixCacheOptions;
use lmx::engine::{
    Engine, EngineOptions, FinishReason, Pooling, PromptLogprobs, PromptToken, Request, RequestId, Update,
};
use lmx::sample::{ProcessorParams, SamplingParams};
use std::collections::BTreeMap;

/// What was told of one request.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    prompt: Vec<PromptToken>,
    embedding: Option<Vec<f32>>,
    /// Tokens of the reply with their log-probabilities.
    reply: Vec<(u32, f32)>,
}

fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Told> {
    run_and_count(engine, requests).0
}

/// And how often a request was preempted.
fn run_and_count(engine: &mut Engine, requests: Vec<Request>) -> (Vec<Told>, usize) {
    let mut preemptions = 0;
    let mut told: BTreeMap<RequestId, Told> =
        requests.into_iter().map(|request| (engine.submit(request).unwrap(), Told::default())).collect();
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            let told = told.get_mut(&id).unwrap();
            match update {
                Update::Prefill { .. } => {}
                Update::Prompt(tokens) => told.prompt.extend(tokens),
                Update::Embedding(vector) => assert!(told.embedding.replace(vector).is_none(), "told twice"),
                Update::Token(event) => {
                    told.reply.extend(event.token.map(|token| (token, event.logprob)));
                    preemptions += if event.finish.is_some() { event.stats.preemptions } else { 0 };
                    assert!(matches!(event.finish, None | Some(FinishReason::Length)));
                }
                Update::Failed(error) => panic!("{error}"),
            }
        }
    }
    (told.into_values().collect(), preemptions)
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| i * 37 % 61).collect()
}

fn scored(tokens: Vec<u32>, from: usize) -> Request {
    Request { prompt_logprobs: Some(PromptLogprobs { from, top: 3 }), ..Request::new(tokens, 0) }
}

#[test]
fn a_prompt_is_scored_as_a_reply_is() {
    for case in ["llama-f32", "gemma3-f32", "llama-q4", "lfm2-f32"] {
        let start = prompt(70);
        let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        let request =
            Request { sampling, seed: Some(3), ignore_eos: true, ..Request::new(start.clone(), 40) };
        let reply = run(&mut engine(case, 1, EngineOptions::default()), vec![request]).remove(0).reply;
        let whole: Vec<u32> = start.into_iter().chain(reply.iter().map(|&(token, _)| token)).collect();
        for chunk in [1, 7, 64, 512] {
            let options = EngineOptions { prefill_step_size: chunk, ..EngineOptions::default() };
            let told = run(&mut engine(case, 1, options), vec![scored(whole.clone(), 1)]).remove(0).prompt;
            assert_eq!(
                told.iter().map(|t| t.index).collect::<Vec<_>>(),
                (1..whole.len()).collect::<Vec<_>>()
            );
            assert!(told.iter().all(|t| t.token == whole[t.index] && t.top.len() == 3));
            assert!(told.iter().all(|t| t.greedy == (t.logprob >= t.top[0].1)));
            let tail: Vec<(u32, f32)> = told[69..].iter().map(|t| (t.token, t.logprob)).collect();
            assert_eq!(tail, reply, "{case}, chunks of {chunk}");
        }
    }
}

#[test]
fn neither_company_nor_a_cache_changes_what_is_told() {
    let requests = || -> Vec<Request> {
        let mut requests = vec![
            scored(prompt(90), 1),
            scored(prompt(90), 50),
            scored(prompt(1), 1),
            scored(prompt(30), 30),
            Request { embedding: Some(Pooling::Mean), ..Request::new(prompt(90), 3) },
            Request { embedding: Some(Pooling::Last), ..scored(prompt(64), 8) },
            Request::new(prompt(80), 20),
        ];
        // Of the model, not of what is made of it.
        requests[0].processors = ProcessorParams { repetition_penalty: 1.5, ..ProcessorParams::default() };
        requests
    };
    let solo: Vec<Told> = requests()
        .into_iter()
        .map(|r| run(&mut engine("gemma3-f32", 1, EngineOptions::default()), vec![r]).remove(0))
        .collect();
    assert_eq!(solo[1].prompt, solo[0].prompt[49..]);
    assert_eq!((solo[2].prompt.len(), solo[3].prompt.len(), solo[5].prompt.len()), (0, 0, 56));
    assert!(solo[4].embedding != solo[5].embedding && solo[5].embedding.is_some());
    for chunk in [1, 13, 512] {
        let prefix_cache = Some(PrefixCacheOptions::default());
        let options = EngineOptions { prefill_step_size: chunk, prefix_cache, ..EngineOptions::default() };
        let mut engine = engine("gemma3-f32", 1, options);
        for round in 0..2 {
            assert_eq!(run(&mut engine, requests()), solo, "chunks of {chunk}, round {round}");
        }
    }
}

#[test]
fn being_preempted_tells_nothing_twice() {
    let requests = || {
        (0..6)
            .map(|i| Request { embedding: Some(Pooling::Mean), ..scored(prompt(120 + i), 1) })
            .map(|r| Request { max_tokens: Some(60), ignore_eos: true, ..r })
    };
    let solo: Vec<Told> = requests()
        .map(|r| run(&mut engine("llama-f32", 1, EngineOptions::default()), vec![r]).remove(0))
        .collect();
    let bytes = engine("llama-f32", 1, EngineOptions::default()).kv().spec().bytes_at(200);
    let options = EngineOptions { kv_memory: 3 * bytes, prefill_step_size: 50, ..EngineOptions::default() };
    let mut small = engine("llama-f32", 1, options);
    let (told, preemptions) = run_and_count(&mut small, requests().collect());
    assert_eq!(told, solo);
    assert!(preemptions > 0);
}
