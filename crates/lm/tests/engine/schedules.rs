//! Many requests with all kinds of options join, leave and are cancelled at random, with so little room for keys and
//! values that some are preempted: each that finishes gets, bit for bit, what it gets alone.

use crate::common::golden_cases::Case;
use crate::common::running::{alone, collect, essence, together};
use crate::common::schedule_requests::{Limits, Requests, Tally, run_schedule, solo, tight};
use crate::common::tiny;
use lmx::KvType;
use lmx::cache::{KvQuantization, KvWindow, PrefixCacheOptions};
use lmx::engine::{DraftModel, Engine, EngineOptions, Request, RequestError, RequestId, Update};
use lmx::models::Model;
use lmx::sample::Key;
use lmx::text::{EosSet, EosSource};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A tiny model whose context is 4,096 tokens.
fn model(case: &str) -> Box<dyn Model> {
    let mut case = Case::read(case);
    case.config["max_position_embeddings"] = json!(4096);
    Box::new(tiny::model_of(&case, 2))
}

fn engine(case: &str, options: EngineOptions) -> Engine {
    let mut eos = EosSet::default();
    eos.insert(33, EosSource::Config);
    let options = EngineOptions { kv_type: KvType::F32, ..options };
    Engine::new(model(case), tiny::tokenizer(), eos, options).unwrap()
}

/// With a draft model that has room for a few sequences only.
fn drafted(case: &str, options: EngineOptions) -> Engine {
    let engine = engine(case, options);
    if !engine.model().states().is_empty() {
        return engine;
    }
    let kv_memory = engine.kv().spec().peak_bytes(1700) * 2;
    let draft =
        DraftModel { model: model(case), tokenizer: tiny::tokenizer(), kv_type: KvType::F32, kv_memory };
    engine.with_draft(draft).unwrap()
}

/// `schedules` schedules of 64 requests.
fn check(case: &str, schedules: u64, options: EngineOptions) {
    let roomy = engine(case, options);
    let speculates = roomy.model().states().is_empty();
    let limits = Limits { count: 64, at_once: 64, longest: 1500, most_new: 120, speculates };
    let requests = Requests::new(&roomy, limits);
    let expected = solo(&mut engine(case, options), &requests);
    let mut sum = Tally::default();
    for seed in 0..schedules {
        let mut engine = drafted(case, tight(options, &roomy, &requests, seed, schedules));
        sum += run_schedule(&mut engine, &requests, &expected, seed, &format!("{case}, schedule {seed}"));
        assert_eq!(engine.draft_kv().map_or(0, |kv| kv.budget().used()), 0, "{case}: the draft's too");
    }
    println!("{case}: {sum:?}");
    assert!(sum.finished > 30 * schedules as usize && sum.cancelled > 0, "{case}: {sum:?}");
    assert!(sum.preemptions > 0, "{case}: {sum:?}");
}

#[test]
fn full_attention() {
    check("llama-f32", 8, EngineOptions::default());
}

#[test]
fn windows_and_quantized_weights() {
    check("gemma3-q4", 6, EngineOptions::default());
}

#[test]
fn bounded_and_quantized_keys_and_values() {
    let kv_window = Some(KvWindow::new(700, 4).unwrap());
    check("gemma3-f32", 2, EngineOptions { kv_window, ..EngineOptions::default() });
    let kv_quantization = Some(KvQuantization::new(4, 32, 300).unwrap());
    check("gemma2-f32", 2, EngineOptions { kv_quantization, ..EngineOptions::default() });
}

#[test]
fn recurrent_state() {
    check("lfm2-f32", 2, EngineOptions::default());
}

/// Sliding layers between global ones, with windows of 8 that wrap again and again while others join: short schedules,
/// and many of them.
#[test]
fn two_hundred_schedules_over_small_windows() {
    const CASES: [&str; 4] = ["qwen2-f32", "gemma3-f32", "gemma2-q4", "mistral-f32"];
    const ENGINES: u64 = 10;
    const SCHEDULES: u64 = 5;
    let limits = Limits { count: 40, at_once: 8, longest: 90, most_new: 24, speculates: true };
    let mut sum = Tally::default();
    for case in CASES {
        let mut roomy = engine(case, EngineOptions::default());
        let requests = Requests::new(&roomy, limits);
        let expected = solo(&mut roomy, &requests);
        for kind in 0..ENGINES {
            let options = tight(EngineOptions::default(), &roomy, &requests, kind, ENGINES);
            let mut engine = drafted(case, options);
            for seed in SCHEDULES * kind..SCHEDULES * (kind + 1) {
                let name = format!("{case}, schedule {seed}");
                sum += run_schedule(&mut engine, &requests, &expected, seed, &name);
                assert_eq!(
                    engine.draft_kv().map_or(0, |kv| kv.budget().used()),
                    0,
                    "{name}: the draft's too"
                );
            }
        }
    }
    println!("{sum:?}");
    let schedules = CASES.len() * (ENGINES * SCHEDULES) as usize;
    assert!(schedules == 200 && sum.finished > 6 * schedules && sum.cancelled > 50, "{sum:?}");
    assert!(sum.preemptions > 20 && sum.accepted > 500, "{sum:?}");
}

/// A window of 512 has wrapped when a short prompt joins, and then one that is a token longer than the window.
#[test]
fn prompts_shorter_and_longer_than_the_window_join_when_it_has_wrapped() {
    let wide = || {
        let mut case = Case::read("gemma3-f32");
        (case.config["sliding_window"], case.config["max_position_embeddings"]) = (json!(512), json!(4096));
        let options = EngineOptions { kv_type: KvType::F32, ..EngineOptions::default() };
        Engine::new(Box::new(tiny::model_of(&case, 2)), tiny::tokenizer(), EosSet::default(), options)
            .unwrap()
    };
    let requests = || [700, 5, 513].into_iter().zip(1..).map(|(length, salt)| endless(length, salt, 60));
    let mut solo = wide();
    let expected: Vec<_> = requests().map(|request| essence(&alone(&mut solo, request))).collect();
    let mut engine = wide();
    let mut events = BTreeMap::new();
    for request in requests() {
        engine.submit(request).unwrap();
        // The one before it generates.
        (0..12).for_each(|_| collect(engine.step(), &mut events));
    }
    while !engine.is_idle() {
        collect(engine.step(), &mut events);
    }
    let got: Vec<_> = events.values().map(|events| essence(events)).collect();
    assert_eq!(got, expected);
}

fn tokens(n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 5 + i + salt * 13) % 32) as u32).collect()
}

/// One that generates until it has `max_tokens` tokens.
fn endless(prompt: usize, salt: usize, max_tokens: usize) -> Request {
    Request { ignore_eos: true, ..Request::new(tokens(prompt, salt), max_tokens) }
}

/// Which requests got a token.
fn spoke(updates: &[(RequestId, Update)]) -> Vec<RequestId> {
    let token = |(id, update): &(RequestId, Update)| matches!(update, Update::Token(_)).then_some(*id);
    updates.iter().filter_map(token).collect()
}

/// The error of the one request that failed.
fn failure(updates: &[(RequestId, Update)]) -> Option<(RequestId, String)> {
    updates.iter().find_map(|(id, update)| match update {
        Update::Failed(error) => Some((*id, error.to_string())),
        _ => None,
    })
}

#[test]
fn a_long_prompt_never_stalls_running_streams_for_more_than_one_chunk() {
    let options = EngineOptions { prefill_step_size: 256, ..EngineOptions::default() };
    let mut engine = engine("llama-f32", options);
    let streams: Vec<RequestId> = (0..6).map(|i| engine.submit(endless(3, i, 60)).unwrap()).collect();
    while spoke(&engine.step()).len() < streams.len() {}
    let long = engine.submit(endless(4000, 9, 3)).unwrap();
    let (mut steps, mut read) = (0, 0);
    loop {
        let updates = engine.step();
        steps += 1;
        let spoke = spoke(&updates);
        assert!(streams.iter().all(|id| spoke.contains(id)), "step {steps}: every stream gets its token");
        for (id, update) in &updates {
            if let (true, Update::Prefill { done, total }) = (*id == long, update) {
                assert!(done - read <= 256 && *total == 4000, "{done} after {read}");
                read = *done;
            }
        }
        if spoke.contains(&long) {
            break;
        }
    }
    assert_eq!(steps, 4000_usize.div_ceil(256));
}

#[test]
fn short_prompts_share_steps_with_long_ones_and_priorities_go_first() {
    let options = EngineOptions { prefill_step_size: 64, prompt_concurrency: 3, ..EngineOptions::default() };
    let mut engine = engine("llama-f32", options);
    let long = engine.submit(endless(2000, 1, 2)).unwrap();
    engine.step();
    let short = engine.submit(endless(30, 2, 2)).unwrap();
    assert!(spoke(&engine.step()).contains(&short), "it does not wait for the end of the long one");
    let first = engine.submit(endless(100, 3, 2)).unwrap();
    let urgent = engine.submit(Request { priority: 1, ..endless(100, 4, 2) }).unwrap();
    let late = engine.submit(endless(10, 5, 2)).unwrap();
    let mut order = Vec::new();
    while !engine.is_idle() {
        for id in spoke(&engine.step()) {
            if ![short].contains(&id) && !order.contains(&id) {
                order.push(id);
            }
        }
    }
    assert_eq!(order, [urgent, late, first, long], "{long:?} {first:?} {urgent:?} {late:?}");
}

#[test]
fn the_newest_is_preempted_and_the_oldest_never_is() {
    let mut roomy = engine("llama-f32", EngineOptions::default());
    let requests = || (0..4).map(|i| endless(60, i, 100));
    let expected: Vec<_> = requests().map(|request| essence(&alone(&mut roomy, request))).collect();
    // Room for less than two whole requests.
    let kv_memory = roomy.kv().spec().bytes_at(310);
    for prefix_cache in [None, Some(PrefixCacheOptions::default())] {
        let mut engine =
            engine("llama-f32", EngineOptions { kv_memory, prefix_cache, ..EngineOptions::default() });
        let events = together(&mut engine, requests().collect());
        let preemptions: Vec<usize> = events.iter().map(|e| e.last().unwrap().stats.preemptions).collect();
        assert!(preemptions[0] == 0 && preemptions.iter().sum::<usize>() > 0, "{preemptions:?}");
        assert_eq!(events.iter().map(|events| essence(events)).collect::<Vec<_>>(), expected);
        engine.clear_prefixes();
        assert_eq!(engine.kv().budget().used(), 0);
    }
}

#[test]
fn cancelling_frees_blocks_at_once_wherever_a_request_is() {
    let options = EngineOptions { prefill_step_size: 32, max_running: 2, ..EngineOptions::default() };
    let mut engine = engine("llama-f32", options);
    let decoding = engine.submit(endless(3, 1, 500)).unwrap();
    engine.step();
    let reading = engine.submit(endless(900, 2, 5)).unwrap();
    engine.step();
    engine.step();
    let waiting = engine.submit(endless(900, 3, 5)).unwrap();
    engine.step();
    let spec = engine.kv().spec().clone();
    let used = engine.kv().budget().used();
    engine.cancel(waiting);
    assert_eq!(engine.kv().budget().used(), used, "it held nothing yet");
    engine.cancel(reading);
    assert_eq!(engine.kv().budget().used(), spec.bytes_at(6));
    engine.cancel(decoding);
    assert_eq!(engine.kv().budget().used(), 0);
    assert!(engine.is_idle() && engine.step().is_empty());
}

#[test]
fn code_of_one_request_that_panics_ends_that_request_only() {
    let mut engine = engine("llama-f32", EngineOptions::default());
    let expected = alone(&mut engine, endless(20, 1, 20));
    let sampler = |_: &[f32], _: Key| -> u32 { panic!("no idea") };
    let outside = |_: &[f32], _: Key| 64_u32;
    let processor = |history: &[u32], _: &mut [f32]| {
        assert!(history.len() < 22, "too long for me");
        Ok(())
    };
    let good = engine.submit(endless(20, 1, 20)).unwrap();
    let bad = [
        Request { sampler: Some(Box::new(sampler)), ..endless(20, 2, 20) },
        Request { sampler: Some(Box::new(outside)), ..endless(20, 3, 20) },
        Request { logits_processors: vec![Box::new(processor)], ..endless(20, 4, 20) },
    ];
    let bad = bad.map(|request| engine.submit(request).unwrap());
    let (mut events, mut errors) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            match update {
                Update::Token(event) if id == good => events.push(event),
                Update::Failed(error) => errors.push((id, error.to_string())),
                _ => {}
            }
        }
    }
    assert_eq!(essence(&events), essence(&expected));
    let says = [
        (bad[0], "the request's sampler panicked: no idea".to_owned()),
        (bad[1], "the request's sampler chose token 64, outside the vocabulary of 64".to_owned()),
        (bad[2], "the request's logits processor panicked: too long for me".to_owned()),
    ];
    assert_eq!(errors, says);
    assert_eq!(engine.kv().budget().used(), 0);
}

/// An engine of one running request whose clock is set by hand, in milliseconds.
fn timed() -> (Engine, Arc<AtomicU64>) {
    let (start, time) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let now = Arc::clone(&time);
    let clock = move || start + Duration::from_millis(now.load(Ordering::Relaxed));
    let options = EngineOptions { max_running: 1, ..EngineOptions::default() };
    (engine("llama-f32", options).with_clock(clock), time)
}

#[test]
fn deadlines_end_a_request_by_name_and_liveness_tells_of_silence() {
    let (mut engine, time) = timed();
    let limit = Some(Duration::from_secs(2));
    let running = engine.submit(Request { stall_deadline: limit, ..endless(5, 1, 9) }).unwrap();
    assert_eq!(spoke(&engine.step()), [running]);
    let waiting = engine.submit(Request { queue_deadline: limit, ..endless(5, 2, 9) }).unwrap();
    time.store(2000, Ordering::Relaxed);
    let liveness = engine.liveness();
    assert_eq!((liveness.in_flight, liveness.silent), (2, Duration::from_secs(2)));
    assert!(liveness.is_stalled(Duration::from_millis(1900)) && !liveness.is_stalled(Duration::from_secs(2)));
    assert_eq!(spoke(&engine.step()), [running], "not later than the deadlines");
    assert_eq!(engine.liveness().silent, Duration::ZERO);
    time.store(2001, Ordering::Relaxed);
    let says = "queue_deadline: the request was not admitted within 2 s".to_owned();
    assert_eq!(failure(&engine.step()), Some((waiting, says)));
    time.store(4002, Ordering::Relaxed);
    let says = "stall_deadline: the request made no progress for 2 s".to_owned();
    assert_eq!(failure(&engine.step()), Some((running, says)));
    assert!(engine.is_idle() && !engine.liveness().is_stalled(Duration::ZERO));
    assert_eq!(engine.kv().budget().used(), 0);
}

#[test]
fn shutdown_lets_run_for_a_while_and_loses_nobody_without_a_word() {
    let (mut engine, time) = timed();
    let quick = engine.submit(endless(5, 1, 2)).unwrap();
    let slow = engine.submit(endless(5, 2, 200)).unwrap();
    let queued = engine.submit(endless(5, 3, 2)).unwrap();
    engine.shutdown(Duration::from_secs(1));
    assert!(matches!(engine.submit(endless(5, 4, 2)), Err(RequestError::Shutdown)));
    assert_eq!(spoke(&engine.step()), [quick]);
    assert_eq!(spoke(&engine.step()), [quick], "it finishes");
    assert_eq!(spoke(&engine.step()), [slow], "those that wait get their turn");
    time.store(1000, Ordering::Relaxed);
    let ended: Vec<_> = engine
        .step()
        .into_iter()
        .map(|(id, update)| (id, matches!(update, Update::Failed(RequestError::Shutdown))))
        .collect();
    assert_eq!(ended, [(slow, true), (queued, true)]);
    assert!(engine.is_idle() && engine.kv().budget().used() == 0);
}
