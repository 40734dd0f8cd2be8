//! The engine on a tiny random model: each request gets what it would get alone, and fails alone.

use crate::common::golden_cases::Case;
use crate::common::running::essence;
use crate::common::schedule_requests;
use crate::common::tiny;
use lmx::cache::{KvQuantError, KvQuantization, PrefixCacheOptions};
use lmx::engine::{
    DraftSpeculation, Engine, EngineOptions, Event, FinishReason, NgramSpeculation, PromptLogprobs, Request,
    RequestError, RequestId, Update,
};
use lmx::grammar::{Form, Grammars};
use lmx::sample::{ProcessorParams, SampleError, SamplingParams};
use lmx::text::{EosSet, EosSource};
use lmx::{Device, Isa, LoadError, LoadOptions};
use lmx_tensor::kernels::attention::KvType;
use std::collections::BTreeMap;

fn engine(case: &str, options: EngineOptions) -> Engine {
    engine_ending_at(case, options, EosSet::default())
}

fn engine_ending_at(case: &str, options: EngineOptions, eos: EosSet) -> Engine {
    tiny::engine_ending_at(case, 2, eos, EngineOptions { kv_type: KvType::F32, ..options })
}

fn tokens(n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 5 + i + salt * 13) % 37) as u32).collect()
}

/// Requests whose prompts and options all differ.
fn mixed(index: usize) -> Request {
    let sampling = SamplingParams {
        temperature: [0.0, 0.7, 1.0, 1.5][index % 4],
        top_p: if index.is_multiple_of(3) { 0.9 } else { 1.0 },
        top_k: [0, 5, 20][index % 3],
        ..SamplingParams::default()
    };
    let mut processors = ProcessorParams::default();
    if index.is_multiple_of(2) {
        processors.repetition_penalty = 1.3;
    }
    Request {
        sampling,
        processors,
        seed: Some(index as u64),
        top_logprobs: 2,
        ..Request::new(tokens(1 + 17 * index, index), 5 + 3 * index)
    }
}

fn drain(engine: &mut Engine, seen: &mut BTreeMap<RequestId, Vec<Event>>) -> Vec<(RequestId, RequestError)> {
    let mut failed = Vec::new();
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            match update {
                Update::Token(event) => seen.entry(id).or_default().push(event),
                Update::Failed(error) => failed.push((id, error)),
                Update::Prefill { done, total } => assert!(done <= total),
                Update::Prompt(_) | Update::Embedding(_) => {}
            }
        }
    }
    failed
}

/// One case of each family.
const FAMILIES: [&str; 12] = [
    "llama-f32",
    "mistral-mxfp4",
    "smollm3-windows-f32",
    "qwen2-f32",
    "qwen3-q8",
    "gemma2-q8",
    "gemma3-q4",
    "phi3-longrope-q4",
    "llama4-q4",
    "lfm2-q4",
    "baichuan-m1-f32",
    "gpt-oss-q4",
];

#[test]
fn eight_at_once_get_what_each_gets_alone() {
    for case in FAMILIES {
        let mut alone = engine(case, EngineOptions::default());
        let solo: Vec<Vec<Event>> =
            (0..8).map(|i| alone.generate(mixed(i)).unwrap().map(Result::unwrap).collect()).collect();
        for (prefill_step_size, max_running) in [(1, 8), (7, 3), (2048, 8)] {
            let options = EngineOptions { prefill_step_size, max_running, ..EngineOptions::default() };
            let mut together = engine(case, options);
            let ids: Vec<RequestId> = (0..8).map(|i| together.submit(mixed(i)).unwrap()).collect();
            let mut seen = BTreeMap::new();
            assert!(drain(&mut together, &mut seen).is_empty());
            for (id, solo) in ids.iter().zip(&solo) {
                assert_eq!(essence(&seen[id]), essence(solo), "{case}, chunks of {prefill_step_size}");
            }
            assert!(together.kv().is_empty(), "every sequence was freed");
            assert_eq!(together.kv().budget().used(), 0);
        }
    }
}

#[test]
fn late_requests_join_and_cancelled_ones_leave_without_a_trace() {
    let mut engine = engine("llama-f32", EngineOptions { prefill_step_size: 8, ..EngineOptions::default() });
    let solo: Vec<Event> = engine.generate(mixed(2)).unwrap().map(Result::unwrap).collect();
    let doomed = engine.submit(mixed(7)).unwrap();
    let waiting = engine.submit(mixed(6)).unwrap();
    for _ in 0..4 {
        engine.step();
    }
    let late = engine.submit(mixed(2)).unwrap();
    engine.step();
    engine.cancel(doomed);
    engine.cancel(waiting);
    let mut seen = BTreeMap::new();
    assert!(drain(&mut engine, &mut seen).is_empty());
    // Some of its events may have come before the cancellation.
    let all = essence(&solo);
    assert!(all.ends_with(&essence(&seen[&late])) && seen.len() == 1);
    assert_eq!(engine.kv().budget().used(), 0);
}

#[test]
fn a_prompt_goes_on_from_the_prefix_that_is_held() {
    let options =
        EngineOptions { prefix_cache: Some(PrefixCacheOptions::default()), ..EngineOptions::default() };
    let mut engine = engine("llama-f32", options);
    let prompt = tokens(50, 1);
    let prefill = engine.generate(Request::new(prompt.clone(), 0)).unwrap().last().unwrap().unwrap();
    assert_eq!((prefill.token, prefill.finish), (None, Some(FinishReason::Length)));
    assert_eq!(engine.cached_tokens(&prompt, None), 50);

    let mut longer = prompt.clone();
    longer.extend(tokens(9, 2));
    let warm: Vec<Event> =
        engine.generate(Request::new(longer.clone(), 6)).unwrap().map(Result::unwrap).collect();
    assert_eq!(warm.last().unwrap().stats.cached_tokens, 50);
    engine.clear_prefixes();
    let cold: Vec<Event> = engine.generate(Request::new(longer, 6)).unwrap().map(Result::unwrap).collect();
    assert_eq!(cold.last().unwrap().stats.cached_tokens, 0);
    assert_eq!(essence(&warm), essence(&cold));

    // The same prompt again: all but the last token, whose logits are needed, is held.
    let again = engine.generate(Request::new(prompt[..40].to_vec(), 1)).unwrap().last().unwrap().unwrap();
    assert_eq!(again.stats.cached_tokens, 39);
    // Nothing at all is to be run here.
    let held = engine.generate(Request::new(prompt[..30].to_vec(), 0)).unwrap().last().unwrap().unwrap();
    assert_eq!(held.stats.cached_tokens, 30);
}

/// Requests for a tiny model of which one option each is out of its range, and what their errors name.
fn bad(vocab: usize, context: usize) -> Vec<(Request, &'static str)> {
    let other = tiny::engine("llama-f32", 1, EngineOptions::default());
    let foreign = schedule_requests::adapters(other.model()).remove(0);
    let grammars = Grammars::new(other.tokenizer(), other.eos(), vocab - 1).unwrap();
    let grammar = grammars.compile(&Form::Regex("[0-9]+".to_owned())).unwrap();
    let base = || Request::new(vec![1, 2, 3], 1);
    // A new field belongs into this list, unless it takes every value.
    #[rustfmt::skip]
    let Request {
        tokens: _, text: _, system_tokens: _, segment_ends: _, sampling: _, processors: _, stop: _, grammar: _,
        speculation: _, adapter: _, top_logprobs: _, prompt_logprobs: _, prompt_rows: _,
        // Those of tests/cache and adapters.rs.
        cache: _, embedding: _,
        max_tokens: _, seed: _, return_cache: _, ignore_eos: _, priority: _, queue_deadline: _, stall_deadline: _,
        sampler: _, logits_processors: _,
    } = base();
    let ngram = NgramSpeculation { ngram: 0, draft_tokens: 1 };
    let of_prompt = |from, top| Request { prompt_logprobs: Some(PromptLogprobs { from, top }), ..base() };
    let mut bad = vec![
        (Request::new(vec![], 1), "prompt is empty"),
        (Request::new(vec![0; context + 1], 1), "context"),
        (Request::new(vec![1, vocab as u32], 1), "token 1 is id"),
        (Request { text: Some("A".to_owned()), ..base() }, "text"),
        (Request { system_tokens: 4, ..base() }, "system_tokens"),
        (Request { segment_ends: vec![4], ..base() }, "segment_ends"),
        (Request { stop: vec!["a".into(), String::new()], ..base() }, "stop"),
        (Request { grammar: Some(grammar), ..base() }, "grammar"),
        (Request { speculation: Some(ngram.into()), ..base() }, "ngram"),
        (Request { speculation: Some(DraftSpeculation::default().into()), ..base() }, "draft model"),
        (Request { adapter: Some(foreign), ..base() }, "adapter"),
        (Request { top_logprobs: vocab + 1, ..base() }, "top_logprobs"),
        (of_prompt(4, 0), "prompt_logprobs.from"),
        (of_prompt(1, vocab + 1), "prompt_logprobs.top"),
        (Request { prompt_rows: Some(Box::new(|_: usize, _: &[f32]| ())), ..base() }, "prompt_rows"),
    ];
    let default = SamplingParams::default;
    let sampling = [
        (SamplingParams { temperature: -0.1, ..default() }, "temperature"),
        (SamplingParams { temperature: f64::NAN, ..default() }, "temperature"),
        (SamplingParams { top_p: 1.5, ..default() }, "top_p"),
        (SamplingParams { min_p: -1.0, ..default() }, "min_p"),
        (SamplingParams { min_tokens_to_keep: 0, ..default() }, "min_tokens_to_keep"),
        (SamplingParams { xtc_probability: 2.0, ..default() }, "xtc_probability"),
        (SamplingParams { xtc_threshold: 0.6, ..default() }, "xtc_threshold"),
        (SamplingParams { xtc_special_tokens: vec![vocab as u32], ..default() }, "xtc_special_tokens"),
    ];
    bad.extend(sampling.map(|(sampling, says)| (Request { sampling, ..base() }, says)));
    let default = ProcessorParams::default;
    let processors = [
        (ProcessorParams { logit_bias: [(vocab as u32, 1.0)].into(), ..default() }, "logit_bias"),
        (ProcessorParams { logit_bias: [(1, f64::INFINITY)].into(), ..default() }, "logit_bias"),
        (ProcessorParams { repetition_penalty: -1.0, ..default() }, "repetition_penalty"),
        (ProcessorParams { presence_penalty: 1e300, ..default() }, "presence_penalty"),
        (ProcessorParams { frequency_penalty: f64::NAN, ..default() }, "frequency_penalty"),
    ];
    bad.extend(processors.map(|(processors, says)| (Request { processors, ..base() }, says)));
    bad
}

#[test]
fn bad_requests_are_refused_by_name_and_touch_nobody() {
    let mut engine = engine("llama-f32", EngineOptions::default());
    let solo: Vec<Event> = engine.generate(mixed(3)).unwrap().map(Result::unwrap).collect();
    let good = engine.submit(mixed(3)).unwrap();
    engine.step();
    let used = engine.kv().budget().used();
    for (request, says) in bad(engine.model().vocab(), engine.model().context_length()) {
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(error.contains(says) && error.lines().count() == 1, "{says}: {error}");
    }
    assert_eq!(engine.kv().budget().used(), used);
    let mut seen = BTreeMap::new();
    assert!(drain(&mut engine, &mut seen).is_empty());
    let got = seen.remove(&good).unwrap();
    assert!(essence(&solo).ends_with(&essence(&got)) && seen.is_empty());
}

#[test]
fn a_request_that_fails_ends_alone() {
    let mut engine = engine("llama-f32", EngineOptions::default());
    let solo: Vec<Event> = engine.generate(mixed(4)).unwrap().map(Result::unwrap).collect();
    let poison = |history: &[u32], logits: &mut [f32]| -> Result<(), SampleError> {
        if history.len() > 5 {
            logits.fill(f32::NAN);
        }
        Ok(())
    };
    let poisoned = Request { logits_processors: vec![Box::new(poison)], ..Request::new(tokens(4, 3), 20) };
    let (poisoned, good) = (engine.submit(poisoned).unwrap(), engine.submit(mixed(4)).unwrap());
    let mut seen = BTreeMap::new();
    let failed = drain(&mut engine, &mut seen);
    let [(id, RequestError::Sample(SampleError::NotANumber { .. }))] = &failed[..] else {
        panic!("{failed:?}")
    };
    assert_eq!(*id, poisoned);
    assert_eq!(seen[&poisoned].len(), 2);
    assert_eq!(essence(&seen[&good]), essence(&solo));
}

#[test]
fn a_stored_prefix_with_state_is_continued_from_its_last_snapshot() {
    let options = EngineOptions {
        prefix_cache: Some(PrefixCacheOptions::default()),
        prefill_step_size: 100,
        ..EngineOptions::default()
    };
    let mut engine = engine("lfm2-f32", options);
    let prompt = tokens(600, 1);
    engine.generate(Request::new(prompt.clone(), 0)).unwrap().last().unwrap().unwrap();
    // 39 tokens of the common prefix lie behind the snapshot at 512, and are run again.
    let mut other = prompt[..551].to_vec();
    other.extend([36, 35, 34]);
    let warm: Vec<Event> =
        engine.generate(Request::new(other.clone(), 6)).unwrap().map(Result::unwrap).collect();
    assert_eq!(warm.last().unwrap().stats.cached_tokens, 512);
    assert_eq!(engine.kv().budget().used(), engine.prefix_stats().bytes());
    let mut engine = self::engine("lfm2-f32", EngineOptions::default());
    let cold: Vec<Event> = engine.generate(Request::new(other, 6)).unwrap().map(Result::unwrap).collect();
    assert_eq!(cold.last().unwrap().stats.cached_tokens, 0);
    assert_eq!(essence(&warm), essence(&cold));
}

#[test]
fn a_request_that_cannot_fit_fails_and_smaller_ones_finish() {
    let block = engine("llama-f32", EngineOptions::default()).kv().spec().groups[0].block_bytes(None);
    let options = EngineOptions { kv_memory: 3 * block, ..EngineOptions::default() };
    let mut engine = engine("llama-f32", options);
    let small: Vec<RequestId> =
        (0..3).map(|i| engine.submit(Request::new(tokens(20, i), 5)).unwrap()).collect();
    let error = engine.submit(Request::new(tokens(120, 9), 5)).unwrap_err();
    assert!(matches!(error, RequestError::OutOfMemory(_)) && error.to_string().contains("budget"), "{error}");
    // The prompt fits, but not the reply.
    let large = engine.submit(Request::new(tokens(90, 9), 50)).unwrap();
    let mut seen = BTreeMap::new();
    let failed = drain(&mut engine, &mut seen);
    let [(id, RequestError::OutOfMemory(_))] = &failed[..] else { panic!("{failed:?}") };
    assert_eq!((*id, seen[&large].len()), (large, 7), "96 positions, and the last token needs none");
    assert!(small.iter().all(|id| seen[id].len() == 5));
    assert_eq!(engine.kv().budget().used(), 0);
}

#[test]
fn quantized_requests_get_the_same_in_company_and_say_from_where_on() {
    let how = KvQuantization::new(4, 32, 30).unwrap();
    let options = |prefill_step_size| EngineOptions {
        prefill_step_size,
        kv_quantization: Some(how),
        ..EngineOptions::default()
    };
    let mut solo = engine("gemma3-f32", options(2048));
    let expected: Vec<Vec<Event>> =
        (0..4).map(|i| solo.generate(mixed(i)).unwrap().map(Result::unwrap).collect()).collect();
    let from: Vec<_> = expected.iter().map(|events| events.last().unwrap().stats.kv_quantized_from).collect();
    assert_eq!(from, [None, None, Some(30), Some(30)], "of 1, 18, 35 and 52 tokens and 5, 8, 11 and 14 more");
    for chunk in [1, 7, 31, 64] {
        let mut engine = engine("gemma3-f32", options(chunk));
        let ids: Vec<RequestId> = (0..4).map(|i| engine.submit(mixed(i)).unwrap()).collect();
        let mut seen = BTreeMap::new();
        assert!(drain(&mut engine, &mut seen).is_empty());
        for (id, expected) in ids.iter().zip(&expected) {
            assert_eq!(essence(&seen[id]), essence(expected), "chunks of {chunk}");
        }
    }
}

#[test]
fn stored_prefixes_are_floats_up_to_the_start_and_quantized_beyond() {
    let how = KvQuantization::new(4, 32, 70).unwrap();
    let cold = EngineOptions { kv_quantization: Some(how), ..EngineOptions::default() };
    let warm = EngineOptions { prefix_cache: Some(PrefixCacheOptions::default()), ..cold };
    let stored = tokens(150, 3);
    for (shared, cached) in [(100, 100), (149, 149), (50, 50), (68, 64), (72, 72), (33, 33)] {
        let mut warm = engine("gemma3-f32", warm);
        warm.generate(Request::new(stored.clone(), 4)).unwrap().for_each(drop);
        let prompt = [&stored[..shared], &[1, 2, 3][..]].concat();
        let reply = |engine: &mut Engine| -> Vec<Event> {
            engine.generate(Request::new(prompt.clone(), 30)).unwrap().map(Result::unwrap).collect()
        };
        let fresh = reply(&mut engine("gemma3-f32", cold));
        let got = reply(&mut warm);
        assert_eq!(got[0].stats.cached_tokens, cached, "{shared} shared");
        assert_eq!(essence(&got), essence(&fresh), "{shared} shared");
        assert_eq!(warm.kv().budget().used(), warm.prefix_stats().bytes());
    }
}

#[test]
fn heads_that_are_not_whole_groups_are_refused() {
    let disk = Case::read("llama-f32").on_disk();
    let how = KvQuantization::new(8, 64, 0).unwrap();
    let options = LoadOptions { kv_quantization: Some(how), ..LoadOptions::new(Device::cpu(Isa::best(), 1)) };
    let error = lmx::load(&disk.path, &options).unwrap_err();
    let LoadError::KvQuant(KvQuantError::HeadDim { layer: 0, head_dim: 16, group: 64 }) = error else {
        panic!("{error}")
    };
}

#[test]
fn replies_end_at_eos_stop_strings_and_limits() {
    let mut engine = engine("llama-f32", EngineOptions::default());
    let prompt = tokens(10, 5);
    let free: Vec<Event> =
        engine.generate(Request::new(prompt.clone(), 12)).unwrap().map(Result::unwrap).collect();
    let text: String = free.iter().map(|e| e.text.as_str()).collect();
    assert_eq!(free.last().unwrap().finish, Some(FinishReason::Length));
    assert_eq!(free.last().unwrap().stats.generation_tokens, 12);

    // A stop string taken out of the middle of the reply, across tokens.
    let middle: String = text.chars().skip(2).take(3).collect();
    let request = Request { stop: vec![middle.clone()], ..Request::new(prompt.clone(), 12) };
    let stopped: Vec<Event> = engine.generate(request).unwrap().map(Result::unwrap).collect();
    let cut: String = stopped.iter().map(|e| e.text.as_str()).collect();
    assert_eq!(cut, text[..text.find(&middle).unwrap()]);
    assert_eq!(stopped.last().unwrap().finish, Some(FinishReason::Stop));

    // The context is full: every position is used, and the last token needs none.
    let context = engine.model().context_length();
    let request = Request { max_tokens: None, ..Request::new(tokens(context - 3, 1), 0) };
    let full = engine.generate(request).unwrap().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!((full.len(), full.last().unwrap().finish), (4, Some(FinishReason::Length)));
}

#[test]
fn an_end_of_sequence_token_on_the_last_allowed_place_is_a_stop() {
    let mut plain = engine("llama-f32", EngineOptions::default());
    let free: Vec<Event> =
        plain.generate(Request::new(tokens(10, 5), 6)).unwrap().map(Result::unwrap).collect();
    let last = free[5].token.unwrap();
    let first = free.iter().position(|e| e.token == Some(last)).unwrap();
    let mut eos = EosSet::default();
    eos.insert(last, EosSource::User);
    let mut stopping = engine_ending_at("llama-f32", EngineOptions::default(), eos);
    let ended: Vec<Event> =
        stopping.generate(Request::new(tokens(10, 5), first + 1)).unwrap().map(Result::unwrap).collect();
    let end = ended.last().unwrap();
    assert_eq!((ended.len(), end.token, end.finish), (first + 1, Some(last), Some(FinishReason::Stop)));
    let request = Request { ignore_eos: true, ..Request::new(tokens(10, 5), 6) };
    assert_eq!(stopping.generate(request).unwrap().count(), 6);
}
