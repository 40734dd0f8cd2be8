//! How many tokens to guess: as many as bring most tokens per second, by what was measured.
//!
//! If each guess is right with probability `a`, independently, `k` guesses bring `1 + a + … + a^k` tokens (Leviathan et
//! al., 2023, section 3.1). They cost `k` steps of the draft model and a step of the model with `k` more rows for each
//! sequence. Time decides how fast a reply comes, never what it is.

use super::DraftSpeculation;
use std::collections::BTreeMap;
use std::time::Duration;

/// A mean that forgets, and that a single slow step does not move far.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    seconds: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.seconds = match self.count {
            0 => seconds,
            // The first step of all touches memory for the first time.
            1 => self.seconds.min(seconds),
            _ => self.seconds + (seconds.min(2.0 * self.seconds) - self.seconds) / 8.0,
        };
        self.count = self.count.saturating_add(1);
    }
}

/// Times of steps.
#[derive(Debug, Default)]
pub(in crate::engine) struct Costs {
    /// One token of the draft model, for all sequences.
    draft: Mean,
    /// Steps of the model without a prompt's rows, by their rows.
    target: BTreeMap<usize, Mean>,
}

impl Costs {
    /// Above this many, numbers of rows are taken together in dozens.
    const EXACT: usize = 48;

    fn bucket(rows: usize) -> usize {
        if rows <= Self::EXACT { rows } else { rows.next_multiple_of(12) }
    }

    pub(super) fn add_draft(&mut self, time: Duration) {
        self.draft.add(time);
    }

    pub(in crate::engine) fn add_target(&mut self, rows: usize, time: Duration) {
        self.target.entry(Self::bucket(rows)).or_default().add(time);
    }

    /// Seconds of a step with so many rows: what was measured, or lies between two measurements, or else those of the
    /// nearest number of rows.
    fn target(&self, rows: usize) -> Option<f64> {
        let rows = Self::bucket(rows);
        let below = self.target.range(..=rows).next_back().map(|(&rows, mean)| (rows, mean.seconds));
        let above = self.target.range(rows..).next().map(|(&rows, mean)| (rows, mean.seconds));
        match (below, above) {
            (Some((low, before)), Some((high, after))) if low < high => {
                Some(before + (after - before) * (rows - low) as f64 / (high - low) as f64)
            }
            (below, above) => below.or(above).map(|(_, seconds)| seconds),
        }
    }

    /// Whether steps without guesses of so many sequences have been measured.
    fn knows_plain(&self, sequences: usize) -> bool {
        self.target.get(&Self::bucket(sequences)).is_some_and(|mean| mean.count > 1)
    }
}

/// One request's choice.
#[derive(Clone, Debug)]
pub(super) struct Depth {
    options: DraftSpeculation,
    /// Guesses that were tested, and those of them that were right; old ones count less.
    tested: f64,
    right: f64,
    /// Steps without guesses that are still to come.
    pause: u32,
    /// Pauses since guesses last paid for a while.
    pauses: u32,
    /// Rounds with guesses since the last pause.
    paying: u32,
    rounds: u32,
}

impl Depth {
    /// What is believed before anything was tested, and how many tests that belief is worth.
    const BELIEF: f64 = 0.8;
    const WEIGHT: f64 = 2.0;
    /// Each round's tests count this much less after the next.
    const FADE: f64 = 0.9;
    /// The first pause, in steps. Each further one is twice as long, up to so many doublings.
    const PAUSE: u32 = 16;
    const DOUBLINGS: u32 = 6;
    /// After so many rounds with guesses there is a step without, to measure it again.
    const REMEASURE: u32 = 64;

    pub(super) fn new(options: DraftSpeculation) -> Self {
        Self { options, tested: 0.0, right: 0.0, pause: 0, pauses: 0, paying: 0, rounds: 0 }
    }

    /// How many tokens to guess in a step of so many `sequences`; `None` if guesses do not pay, 0 if there is only a
    /// measurement to be made.
    pub(super) fn choose(&mut self, costs: &Costs, sequences: usize) -> Option<usize> {
        if !self.options.adaptive {
            return Some(self.options.draft_tokens);
        }
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        self.rounds += 1;
        if !costs.knows_plain(sequences) || self.rounds.is_multiple_of(Self::REMEASURE) {
            return Some(0);
        }
        let acceptance = (self.right + Self::BELIEF * Self::WEIGHT) / (self.tested + Self::WEIGHT);
        let plain = costs.target(sequences)?;
        let (mut tokens, mut power, mut best) = (1.0, 1.0, (1.0, 0));
        for depth in 1..=self.options.draft_tokens {
            power *= acceptance;
            tokens += power;
            let rows = costs.target(sequences * (1 + depth))?;
            let speed = tokens * plain / (depth as f64 * costs.draft.seconds + rows);
            if speed > best.0 {
                best = (speed, depth);
            }
        }
        if best.1 == 0 {
            self.pause = Self::PAUSE << self.pauses.min(Self::DOUBLINGS);
            self.pauses += 1;
            self.paying = 0;
            // Texts change: what was learnt counts less after a pause.
            self.tested /= 2.0;
            self.right /= 2.0;
            return None;
        }
        self.paying += 1;
        if self.paying >= Self::PAUSE {
            self.pauses = 0;
        }
        Some(best.1)
    }

    /// `right` of `guessed` tokens were right; none behind the first wrong one was tested.
    pub(super) fn learn(&mut self, guessed: usize, right: usize) {
        self.tested = Self::FADE * self.tested + (right + 1).min(guessed) as f64;
        self.right = Self::FADE * self.right + right as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of the model takes 10 ms, and `row` more for each row beyond the first; one of the draft `draft`.
    fn costs(draft: u64, row: u64) -> Costs {
        let mut costs = Costs::default();
        for _ in 0..3 {
            costs.add_draft(Duration::from_millis(draft));
            for rows in 1..=9 {
                costs.add_target(rows, Duration::from_millis(10 + row * (rows as u64 - 1)));
            }
        }
        costs
    }

    fn depth(draft_tokens: usize) -> Depth {
        Depth::new(DraftSpeculation { draft_tokens, adaptive: true })
    }

    #[test]
    fn as_many_as_pay() {
        let mut always = depth(8);
        (0..50).for_each(|_| always.learn(8, 8));
        assert_eq!(always.choose(&costs(1, 0), 1), Some(8), "all are right and nearly free");
        assert_eq!(always.choose(&costs(10, 0), 1), None, "as slow as the model itself");
        let mut often = depth(8);
        (0..50).for_each(|_| often.learn(2, 1));
        let few = often.choose(&costs(1, 1), 1);
        assert!(few.is_some_and(|depth| (1..=3).contains(&depth)), "{few:?}");
    }

    #[test]
    fn nothing_is_guessed_before_there_is_something_to_compare_with() {
        let mut costs = Costs::default();
        costs.add_target(2, Duration::from_millis(9));
        assert_eq!(depth(4).choose(&costs, 1), Some(0));
        let fixed = DraftSpeculation { draft_tokens: 4, adaptive: false };
        assert_eq!(Depth::new(fixed).choose(&costs, 1), Some(4));
    }

    #[test]
    fn wrong_guesses_cost_less_and_less() {
        let (costs, mut depth) = (costs(2, 0), depth(4));
        let mut guessing = 0;
        for _ in 0..4000 {
            if depth.choose(&costs, 1).is_some_and(|guesses| guesses > 0) {
                guessing += 1;
                depth.learn(1, 0);
            }
        }
        assert!((5..80).contains(&guessing), "{guessing} of 4000 steps");
        (0..60).for_each(|_| depth.learn(4, 4));
        while depth.pause > 0 {
            assert_eq!(depth.choose(&costs, 1), None);
        }
        assert_eq!(depth.choose(&costs, 1), Some(4), "what has become right is guessed again");
    }

    #[test]
    fn times_between_measurements_are_interpolated() {
        let mut costs = Costs::default();
        assert_eq!(costs.target(3), None);
        costs.add_target(2, Duration::from_secs(1));
        assert_eq!((costs.target(1), costs.target(9)), (Some(1.0), Some(1.0)));
        costs.add_target(6, Duration::from_secs(3));
        assert_eq!(costs.target(4), Some(2.0));
    }
}
