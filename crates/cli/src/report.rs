//! What is said about a reply: notices, statistics, the JSON object.

use crate::args::sampling::{MaxTokens, flag_of};
use crate::running::Outcome;
use crate::terminal;
use lmx::engine::{FinishReason, Stats};
use lmx::sample::{ProcessorParams, SamplingParams};
use serde_json::{Value, json};

/// Things that are true of a run and that the user may not expect.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    lines: Vec<String>,
    /// Those of them that were not said yet.
    facts: Vec<String>,
    /// Collected only, for the JSON object.
    quiet: bool,
}

impl Notices {
    /// Collects and, unless `quiet`, says them at once.
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet, ..Self::default() }
    }

    /// Something that may change what the user makes of the reply; said once.
    pub(crate) fn add(&mut self, line: impl Into<String>) {
        let line = line.into();
        if self.lines.contains(&line) {
            return;
        }
        if !self.quiet {
            terminal::note(&line);
        }
        self.lines.push(line);
    }

    /// All of them.
    pub(crate) fn lines(&self) -> &[String] {
        &self.lines
    }

    /// Says what was not said yet.
    pub(crate) fn say_facts(&self) {
        self.facts.iter().for_each(|fact| terminal::note(fact));
    }

    /// Something that is as it should be; only for the JSON object and the statistics.
    pub(crate) fn add_fact(&mut self, line: impl Into<String>) {
        let line = line.into();
        self.facts.push(line.clone());
        self.lines.push(line);
    }
}

/// Notices the flags that are set but change nothing.
pub(crate) fn filters_without_effect(
    sampling: &SamplingParams,
    processors: &ProcessorParams,
    notices: &mut Notices,
) {
    let why = match sampling.temperature {
        0.0 => "at --temp 0 the most likely token is taken",
        _ => "the filter that it belongs to is off",
    };
    for field in sampling.without_effect() {
        notices.add(format!("{} has no effect: {why}", flag_of(field)));
    }
    for field in processors.without_effect() {
        notices.add(format!("{} has no effect: the penalty that it belongs to is off", flag_of(field)));
    }
}

/// Says that a reply did not end by itself.
pub(crate) fn cut(limit: MaxTokens, outcome: &Outcome) -> String {
    match limit.0 {
        Some(limit) if outcome.stats.generation_tokens >= limit => {
            format!("the reply was cut after {limit} tokens (--max-tokens)")
        }
        _ => "the reply was cut: the model's context is full".to_owned(),
    }
}

/// mlx-lm's block of statistics, and what it leaves out.
pub(crate) fn say_statistics(outcome: &Outcome, notices: &Notices) {
    let stats = &outcome.stats;
    terminal::say("==========");
    if outcome.text.is_empty() {
        terminal::say("No text generated for this prompt");
    }
    terminal::say(&format!(
        "Prompt: {} tokens, {:.3} tokens-per-sec",
        stats.prompt_tokens,
        stats.prompt_tps()
    ));
    terminal::say(&format!(
        "Generation: {} tokens, {:.3} tokens-per-sec",
        stats.generation_tokens,
        stats.generation_tps()
    ));
    say_events(stats);
    terminal::say(&format!("Peak memory: {:.3} GB", gigabytes(peak_memory())));
    terminal::say(&format!("Time to first token: {:.3} s", stats.first_token_seconds));
    terminal::say(&format!("Seed: {}", stats.seed));
    notices.say_facts();
}

/// Lines about guesses and preemptions, where there were any.
pub(crate) fn say_events(stats: &Stats) {
    if stats.drafted_tokens > 0 {
        let (right, all) = (stats.accepted_tokens, stats.drafted_tokens);
        let time = match stats.draft_seconds {
            0.0 => String::new(),
            seconds => format!(", {seconds:.3} s for the guesses"),
        };
        terminal::say(&format!("Drafts: {right} of {all} tokens accepted{time}"));
    }
    if let Some(why) = stats.draft_stop {
        terminal::say(&format!("Drafts: none at the end, because {why}"));
    }
    if stats.preemptions > 0 {
        terminal::say(&format!("Preemptions: {}", stats.preemptions));
    }
}

/// The object of `--json`.
pub(crate) fn json(outcome: &Outcome, model: &str, kv_format: &str, notices: &Notices) -> Value {
    let stats = &outcome.stats;
    json!({
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "finish_reason": outcome.finish.map(FinishReason::as_str),
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generation_tokens": stats.generation_tokens,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "draft_seconds": stats.draft_seconds,
        "preemptions": stats.preemptions,
        "draft_stop": stats.draft_stop.map(|why| why.to_string()),
        "prompt_tps": stats.prompt_tps(),
        "generation_tps": stats.generation_tps(),
        "ttft_ms": stats.first_token_seconds * 1e3,
        "peak_memory_bytes": peak_memory(),
        "kv_format": kv_format,
        "kv_quantized_from": stats.kv_quantized_from,
        "seed": stats.seed,
        "model": model,
        "notices": notices.lines,
    })
}

/// The most memory that the process has held, in bytes (`VmHWM` of Linux); 0 where the system does not tell.
pub(crate) fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

/// Has [`peak_memory`] begin again with what is held now, where the system allows that (Linux); elsewhere it goes on.
pub(crate) fn forget_peak_memory() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Bytes in mlx-lm's unit, 10⁹.
pub(crate) fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}
