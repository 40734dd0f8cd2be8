//! The built-in logits processors, and the chain that runs them before the user's own.

use std::collections::HashMap;
use std::fmt;

use super::{LogitsProcessor, ProcessorParams, SampleError};

/// Logit bias, repetition, presence and frequency penalty, in this order as in mlx-lm, then the user's processors.
///
/// Penalties count the tokens of their context as these come and go, so that a step costs as much as there are
/// different tokens in the context, however long the history is.
#[derive(Default)]
pub struct ProcessorChain {
    bias: Vec<(u32, f32)>,
    penalties: Vec<Penalty>,
    own: Vec<Box<dyn LogitsProcessor>>,
    /// What the penalties have counted; `None` until the first step shows the prompt.
    history: Option<Vec<u32>>,
}

impl ProcessorChain {
    /// The processors that `params`, which [`ProcessorParams::validate`] accepts, switches on.
    #[must_use]
    pub fn new(params: &ProcessorParams) -> Self {
        let penalties = [
            (
                params.has_repetition(),
                Rule::Repetition,
                params.repetition_penalty,
                params.repetition_context_size,
            ),
            (
                params.presence_penalty != 0.0,
                Rule::Presence,
                params.presence_penalty,
                params.presence_context_size,
            ),
            (
                params.frequency_penalty != 0.0,
                Rule::Frequency,
                params.frequency_penalty,
                params.frequency_context_size,
            ),
        ];
        let on = penalties.into_iter().filter(|&(on, ..)| on);
        Self {
            bias: params.logit_bias.iter().map(|(&id, &bias)| (id, bias as f32)).collect(),
            penalties: on
                .map(|(_, rule, value, context)| Penalty::new(rule, value as f32, context))
                .collect(),
            own: Vec::new(),
            history: None,
        }
    }

    /// Adds a processor of your own, to run after those that are there.
    pub fn push(&mut self, processor: Box<dyn LogitsProcessor>) {
        self.own.push(processor);
    }

    /// Nothing would happen to the logits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bias.is_empty() && self.penalties.is_empty() && self.own.is_empty()
    }

    fn count(&mut self, token: u32) {
        if let Some(history) = &mut self.history {
            history.push(token);
            self.penalties.iter_mut().for_each(|penalty| penalty.enter(history));
        }
    }
}

impl LogitsProcessor for ProcessorChain {
    fn process(&mut self, history: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
        for &(id, bias) in &self.bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        if !self.penalties.is_empty() {
            let counted = self.history.get_or_insert_default().len();
            debug_assert!(counted <= history.len(), "tokens left the history without a rollback");
            history.iter().skip(counted).for_each(|&token| self.count(token));
        }
        self.penalties.iter().for_each(|penalty| penalty.apply(logits));
        self.own.iter_mut().try_for_each(|processor| processor.process(history, logits))
    }

    fn accept(&mut self, token: u32) {
        self.count(token);
        self.own.iter_mut().for_each(|processor| processor.accept(token));
    }

    fn rollback(&mut self, tokens: usize) {
        if let Some(history) = &mut self.history {
            for _ in 0..tokens {
                self.penalties.iter_mut().for_each(|penalty| penalty.leave(history));
                history.pop();
            }
        }
        self.own.iter_mut().for_each(|processor| processor.rollback(tokens));
    }
}

impl fmt::Debug for ProcessorChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessorChain")
            .field("bias", &self.bias)
            .field("penalties", &self.penalties)
            .field("own", &self.own.len())
            .finish_non_exhaustive()
    }
}

/// What a penalty does to the logit of a token that occurs in its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// Divides a positive logit, multiplies a negative one (Keskar et al., "CTRL", 2019).
    Repetition,
    /// Subtracts once.
    Presence,
    /// Subtracts for each occurrence.
    Frequency,
}

#[derive(Clone, Debug)]
struct Penalty {
    rule: Rule,
    value: f32,
    /// Tokens at the end of the history that count; 0 is all.
    context: usize,
    /// How often each token occurs in the context; tokens that do not are absent.
    counts: HashMap<u32, u32>,
}

impl Penalty {
    fn new(rule: Rule, value: f32, context: usize) -> Self {
        Self { rule, value, context, counts: HashMap::new() }
    }

    /// The last token of `history` has just come.
    fn enter(&mut self, history: &[u32]) {
        if let Some(&token) = history.last() {
            self.add(token);
        }
        if let Some(token) = self.beyond(history) {
            self.remove(token);
        }
    }

    /// The last token of `history` is about to go: the reverse of `enter`.
    fn leave(&mut self, history: &[u32]) {
        if let Some(token) = self.beyond(history) {
            self.add(token);
        }
        if let Some(&token) = history.last() {
            self.remove(token);
        }
    }

    /// The token just before the context.
    fn beyond(&self, history: &[u32]) -> Option<u32> {
        let index = history.len().checked_sub(self.context)?.checked_sub(1)?;
        history.get(index).copied().filter(|_| self.context > 0)
    }

    fn add(&mut self, token: u32) {
        *self.counts.entry(token).or_insert(0) += 1;
    }

    fn remove(&mut self, token: u32) {
        if let Some(count) = self.counts.get_mut(&token) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&token);
            }
        }
    }

    fn apply(&self, logits: &mut [f32]) {
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = match self.rule {
                Rule::Repetition if *logit < 0.0 => *logit * self.value,
                Rule::Repetition => *logit / self.value,
                Rule::Presence => *logit - self.value,
                Rule::Frequency => *logit - self.value * count as f32,
            };
        }
    }
}
