//! `lmx generate` with several replies to one prompt.

use crate::args::choices::Choices;
use crate::args::generate::GenerateOptions;
use crate::end::End;
use crate::report::{self, Notices};
use crate::running::Outcome;
use crate::session::Session;
use crate::terminal;
use anyhow::Context;
use lmx::engine::{FinishReason, Reply, Request, Stats, Vote, best, majority_vote};
use lmx::sample::random_seed;
use serde_json::{Value, json};

/// What is printed, and what it was taken from.
struct Outcomes {
    /// The replies to print, with their scores where they were compared.
    replies: Vec<(Reply, Option<f64>)>,
    votes: Option<Vec<Vote>>,
    /// How many replies were made.
    made: usize,
    /// What all of them cost together.
    cost: Stats,
}

/// Makes the replies and prints them.
pub(crate) fn run(
    options: &GenerateOptions,
    choices: &Choices,
    session: &mut Session,
    tokens: &[u32],
    model: &str,
    mut notices: Notices,
) -> Result<(), End> {
    let args = &options.args;
    if options.sampling.temperature == 0.0 {
        notices.add("at --temp 0 all replies are the same");
    }
    let grammar = session.grammar(options.form.as_ref())?;
    let sampling = session.sampling(&options.sampling);
    // 32 bits, so that the seed can be typed.
    let seed = args.seed.unwrap_or_else(|| random_seed() >> 32);
    let adapter = session.adapter.clone();
    let mut make = |seed| Request {
        adapter: adapter.clone(),
        tokens: tokens.to_vec(),
        max_tokens: args.max_tokens.0,
        sampling: sampling.clone(),
        processors: options.processors.clone(),
        stop: options.stop.clone(),
        grammar: grammar.clone(),
        seed: Some(seed),
        speculation: options.speculation,
        ..Request::default()
    };
    let replies = session.engine.choices(choices.count(), seed, &mut make).context("a reply failed")?;
    session.note_prefix_warnings(&mut notices);
    let result = Outcomes::of(choices, replies);
    let cut = result.replies.iter().filter(|(reply, _)| reply.finish == FinishReason::Length).count();
    if cut > 0 {
        notices.add(format!("{cut} of {} replies were cut (--max-tokens)", result.replies.len()));
    }
    if args.json {
        let object = result.json(model, &session.kv_format, &notices);
        return terminal::print(&format!("{object}\n"));
    }
    result.print()?;
    if args.verbose {
        result.say_statistics(&notices);
    }
    Ok(())
}

impl Outcomes {
    fn of(choices: &Choices, replies: Vec<Reply>) -> Self {
        let (made, cost) = (replies.len(), Stats::of_choices(&replies));
        let votes = match choices {
            Choices::Vote { answer, .. } => Some(majority_vote(&replies, &|text| match answer {
                None => Some(text.trim().to_owned()),
                Some(regex) => {
                    let found = regex.captures_iter(text).last()?;
                    Some(found.get(1).or(found.get(0))?.as_str().to_owned())
                }
            })),
            _ => None,
        };
        let replies = match choices {
            Choices::Best { keep, score, .. } => {
                best(replies, *keep, *score).into_iter().map(|(reply, score)| (reply, Some(score))).collect()
            }
            _ => replies.into_iter().map(|reply| (reply, None)).collect(),
        };
        Self { replies, votes, made, cost }
    }

    /// The answer with the most votes.
    fn winner(&self) -> Option<&Vote> {
        self.votes.as_ref().and_then(|votes| votes.first())
    }

    fn print(&self) -> Result<(), End> {
        if self.votes.is_some() {
            return self.winner().map_or(Ok(()), |vote| terminal::print(&format!("{}\n", vote.answer)));
        }
        for (index, (reply, _)) in self.replies.iter().enumerate() {
            let line = if index > 0 { "---\n" } else { "" };
            terminal::print(&format!("{line}{}\n", reply.text))?;
        }
        Ok(())
    }

    /// The object of one reply, the first or the winner's first, with what all of them cost, and them in `choices`.
    fn json(&self, model: &str, kv_format: &str, notices: &Notices) -> Value {
        let first = self.winner().and_then(|vote| vote.replies.first()).copied().unwrap_or(0);
        let outcome = self.replies.get(first).map(|(reply, _)| Outcome {
            text: reply.text.clone(),
            token_ids: reply.token_ids.clone(),
            finish: Some(reply.finish),
            stats: self.cost.clone(),
        });
        let mut object = report::json(&outcome.unwrap_or_default(), model, kv_format, notices);
        let choice = |(index, (reply, score)): (usize, &(Reply, Option<f64>))| {
            json!({
                "index": index,
                "text": reply.text,
                "token_ids": reply.token_ids,
                "finish_reason": reply.finish.as_str(),
                "seed": reply.stats.seed,
                "score": score,
            })
        };
        object["choices"] = self.replies.iter().enumerate().map(choice).collect();
        if let Some(votes) = &self.votes {
            let vote = |vote: &Vote| json!({"answer": vote.answer, "count": vote.replies.len(), "choices": vote.replies});
            object["votes"] = votes.iter().map(vote).collect();
        }
        object
    }

    fn say_statistics(&self, notices: &Notices) {
        let cost = &self.cost;
        let Stats { prompt_tokens, generation_tokens, seed, .. } = cost;
        terminal::say("==========");
        let rate = cost.prompt_tps();
        terminal::say(&format!("Prompt: {prompt_tokens} tokens, run once, {rate:.3} tokens-per-sec"));
        let (made, rate) = (self.made, cost.generation_tps());
        terminal::say(&format!(
            "Generation: {generation_tokens} tokens in {made} replies, {rate:.3} tokens-per-sec"
        ));
        report::say_events(cost);
        for vote in self.votes.iter().flatten() {
            terminal::say(&format!("Votes: {} for {}", vote.replies.len(), vote.answer));
        }
        terminal::say(&format!("Peak memory: {:.3} GB", report::gigabytes(report::peak_memory())));
        terminal::say(&format!("Time to first token: {:.3} s", cost.first_token_seconds));
        terminal::say(&format!("Seed: {seed}"));
        notices.say_facts();
    }
}
