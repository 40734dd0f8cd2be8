//! Requests of all kinds, with and without adapters, and random schedules of them against what each gets alone.

use crate::common::golden_cases::{Stored, Tensors, write_safetensors};
use crate::common::running::{Essence, alone, essence};
use lmx::cache::PrefixCacheOptions;
use lmx::checkpoint::OpenOptions;
use lmx::engine::{
    DraftSpeculation, Engine, EngineOptions, Event, NgramSpeculation, Request, RequestId, Update,
};
use lmx::grammar::{Form, Grammar};
use lmx::models::{LinearRole, Model};
use lmx::sample::{ProcessorParams, SampleError, SamplingParams};
use lmx::{Adapter, AdapterFiles};
use serde_json::json;
use std::collections::BTreeMap;
use std::ops::AddAssign;

/// A small generator of numbers (SplitMix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }
}

/// Two adapters with random weights for every matrix of a model's layers, of ranks 2 and 3.
pub fn adapters(model: &dyn Model) -> Vec<Adapter> {
    [2, 3].map(|rank| adapter(model, rank)).to_vec()
}

fn adapter(model: &dyn Model, rank: usize) -> Adapter {
    let mut random = Random::new(rank as u64);
    let mut tensors = Tensors::new();
    model.visit_linears(&mut |module, role, linear| {
        let outputs = match role {
            LinearRole::Whole => linear.out_features(),
            LinearRole::Outputs { of, .. } => of,
            _ => return,
        };
        if !module.contains("layers.") {
            return;
        }
        let mut add = |name: &str, shape: [usize; 2]| {
            let scale = 2.0 / (shape[0] as f32).sqrt();
            let mut value = |_| scale * (random.below(2001) as f32 / 1000.0 - 1.0);
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(&mut value).collect();
            tensors.insert(format!("{module}.{name}"), Stored::f32(shape.to_vec(), &values));
        };
        add("lora_a", [linear.in_features(), rank]);
        add("lora_b", [rank, outputs]);
    });
    let folder = tempfile::tempdir().unwrap();
    let config =
        json!({"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": {"rank": rank, "scale": 0.25}});
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    write_safetensors(&folder.path().join("adapters.safetensors"), &tensors);
    let files = AdapterFiles::open(folder.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
    files.fit(model).unwrap()
}

/// How many requests, and how large.
#[derive(Clone, Copy)]
pub struct Limits {
    pub count: usize,
    /// How many of them, drawn at random, run in one schedule.
    pub at_once: usize,
    pub longest: usize,
    pub most_new: usize,
    pub speculates: bool,
}

/// What each request is made of: the same request for the same index.
pub struct Requests {
    pub limits: Limits,
    vocab: usize,
    grammar: Grammar,
}

impl Requests {
    pub fn new(engine: &Engine, limits: Limits) -> Self {
        let form = Form::Regex("[A-Z0-9!? ]{5,60}".to_owned());
        let grammar = engine.grammars().unwrap().compile(&form).unwrap();
        Self { limits, vocab: engine.model().vocab(), grammar }
    }

    /// Tokens of the longest request, with its reply if that is not ended early.
    pub fn longest(&self) -> usize {
        let tokens = |request: Request| request.tokens.len() + request.max_tokens.unwrap_or(0);
        (0..self.limits.count).map(|index| tokens(self.make(index, &[]))).max().unwrap_or(0)
    }

    /// Few are long, as in life; some begin alike.
    fn prompt(&self, random: &mut Random) -> Vec<u32> {
        let share = (random.below(1000) + 1) as f64 / 1000.0;
        let length = 1 + (share.powi(3) * (self.limits.longest - 1) as f64) as usize;
        let (period, salt) = (2 + random.below(60), random.below(4));
        let usual = self.vocab.min(1000) - 1;
        let token = |i: usize| if i < 100 { i * i + salt } else { (i % period) * 7 + salt };
        (0..length).map(|i| (1 + token(i) % usual) as u32).collect()
    }

    /// Request `index`, with some of every option; the adapters are those of the engine's model.
    pub fn make(&self, index: usize, adapters: &[Adapter]) -> Request {
        let mut random = Random::new(index as u64 + 1);
        let tokens = self.prompt(&mut random);
        let mut one_in = |n: usize| random.below(n) == 0;
        let mut request = Request {
            seed: Some(index as u64),
            top_logprobs: index % 3,
            system_tokens: if one_in(3) { tokens.len() / 2 } else { 0 },
            ignore_eos: one_in(2),
            sampling: SamplingParams {
                temperature: [0.0, 1.0, 0.6, 1.4][index % 4],
                top_p: if one_in(3) { 0.9 } else { 1.0 },
                top_k: if one_in(3) { 20 } else { 0 },
                min_p: if one_in(4) { 0.02 } else { 0.0 },
                xtc_probability: if one_in(5) { 0.5 } else { 0.0 },
                temperature_first: one_in(3),
                ..SamplingParams::default()
            },
            processors: ProcessorParams {
                repetition_penalty: if one_in(3) { 1.2 } else { 0.0 },
                frequency_penalty: if one_in(4) { 0.1 } else { 0.0 },
                presence_penalty: if one_in(4) { 0.1 } else { 0.0 },
                logit_bias: if one_in(5) { [(5, 1.5), (9, -2.0)].into() } else { BTreeMap::new() },
                ..ProcessorParams::default()
            },
            stop: if one_in(4) { vec!["AB".to_owned(), "7".to_owned()] } else { Vec::new() },
            grammar: one_in(5).then(|| self.grammar.clone()),
            ..Request::default()
        };
        if one_in(6) {
            request.logits_processors.push(Box::new(shy_of_repeats));
        }
        if self.limits.speculates && one_in(2) {
            let draft_tokens = 1 + index % 8;
            request.speculation = Some(match index % 3 {
                0 => DraftSpeculation { draft_tokens, adaptive: false }.into(),
                ngram => NgramSpeculation { ngram, draft_tokens }.into(),
            });
        }
        request.tokens = tokens;
        request.max_tokens = Some(random.below(self.limits.most_new + 1));
        request.priority = random.below(3) as i32 - 1;
        // One in three has none.
        request.adapter = adapters.get(random.below(adapters.len() + 1)).cloned();
        request
    }
}

/// A user's own processor.
fn shy_of_repeats(history: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
    if let Some(&last) = history.last() {
        logits[last as usize] -= 2.0;
    }
    Ok(())
}

/// Schedule `seed` of `count`: room for little more than the longest request, the first half without a prefix cache, and
/// steps of all sizes.
pub fn tight(
    options: EngineOptions,
    roomy: &Engine,
    requests: &Requests,
    seed: u64,
    count: u64,
) -> EngineOptions {
    let spec = roomy.kv().spec();
    EngineOptions {
        // Where all layers have small windows a step needs more than is held after it.
        kv_memory: (spec.peak_bytes(requests.longest() + 80) * 5 / 4).max(4 * spec.bytes_at(1)),
        prefix_cache: (2 * seed >= count).then(PrefixCacheOptions::default),
        prefill_step_size: [64, 512, 7, 2048][seed as usize % 4],
        prompt_concurrency: 1 + seed as usize % 6,
        max_running: 4 + 5 * (seed as usize % 3),
        ..options
    }
}

/// What each request gets alone, without guesses.
pub fn solo(engine: &mut Engine, requests: &Requests) -> Vec<Essence> {
    let adapters = adapters(engine.model());
    let request = |index| Request { speculation: None, ..requests.make(index, &adapters) };
    (0..requests.limits.count).map(|index| essence(&alone(engine, request(index)))).collect()
}

/// What became of requests.
#[derive(Debug, Default)]
pub struct Tally {
    pub finished: usize,
    pub cancelled: usize,
    pub preemptions: usize,
    /// Tokens of those that have finished.
    pub tokens: usize,
    pub accepted: usize,
    pub steps: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.finished += other.finished;
        self.cancelled += other.cancelled;
        self.preemptions += other.preemptions;
        self.tokens += other.tokens;
        self.accepted += other.accepted;
        self.steps += other.steps;
    }
}

/// Runs as many requests as a schedule has: they join a few at a time between steps, and one in eight is cancelled at
/// some time. Each that finishes must have got what it gets alone.
pub fn run_schedule(
    engine: &mut Engine,
    requests: &Requests,
    expected: &[Essence],
    seed: u64,
    name: &str,
) -> Tally {
    let mut random = Random::new(seed + 1000);
    let mut left: Vec<usize> = (0..requests.limits.count).collect();
    let mut open: BTreeMap<RequestId, (usize, Vec<Event>)> = BTreeMap::new();
    let mut doomed: Vec<(usize, RequestId)> = Vec::new();
    let mut tally = Tally::default();
    let adapters = adapters(engine.model());
    let stay = left.len() - requests.limits.at_once;
    while left.len() > stay || !engine.is_idle() {
        let joining = if engine.is_idle() { 1 } else { random.below(7).saturating_sub(2) };
        for _ in 0..joining.min(left.len() - stay) {
            let index = left.swap_remove(random.below(left.len()));
            let id = engine.submit(requests.make(index, &adapters)).unwrap();
            open.insert(id, (index, Vec::new()));
            if random.below(8) == 0 {
                doomed.push((tally.steps + random.below(30), id));
            }
        }
        for (_, id) in doomed.extract_if(.., |(at, _)| *at <= tally.steps) {
            engine.cancel(id);
            tally.cancelled += usize::from(open.remove(&id).is_some());
        }
        for (id, update) in engine.step() {
            let Some((index, events)) = open.get_mut(&id) else { panic!("{name}: {id:?} is over") };
            match update {
                Update::Prefill { done, total } => assert!(done <= total),
                Update::Prompt(_) | Update::Embedding(_) => {}
                Update::Failed(error) => panic!("{name}: request {index}: {error}"),
                Update::Token(event) => {
                    let stats = event.stats.clone();
                    let ended = event.finish.is_some();
                    events.push(event);
                    if ended {
                        assert_eq!(essence(events), expected[*index], "{name}: request {index}");
                        tally.finished += 1;
                        tally.preemptions += stats.preemptions;
                        tally.tokens += stats.generation_tokens;
                        tally.accepted += stats.accepted_tokens;
                        open.remove(&id);
                    }
                }
            }
        }
        let budget = engine.kv().budget();
        assert!(budget.used() <= budget.limit());
        tally.steps += 1;
    }
    assert!(open.is_empty(), "{name}: all were heard of");
    engine.clear_prefixes();
    assert!(engine.kv().is_empty(), "{name}: every sequence was freed");
    assert_eq!(engine.kv().budget().used(), 0, "{name}: every block was freed");
    tally
}
