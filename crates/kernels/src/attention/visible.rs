//! Which positions a query sees.

use super::BLOCK;
use std::ops::Range;

/// A sliding window with sink tokens: a query at p sees the positions below `keep` and the last
/// `size - keep`, itself included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Positions seen in all; greater than `keep`.
    pub size: usize,
    /// First positions of the sequence that are always seen.
    pub keep: usize,
}

/// The positions that one query sees: `0..keep` and `recent..end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Visible {
    pub(super) keep: usize,
    pub(super) recent: usize,
    pub(super) end: usize,
}

impl Visible {
    pub(super) fn new(window: Option<Window>, position: usize) -> Self {
        let end = position + 1;
        match window {
            None => Self { keep: 0, recent: 0, end },
            Some(w) => Self { keep: w.keep.min(end), recent: end.saturating_sub(w.size - w.keep), end },
        }
    }

    /// Whether any position of `range` is seen.
    pub(super) fn any(&self, range: Range<usize>) -> bool {
        let (start, end) = (range.start, range.end.min(self.end));
        start < end && (start < self.keep || end > self.recent)
    }

    /// The lowest position seen.
    pub(super) fn first(&self) -> usize {
        if self.keep > 0 { 0 } else { self.recent }
    }

    /// Bit t is set where position `block * BLOCK + t` is seen.
    pub(super) fn mask(&self, block: usize) -> u32 {
        let start = block * BLOCK;
        below(self.end, start) & (below(self.keep, start) | !below(self.recent, start))
    }
}

/// Bit t is set where `start + t < limit`.
fn below(limit: usize, start: usize) -> u32 {
    match limit.saturating_sub(start) {
        count if count >= BLOCK => u32::MAX,
        count => (1 << count) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Visible, Window};

    #[test]
    fn masks_follow_the_definition() {
        let windows = [None, Some((1, 0)), Some((5, 0)), Some((33, 0)), Some((40, 4)), Some((100, 40))];
        for window in windows.map(|w| w.map(|(size, keep)| Window { size, keep })) {
            for position in 0..150 {
                let visible = Visible::new(window, position);
                let sees = |p: usize| {
                    p <= position && window.is_none_or(|w| p < w.keep || p + w.size - w.keep > position)
                };
                for block in 0..6 {
                    let mask = visible.mask(block);
                    for t in 0..BLOCK {
                        assert_eq!(
                            mask >> t & 1 == 1,
                            sees(block * BLOCK + t),
                            "{window:?} {position} {block} {t}"
                        );
                    }
                }
                for (start, end) in [(0, 1), (0, 32), (3, 7), (32, 64), (64, 160), (40, 41)] {
                    assert_eq!(
                        visible.any(start..end),
                        (start..end).any(sees),
                        "{window:?} {position} {start} {end}"
                    );
                }
            }
        }
    }
}
