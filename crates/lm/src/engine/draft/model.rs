//! Guesses of a second model, which are drawn as the request itself would draw.

use super::depth::{Costs, Depth};
use super::{DraftSpeculation, DraftStop};
use crate::cache::{KvQuantError, KvStore, Policy, PrefixTokens, SequenceId};
use crate::engine::EngineOptions;
use crate::engine::active::Active;
use crate::engine::root::root;
use crate::grammar::{Grammar, GrammarError};
use crate::models::{ForwardError, Model, StepInputs};
use crate::text::{EosSet, Tokenizer};
use lmx_tensor::Tensor;
use lmx_tensor::kernels::attention::KvType;
use std::sync::Arc;
use std::time::Instant;

/// A model that guesses for an engine, with the vocabulary of the engine's own.
pub struct DraftModel {
    /// The network.
    pub model: Box<dyn Model>,
    /// Its tokenizer, which is compared with the engine's.
    pub tokenizer: Arc<Tokenizer>,
    /// How its keys and values are stored; windows and quantization are the engine's.
    pub kv_type: KvType,
    /// Most bytes of its keys and values, beside those of the engine's model.
    pub kv_memory: usize,
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftModel").field("kv_memory", &self.kv_memory).finish_non_exhaustive()
    }
}

/// Why a model cannot guess for an engine.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The engine's model cannot take a guess back.
    #[error("a draft model cannot be used: the model's recurrent state cannot be taken back token by token")]
    TargetState,
    /// The draft model cannot take a guess back.
    #[error("the draft model cannot be used: its recurrent state cannot be taken back token by token")]
    DraftState,
    /// The draft model's keys and values cannot be quantized as the engine's are.
    #[error("the draft model cannot be used: {0}")]
    Quantization(#[from] KvQuantError),
    /// The same id means different tokens.
    #[error("the draft model's tokenizer differs: id {id} is {draft}, but in the model's it is {target}")]
    Tokenizer {
        /// The first such id.
        id: u32,
        /// The token of the engine's model.
        target: String,
        /// The token of the draft model.
        draft: String,
    },
}

/// Refuses tokenizers in which an id that both have means different tokens.
fn compare(target: &Tokenizer, draft: &Tokenizer) -> Result<(), DraftError> {
    match target.difference(draft) {
        Some((id, [target, draft])) => Err(DraftError::Tokenizer { id, target, draft }),
        None => Ok(()),
    }
}

/// One request's guesses, and what the draft model holds for it.
pub(in crate::engine) struct DraftRow {
    depth: Depth,
    /// The reply's grammar, which has followed the guesses too.
    pub(in crate::engine) grammar: Option<Grammar>,
    sequence: Option<SequenceId>,
    /// What its sequence was before the guesses, where those might not be trimmed.
    fork: Option<SequenceId>,
    /// Tokens that were known when the last guesses were made.
    base: usize,
    /// The last guesses.
    pub(in crate::engine) guesses: Vec<u32>,
    /// Whether they have not been proposed yet.
    pub(in crate::engine) fresh: bool,
    /// It makes no guesses any more.
    pub(in crate::engine) stopped: bool,
}

impl DraftRow {
    pub(super) fn new(options: DraftSpeculation, grammar: Option<Grammar>, prompt: usize) -> Self {
        Self {
            depth: Depth::new(options),
            grammar,
            sequence: None,
            fork: None,
            base: prompt,
            guesses: Vec::new(),
            fresh: false,
            stopped: false,
        }
    }

    pub(super) fn take_proposed(&mut self, most: usize) -> Vec<u32> {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh { self.guesses.iter().copied().take(most).collect() } else { Vec::new() }
    }

    pub(super) fn learn(&mut self, guessed: usize, right: usize) {
        self.depth.learn(guessed, right);
    }

    /// Takes the wrong ones of the last guesses back, now that `tokens` are known; `grammar` has followed those.
    fn settle(&mut self, kv: &mut KvStore, tokens: &[u32], grammar: Option<&Grammar>) {
        let came = tokens.get(self.base..).unwrap_or_default();
        let right = self.guesses.iter().zip(came).take_while(|(guess, token)| guess == token).count();
        if let Some(sequence) = self.sequence {
            let held = kv.len(sequence);
            let fork = self.fork.take();
            let trimmed = kv.trim(sequence, held - held.min(self.base + right));
            let gone = if trimmed.is_ok() { fork } else { std::mem::replace(&mut self.sequence, fork) };
            gone.into_iter().for_each(|sequence| kv.remove(sequence));
        }
        // Where no token came, the last one is run again for its logits.
        if let Some(sequence) = self.sequence.filter(|&sequence| kv.len(sequence) >= tokens.len())
            && kv.trim(sequence, 1).is_err()
        {
            kv.remove(sequence);
            self.sequence = None;
        }
        if let Some(own) = &mut self.grammar {
            let wrong = self.guesses.len() - right;
            let mut follow = || -> Result<(), GrammarError> {
                if wrong > 0 {
                    own.rollback(wrong)?;
                }
                came.iter().skip(right).try_for_each(|&token| own.accept(token))
            };
            if follow().is_err() {
                self.grammar = grammar.cloned();
            }
        }
        self.base = tokens.len();
        self.guesses.clear();
        self.fresh = false;
    }
}

/// One request's part of a round of guesses.
struct Turn {
    /// Index into the running sequences.
    index: usize,
    sequence: SequenceId,
    /// Tokens that are run next.
    count: usize,
    /// Guesses that are still to be made.
    depth: usize,
    long_context: bool,
}

/// The draft model, and what it holds of the sequences.
pub(in crate::engine) struct Draft {
    model: Box<dyn Model>,
    kv: KvStore,
    pub(in crate::engine) costs: Costs,
    /// Room for one row of the engine's logits.
    logits: Vec<f32>,
    /// What several requests begin with.
    shared: Option<Shared>,
}

/// A prompt that was run for all requests that begin with it.
struct Shared {
    tokens: Vec<u32>,
    long_context: bool,
    sequence: SequenceId,
}

impl Draft {
    pub(in crate::engine) fn new(
        draft: DraftModel,
        target: &dyn Model,
        tokenizer: &Tokenizer,
        options: &EngineOptions,
    ) -> Result<Self, DraftError> {
        let DraftModel { model, tokenizer: own, kv_type, kv_memory } = draft;
        if !target.states().is_empty() {
            return Err(DraftError::TargetState);
        }
        if !model.states().is_empty() {
            return Err(DraftError::DraftState);
        }
        compare(tokenizer, &own)?;
        let kv = options.store(&*model, kv_type, kv_memory)?;
        let logits = vec![0.0; target.vocab()];
        Ok(Self { model, kv, costs: Costs::default(), logits, shared: None })
    }

    pub(in crate::engine) fn kv(&self) -> &KvStore {
        &self.kv
    }

    pub(in crate::engine) fn clear_prefixes(&mut self) {
        self.kv.clear_prefixes();
    }

    /// Runs a prompt, `chunk` tokens at a time, for requests that begin with it and come to have `most` tokens; until
    /// [`Draft::unshare`] they begin with a fork of it. If it cannot be run, each of them finds that out itself.
    pub(in crate::engine) fn share(&mut self, tokens: &[u32], most: usize, chunk: usize) {
        self.unshare();
        let known = |&token: &u32| (token as usize) < self.model.vocab();
        if tokens.len() > self.model.context_length() || !tokens.iter().all(known) {
            return;
        }
        let long_context = self.is_long(most);
        let root = root(None, long_context);
        let found = self.kv.add_prefix(root, tokens, tokens.len());
        let sequence = found.map_or_else(|| self.kv.add(), |(sequence, _)| sequence);
        match self.run_prompt(sequence, tokens, long_context, chunk) {
            Ok(()) => self.shared = Some(Shared { tokens: tokens.to_vec(), long_context, sequence }),
            Err(_) => self.kv.remove(sequence),
        }
    }

    /// Runs what a sequence does not hold of a prompt.
    fn run_prompt(
        &mut self,
        sequence: SequenceId,
        tokens: &[u32],
        long_context: bool,
        chunk: usize,
    ) -> Result<(), ForwardError> {
        while let pending @ [_, ..] = &tokens[self.kv.len(sequence).min(tokens.len())..] {
            let count = self.kv.step_limit(sequence, pending.len().min(chunk.max(1)));
            self.kv.reserve(sequence, count)?;
            let mut inputs = StepInputs::default();
            inputs.push(sequence, self.kv.len(sequence), &pending[..count], long_context);
            self.model.hidden(&inputs, &mut self.kv)?;
            self.kv.commit(sequence, count)?;
        }
        Ok(())
    }

    /// Forgets the prompt of [`Draft::share`]; what was forked from it stays.
    pub(in crate::engine) fn unshare(&mut self) {
        if let Some(shared) = self.shared.take() {
            self.kv.remove(shared.sequence);
        }
    }

    /// Whether so many tokens are more than the draft model's original context.
    fn is_long(&self, most: usize) -> bool {
        self.model.original_context().is_some_and(|original| most > original)
    }

    /// Guesses for all sequences that decode, each position as one batch. `kv` are the engine's; at most `chunk` tokens
    /// are run to catch up, and who has not caught up decodes without guesses.
    pub(in crate::engine) fn propose(
        &mut self,
        running: &mut [Active],
        kv: &KvStore,
        chunk: usize,
        eos: &EosSet,
    ) {
        let decoding = |(_, active): &(usize, &Active)| active.is_decoding(kv.len(active.sequence()));
        let decoding: Vec<usize> = running.iter().enumerate().filter(decoding).map(|(i, _)| i).collect();
        let (start, mut turns, mut left) = (Instant::now(), Vec::new(), chunk.max(1));
        for &index in &decoding {
            match self.begin(&mut running[index], index, decoding.len(), left) {
                Ok(turn) => {
                    left -= turn.as_ref().map_or(0, |turn| turn.count);
                    turns.extend(turn);
                }
                Err(stop) => self.stop(&mut running[index], stop),
            }
        }
        let guessing: Vec<usize> = turns.iter().map(|turn| turn.index).collect();
        let result = self.guess(running, turns, eos);
        for index in guessing {
            let active = &mut running[index];
            active.stats.draft_seconds += start.elapsed().as_secs_f64();
            active.take_guesses_back();
            if result.is_err() {
                self.stop(active, DraftStop::Failed);
            }
        }
    }

    /// A request's part of a round: `None` if it is not to guess now, an error if it never is again.
    fn begin(
        &mut self,
        active: &mut Active,
        index: usize,
        sequences: usize,
        left: usize,
    ) -> Result<Option<Turn>, DraftStop> {
        let most = active.guesses_max();
        let Some(row) = active.draft_row().filter(|row| !row.stopped && most > 0 && left > 0) else {
            return Ok(None);
        };
        let depth = row.depth.choose(&self.costs, sequences);
        active.stats.draft_stop = if depth.is_none() { Some(DraftStop::Unprofitable) } else { None };
        let Some(depth) = depth.filter(|&depth| depth > 0) else { return Ok(None) };
        let long_context = self.is_long(active.most_tokens());
        let sequence = self.sequence(active, long_context);
        let held = self.kv.len(sequence);
        let pending = active.tokens.get(held..).unwrap_or_default();
        if active.tokens.len() > self.model.context_length() {
            return Err(DraftStop::Context);
        }
        if pending.iter().any(|&token| token as usize >= self.model.vocab()) {
            return Err(DraftStop::Vocabulary);
        }
        let count = self.kv.step_limit(sequence, pending.len().min(left));
        let depth = if count == pending.len() { depth.min(most) } else { 0 };
        self.kv.reserve(sequence, count).map_err(|_| DraftStop::OutOfMemory)?;
        Ok(Some(Turn { index, sequence, count, depth, long_context }))
    }

    /// The request's sequence, without wrong guesses; if it has none, one that begins with what is held of its tokens.
    fn sequence(&mut self, active: &mut Active, long_context: bool) -> SequenceId {
        active.with_draft_row(|row, tokens, grammar| row.settle(&mut self.kv, tokens, grammar));
        if let Some(sequence) = active.draft_row().and_then(|row| row.sequence) {
            return sequence;
        }
        let sequence = entry(active, active.tokens.len(), long_context).and_then(|known| {
            let begins = |shared: &&Shared| {
                shared.long_context == long_context && known.tokens.starts_with(&shared.tokens)
            };
            match self.shared.as_ref().filter(begins).map(|shared| shared.sequence) {
                Some(shared) => self.kv.fork(shared).ok(),
                // The last token is run again for its logits.
                None => {
                    let found = self.kv.add_prefix(known.root, known.tokens, known.tokens.len() - 1);
                    found.map(|(sequence, _)| sequence)
                }
            }
        });
        let sequence = sequence.unwrap_or_else(|| self.kv.add());
        if let Some(row) = active.draft_row() {
            row.sequence = Some(sequence);
        }
        sequence
    }

    /// Runs what is pending, then guess after guess, until no turn has any left.
    fn guess(
        &mut self,
        running: &mut [Active],
        mut turns: Vec<Turn>,
        eos: &EosSet,
    ) -> Result<(), ForwardError> {
        let mut guessed = false;
        while !turns.is_empty() {
            let (start, mut inputs, mut rows) = (Instant::now(), StepInputs::default(), Vec::new());
            for turn in &turns {
                let held = self.kv.len(turn.sequence);
                let pending = running[turn.index].tokens.get(held..held + turn.count).unwrap_or_default();
                inputs.push(turn.sequence, held, pending, turn.long_context);
                rows.extend((turn.depth > 0).then_some(inputs.tokens.len() - 1));
            }
            let hidden = self.model.hidden(&inputs, &mut self.kv)?;
            for &Turn { index, sequence, count, long_context, .. } in &turns {
                let held = self.kv.len(sequence) + count;
                // Others may begin with what is known; guesses may be wrong.
                let known = if guessed { None } else { entry(&running[index], held, long_context) };
                match known {
                    Some(entry) => self.kv.commit_prefix(sequence, count, &entry)?,
                    None => self.kv.commit(sequence, count)?,
                }
            }
            guessed = true;
            turns.retain(|turn| turn.depth > 0);
            if turns.is_empty() {
                break;
            }
            let logits = self.model.head(&hidden, &rows, &inputs.adapters)?;
            // A step that catches up with no more than a right guess costs about as much.
            if inputs.tokens.len() <= 2 * turns.len() {
                self.costs.add_draft(start.elapsed());
            }
            let mut row = 0..;
            turns.retain_mut(|turn| {
                let index = row.next().unwrap_or_default();
                self.draw(&mut running[turn.index], turn, &logits, index, eos)
            });
        }
        Ok(())
    }

    /// Draws a guess from a row of logits; whether another one is to follow.
    fn draw(
        &mut self,
        active: &mut Active,
        turn: &mut Turn,
        logits: &Tensor,
        row: usize,
        eos: &EosSet,
    ) -> bool {
        let own = logits.data().chunks_exact(logits.cols()).nth(row).unwrap_or_default();
        let both = own.len().min(self.logits.len());
        // What the draft model has no logit for it never guesses.
        self.logits.fill(f32::NEG_INFINITY);
        self.logits[..both].copy_from_slice(&own[..both]);
        let Some(guess) = active.guess(self.model.device().exec(), &mut self.logits, eos) else {
            return false;
        };
        (turn.depth, turn.count) = (turn.depth - 1, 1);
        let known = (guess as usize) < self.model.vocab();
        if turn.depth == 0 || !known || self.kv.len(turn.sequence) >= self.model.context_length() {
            return false;
        }
        let spec = self.kv.spec();
        let trims = spec.quantization.is_none() && spec.groups.iter().all(|g| g.policy == Policy::Full);
        if let Some(row) = active.draft_row().filter(|row| !trims && row.fork.is_none()) {
            row.fork = self.kv.fork(turn.sequence).ok();
        }
        let reserved = self.kv.reserve(turn.sequence, 1).is_ok();
        if !reserved {
            self.kv.release_reserved(turn.sequence);
        }
        reserved
    }

    /// The request goes on without guesses.
    fn stop(&mut self, active: &mut Active, why: DraftStop) {
        self.release(active);
        active.stats.draft_stop = Some(why);
        if let Some(row) = active.draft_row() {
            row.stopped = true;
        }
    }

    /// Frees what is held for a request; it is kept for prompts that begin like it. Should the request go on, it is run
    /// again.
    pub(in crate::engine) fn release(&mut self, active: &mut Active) {
        active.with_draft_row(|row, tokens, grammar| row.settle(&mut self.kv, tokens, grammar));
        let Some(sequence) = active.draft_row().and_then(|row| row.sequence.take()) else { return };
        let long_context = self.is_long(active.most_tokens());
        self.kv.release_reserved(sequence);
        match entry(active, self.kv.len(sequence), long_context) {
            Some(entry) => self.kv.set_aside(sequence, &entry),
            None => self.kv.remove(sequence),
        }
    }
}

/// The first `held` tokens of a request, as the draft model's prefix cache knows them: adapters do not act on it.
fn entry(active: &Active, held: usize, long_context: bool) -> Option<PrefixTokens<'_>> {
    active.prefix(held).map(|entry| PrefixTokens { root: root(None, long_context), ..entry })
}
