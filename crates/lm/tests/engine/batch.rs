//! Requests in the hands of a caller who steps: texts or tokens, caches taken out at any time, removal, statistics.

use crate::common::tiny;
use lmx::KvType;
use lmx::cache::PrefixCacheOptions;
use lmx::engine::{BatchGenerator, Engine, EngineOptions, Event, Reply, Request, RequestError, Update};
use lmx::sample::SamplingParams;

/// Its tokens are few enough for the tiny models.
const TEXT: &str = "HELLO,WORLD!";

fn engine(case: &str) -> Engine {
    let options = EngineOptions { kv_type: KvType::F32, prefill_step_size: 32, ..EngineOptions::default() };
    tiny::engine(case, 2, options)
}

fn request(length: usize, max_tokens: usize) -> Request {
    let tokens = (0..length).map(|i| ((i * i * 5 + i) % 37) as u32).collect();
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    Request { sampling, seed: Some(3), ..Request::new(tokens, max_tokens) }
}

fn alone(engine: &mut Engine, request: Request) -> Reply {
    engine.batch_generate([request], &mut |_| {}).remove(0).unwrap()
}

fn bits(reply: &Reply) -> (&[u32], Vec<u32>, &str) {
    (&reply.token_ids, reply.logprobs.iter().map(|p| p.to_bits()).collect(), &reply.text)
}

#[test]
fn texts_and_tokens_are_the_same_prompt() {
    let mut engine = engine("llama-f32");
    let tokens = engine.tokenizer().encode(TEXT, true).unwrap();
    let requests = [Request::from_text(TEXT, 9), Request::new(tokens.clone(), 9)];
    let replies: Vec<Reply> =
        engine.batch_generate(requests, &mut |_| {}).into_iter().map(Result::unwrap).collect();
    assert_eq!(bits(&replies[0]), bits(&replies[1]));
    assert_eq!((replies[0].token_ids.len(), replies[0].stats.prompt_tokens), (9, tokens.len()));
    let choices =
        engine.choices(2, 0, &mut |seed| Request { seed: Some(seed), ..Request::from_text(TEXT, 9) });
    assert_eq!(bits(&choices.unwrap()[1]), bits(&replies[0]));

    let both = Request { text: Some(TEXT.to_owned()), ..Request::new(tokens.clone(), 9) };
    let error = engine.submit(both).unwrap_err();
    assert!(matches!(error, RequestError::TextAndTokens { tokens: n } if n == tokens.len()), "{error}");
    assert!(matches!(engine.submit(Request::from_text("", 9)), Err(RequestError::EmptyPrompt)));
    assert!(engine.is_idle() && engine.kv().is_empty());
}

/// A request that gets `more` tokens after what another left, and what it would get from the beginning.
fn continued(engine: &mut Engine, known: &[u32], cache: lmx::prompt_cache::PromptCache) {
    let held = cache.len();
    let tokens = [known, &[7, 8, 9]].concat();
    let whole = alone(engine, Request { tokens: tokens.clone(), ..request(0, 20) });
    let reply = alone(engine, Request { tokens, cache: Some(cache), ..request(0, 20) });
    assert_eq!(bits(&reply), bits(&whole));
    assert_eq!((reply.stats.cached_tokens, whole.stats.cached_tokens), (held, 0));
}

#[test]
fn a_cache_that_is_taken_at_any_time_continues_with_the_same_bits() {
    for case in ["llama-f32", "gemma3-q4", "lfm2-f32"] {
        let mut engine = engine(case);
        let prompt = request(80, 0).tokens;
        let mut taken = Vec::new();
        let mut known = prompt.clone();
        let mut batch = BatchGenerator::new(&mut engine);
        let id = batch.insert(Request { return_cache: true, ..request(80, 10) }).unwrap();
        batch.insert(request(33, 30)).unwrap();
        assert_eq!(batch.extract_cache(id).unwrap().len(), 0, "it waits");
        let mut first = true;
        while let Some(updates) = batch.next() {
            if first {
                let cache = batch.extract_cache(id).unwrap();
                assert!(!cache.is_empty() && cache.len() < prompt.len(), "{case}: in the prompt");
                taken.push((known.clone(), cache));
                first = false;
            }
            for (_, event) in updates.into_iter().filter(|(of, _)| *of == id) {
                let Update::Token(Event { token: Some(token), finish, .. }) = event else { continue };
                known.push(token);
                if known.len() == prompt.len() + 4 || finish.is_some() {
                    let cache = batch.extract_cache(id).unwrap();
                    assert_eq!(cache.tokens(), Some(&known[..known.len() - 1]), "{case}");
                    taken.push((known.clone(), cache));
                }
            }
        }
        assert_eq!(known.len(), prompt.len() + 10);
        assert!(batch.extract_cache(id).is_none(), "{case}: only in the step after its end");
        drop(batch);
        assert_eq!(taken.len(), 3);
        for (known, cache) in taken {
            continued(&mut engine, &known, cache);
        }
        assert!(engine.kv().is_empty() && engine.kv().budget().used() == 0, "{case}: every block was freed");
    }
}

#[test]
fn a_step_ends_where_a_segment_does() {
    segments("llama-f32");
    segments("lfm2-f32");
}

fn segments(case: &str) {
    let whole = request(83, 6);
    let prompt = whole.tokens.clone();
    let mut plain = engine(case);
    let expected = alone(&mut plain, whole);
    let parts: Vec<Vec<u32>> =
        [&prompt[..10], &[], &prompt[10..57], &prompt[57..]].map(<[u32]>::to_vec).into();
    let options = EngineOptions {
        kv_type: KvType::F32,
        prefix_cache: Some(PrefixCacheOptions::default()),
        ..EngineOptions::default()
    };
    let mut engine = tiny::engine(case, 2, options);
    // The second round finds the prompt in the prefix cache.
    for round in 0..2 {
        let mut batch = BatchGenerator::new(&mut engine);
        let id = batch.insert_segments(&parts, request(0, 6)).unwrap();
        let (mut taken, mut generated) = (Vec::new(), Vec::new());
        while let Some(updates) = batch.next() {
            for (_, update) in updates {
                match update {
                    Update::Prefill { done, total: 83 } => {
                        let cache = batch.extract_cache(id).unwrap();
                        assert_eq!((cache.len(), cache.tokens()), (done, Some(&prompt[..done])));
                        taken.push(cache);
                    }
                    Update::Token(event) => generated.extend(event.token),
                    other => panic!("{other:?}"),
                }
            }
        }
        drop(batch);
        let ends: Vec<usize> = taken.iter().map(lmx::prompt_cache::PromptCache::len).collect();
        assert_eq!(ends, [10, 57, 83], "round {round}");
        assert_eq!(generated, expected.token_ids);
        let reply = alone(&mut engine, Request { cache: Some(taken.swap_remove(1)), ..request(83, 6) });
        assert_eq!(bits(&reply), bits(&expected));
        assert_eq!(reply.stats.cached_tokens, 57);
    }
    let wrong = |end| Request { segment_ends: vec![1, end], ..request(5, 1) };
    for end in [0, 6] {
        let error = engine.submit(wrong(end)).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("segment_ends must be numbers of prompt tokens from 1 to 5, but one is {end}")
        );
    }
    assert!(matches!(
        BatchGenerator::new(&mut engine).insert_segments(&[], request(0, 1)),
        Err(RequestError::EmptyPrompt)
    ));
}

#[test]
fn replies_have_caches_on_request_only() {
    let mut engine = engine("gemma3-q4");
    let requests = [request(40, 12), Request { return_cache: true, ..request(50, 12) }];
    let mut replies = engine.batch_generate(requests, &mut |_| {}).into_iter().map(Result::unwrap);
    assert!(replies.next().unwrap().cache.is_none());
    let reply = replies.next().unwrap();
    let known = [&request(50, 0).tokens[..], &reply.token_ids].concat();
    let cache = reply.cache.unwrap();
    assert_eq!(cache.len(), 61);
    continued(&mut engine, &known, cache);
    assert_eq!(engine.kv().budget().used(), 0);
}

#[test]
fn removing_frees_blocks_and_the_statistics_count_everybody() {
    let mut engine = engine("llama-f32");
    let mut batch = BatchGenerator::new(&mut engine);
    assert!(batch.next().is_none());
    let removed = batch.insert(request(60, 40)).unwrap();
    let kept = batch.insert(request(20, 5)).unwrap();
    let mut of_removed = 0;
    for _ in 0..4 {
        let updates = batch.next().unwrap();
        of_removed +=
            updates.iter().filter(|(id, u)| *id == removed && matches!(u, Update::Token(_))).count();
    }
    assert!(of_removed > 0);
    let used = batch.engine().kv().budget().used();
    batch.remove(removed);
    assert!(batch.engine().kv().budget().used() < used);
    assert!(batch.extract_cache(removed).is_none());
    let mut rest = Vec::new();
    batch.by_ref().for_each(|updates| rest.extend(updates));
    assert!(rest.iter().all(|(id, _)| *id == kept));
    batch.insert(request(3, 1)).unwrap();
    assert_eq!(batch.by_ref().count(), 1, "more can be inserted after the end");
    let stats = batch.stats();
    assert_eq!((stats.requests, stats.prompt_tokens), (3, 83));
    assert_eq!(stats.generation_tokens, of_removed + 5 + 1);
    assert!(stats.steps > 5 && stats.seconds > 0.0, "{stats:?}");
    let [prompts, generated] = [stats.prompt_tps(), stats.generation_tps()].map(|tps| tps * stats.seconds);
    assert_eq!((prompts.round(), generated.round()), (83.0, (of_removed + 6) as f64));
    batch.insert(request(9, 9)).unwrap();
    drop(batch);
    assert!(engine.is_idle() && engine.kv().is_empty());
    assert_eq!(engine.kv().budget().used(), 0);
}
