//! Whole replies: of many requests, or many of one prompt, from which the best or the most frequent is taken.

use super::{Engine, FinishReason, Request, RequestError, Stats, Update};
use crate::prompt_cache::PromptCache;
use crate::sample::fold_seed;
use std::collections::BTreeMap;

/// A finished reply.
#[derive(Debug)]
pub struct Reply {
    /// Its text, without a stop string.
    pub text: String,
    /// Its tokens, an end-of-sequence token included.
    pub token_ids: Vec<u32>,
    /// The natural logarithm of each token's probability, after logits processors, before temperature and filters.
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// What it cost.
    pub stats: Stats,
    /// Its keys and values and those of the prompt, without the last token's, if the request asked for them
    /// ([`Request::return_cache`]).
    pub cache: Option<PromptCache>,
}

/// What makes a reply better than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// The logarithm of its probability: the sum over its tokens. Favours short replies.
    LogProb,
    /// The mean over its tokens.
    LengthNormalized,
}

impl Score {
    /// The score of a reply; 0 without tokens.
    #[must_use]
    pub fn of(self, reply: &Reply) -> f64 {
        let sum: f64 = reply.logprobs.iter().copied().map(f64::from).sum();
        match self {
            Score::LogProb => sum,
            Score::LengthNormalized => sum / reply.logprobs.len().max(1) as f64,
        }
    }
}

/// An answer and who gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vote {
    /// The answer.
    pub answer: String,
    /// The replies that gave it, by index, ascending.
    pub replies: Vec<usize>,
}

impl Engine {
    /// Runs requests, whose prompts are texts or tokens, to their ends, as many at a time as the engine runs, and returns
    /// their replies in order.
    /// `finished` is told how many have ended, from time to time.
    ///
    /// # Errors
    /// Each request has its own; the others are not touched.
    pub fn batch_generate(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        finished: &mut dyn FnMut(usize),
    ) -> Vec<Result<Reply, RequestError>> {
        let mut replies: Vec<Option<Result<Reply, RequestError>>> = Vec::new();
        let mut open = BTreeMap::new();
        for request in requests {
            let submitted =
                self.submit(request).map(|id| drop(open.insert(id, (replies.len(), Reply::empty()))));
            replies.push(submitted.err().map(Err));
        }
        while !open.is_empty() {
            for (id, update) in self.step() {
                let Some((index, reply)) = open.get_mut(&id) else { continue };
                let ended = match update {
                    Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => None,
                    Update::Failed(error) => Some(Err(error)),
                    Update::Token(event) => {
                        reply.text.push_str(&event.text);
                        reply.logprobs.extend(event.token.map(|_| event.logprob));
                        reply.token_ids.extend(event.token);
                        event.finish.map(|finish| {
                            let reply = std::mem::replace(reply, Reply::empty());
                            let cache = self.left_by(id);
                            Ok(Reply { finish, stats: event.stats, cache, ..reply })
                        })
                    }
                };
                if let (Some(ended), Some(slot)) = (ended, replies.get_mut(*index)) {
                    *slot = Some(ended);
                    open.remove(&id);
                }
            }
            finished(replies.iter().flatten().count());
        }
        replies.into_iter().flatten().collect()
    }

    /// `count` replies to one prompt. `make` builds the request from the seed that it is to have: reply 0 has `seed`
    /// itself, reply i one that follows from it and i. In an engine with a prefix cache the prompt is run once.
    ///
    /// # Errors
    /// The first request's that fails.
    pub fn choices(
        &mut self,
        count: usize,
        seed: u64,
        make: &mut dyn FnMut(u64) -> Request,
    ) -> Result<Vec<Reply>, RequestError> {
        let mut requests: Vec<Request> = (0..count as u64).map(|i| make(fold_seed(seed, i))).collect();
        requests.iter_mut().try_for_each(|request| self.encode(request))?;
        // Without a prefix cache there would be nothing left of it.
        let shares = count > 1 && self.options.prefix_cache.is_some();
        let shares = |request: &&Request| shares && request.tokens.len() > 1 && request.cache.is_none();
        if let Some(request) = requests.first().filter(shares) {
            let prompt = request.tokens[..request.tokens.len() - 1].to_vec();
            let request = Request { adapter: request.adapter.clone(), ..Request::new(prompt, 0) };
            self.generate(request)?.try_for_each(|event| event.map(drop))?;
        }
        self.batch_generate(requests, &mut |_| {}).into_iter().collect()
    }

    /// The `keep` best of `count` replies, best first (of equal ones the earlier), with their scores. See
    /// [`Engine::choices`] for `seed` and `make`.
    ///
    /// # Errors
    /// The first request's that fails.
    pub fn best_of_n(
        &mut self,
        count: usize,
        keep: usize,
        score: Score,
        seed: u64,
        make: &mut dyn FnMut(u64) -> Request,
    ) -> Result<Vec<(Reply, f64)>, RequestError> {
        let scored = |reply: Reply| {
            let score = score.of(&reply);
            (reply, score)
        };
        let mut scored: Vec<_> = self.choices(count, seed, make)?.into_iter().map(scored).collect();
        scored.sort_by(|a, b| b.1.total_cmp(&a.1));
        scored.truncate(keep);
        Ok(scored)
    }
}

/// Counts the answers that `extract` finds in replies: most votes first, of equal ones the one that came first. A reply
/// without an answer has no vote.
pub fn majority_vote(replies: &[Reply], extract: &dyn Fn(&str) -> Option<String>) -> Vec<Vote> {
    let mut votes: Vec<Vote> = Vec::new();
    for (index, reply) in replies.iter().enumerate() {
        let Some(answer) = extract(&reply.text) else { continue };
        match votes.iter_mut().find(|vote| vote.answer == answer) {
            Some(vote) => vote.replies.push(index),
            None => votes.push(Vote { answer, replies: vec![index] }),
        }
    }
    votes.sort_by_key(|vote| std::cmp::Reverse(vote.replies.len()));
    votes
}

impl Reply {
    fn empty() -> Self {
        Self {
            text: String::new(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            finish: FinishReason::Length,
            stats: Stats::default(),
            cache: None,
        }
    }
}
