//! The last part of a step: tokens are drawn from the logits, and what the step ran counts as held.

use super::active::Active;
use super::schedule::Planned;
use super::{Engine, RequestId, Update};
use crate::cache::KvQuantization;
use crate::text::EosSet;
use lmx_tensor::Tensor;
use lmx_tensor::kernels::Exec;
use std::sync::{Mutex, PoisonError};

impl Engine {
    pub(super) fn deliver(
        &mut self,
        plan: &[Planned],
        logits: Option<Tensor>,
        updates: &mut Vec<(RequestId, Update)>,
    ) {
        // Right guesses need the commit of what was drawn, everything else can be committed before.
        for planned in plan.iter().filter(|planned| planned.guesses.is_empty()) {
            self.commit(planned, planned.count, updates);
        }
        let mut logits = logits;
        let rights = self.draw(plan, &mut logits, updates);
        for (planned, right) in plan.iter().zip(rights).filter(|(planned, _)| !planned.guesses.is_empty()) {
            let active = &mut self.running[planned.index];
            active.learn(planned.guesses.len(), right);
            let sequence = active.sequence();
            self.commit(planned, planned.count - planned.guesses.len() + right, updates);
            // The room of wrong guesses may be another's.
            self.kv.release_reserved(sequence);
        }
    }

    /// Draws the tokens of all sequences, which know nothing of each other, on all threads. For each the number of right
    /// guesses.
    fn draw(
        &mut self,
        plan: &[Planned],
        logits: &mut Option<Tensor>,
        updates: &mut Vec<(RequestId, Update)>,
    ) -> Vec<usize> {
        let width = logits.as_ref().map_or(1, Tensor::cols);
        let mut rest = logits.as_mut().map_or(&mut [][..], Tensor::data_mut);
        let mut running: Vec<Option<&mut Active>> = self.running.iter_mut().map(Some).collect();
        let mut draws = Vec::with_capacity(plan.len());
        for planned in plan {
            let (rows, others) = std::mem::take(&mut rest).split_at_mut(planned.rows.len() * width);
            rest = others;
            // A plan has a sequence once.
            let Some(active) = running[planned.index].take() else { continue };
            let held = self.kv.len(active.sequence());
            draws.push(Mutex::new(Draws { active, rows, held, planned, updates: Vec::new(), right: 0 }));
        }
        let (exec, eos) = (self.model.device().exec(), &self.eos);
        exec.pool.for_each(draws.len(), &|index| {
            draws[index].lock().unwrap_or_else(PoisonError::into_inner).run(exec, width, eos);
        });
        let mut rights = Vec::with_capacity(plan.len());
        for draws in draws {
            let draws = draws.into_inner().unwrap_or_else(PoisonError::into_inner);
            let id = draws.active.id;
            updates.extend(draws.updates.into_iter().map(|update| (id, update)));
            rights.push(draws.right);
        }
        rights
    }

    /// Counts `tokens` of a planned step as held.
    fn commit(&mut self, planned: &Planned, tokens: usize, updates: &mut Vec<(RequestId, Update)>) {
        let active = &mut self.running[planned.index];
        let held = self.kv.len(active.sequence()) + tokens;
        // The sequence is known and its blocks were reserved, so the commit cannot fail.
        let committed = match active.prefix(held) {
            Some(entry) => self.kv.commit_prefix(active.sequence(), tokens, &entry),
            None => self.kv.commit(active.sequence(), tokens),
        };
        debug_assert!(committed.is_ok(), "{committed:?}");
        active.watch.note_progress(self.clock.now());
        let quantized = self.kv.quant(active.sequence()).and(self.options.kv_quantization);
        active.stats.kv_quantized_from = quantized.map(KvQuantization::start);
        if !active.generating() {
            let total = active.prompt_total();
            updates.push((active.id, Update::Prefill { done: held.min(total), total }));
        }
    }
}

/// What a sequence draws in a step.
struct Draws<'a> {
    active: &'a mut Active,
    /// Logits of its rows.
    rows: &'a mut [f32],
    held: usize,
    planned: &'a Planned,
    updates: Vec<Update>,
    right: usize,
}

impl Draws<'_> {
    fn run(&mut self, exec: &Exec, width: usize, eos: &EosSet) {
        let mut rows = self.rows.chunks_exact_mut(width);
        loop {
            let guess = self.planned.guesses.get(self.right).copied();
            self.updates.extend(self.active.advance(exec, rows.next(), self.held, eos, guess));
            // Only after the token that was guessed are the logits those of the reply.
            if self.active.finished() || guess.is_none() || guess != self.active.last_token() {
                return;
            }
            self.right += 1;
        }
    }
}
