//! Several replies to one prompt: their seeds, their cost, the best of them, and votes.

use crate::common::tiny;
use lmx::cache::{KvQuantization, KvWindow, PrefixCacheOptions};
use lmx::engine::{
    Engine, EngineOptions, FinishReason, Reply, Request, RequestError, Score, Stats, majority_vote,
};
use lmx::sample::{SamplingParams, fold_seed};

fn engine(prefix_cache: Option<PrefixCacheOptions>) -> Engine {
    tiny::engine("llama-f32", 1, EngineOptions { prefix_cache, max_running: 5, ..EngineOptions::default() })
}

fn request(seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 1.2, ..SamplingParams::default() };
    let tokens = (0..90).map(|i| i * i % 37).collect();
    Request { sampling, seed: Some(seed), ..Request::new(tokens, 9) }
}

fn reply(text: &str, logprobs: &[f32]) -> Reply {
    let (token_ids, finish) = (vec![1; logprobs.len()], FinishReason::Stop);
    Reply {
        text: text.to_owned(),
        token_ids,
        logprobs: logprobs.to_vec(),
        finish,
        stats: Stats::default(),
        cache: None,
    }
}

#[test]
fn choice_i_is_the_reply_of_its_own_seed_and_the_prompt_is_run_once() {
    let mut shared = engine(Some(PrefixCacheOptions::default()));
    let choices = shared.choices(8, 41, &mut request).unwrap();
    let mut solo = engine(None);
    for (i, choice) in choices.iter().enumerate() {
        let alone = solo.batch_generate([request(fold_seed(41, i as u64))], &mut |_| {}).remove(0).unwrap();
        assert_eq!((&choice.token_ids, &choice.logprobs), (&alone.token_ids, &alone.logprobs), "choice {i}");
        let cached = if i == 0 { 0 } else { 89 };
        assert_eq!((choice.stats.prompt_tokens, choice.stats.cached_tokens), (90, cached), "choice {i}");
        assert_eq!(choice.logprobs.len(), 9);
    }
    let apart = solo.choices(2, 41, &mut request).unwrap();
    assert_eq!(apart[1].token_ids, choices[1].token_ids, "without a prefix cache");
    assert_eq!(apart[1].stats.cached_tokens, 89, "it is run once all the same");
    assert_eq!(solo.kv().budget().used(), 0);
    assert_eq!(fold_seed(41, 0), 41, "the first has the seed itself");
    let mut seeds: Vec<u64> = (0..1000).map(|i| fold_seed(7, i)).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 1000);
    assert!(choices.windows(2).any(|pair| pair[0].token_ids != pair[1].token_ids));
}

/// Requests of `prompt` tokens, more than run at the same time.
fn choices_of(engine: &mut Engine, prompt: usize, max_tokens: usize) -> Vec<Reply> {
    let tokens: Vec<u32> = (0..prompt as u32).map(|i| i * i % 37).collect();
    let mut make = |seed| Request { tokens: tokens.clone(), max_tokens: Some(max_tokens), ..request(seed) };
    engine.choices(8, 41, &mut make).unwrap()
}

#[test]
fn eight_choices_cost_one_prefill_whatever_the_model_and_the_cache() {
    let window = Some(KvWindow::new(40, 4).unwrap());
    let quantized = Some(KvQuantization::new(8, 32, 30).unwrap());
    let small = Some(PrefixCacheOptions { bytes_max: 1, ..PrefixCacheOptions::default() });
    let unseen = Some(PrefixCacheOptions { keep_unseen: false, ..PrefixCacheOptions::default() });
    let options = |kv_window, kv_quantization, prefix_cache| EngineOptions {
        kv_window,
        kv_quantization,
        prefix_cache,
        max_running: 3,
        ..EngineOptions::default()
    };
    let cases = [
        ("llama-f32", options(None, None, small)),
        ("llama-f32", options(window, None, unseen)),
        // Whose keys depend on how long the replies may become.
        ("phi3-longrope-f32", options(None, None, Some(PrefixCacheOptions::default()))),
        ("gemma3-f32", options(None, quantized, None)),
        // Whose state is kept every 256 tokens only.
        ("lfm2-f32", options(None, None, Some(PrefixCacheOptions::default()))),
    ];
    for (case, options) in cases {
        let mut solo = tiny::engine(case, 1, EngineOptions { prefix_cache: None, ..options });
        let prompt = solo.model().original_context().map_or(90, |original| original - 4);
        let mut shared = tiny::engine(case, 1, options);
        for (i, choice) in choices_of(&mut shared, prompt, 9).iter().enumerate() {
            let tokens = (0..prompt as u32).map(|i| i * i % 37).collect();
            let alone = Request { tokens, ..request(fold_seed(41, i as u64)) };
            let alone = solo.batch_generate([alone], &mut |_| {}).remove(0).unwrap();
            assert_eq!(
                (&choice.token_ids, &choice.logprobs),
                (&alone.token_ids, &alone.logprobs),
                "{case} {i}"
            );
            let cached = if i == 0 { 0 } else { prompt - 1 };
            assert_eq!(choice.stats.cached_tokens, cached, "{case}, choice {i}");
        }
        shared.clear_prefixes();
        assert_eq!(shared.kv().budget().used(), 0, "{case}");
    }
}

#[test]
fn choices_that_do_not_fit_together_are_preempted_and_stay_the_same() {
    let expected = choices_of(&mut engine(None), 90, 150);
    // Less than the large request and what the choices share.
    let kv_memory = engine(None).kv().spec().bytes_at(260);
    let mut tight = tiny::engine("llama-f32", 1, EngineOptions { kv_memory, ..EngineOptions::default() });
    // A request that came before them, and needs all the room there is.
    let tokens = (0..20).collect();
    let large = tight.submit(Request { ignore_eos: true, ..Request::new(tokens, 230) }).unwrap();
    let got = choices_of(&mut tight, 90, 150);
    assert!(got.iter().any(|reply| reply.stats.preemptions > 0));
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((&got.token_ids, &got.logprobs), (&expected.token_ids, &expected.logprobs));
    }
    assert!(tight.stats(large).is_none(), "it came to its end");
    assert!(tight.is_idle() && tight.kv().budget().used() == 0);
}

#[test]
fn the_best_have_the_highest_scores() {
    let short = reply("a", &[-1.0, -0.5]);
    let long = reply("b", &[-0.5, -0.75, -0.5, -0.25]);
    assert_eq!((Score::LogProb.of(&short), Score::LengthNormalized.of(&short)), (-1.5, -0.75));
    assert_eq!((Score::LogProb.of(&long), Score::LengthNormalized.of(&long)), (-2.0, -0.5));
    assert_eq!(Score::LengthNormalized.of(&reply("", &[])), 0.0);

    let mut engine = engine(Some(PrefixCacheOptions::default()));
    let all = engine.choices(6, 3, &mut request).unwrap();
    let best = engine.best_of_n(6, 2, Score::LogProb, 3, &mut request).unwrap();
    let mut scores: Vec<f64> = all.iter().map(|reply| Score::LogProb.of(reply)).collect();
    scores.sort_by(|a, b| b.total_cmp(a));
    assert_eq!(best.iter().map(|(_, score)| *score).collect::<Vec<_>>(), scores[..2]);
    assert_eq!(Score::LogProb.of(&best[0].0), best[0].1);
}

#[test]
fn what_replies_cost_together_has_the_prompt_once_and_all_of_them() {
    let stats = |cached_tokens, tokens, first_token_seconds, generation_seconds, seed| Stats {
        prompt_tokens: 90,
        cached_tokens,
        generation_tokens: tokens,
        drafted_tokens: 2 * tokens,
        accepted_tokens: tokens,
        preemptions: 1,
        first_token_seconds,
        generation_seconds,
        seed,
        ..Stats::default()
    };
    let all = [stats(10, 5, 0.5, 2.0, 41), stats(89, 7, 0.75, 3.25, 9)];
    let sum = Stats::of_choices(&all.map(|stats| Reply { stats, ..reply("a", &[-1.0]) }));
    let (drafted_tokens, accepted_tokens) = (24, 12);
    let whole = Stats { drafted_tokens, accepted_tokens, preemptions: 2, ..stats(10, 12, 0.5, 3.5, 41) };
    assert_eq!((sum.prompt_tps(), sum), (160.0, whole));
    assert_eq!(Stats::of_choices(&[]), Stats::default());
}

#[test]
fn votes_are_counted_and_ties_go_to_the_first() {
    let replies = ["so 5", "it is 7", "no idea", "7!", "5", "9"].map(|text| reply(text, &[]));
    let digits = |text: &str| -> Option<String> {
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        (!digits.is_empty()).then_some(digits)
    };
    let votes = majority_vote(&replies, &digits);
    let counted: Vec<(&str, &[usize])> = votes.iter().map(|v| (v.answer.as_str(), &v.replies[..])).collect();
    assert_eq!(counted, [("5", &[0, 4][..]), ("7", &[1, 3]), ("9", &[5])]);
    assert!(majority_vote(&replies, &|_| None).is_empty());
}

#[test]
fn a_batch_keeps_its_order_and_errors_to_themselves() {
    let mut engine = engine(None);
    let bad = Request::new(Vec::new(), 3);
    let mut counts = Vec::new();
    let requests = [request(1), bad, Request::new(vec![1, 2], 2), Request::new(vec![5], 0)];
    let mut replies = engine.batch_generate(requests, &mut |count| counts.push(count)).into_iter();
    assert_eq!(replies.next().unwrap().unwrap().token_ids.len(), 9);
    assert!(matches!(replies.next(), Some(Err(RequestError::EmptyPrompt))));
    assert_eq!(replies.next().unwrap().unwrap().token_ids.len(), 2);
    assert_eq!(replies.next().unwrap().unwrap().finish, FinishReason::Length);
    assert_eq!(counts.last(), Some(&4));
    assert!(engine.choices(2, 0, &mut |_| Request::new(Vec::new(), 1)).is_err());
}
