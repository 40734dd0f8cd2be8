//! Several replies to one prompt: their seeds, their cost, the best of them, and votes.

use crate::common::tiny;
use lmx::cache::PrefixCacheOptions;
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
        assert_eq!((choice.stats.prompt_tokens, choice.stats.cached_tokens), (90, 89), "choice {i}");
        assert_eq!(choice.logprobs.len(), 9);
    }
    let apart = solo.choices(2, 41, &mut request).unwrap();
    assert_eq!(apart[1].token_ids, choices[1].token_ids, "without a prefix cache");
    assert_eq!(apart[1].stats.cached_tokens, 0);
    assert_eq!(fold_seed(41, 0), 41, "the first has the seed itself");
    let mut seeds: Vec<u64> = (0..1000).map(|i| fold_seed(7, i)).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 1000);
    assert!(choices.windows(2).any(|pair| pair[0].token_ids != pair[1].token_ids));
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
