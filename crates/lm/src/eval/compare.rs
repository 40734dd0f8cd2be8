//! Two models on the same tokens: what the second one costs, or gains.

use super::perplexity::{Estimate, Loss, Plan, losses};
use super::score::{Queue, Rows, ScoreError, Scored, Scorer};
use crate::sample::{argmax, exp};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

/// Why two models cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// The same id means different tokens.
    #[error("the tokenizers differ: token {id} is {first} in the first, and {second} in the second")]
    Tokenizer {
        /// The first such id.
        id: u32,
        /// The first model's token.
        first: String,
        /// The second one's.
        second: String,
    },
    /// Their distributions are over different numbers of tokens.
    #[error("the first model has {first} logits, and the second {second}")]
    Vocabulary {
        /// Of the first model.
        first: usize,
        /// Of the second one.
        second: usize,
    },
    /// One of them cannot score a window.
    #[error("the {which} model: {error}")]
    Score {
        /// `first` or `second`.
        which: &'static str,
        /// Why not.
        error: Box<ScoreError>,
    },
    /// The caller wanted no more.
    #[error("stopped before all was scored")]
    Stopped,
}

/// How two models find the same tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The losses of both, token by token.
    pub losses: [Loss; 2],
    /// KL(first || second) at each token, in nats: what it costs to take the second's distribution for the first's. 0 or
    /// more; infinite where the second thinks impossible what the first does not.
    pub kl: Vec<f64>,
    /// Whether both think the same token the likeliest, at each token.
    pub same_top: Vec<bool>,
}

impl Comparison {
    /// How much greater the second's loss is, in nats per token. The error is that of the differences, token by token,
    /// which is smaller than those of the two means. `None` if a loss is not finite.
    #[must_use]
    pub fn difference(&self) -> Option<Estimate> {
        let [first, second] = &self.losses;
        Estimate::of(&first.tokens.iter().zip(&second.tokens).map(|(a, b)| b - a).collect::<Vec<_>>())
    }

    /// The share of tokens at which both think the same token the likeliest. `None` without tokens.
    #[must_use]
    pub fn agreement(&self) -> Option<f64> {
        let same = self.same_top.iter().filter(|same| **same).count();
        (!self.same_top.is_empty()).then(|| same as f64 / self.same_top.len() as f64)
    }

    /// The mean of the finite KL divergences, and how many are not finite.
    #[must_use]
    pub fn mean_kl(&self) -> (Option<Estimate>, usize) {
        let finite: Vec<f64> = self.kl.iter().copied().filter(|kl| kl.is_finite()).collect();
        (Estimate::of(&finite), self.kl.len() - finite.len())
    }
}

/// A window's place and a token's index in it.
type Place = (usize, usize);

/// Where the distributions of the two meet: the one that comes first is held until the other comes.
#[derive(Default)]
struct Meeting {
    held: HashMap<Place, (usize, Vec<f32>)>,
    met: HashMap<Place, (f64, bool)>,
    /// Distributions that came of each.
    seen: [usize; 2],
}

impl Meeting {
    fn see(&mut self, which: usize, place: Place, logprobs: &[f32]) {
        self.seen[which] += 1;
        match self.held.remove(&place) {
            Some((other, row)) if other != which => {
                let (first, second) = if which == 0 { (logprobs, &row[..]) } else { (&row[..], logprobs) };
                self.met.insert(place, (divergence(first, second), argmax(first) == argmax(second)));
            }
            _ => drop(self.held.insert(place, (which, logprobs.to_vec()))),
        }
    }
}

/// KL(first || second) of two rows of log-probabilities.
fn divergence(first: &[f32], second: &[f32]) -> f64 {
    // In parts, so that the compiler uses SIMD within one and no digits are lost over all.
    let part = |(first, second): (&[f32], &[f32])| {
        let terms = first.iter().zip(second).map(|(&p, &q)| if p < -87.0 { 0.0 } else { exp(p) * (p - q) });
        f64::from(terms.sum::<f32>())
    };
    let sum: f64 = first.chunks(256).zip(second.chunks(256)).map(part).sum();
    // Rounding of equal rows.
    sum.max(0.0)
}

/// Scores what is planned with two models. Their engines step in turn, so that only a step's distributions are held:
/// with the same options they get on alike, and [`prefill_step_size`](crate::engine::EngineOptions::prefill_step_size)
/// times the vocabulary is what is held. `progress` is told how many windows are done, and says whether to go on.
///
/// # Errors
/// [`CompareError`].
pub fn compare<'e>(
    first: &mut Scorer<'e>,
    second: &mut Scorer<'e>,
    plan: &Plan,
    progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Comparison, CompareError> {
    check(first, second)?;
    let meeting = Arc::new(Mutex::new(Meeting::default()));
    let rows = |which: usize| -> Rows {
        let meeting = Arc::clone(&meeting);
        Arc::new(move |place, index, logprobs: &[f32]| {
            meeting.lock().unwrap_or_else(PoisonError::into_inner).see(which, (place, index), logprobs);
        })
    };
    let mut queues = [0, 1].map(|which| Queue::new(plan.spans(), Some(rows(which))));
    let mut scored: [Vec<Scored>; 2] =
        [0, 1].map(|_| (0..plan.windows()).map(|_| Err(ScoreError::Stopped)).collect());
    let mut done = [0, 0];
    let mut scorers = [first, second];
    let stopped = loop {
        let which = {
            let seen = meeting.lock().unwrap_or_else(PoisonError::into_inner).seen;
            usize::from(queues[0].is_done() || (seen[1] < seen[0] && !queues[1].is_done()))
        };
        if queues[which].is_done() {
            break false;
        }
        for (place, window) in queues[which].step(scorers[which]) {
            done[which] += 1;
            scored[which].get_mut(place).into_iter().for_each(|slot| {
                *slot = window.as_ref().map_or(Err(ScoreError::Stopped), |tokens| Ok(tokens.clone()));
            });
            if let Err(error) = window {
                queues.iter().zip(&mut scorers).for_each(|(queue, scorer)| queue.stop(scorer));
                return Err(CompareError::Score {
                    which: ["first", "second"][which],
                    error: Box::new(error),
                });
            }
        }
        if progress(done[0].min(done[1])).is_break() {
            break true;
        }
    };
    if stopped {
        queues.iter().zip(&mut scorers).for_each(|(queue, scorer)| queue.stop(scorer));
        return Err(CompareError::Stopped);
    }
    let all = |scored: Vec<Scored>, which| -> Result<Vec<Vec<(usize, f64)>>, CompareError> {
        let score = |error| CompareError::Score { which, error: Box::new(error) };
        scored.into_iter().map(|window| window.map(|tokens| losses(&tokens)).map_err(score)).collect()
    };
    let [first, second] = scored;
    let (first, second) = (all(first, "first")?, all(second, "second")?);
    let met = &meeting.lock().unwrap_or_else(PoisonError::into_inner).met;
    let places =
        first.iter().enumerate().flat_map(|(place, window)| window.iter().map(move |&(i, _)| (place, i)));
    let (kl, same_top) = places.filter_map(|place| met.get(&place).copied()).unzip();
    Ok(Comparison { losses: [plan.sum(&first), plan.sum(&second)], kl, same_top })
}

fn check(first: &Scorer<'_>, second: &Scorer<'_>) -> Result<(), CompareError> {
    let (a, b) = (first.engine.model().vocab(), second.engine.model().vocab());
    if a != b {
        return Err(CompareError::Vocabulary { first: a, second: b });
    }
    match first.engine.tokenizer().difference(second.engine.tokenizer()) {
        Some((id, [first, second])) => Err(CompareError::Tokenizer { id, first, second }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_divergence_of_two_rows() {
        let logs = |row: &[f32]| row.iter().map(|p| p.ln()).collect::<Vec<f32>>();
        let (p, q) = (logs(&[0.5, 0.25, 0.25, 0.0]), logs(&[0.25, 0.25, 0.5, 0.0]));
        let expected = 0.5 * 2.0_f64.ln() + 0.25 * 0.5_f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-6);
        assert_eq!(divergence(&p, &p), 0.0);
        assert_eq!(divergence(&p, &logs(&[1.0, 0.0, 0.0, 0.0])), f64::INFINITY);
        assert!(divergence(&logs(&[1.0, 0.0, 0.0, 0.0]), &p).is_finite());
    }
}
