//! A trial of this program's engine.

use super::trial::{Sequence, Trial};
use crate::end::End;
use crate::interrupt::Hold;
use crate::report::{forget_peak_memory, peak_memory};
use anyhow::Context;
use lmx::Adapter;
use lmx::engine::{Engine, Request, RequestId, Update};
use std::collections::BTreeMap;
use std::time::Instant;

/// Continues `prompts` together by `tokens` tokens each, whatever they are.
///
/// # Errors
/// A request's own, and [`End::Interrupted`].
pub(crate) fn run(
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    tokens: usize,
    adapter: Option<&Adapter>,
    hold: &Hold,
) -> Result<Trial, End> {
    forget_peak_memory();
    let start = Instant::now();
    let mut sequences: BTreeMap<RequestId, Sequence> = BTreeMap::new();
    for prompt in prompts {
        let request =
            Request { ignore_eos: true, adapter: adapter.cloned(), ..Request::new(prompt.clone(), tokens) };
        let id = engine.submit(request).map_err(anyhow::Error::new)?;
        sequences.insert(id, Sequence { prompt_tokens: prompt.len(), ..Sequence::default() });
    }
    let mut preemptions = 0;
    while !engine.is_idle() {
        if hold.is_pressed() {
            sequences.keys().for_each(|&id| engine.cancel(id));
            return Err(End::Interrupted);
        }
        for (id, update) in engine.step() {
            match update {
                Update::Token(event) => {
                    let stats = event.stats;
                    if let Some(sequence) = sequences.get_mut(&id) {
                        sequence.tokens = stats.generation_tokens;
                        sequence.arrivals.push(stats.first_token_seconds + stats.generation_seconds);
                    }
                    if event.finish.is_some() {
                        preemptions += stats.preemptions;
                    }
                }
                Update::Failed(error) => {
                    sequences.keys().for_each(|&id| engine.cancel(id));
                    return Err(error).context("a sequence failed").map_err(End::Failed);
                }
                Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let sequences = sequences.into_values().collect();
    Ok(Trial { sequences, seconds, peak_memory: Some(peak_memory()), preemptions })
}
