//! Whole replies: of many requests, or many of one prompt, from which the best or the most frequent is taken.

use super::active::{Active, extent};
use super::draft::Draft;
use super::{Engine, FinishReason, Request, RequestError, RequestId, Speculation, Stats, Update};
use crate::prompt_cache::PromptCache;
use crate::sample::fold_seed;
use std::collections::BTreeMap;
use std::time::Instant;

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
        let submitted = requests.into_iter().map(|request| self.submit(request)).collect();
        self.finish(submitted, finished)
    }

    /// Runs submitted requests to their ends.
    fn finish(
        &mut self,
        submitted: Vec<Result<RequestId, RequestError>>,
        finished: &mut dyn FnMut(usize),
    ) -> Vec<Result<Reply, RequestError>> {
        let mut replies: Vec<Option<Result<Reply, RequestError>>> = Vec::new();
        let mut open = BTreeMap::new();
        for submitted in submitted {
            let submitted = submitted.map(|id| drop(open.insert(id, (replies.len(), Reply::empty()))));
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

    /// `count` replies to one prompt, which is run once, for the first of them; once by the draft model too. `make` builds the
    /// request from the seed that it is to have: reply 0 has `seed` itself, reply i one that follows from it and i.
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
        let started = Instant::now();
        let prompt = match requests.first() {
            Some(first) if count > 1 => self.run_prompt(first)?,
            _ => None,
        };
        let seconds = started.elapsed().as_secs_f64();
        let (cache, cached_tokens) = prompt.unzip();
        let submitted =
            requests.into_iter().map(|request| self.submit_after(cache.as_ref(), request)).collect();
        drop(cache);
        let replies: Result<Vec<Reply>, _> = self.finish(submitted, &mut |_| {}).into_iter().collect();
        self.draft.iter_mut().for_each(Draft::unshare);
        let mut replies = replies?;
        // All have waited for the prompt, and it was run for the first of them.
        replies.iter_mut().for_each(|reply| reply.stats.first_token_seconds += seconds);
        if let (Some(first), Some(cached_tokens)) = (replies.first_mut(), cached_tokens) {
            first.stats.cached_tokens = cached_tokens;
        }
        Ok(replies)
    }

    /// Runs what choices have in common, the prompt but for its last token; with how many of its tokens were held already.
    /// `None` if there is nothing in common, or the request has a cache of its own.
    fn run_prompt(&mut self, first: &Request) -> Result<Option<(PromptCache, usize)>, RequestError> {
        let Some((_, tokens)) = first.tokens.split_last().filter(|(_, tokens)| !tokens.is_empty()) else {
            return Ok(None);
        };
        if first.cache.is_some() {
            return Ok(None);
        }
        let id = self.submit(Request {
            system_tokens: first.system_tokens.min(tokens.len()),
            adapter: first.adapter.clone(),
            priority: first.priority,
            return_cache: true,
            ..Request::new(tokens.to_vec(), 0)
        })?;
        // The factors of some ropes depend on how long the replies may become.
        let (most, long_context) = extent(&*self.model, first.tokens.len(), first.max_tokens);
        self.waiting.iter_mut().filter(|active| active.id == id).for_each(|a| a.long_context = long_context);
        let reply = self.finish(vec![Ok(id)], &mut |_| {}).pop().transpose()?;
        let guesses = matches!(first.speculation, Some(Speculation::Draft(_)));
        if let Some(draft) = self.draft.as_mut().filter(|_| guesses) {
            draft.share(&first.tokens, most, self.options.prefill_step_size);
        }
        Ok(reply.and_then(|reply| Some((reply.cache?, reply.stats.cached_tokens))))
    }

    /// Queues a choice, which begins with a fork of the prompt's keys and values.
    fn submit_after(
        &mut self,
        prompt: Option<&PromptCache>,
        mut request: Request,
    ) -> Result<RequestId, RequestError> {
        let fits =
            |prompt: &&PromptCache| request.cache.is_none() && prompt.adapter() == request.adapter.as_ref();
        let Some(prompt) = prompt.filter(fits) else { return self.submit(request) };
        request.cache = Some(prompt.fork().map_err(RequestError::Cache)?);
        let id = self.submit(request)?;
        self.waiting.iter_mut().filter(|active| active.id == id).for_each(Active::unpin);
        Ok(id)
    }

    /// The [`best`] `keep` of `count` replies. See [`Engine::choices`] for `seed` and `make`.
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
        Ok(best(self.choices(count, seed, make)?, keep, score))
    }
}

/// The `keep` best of replies, best first (of equal ones the earlier), with their scores.
#[must_use]
pub fn best(replies: Vec<Reply>, keep: usize, score: Score) -> Vec<(Reply, f64)> {
    let scored = |reply: Reply| {
        let score = score.of(&reply);
        (reply, score)
    };
    let mut scored: Vec<_> = replies.into_iter().map(scored).collect();
    scored.sort_by(|a, b| b.1.total_cmp(&a.1));
    scored.truncate(keep);
    scored
}

impl Stats {
    /// What all replies of [`Engine::choices`] cost together, the ones that are not kept included. The prompt, which was run
    /// once, counts once; the first token is the first of any reply, the last one the last of any; the seed is the one that
    /// was asked for.
    #[must_use]
    pub fn of_choices(replies: &[Reply]) -> Self {
        let all = || replies.iter().map(|reply| &reply.stats);
        let first = all().map(|stats| stats.first_token_seconds).fold(f64::INFINITY, f64::min);
        let last =
            all().map(|stats| stats.first_token_seconds + stats.generation_seconds).fold(0.0, f64::max);
        let mut sum = replies.first().map(|reply| reply.stats.clone()).unwrap_or_default();
        for stats in all().skip(1) {
            sum.generation_tokens += stats.generation_tokens;
            sum.drafted_tokens += stats.drafted_tokens;
            sum.accepted_tokens += stats.accepted_tokens;
            sum.preemptions += stats.preemptions;
            // They are guessed for in the same steps.
            sum.draft_seconds = sum.draft_seconds.max(stats.draft_seconds);
            sum.draft_stop = sum.draft_stop.or(stats.draft_stop);
            sum.kv_quantized_from = sum.kv_quantized_from.or(stats.kv_quantized_from);
        }
        sum.first_token_seconds = if replies.is_empty() { 0.0 } else { first };
        sum.generation_seconds = last - sum.first_token_seconds;
        sum
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
