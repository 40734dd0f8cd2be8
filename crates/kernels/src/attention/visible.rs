//! Which positions a query sees.

use super::BLOCK;
use std::ops::Range;

/// What is left to a query of the positions up to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// A sliding window that keeps the sequence's first tokens: a query at p sees the positions below `keep` and the last
    /// `size - keep`, itself included.
    Last {
        /// Positions seen in all; greater than `keep`.
        size: usize,
        /// First positions of the sequence that are always seen.
        keep: usize,
    },
    /// Chunks of so many positions, at least 1, from the sequence's start on: a query sees those of its own chunk.
    Chunk(usize),
}

impl Window {
    /// Whether every query sees at least itself.
    pub(super) fn is_sound(self) -> bool {
        match self {
            Self::Last { size, keep } => keep < size,
            Self::Chunk(size) => size > 0,
        }
    }
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
            Some(Window::Last { size, keep }) => {
                Self { keep: keep.min(end), recent: end.saturating_sub(size - keep), end }
            }
            Some(Window::Chunk(size)) => Self { keep: 0, recent: position - position % size, end },
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
        let last = [(1, 0), (5, 0), (33, 0), (40, 4), (100, 40)];
        let last = last.map(|(size, keep)| Some(Window::Last { size, keep }));
        let chunks = [1, 5, 32, 40, 100].map(|size| Some(Window::Chunk(size)));
        for window in last.into_iter().chain(chunks).chain([None]) {
            for position in 0..150 {
                let visible = Visible::new(window, position);
                let left = |p: usize| match window {
                    None => true,
                    Some(Window::Last { size, keep }) => p < keep || p + size - keep > position,
                    Some(Window::Chunk(size)) => p / size == position / size,
                };
                let sees = |p: usize| p <= position && left(p);
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
