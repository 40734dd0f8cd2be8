//! A limit on what a model thinks.

use super::{LogitsProcessor, SampleError};

/// Ends a model's thoughts after so many tokens: from then on only the tokens of the marker that ends them can follow.
///
/// It counts the tokens between the markers, over all thoughts of a reply. Push it behind all processors that change the
/// likelihood of the marker's tokens. Under speculation it follows what is accepted and taken back, so it forces the same tokens.
#[derive(Clone, Debug)]
pub struct ReasoningBudget {
    start: Vec<u32>,
    end: Vec<u32>,
    budget: usize,
    /// Before the first token, then after each accepted one.
    states: Vec<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    thinking: bool,
    /// Tokens of thoughts so far.
    used: usize,
    /// Tokens of the next marker that have come.
    matched: usize,
}

impl ReasoningBudget {
    /// Allows `budget` tokens between the ids `start` and `end` of [`ThinkingMarkers`]; `thinking` says that the prompt
    /// has opened the thoughts. Without an `end` nothing is ever forced.
    ///
    /// [`ThinkingMarkers`]: crate::text::ThinkingMarkers
    #[must_use]
    pub fn new(start: Vec<u32>, end: Vec<u32>, budget: usize, thinking: bool) -> Self {
        Self { start, end, budget, states: vec![State { thinking, ..State::default() }] }
    }

    fn state(&self) -> State {
        self.states.last().copied().unwrap_or_default()
    }

    /// The tokens of thoughts so far, those of the markers not counted.
    #[must_use]
    pub fn used(&self) -> usize {
        self.state().used
    }

    /// The token that must come next.
    fn forced(&self) -> Option<u32> {
        let State { thinking, used, matched } = self.state();
        let spent = thinking && used >= self.budget;
        self.end.get(matched).copied().filter(|_| spent)
    }
}

/// How much of `marker` the text ends with, if it ended with `matched` tokens of it before `token`.
fn advance(marker: &[u32], matched: usize, token: u32) -> usize {
    (0..=matched)
        .rev()
        .find(|&length| {
            // The longest beginning that is also an end of what has come.
            marker.get(length) == Some(&token)
                && marker.get(..length) == marker.get(matched - length..matched)
        })
        .map_or(0, |length| length + 1)
}

impl LogitsProcessor for ReasoningBudget {
    fn process(&mut self, _: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
        let Some(token) = self.forced() else { return Ok(()) };
        for (id, logit) in logits.iter_mut().enumerate() {
            *logit = if id == token as usize { 0.0 } else { f32::NEG_INFINITY };
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) {
        let mut state = self.state();
        let marker = if state.thinking { &self.end } else { &self.start };
        let matched = advance(marker, state.matched, token);
        if state.thinking {
            // What seemed to begin the marker and did not was a thought.
            state.used += (state.matched + 1).saturating_sub(matched);
        }
        state.matched = matched;
        if matched > 0 && matched == marker.len() {
            state.thinking = !state.thinking;
            state.matched = 0;
        }
        self.states.push(state);
    }

    fn rollback(&mut self, tokens: usize) {
        let keep = self.states.len().saturating_sub(tokens).max(1);
        self.states.truncate(keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOCAB: usize = 10;

    /// The only token that may follow.
    fn forced(budget: &mut ReasoningBudget) -> Option<usize> {
        let mut logits = vec![f32::NEG_INFINITY; VOCAB];
        logits[1] = 3.0;
        logits[2] = 2.0;
        budget.process(&[], &mut logits).unwrap();
        let allowed: Vec<usize> = (0..VOCAB).filter(|&id| logits[id] > f32::NEG_INFINITY).collect();
        (allowed.len() == 1).then(|| allowed[0])
    }

    fn feed(budget: &mut ReasoningBudget, tokens: &[u32]) -> Vec<Option<usize>> {
        let mut all = vec![forced(budget)];
        for &token in tokens {
            budget.accept(token);
            all.push(forced(budget));
        }
        all
    }

    #[test]
    fn thoughts_end_when_the_budget_is_used() {
        let mut budget = ReasoningBudget::new(vec![8], vec![9], 2, true);
        assert_eq!(feed(&mut budget, &[1, 2, 9, 1, 1]), [None, None, Some(9), None, None, None]);
        assert_eq!(budget.used(), 2);
        // A second thought has nothing left.
        assert_eq!(feed(&mut budget, &[8, 9]), [None, Some(9), None]);
        let mut opens = ReasoningBudget::new(vec![8], vec![9], 0, false);
        assert_eq!(feed(&mut opens, &[1, 8, 9]), [None, None, Some(9), None]);
        let mut ends_itself = ReasoningBudget::new(vec![8], vec![9], 3, true);
        assert_eq!(feed(&mut ends_itself, &[1, 9, 1, 1, 1, 1]), [None; 7]);
    }

    #[test]
    fn a_marker_of_several_tokens_is_forced_to_its_end() {
        let mut budget = ReasoningBudget::new(vec![7, 8], vec![5, 5, 6], 2, true);
        assert_eq!(
            feed(&mut budget, &[1, 2, 5, 5, 6, 1]),
            [None, None, Some(5), Some(5), Some(6), None, None]
        );
        // The beginning of the marker was there already; of three the last two are it.
        let mut begun = ReasoningBudget::new(vec![7, 8], vec![5, 5, 6], 2, true);
        assert_eq!(feed(&mut begun, &[1, 5, 5, 5, 6]), [None, None, None, None, Some(6), None]);
        // What only seemed to be it counts.
        let mut seemed = ReasoningBudget::new(vec![7, 8], vec![5, 5, 6], 3, true);
        assert_eq!(feed(&mut seemed, &[5, 5, 1]), [None, None, None, Some(5)]);
        let mut start = ReasoningBudget::new(vec![7, 8], vec![5], 0, false);
        assert_eq!(feed(&mut start, &[7, 1, 7, 8]), [None, None, None, None, Some(5)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn taking_back_leaves_the_state_of_before(
            first in prop::collection::vec(0..6u32, 0..20), wrong in prop::collection::vec(0..6u32, 0..20),
            then in prop::collection::vec(0..6u32, 0..20), limit in 0..6usize, thinking in any::<bool>(),
        ) {
            let new = || ReasoningBudget::new(vec![3, 4], vec![4, 4, 5], limit, thinking);
            let (mut straight, mut guessed) = (new(), new());
            feed(&mut straight, &first);
            feed(&mut guessed, &first);
            feed(&mut guessed, &wrong);
            guessed.rollback(wrong.len());
            prop_assert_eq!(feed(&mut straight, &then), feed(&mut guessed, &then));
            prop_assert_eq!(straight.used(), guessed.used());
        }

        #[test]
        fn thoughts_are_never_longer_than_the_budget(tokens in prop::collection::vec(0..6u32, 0..60), limit in 0..8usize) {
            let mut budget = ReasoningBudget::new(vec![3], vec![4, 5], limit, true);
            for token in tokens {
                let forced = forced(&mut budget);
                budget.accept(forced.map_or(token, |id| id as u32));
                prop_assert!(budget.used() <= limit + 1);
            }
        }
    }
}
