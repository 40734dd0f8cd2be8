//! Who runs, and by how many tokens.
//!
//! Requests have a rank: higher priorities come first, and among equal ones those that were submitted first. By rank
//! they are admitted, and get room for the tokens of a step; when there is none, the last one that runs is preempted.
//! So the first one always gets on, and nobody waits for ever for somebody who came later.

use super::active::Active;
use super::{Engine, RequestError, RequestId, Update};
use crate::cache::{BLOCK, KvError, SequenceId};
use crate::models::StepInputs;
use std::cmp::Reverse;
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

/// A sequence, by its index among the running ones, and how many tokens of it a step runs.
struct Share {
    index: usize,
    count: usize,
}

impl Engine {
    /// Refuses a prompt that the whole budget could not hold.
    pub(super) fn check_fits(&self, prompt: usize) -> Result<(), RequestError> {
        let (needed, limit) = (self.kv.spec().bytes_at(prompt), self.kv.budget().limit());
        if needed > limit {
            return Err(RequestError::OutOfMemory(KvError::OutOfMemory { used: 0, limit, needed }));
        }
        Ok(())
    }

    /// Puts a request among those that wait.
    pub(super) fn enqueue(&mut self, active: Active) {
        let place = self.waiting.partition_point(|other| other.rank() < active.rank());
        self.waiting.insert(place, active);
    }

    /// Moves waiting requests into the batch, each starting from the longest prefix that is held.
    pub(super) fn admit(&mut self) {
        let reading = |a: &&Active| !a.is_decoding(self.kv.len(a.sequence()));
        let mut reading = self.running.iter().filter(reading).count();
        while self.running.len() < self.options.max_running.max(1)
            && reading < self.options.prompt_concurrency.max(1)
        {
            let Some(next) = self.waiting.front() else { return };
            if !self.running.is_empty() && !self.has_room(next) {
                return;
            }
            let Some(mut active) = self.waiting.pop_front() else { return };
            self.begin(&mut active);
            active.watch.note_progress(self.clock.now());
            active.resume();
            reading += 1;
            let place = self.running.partition_point(|other| other.rank() < active.rank());
            self.running.insert(place, active);
        }
    }

    /// Whether all known tokens of a request, and some more of everybody, would find room.
    fn has_room(&self, next: &Active) -> bool {
        let spec = self.kv.spec();
        let at = |active: &Active| spec.bytes_at(active.total() + BLOCK);
        let held = |active: &Active| spec.bytes_at(self.kv.len(active.sequence()));
        let growth: usize = self.running.iter().map(|active| at(active).saturating_sub(held(active))).sum();
        let shared = match next.prefix(next.tokens.len()) {
            Some(p) => self.kv.shared_bytes(p.root, p.tokens, p.tokens.len()),
            None => 0,
        };
        let needed = growth + at(next).saturating_sub(held(next).max(shared));
        let budget = self.kv.budget();
        budget.limit().saturating_sub(budget.used()) >= needed || self.kv.available_bytes() >= needed
    }

    /// Gives a request the longest prefix that is held, unless it has one of its own.
    fn begin(&mut self, active: &mut Active) {
        if self.kv.len(active.sequence()) > 0 {
            return;
        }
        // The last token is run again where its logits are needed.
        let limit = active.tokens.len() - usize::from(active.wants_logits());
        let limit = limit.min(active.cacheable());
        let found = active.prefix(active.tokens.len()).and_then(|known| {
            self.kv.load_prefix(&known, limit);
            self.kv.add_prefix(known.root, known.tokens, limit)
        });
        if let Some((sequence, cached)) = found {
            self.kv.remove(active.sequence());
            active.start(sequence, cached, false);
        }
    }

    /// Decides who advances by how many tokens, and reserves their room.
    pub(super) fn schedule(&mut self, updates: &mut Vec<(RequestId, Update)>) -> (StepInputs, Vec<Planned>) {
        let counts = self.share_out();
        let shares = self.reserve_by_rank(&counts, updates);
        self.assemble(&shares)
    }

    /// How many tokens each running sequence may advance by.
    fn share_out(&self) -> Vec<usize> {
        let mut counts = Vec::with_capacity(self.running.len());
        let mut prompts = Vec::new();
        for (index, active) in self.running.iter().enumerate() {
            let held = self.kv.len(active.sequence());
            counts.push(active.pending(held).len().min(active.until_segment_end(held)));
            if !active.is_decoding(held) {
                prompts.push(index);
            }
        }
        let priority = |index: usize| self.running[index].priority();
        let mut budget = self.options.prefill_step_size.max(1);
        // What the shortest of equal priority do not need goes to the longer ones.
        prompts.sort_by_key(|&index| (Reverse(priority(index)), counts[index]));
        for level in prompts.chunk_by(|&a, &b| priority(a) == priority(b)) {
            for (place, &index) in level.iter().enumerate() {
                counts[index] = counts[index].min(budget.div_ceil(level.len() - place));
                budget -= counts[index];
            }
        }
        counts
    }

    /// Reserves the room for the tokens of a step, and ends those that have nothing left to run.
    fn reserve_by_rank(&mut self, counts: &[usize], updates: &mut Vec<(RequestId, Update)>) -> Vec<Share> {
        let mut shares = Vec::new();
        let mut stuck = None;
        for (index, &count) in counts.iter().enumerate() {
            let active = &mut self.running[index];
            if active.is_preempted() {
                continue;
            }
            let held = self.kv.len(active.sequence());
            if active.pending(held).is_empty() {
                let update = active.advance(self.model.device().exec(), None, held, &self.eos, None);
                updates.extend(update.map(|update| (active.id, update)));
                continue;
            }
            let count = self.kv.step_limit(active.sequence(), count);
            if count == 0 {
                continue;
            }
            match self.reserve_or_preempt(index, count) {
                Ok(count) => shares.push(Share { index, count }),
                Err(error) => {
                    stuck = (!self.running[index].is_preempted()).then_some((index, error)).or(stuck)
                }
            }
        }
        // Others that advance will free their blocks in time; if nobody does, waiting would be for ever.
        if let Some((index, error)) = stuck.filter(|_| shares.is_empty() && updates.is_empty()) {
            let active = &mut self.running[index];
            active.fail();
            updates.push((active.id, Update::Failed(RequestError::OutOfMemory(error))));
        }
        shares
    }

    /// Reserves room for up to `count` tokens, at least 1, and returns for how many. If there is none the last ones by
    /// rank are preempted, perhaps this one itself.
    fn reserve_or_preempt(&mut self, index: usize, count: usize) -> Result<usize, KvError> {
        loop {
            let error = match self.reserve_up_to(self.running[index].sequence(), count) {
                Ok(count) => return Ok(count),
                Err(error) => error,
            };
            let last = self.running[index + 1..].iter().rposition(Active::can_be_preempted);
            match last {
                Some(place) => self.preempt(index + 1 + place),
                // Alone it would find no more room another time.
                None if self.running[..index].iter().any(Active::is_running) => {
                    if self.running[index].can_be_preempted() {
                        self.preempt(index);
                    }
                    return Err(error);
                }
                None if self.release_waiting() => {}
                None => return Err(error),
            }
        }
    }

    /// Takes from those that wait what can be run again; whether anybody held anything.
    fn release_waiting(&mut self) -> bool {
        let mut held = false;
        for active in self.waiting.iter_mut().filter(|active| !active.is_pinned()) {
            let sequence = active.sequence();
            if self.kv.len(sequence) > 0 {
                self.kv.remove(sequence);
                active.start(self.kv.add(), 0, false);
                held = true;
            }
        }
        held
    }

    /// Room for `count` tokens, or for as many halves of them as are to be had.
    fn reserve_up_to(&mut self, sequence: SequenceId, count: usize) -> Result<usize, KvError> {
        let mut count = count;
        loop {
            match self.kv.reserve(sequence, count) {
                Ok(()) => return Ok(count),
                Err(error) => {
                    self.kv.release_reserved(sequence);
                    if count <= 1 {
                        return Err(error);
                    }
                }
            }
            count /= 2;
        }
    }

    /// Takes a sequence's blocks; what it holds is kept for as long as others have no need of the room.
    fn preempt(&mut self, index: usize) {
        let fresh = self.kv.add();
        let active = &mut self.running[index];
        if let Some(draft) = &mut self.draft {
            draft.release(active);
        }
        let (sequence, held) = (active.sequence(), self.kv.len(active.sequence()));
        match active.prefix(held) {
            Some(entry) => self.kv.set_aside(sequence, &entry),
            None => self.kv.remove(sequence),
        }
        active.preempt(fresh, held);
    }

    /// The batch of a step. Guesses take room that is left over: nobody is preempted for them.
    fn assemble(&mut self, shares: &[Share]) -> (StepInputs, Vec<Planned>) {
        let mut inputs = StepInputs::default();
        let mut plan = Vec::with_capacity(shares.len());
        for &Share { index, count } in shares {
            let active = &mut self.running[index];
            let held = self.kv.len(active.sequence());
            let caught_up = count == active.pending(held).len() && active.wants_logits();
            let mut guesses = if caught_up { active.draft() } else { Vec::new() };
            guesses.truncate(self.kv.step_limit(active.sequence(), count + guesses.len()) - count);
            if !guesses.is_empty() && self.kv.reserve(active.sequence(), count + guesses.len()).is_err() {
                guesses.clear();
            }
            active.stats.drafted_tokens += guesses.len();
            let tokens = [&active.pending(held)[..count], &guesses].concat();
            inputs.push(active.sequence(), held, &tokens, active.long_context);
            if let Some(adapter) = &active.adapter {
                inputs.adapt(adapter.weights());
            }
            let end = inputs.tokens.len();
            let rows = if caught_up { end - 1 - guesses.len()..end } else { end..end };
            plan.push(Planned { index, count: tokens.len(), rows, guesses });
        }
        (inputs, plan)
    }

    /// Takes those out of the batch that have ended, and those that wait again.
    pub(super) fn settle(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].is_running() {
                index += 1;
                continue;
            }
            let active = self.running.remove(index);
            if active.is_preempted() {
                self.enqueue(active);
            } else {
                self.keep_cache(&active);
                self.retire(active);
            }
        }
    }

    /// Frees a sequence; what it holds is kept for prompts that begin like it.
    pub(super) fn retire(&mut self, active: Active) {
        let mut active = active;
        if let Some(draft) = &mut self.draft {
            draft.release(&mut active);
        }
        let sequence = active.sequence();
        match active.prefix(self.kv.len(sequence)).filter(|_| !active.failed()) {
            Some(entry) => self.kv.leave_prefix(sequence, &entry),
            None => self.kv.remove(sequence),
        }
    }
}
