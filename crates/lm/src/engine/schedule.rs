//! Who runs, and by how many tokens.

use super::active::Active;
use super::{Engine, RequestError, RequestId, Update};
use crate::models::StepInputs;
use std::ops::Range;

/// One sequence's place in a step.
pub(super) struct Planned {
    /// Index into the running sequences.
    pub(super) index: usize,
    /// Tokens that it advances by, guesses included.
    pub(super) count: usize,
    /// Rows of the batch whose logits are sampled, if the sequence has caught up: that of its last token, and one for
    /// each guess.
    pub(super) rows: Range<usize>,
    /// The tokens that are guessed to follow its last one.
    pub(super) guesses: Vec<u32>,
}

impl Engine {
    /// Moves waiting requests into the batch, each starting from the longest prefix that is held.
    pub(super) fn admit(&mut self) {
        while self.running.len() < self.options.max_running.max(1) {
            let Some(mut active) = self.waiting.pop_front() else { return };
            // The last prompt token is run again where its logits are needed.
            let limit = active.prompt().len() - usize::from(active.wants_logits());
            let prompt = active.prefix(active.prompt().len()).filter(|_| !active.has_begun());
            let found = prompt.and_then(|prompt| {
                self.kv.load_prefix(&prompt, limit);
                self.kv.add_prefix(prompt.root, prompt.tokens, limit)
            });
            if let Some((sequence, cached)) = found {
                self.kv.remove(active.sequence());
                active.start(sequence, cached);
            }
            self.running.push(active);
        }
    }

    /// Decides who advances by how many tokens, and reserves their room.
    pub(super) fn schedule(&mut self, updates: &mut Vec<(RequestId, Update)>) -> (StepInputs, Vec<Planned>) {
        let mut inputs = StepInputs::default();
        let mut plan = Vec::new();
        let mut budget = self.options.prefill_step_size.max(1);
        // Sequences that generate go first: a long prompt must not stall them.
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|&i| !self.running[i].generating());
        let running = self.running.len();
        for index in order {
            let active = &mut self.running[index];
            let held = self.kv.len(active.sequence());
            let pending = active.pending(held).len();
            let count = if active.generating() { pending } else { pending.min(budget) };
            let count = self.kv.step_limit(active.sequence(), count);
            if count == 0 {
                // All that was asked for is held already.
                updates.extend(
                    active
                        .advance(self.model.device().exec(), None, held, &self.eos, None)
                        .map(|update| (active.id, update)),
                );
                continue;
            }
            if let Err(error) = self.kv.reserve(active.sequence(), count) {
                // Others that advance will free their blocks in time; alone, waiting would be for ever.
                if plan.is_empty() && index + 1 == running {
                    active.fail();
                    updates.push((active.id, Update::Failed(RequestError::OutOfMemory(error))));
                }
                continue;
            }
            if !active.generating() {
                budget -= count;
            }
            let caught_up = count == pending && active.wants_logits();
            let mut guesses = if caught_up { active.draft() } else { Vec::new() };
            guesses.truncate(self.kv.step_limit(active.sequence(), count + guesses.len()) - count);
            // Where there is no room for guesses the sequence goes on without.
            if !guesses.is_empty() && self.kv.reserve(active.sequence(), count + guesses.len()).is_err() {
                guesses.clear();
            }
            active.stats.drafted_tokens += guesses.len();
            let tokens = [&active.pending(held)[..count], &guesses].concat();
            inputs.push(active.sequence(), held, &tokens, active.long_context);
            let end = inputs.tokens.len();
            let rows = if caught_up { end - 1 - guesses.len()..end } else { end..end };
            plan.push(Planned { index, count: tokens.len(), rows, guesses });
        }
        (inputs, plan)
    }

    pub(super) fn retire_finished(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].finished() {
                let active = self.running.remove(index);
                self.retire(active);
            } else {
                index += 1;
            }
        }
    }

    /// Frees a sequence; what it holds is kept for prompts that begin like it.
    pub(super) fn retire(&mut self, active: Active) {
        let sequence = active.sequence();
        match active.prefix(self.kv.len(sequence)).filter(|_| !active.failed()) {
            Some(entry) => self.kv.leave_prefix(sequence, &entry),
            None => self.kv.remove(sequence),
        }
    }
}
