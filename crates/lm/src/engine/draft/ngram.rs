//! Guesses from the text itself. (Saxena, "Prompt lookup decoding", 2023.)

use crate::sample::ParamError;

/// Guesses from the text itself: what followed the last time that the same tokens came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramSpeculation {
    /// Tokens at the end of the text that are looked for in it, from 1 to [`NgramSpeculation::MOST`].
    pub ngram: usize,
    /// Tokens guessed at once at most, from 1 to [`NgramSpeculation::MOST`].
    pub draft_tokens: usize,
}

impl Default for NgramSpeculation {
    fn default() -> Self {
        Self { ngram: 3, draft_tokens: 3 }
    }
}

impl NgramSpeculation {
    /// The most that either number can be.
    pub const MOST: usize = 64;

    /// Checks both numbers.
    ///
    /// # Errors
    /// Names the one that is out of range.
    pub fn validate(&self) -> Result<(), ParamError> {
        for (field, value) in [("ngram", self.ngram), ("draft_tokens", self.draft_tokens)] {
            if !(1..=Self::MOST).contains(&value) {
                let allowed = format!("an integer from 1 to {}", Self::MOST);
                return Err(ParamError { field, value: value.to_string(), allowed });
            }
        }
        Ok(())
    }
}

/// One request's guesses. How many there are follows from how many were right: a step with wrong ones costs more than
/// a step without.
#[derive(Clone, Debug)]
pub(in crate::engine) struct NgramDrafter {
    options: NgramSpeculation,
    /// How many are guessed at once, for now.
    depth: usize,
    /// Steps without guesses that are still to come.
    pause: usize,
    /// Guesses in a row of which none was right.
    failures: u32,
}

impl NgramDrafter {
    pub(in crate::engine) fn new(options: NgramSpeculation) -> Self {
        Self { options, depth: options.draft_tokens, pause: 0, failures: 0 }
    }

    /// Guesses what follows `tokens`, at most `most` tokens; often nothing.
    pub(in crate::engine) fn propose(&mut self, tokens: &[u32], most: usize) -> Vec<u32> {
        if self.pause > 0 {
            self.pause -= 1;
            return Vec::new();
        }
        let Some(end) = tokens.len().checked_sub(self.options.ngram) else { return Vec::new() };
        let (last, n) = (&tokens[end..], self.options.ngram);
        // The latest occurrence: texts repeat what they just said.
        let found = tokens[..tokens.len() - 1].windows(n).rposition(|earlier| earlier == last);
        let Some(follows) = found.map(|at| &tokens[at + n..]) else { return Vec::new() };
        // What has come round once may come round again.
        follows.iter().copied().cycle().take(self.depth.min(most)).collect()
    }

    /// `right` of `guessed` tokens, at least 1, were right.
    pub(in crate::engine) fn learn(&mut self, guessed: usize, right: usize) {
        const LONGEST_PAUSE: u32 = 6;
        if right == 0 {
            self.failures += 1;
            self.pause = (1 << self.failures.min(LONGEST_PAUSE)) - 1;
            self.depth = 1;
        } else {
            self.failures = 0;
            self.depth =
                if right == guessed { (2 * self.depth).min(self.options.draft_tokens) } else { right };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_are_what_followed_last_time() {
        let mut drafter = NgramDrafter::new(NgramSpeculation { ngram: 2, draft_tokens: 3 });
        assert_eq!(drafter.propose(&[1, 2, 3, 4, 5, 6, 1, 2], 9), [3, 4, 5]);
        assert_eq!(drafter.propose(&[1, 2, 3, 4, 1, 2, 9, 1, 2], 9), [9, 1, 2], "the latest");
        assert_eq!(drafter.propose(&[5, 1, 2, 1, 2], 9), [1, 2, 1], "round and round");
        assert_eq!(drafter.propose(&[1, 2, 3, 4, 1, 2], 1), [3]);
        assert_eq!(drafter.propose(&[7, 7, 7], 9), [7, 7, 7], "overlapping");
        let none: [u32; 0] = [];
        assert_eq!(drafter.propose(&[1, 2, 3], 9), none);
        assert_eq!(drafter.propose(&[1], 9), none);
        assert_eq!(drafter.propose(&[], 9), none);
    }

    #[test]
    fn wrong_guesses_make_it_pause_and_right_ones_bold() {
        let mut drafter = NgramDrafter::new(NgramSpeculation { ngram: 1, draft_tokens: 8 });
        let text = [5, 1, 2, 3, 4, 6, 7, 8, 9, 5];
        let guesses = |drafter: &mut NgramDrafter| drafter.propose(&text, 99).len();
        assert_eq!(guesses(&mut drafter), 8);
        drafter.learn(8, 0);
        assert_eq!([guesses(&mut drafter), guesses(&mut drafter)], [0, 1]);
        drafter.learn(1, 0);
        assert_eq!((0..4).map(|_| guesses(&mut drafter)).collect::<Vec<_>>(), [0, 0, 0, 1]);
        drafter.learn(1, 1);
        assert_eq!(guesses(&mut drafter), 2);
        drafter.learn(2, 2);
        drafter.learn(4, 3);
        assert_eq!(guesses(&mut drafter), 3);
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        for (ngram, draft_tokens, field) in [(0, 1, "ngram"), (65, 1, "ngram"), (1, 0, "draft_tokens")] {
            let error = NgramSpeculation { ngram, draft_tokens }.validate().map_err(|error| error.field);
            assert_eq!(error, Err(field));
        }
    }
}
