//! What a benchmark says: mlx-lm's lines with more figures below them, or JSON.

use super::machine::{Machine, Roofline};
use super::trial::{Sample, Sequence, Trial};
use crate::report::{Notices, gigabytes};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Said where a server does not take token ids.
pub(crate) const SENT_AS_TEXT: &str = "the server does not take token ids: it got the prompts as text, which it may have \
    cut into another number of tokens";

/// Up to this share other programs do little harm.
const QUIET: f64 = 0.1;

/// One point of the sweeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) prompt_tokens: usize,
    pub(crate) batch_size: usize,
}

/// Who was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Program {
    Lmx,
    Server,
}

/// The trials of a program.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) program: Program,
    /// For each cell at least one.
    pub(crate) trials: Vec<Vec<Trial>>,
}

/// Everything that a reader needs to judge the figures.
pub(crate) struct Report<'a> {
    pub(crate) model: &'a str,
    /// Address and model of the server.
    pub(crate) server: Option<(&'a str, &'a str)>,
    pub(crate) machine: Machine,
    /// The share of the machine that other programs took meanwhile, a local server among them.
    pub(crate) others: Option<f64>,
    pub(crate) kv_format: &'a str,
    pub(crate) roofline: Roofline,
    pub(crate) generation_tokens: usize,
    pub(crate) prefill_step_size: usize,
    pub(crate) seed: u64,
    pub(crate) cells: &'a [Cell],
    /// Bytes of keys and values that a step reads of a sequence, for each cell.
    pub(crate) kv_bytes: Vec<usize>,
    pub(crate) measured: &'a [Measured],
}

/// The figures of a cell.
pub(crate) struct Figures {
    pub(crate) prompt_tps: Sample,
    /// `None` for replies of one token.
    pub(crate) generation_tps: Option<Sample>,
    pub(crate) seconds: Sample,
    pub(crate) first_token: Sample,
    pub(crate) gaps: Option<Sample>,
    peak_memory: Option<u64>,
}

impl Figures {
    fn of(trials: &[Trial]) -> Option<Self> {
        Some(Self {
            prompt_tps: Sample::new(trials.iter().map(Trial::prompt_tps))?,
            generation_tps: Sample::new(trials.iter().filter_map(Trial::generation_tps)),
            seconds: Sample::new(trials.iter().map(|trial| trial.seconds))?,
            first_token: Sample::new(trials.iter().flat_map(Trial::first_tokens))?,
            gaps: Sample::new(trials.iter().flat_map(Trial::gaps)),
            peak_memory: trials.iter().filter_map(|trial| trial.peak_memory).max(),
        })
    }
}

/// A program in a cell.
pub(crate) struct Row<'a> {
    pub(crate) program: Program,
    pub(crate) cell: Cell,
    pub(crate) figures: Figures,
    /// Tokens per second at most, by what memory gives.
    pub(crate) limit: Option<f64>,
    trials: &'a [Trial],
}

impl Report<'_> {
    pub(crate) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.measured.iter().flat_map(move |Measured { program, trials }| {
            let cells = self.cells.iter().zip(&self.kv_bytes).zip(trials);
            cells.filter_map(move |((&cell, &kv_bytes), trials)| {
                let limit = self.roofline.tokens_per_second(cell.batch_size, kv_bytes);
                let limit = limit.filter(|_| *program == Program::Lmx);
                Some(Row { program: *program, cell, figures: Figures::of(trials)?, limit, trials })
            })
        })
    }

    /// Adds what makes figures say something else than they seem to.
    pub(crate) fn note(&self, notices: &mut Notices) {
        for row in self.rows() {
            let Cell { prompt_tokens, batch_size } = row.cell;
            let at = format!("prompt_tokens={prompt_tokens}, batch_size={batch_size}");
            let sequences = || row.trials.iter().flat_map(|trial| &trial.sequences);
            let preemptions: usize = row.trials.iter().map(|trial| trial.preemptions).sum();
            if preemptions > 0 {
                notices.add(format!(
                    "{at}: memory was short, {preemptions} times a sequence was run again (--kv-memory)"
                ));
            }
            let short = sequences().filter(|sequence| sequence.tokens < self.generation_tokens).count();
            if short > 0 {
                notices.add(format!("{at}: the server ended {short} replies before --generation-tokens"));
            }
            let cached: usize = sequences().map(|sequence: &Sequence| sequence.cached_tokens).sum();
            if cached > 0 {
                notices.add(format!(
                    "{at}: the server had {cached} prompt tokens in a cache; they are not counted"
                ));
            }
        }
        if let Some(others) = self.others.filter(|&others| others > QUIET && self.server.is_none()) {
            notices.add(format!(
                "other programs took {:.0} % of the machine's CPU time meanwhile: the figures say little",
                100.0 * others
            ));
        }
        if self.roofline.weights_bytes.is_none() {
            notices.add_fact("no roofline: how many experts' weights a step reads depends on the tokens");
        }
    }

    /// The report for people.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for row in self.rows() {
            self.say(&row, &mut text);
        }
        let Machine { processor, cpus, memory_bytes, threads, isa } = &self.machine;
        let memory = gigabytes(*memory_bytes);
        let _ = writeln!(text, "Model: {}, keys and values as {}", self.model, self.kv_format);
        let _ = writeln!(
            text,
            "Machine: {processor}, {cpus} CPUs, {memory:.0} GB; lmx {} with {threads} threads, {isa}",
            env!("CARGO_PKG_VERSION")
        );
        let _ = write!(text, "Memory: {:.1} GB/s read by all threads", self.roofline.bandwidth / 1e9);
        if let Some(weights) = self.roofline.weights_bytes {
            let _ = write!(text, "; a step reads {:.3} GB of weights", gigabytes(weights));
        }
        text.push('\n');
        if let Some(others) = self.others {
            let server = if self.server.is_some() { ", the server if it runs here" } else { "" };
            let _ = writeln!(
                text,
                "Others: {:.0} % of all CPU time went to other programs{server}",
                100.0 * others
            );
        }
        text
    }

    fn say(&self, row: &Row<'_>, text: &mut String) {
        let Cell { prompt_tokens, batch_size } = row.cell;
        let who = match (row.program, self.server) {
            (Program::Server, Some((url, model))) => format!("{url} (model {model}) "),
            _ => String::new(),
        };
        let generation = self.generation_tokens;
        let _ = writeln!(
            text,
            "Timing {who}with prompt_tokens={prompt_tokens}, generation_tokens={generation}, batch_size={batch_size}."
        );
        for (number, trial) in (1..).zip(row.trials) {
            let speeds = speeds(Some(trial.prompt_tps()), trial.generation_tps(), trial.peak_memory);
            let _ = writeln!(text, "Trial {number}:  {speeds}, total_time={:.3}", trial.seconds);
        }
        let Figures { prompt_tps, generation_tps, seconds, first_token, gaps, peak_memory } = &row.figures;
        let means = speeds(Some(prompt_tps.mean()), generation_tps.as_ref().map(Sample::mean), *peak_memory);
        let _ = writeln!(text, "Averages: {means}");
        let _ = write!(text, "Medians: prompt_tps={}", spread(prompt_tps));
        if let Some(generation_tps) = generation_tps {
            let _ = write!(text, ", generation_tps={}", spread(generation_tps));
        }
        let _ = writeln!(text, ", total_time={}", spread(seconds));
        let _ = writeln!(text, "Time to first token: {} s", tail(first_token, 1.0));
        if let Some(gaps) = gaps {
            let _ = writeln!(text, "Between tokens: {} ms", tail(gaps, 1e3));
        }
        if let Some((limit, reached)) = row.limit.zip(generation_tps.as_ref()) {
            let part = 100.0 * reached.median() / limit;
            let _ = writeln!(
                text,
                "Roofline: generation_tps={limit:.3} by what memory gives, {part:.0} % reached"
            );
        }
        text.push('\n');
    }

    /// The object of `--json`: the figures, and every trial.
    pub(crate) fn json(&self, notices: &Notices) -> Value {
        let rows: Vec<Value> = self.rows().map(|row| row.json()).collect();
        json!({
            "lmx": env!("CARGO_PKG_VERSION"),
            "model": self.model,
            "against": self.server.map(|(url, model)| json!({"url": url, "model": model})),
            "machine": self.machine,
            "others_share": self.others,
            "kv_format": self.kv_format,
            "prefill_step_size": self.prefill_step_size,
            "generation_tokens": self.generation_tokens,
            "seed": self.seed,
            "bandwidth_bytes_per_second": self.roofline.bandwidth,
            "weights_bytes": self.roofline.weights_bytes,
            "results": rows,
            "notices": notices.lines(),
        })
    }
}

impl Row<'_> {
    fn json(&self) -> Value {
        let Figures { prompt_tps, generation_tps, seconds, first_token, gaps, peak_memory } = &self.figures;
        let trial = |trial: &Trial| {
            json!({
                "prompt_tps": trial.prompt_tps(),
                "generation_tps": trial.generation_tps(),
                "first_token_seconds": trial.first_tokens().collect::<Vec<f64>>(),
                "seconds": trial.seconds,
                "peak_memory_bytes": trial.peak_memory,
                "prompt_tokens": trial.sequences.iter().map(|s| s.prompt_tokens).sum::<usize>(),
                "generation_tokens": trial.sequences.iter().map(|s| s.tokens).sum::<usize>(),
                "preemptions": trial.preemptions,
            })
        };
        json!({
            "program": match self.program { Program::Lmx => "lmx", Program::Server => "server" },
            "prompt_tokens": self.cell.prompt_tokens,
            "batch_size": self.cell.batch_size,
            "prompt_tps": quantiles(prompt_tps),
            "generation_tps": generation_tps.as_ref().map(quantiles),
            "seconds": quantiles(seconds),
            "first_token_seconds": quantiles(first_token),
            "between_tokens_seconds": gaps.as_ref().map(quantiles),
            "peak_memory_bytes": peak_memory,
            "roofline_tps": self.limit,
            "trials": self.trials.iter().map(trial).collect::<Vec<Value>>(),
        })
    }
}

/// mlx-lm's figures, as it spells them; what there is none of is left out.
fn speeds(prompt_tps: Option<f64>, generation_tps: Option<f64>, peak_memory: Option<u64>) -> String {
    let figures = [
        ("prompt_tps", prompt_tps),
        ("generation_tps", generation_tps),
        ("peak_memory", peak_memory.map(gigabytes)),
    ];
    let said = figures.iter().filter_map(|(name, value)| value.map(|value| format!("{name}={value:.3}")));
    said.collect::<Vec<String>>().join(", ")
}

/// The median with the quartiles.
fn spread(sample: &Sample) -> String {
    let [low, middle, high] = [0.25, 0.5, 0.75].map(|part| sample.quantile(part));
    format!("{middle:.3} [{low:.3}–{high:.3}]")
}

/// How bad it gets.
fn tail(sample: &Sample, scale: f64) -> String {
    let [middle, p90, p99, most] = [0.5, 0.9, 0.99, 1.0].map(|part| sample.quantile(part) * scale);
    format!("median {middle:.3}, p90 {p90:.3}, p99 {p99:.3}, max {most:.3}")
}

fn quantiles(sample: &Sample) -> Value {
    let at = |part| sample.quantile(part);
    json!({
        "mean": sample.mean(), "min": at(0.0), "p25": at(0.25), "median": at(0.5), "p75": at(0.75), "p90": at(0.9),
        "p99": at(0.99), "max": at(1.0),
    })
}
