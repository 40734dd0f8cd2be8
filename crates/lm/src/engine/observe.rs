//! What a request wants to know of its prompt: how likely its tokens are, or one vector for all of it.

use super::active::Active;
use super::schedule::Planned;
use super::watch::guarded;
use super::{Engine, RequestError, RequestId, Update};
use crate::models::{Model, StepInputs};
use crate::sample::{log_softmax, top_logprobs};
use lmx_tensor::Tensor;
use std::sync::Arc;

/// Rows whose logits are computed at a time: a prompt's logits are never held all at once.
const ROWS: usize = 64;

/// Asks for the log-probabilities of the prompt's own tokens, as the model sees them: before logits processors,
/// grammar and temperature. They come as [`Update::Prompt`], in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLogprobs {
    /// The first token to tell of, by its index in the prompt, at most its length. Of token 0 nothing can be told.
    pub from: usize,
    /// How many likely tokens to list for each, at most all.
    pub top: usize,
}

/// How likely a token of the prompt is, given those before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptToken {
    /// Its index in the prompt.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Whether no token is likelier: greedy decoding would have drawn it (or one that is as likely).
    pub greedy: bool,
    /// The most likely tokens with their log-probabilities, descending.
    pub top: Vec<(u32, f32)>,
}

/// Sees the whole distribution at each token of a prompt that [`PromptLogprobs`] asks for; closures implement it.
pub trait RowObserver: Send {
    /// `logprobs` are the natural logarithms of the probabilities of all tokens at place `index` of the prompt, given
    /// those before it. Places come in order, each once.
    fn see(&mut self, index: usize, logprobs: &[f32]);
}

impl<F: FnMut(usize, &[f32]) + Send> RowObserver for F {
    fn see(&mut self, index: usize, logprobs: &[f32]) {
        self(index, logprobs);
    }
}

/// How the vectors of a prompt's tokens become one. They are those behind the last layer's norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean. Not for a prompt that goes on from a cache whose tokens are not known.
    Mean,
    /// That of the last token.
    Last,
}

/// What has been seen of a prompt.
#[derive(Default)]
pub(super) struct Observer {
    logprobs: Option<PromptLogprobs>,
    rows: Option<Box<dyn RowObserver>>,
    pooling: Option<Pooling>,
    /// The prompt's first tokens, of which all has been told that was asked.
    told: usize,
    /// The prompt's first tokens, which are in `sum`.
    pooled: usize,
    sum: Vec<f64>,
}

impl Observer {
    pub(super) fn new(
        logprobs: Option<PromptLogprobs>,
        rows: Option<Box<dyn RowObserver>>,
        pooling: Option<Pooling>,
    ) -> Self {
        let told = logprobs.map_or(0, |asked| asked.from.max(1));
        Self { logprobs, rows, pooling, told, ..Self::default() }
    }

    /// How many tokens, of which the first `prompt` are the prompt, may be taken from a cache: it knows nothing of what
    /// came before the cached keys and values.
    pub(super) fn cacheable(&self, prompt: usize) -> usize {
        let untold = self.logprobs.filter(|_| self.told < prompt).map_or(usize::MAX, |_| self.told - 1);
        let unpooled = match self.pooling.filter(|_| self.pooled < prompt) {
            None => usize::MAX,
            Some(Pooling::Mean) => self.pooled,
            Some(Pooling::Last) => prompt - 1,
        };
        untold.min(unpooled)
    }

    fn is_idle(&self) -> bool {
        self.logprobs.is_none() && self.pooling.is_none()
    }

    /// Adds the vectors of tokens that follow those seen before; returns the one of all `prompt` tokens at their end.
    fn pool(&mut self, how: Pooling, normed: &Tensor, first: usize, prompt: usize) -> Option<Vec<f32>> {
        if self.pooled >= prompt {
            return None;
        }
        self.sum.resize(normed.cols(), 0.0);
        for (index, row) in (first..).zip(normed.data().chunks_exact(normed.cols().max(1))) {
            // What runs again after a preemption counts once.
            if index < self.pooled {
                continue;
            }
            self.pooled = index + 1;
            match how {
                Pooling::Mean => self.sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x)),
                Pooling::Last => self.sum.iter_mut().zip(row).for_each(|(sum, x)| *sum = f64::from(*x)),
            }
        }
        let count = if how == Pooling::Mean { prompt as f64 } else { 1.0 };
        (self.pooled == prompt).then(|| self.sum.iter().map(|sum| (sum / count) as f32).collect())
    }
}

impl Engine {
    /// Tells what requests want to know of the prompt tokens of this step.
    pub(super) fn observe(
        &mut self,
        hidden: &Tensor,
        inputs: &StepInputs,
        plan: &[Planned],
        updates: &mut Vec<(RequestId, Update)>,
    ) {
        for (planned, sequence) in plan.iter().zip(&inputs.sequences) {
            let active = &mut self.running[planned.index];
            if active.observer.is_idle() {
                continue;
            }
            let known = sequence.first_position - active.unknown().min(sequence.first_position);
            let rows = sequence.rows.start
                ..sequence.rows.end.min(sequence.rows.start + active.prompt().len().saturating_sub(known));
            let first = sequence.rows.start;
            for begin in rows.clone().step_by(ROWS) {
                let chunk: Vec<usize> = (begin..rows.end.min(begin + ROWS)).collect();
                let told = look(&*self.model, active, hidden, inputs, &chunk, known + begin - first);
                match told {
                    Ok(told) => updates.extend(told.into_iter().map(|update| (active.id, update))),
                    Err(error) => {
                        active.fail();
                        updates.push((active.id, Update::Failed(error)));
                        break;
                    }
                }
            }
        }
    }
}

/// Looks at the rows of prompt tokens, the first of which has the index `first`.
fn look(
    model: &dyn Model,
    active: &mut Active,
    hidden: &Tensor,
    inputs: &StepInputs,
    rows: &[usize],
    first: usize,
) -> Result<Vec<Update>, RequestError> {
    let forward = |error| RequestError::Forward(Arc::new(error));
    let prompt = active.prompt().len();
    let mut told = Vec::new();
    if let Some(how) = active.observer.pooling {
        let normed = model.final_norm(hidden, rows).map_err(forward)?;
        told.extend(active.observer.pool(how, &normed, first, prompt).map(Update::Embedding));
    }
    if let Some(asked) = active.observer.logprobs {
        // Each row predicts the token after its own.
        let wanted = |index: usize| index >= active.observer.told && index < prompt;
        let rows: Vec<(usize, usize)> =
            (first + 1..).zip(rows.iter().copied()).filter(|&(index, _)| wanted(index)).collect();
        if let Some(&(last, _)) = rows.last() {
            let indices: Vec<usize> = rows.iter().map(|&(_, row)| row).collect();
            let logits = model.head(hidden, &indices, &inputs.adapters).map_err(forward)?;
            let exec = model.device().exec();
            let mut tokens = Vec::with_capacity(rows.len());
            let mut logprobs = vec![0.0; logits.cols()];
            for (&(index, _), row) in rows.iter().zip(logits.data().chunks_exact(logits.cols().max(1))) {
                log_softmax(exec, row, &mut logprobs)?;
                if let Some(rows) = &mut active.observer.rows {
                    guarded("row observer", || {
                        rows.see(index, &logprobs);
                        Ok(())
                    })?;
                }
                let token = active.prompt()[index];
                let logprob = logprobs.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
                let greedy = logprobs.iter().all(|&other| other <= logprob);
                let top = top_logprobs(&logprobs, asked.top);
                tokens.push(PromptToken { index, token, logprob, greedy, top });
            }
            active.observer.told = last + 1;
            told.push(Update::Prompt(tokens));
        }
    }
    Ok(told)
}
