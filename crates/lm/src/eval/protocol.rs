//! Protocols of perplexity: in which windows a text is read, and what of each window is scored.
//!
//! No number of perplexity means anything without them: they decide how much context each token has.

use super::score::Span;
use std::ops::Range;

/// How a list of tokens is cut into windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Windows of `length` tokens side by side; what does not fill one is left out. The first token of each is context
    /// only. That is mlx-lm's.
    Windows {
        /// Tokens of a window, at least 2.
        length: usize,
    },
    /// One window after the other that scores what follows, the last one after as much as fits: each token but the very
    /// first is scored once. The model reads `max_length` tokens at a time, and one more is scored. These are
    /// lm-evaluation-harness's rolling windows, whose `context` is 1.
    Documents {
        /// Most tokens that the model reads at a time, at least 1.
        max_length: usize,
        /// How many of those that were scored before a window after the first reads again, from 1 to `max_length`.
        context: usize,
    },
    /// Windows of `length` tokens that begin every `stride` tokens and score those that no window before did; the last
    /// one is shorter. So each token has at least `length - stride` before it where there are as many. That is the
    /// sliding window of transformers' guide to perplexity.
    Strided {
        /// Most tokens of a window, at least 2.
        length: usize,
        /// From the beginning of a window to that of the next, from 1 to `length`.
        stride: usize,
    },
}

/// A part of a longer list of tokens that the model reads at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The tokens that are read.
    pub read: Range<usize>,
    /// The first of them that is scored, by its index in the list.
    pub from: usize,
}

impl Window {
    /// Its tokens out of the list, behind `prefix` if that is not the first of them already. `None` if the window does
    /// not lie in the list, or scores nothing.
    #[must_use]
    pub fn span(&self, list: &[u32], prefix: Option<u32>) -> Option<Span> {
        let read = list.get(self.read.clone())?;
        let prefix = prefix.filter(|prefix| read.first() != Some(prefix));
        let tokens: Vec<u32> = prefix.into_iter().chain(read.iter().copied()).collect();
        let from = self.from.checked_sub(self.read.start)?;
        // Behind a prefix the first token can be scored too, where no window before did that.
        let from = if prefix.is_some() && from > 1 { from + 1 } else { 1.max(from) };
        (from < tokens.len()).then_some(Span { tokens, from })
    }
}

impl Protocol {
    /// The windows of a list of `len` tokens. Numbers that are out of their ranges count as the nearest that are not.
    #[must_use]
    pub fn windows(&self, len: usize) -> Vec<Window> {
        match *self {
            Protocol::Windows { length } => {
                let length = length.max(2);
                let starts = (0..len / length).map(|i| i * length);
                starts.map(|start| Window { read: start..start + length, from: start + 1 }).collect()
            }
            Protocol::Documents { max_length, context } => {
                let (mut windows, mut scored) = (Vec::new(), 1);
                let max_length = max_length.max(1);
                let context = context.clamp(1, max_length);
                while scored < len {
                    let most = if scored == 1 { max_length } else { max_length + 1 - context };
                    let end = len.min(scored + most);
                    windows.push(Window { read: end.saturating_sub(max_length + 1)..end, from: scored });
                    scored = end;
                }
                windows
            }
            Protocol::Strided { length, stride } => {
                let (mut windows, mut start, mut scored) = (Vec::new(), 0, 0);
                let length = length.max(2);
                let stride = stride.clamp(1, length);
                while scored < len {
                    let end = len.min(start + length);
                    windows.push(Window { read: start..end, from: scored.max(start + 1) });
                    (start, scored) = (start + stride, end);
                }
                windows
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn windows(protocol: Protocol, len: usize) -> Vec<(usize, usize, usize)> {
        protocol.windows(len).into_iter().map(|w| (w.read.start, w.from, w.read.end)).collect()
    }

    #[test]
    fn by_hand() {
        assert_eq!(windows(Protocol::Windows { length: 4 }, 11), [(0, 1, 4), (4, 5, 8)]);
        assert_eq!(windows(Protocol::Windows { length: 4 }, 3), []);
        let rolling = |context| Protocol::Documents { max_length: 4, context };
        assert_eq!(windows(rolling(1), 11), [(0, 1, 5), (4, 5, 9), (6, 9, 11)]);
        assert_eq!(windows(rolling(3), 8), [(0, 1, 5), (2, 5, 7), (3, 7, 8)]);
        let strided = Protocol::Strided { length: 4, stride: 2 };
        assert_eq!(windows(strided, 9), [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]);
        assert_eq!(windows(Protocol::Strided { length: 4, stride: 4 }, 6), [(0, 1, 4), (4, 5, 6)]);
    }

    #[test]
    fn a_prefix_stands_before_every_window_once() {
        let list: Vec<u32> = (10..20).collect();
        let span = |start, from, end, prefix| Window { read: start..end, from }.span(&list, prefix);
        assert_eq!(span(2, 3, 5, None), Some(Span { tokens: vec![12, 13, 14], from: 1 }));
        assert_eq!(span(2, 3, 5, Some(1)), Some(Span { tokens: vec![1, 12, 13, 14], from: 1 }));
        assert_eq!(span(2, 4, 5, Some(1)), Some(Span { tokens: vec![1, 12, 13, 14], from: 3 }));
        assert_eq!(span(2, 4, 5, Some(12)), Some(Span { tokens: vec![12, 13, 14], from: 2 }));
        assert_eq!((span(5, 6, 6, None), span(8, 9, 12, None)), (None, None));
    }

    proptest! {
        #[test]
        fn each_token_is_scored_once(len in 0_usize..300, length in 2_usize..40, other in 1_usize..40) {
            let rolling = Protocol::Documents { max_length: length, context: other };
            let strided = Protocol::Strided { length, stride: other.min(length - 1) };
            for (protocol, most) in [(rolling, length + 1), (strided, length)] {
                let windows = protocol.windows(len);
                let scored: Vec<usize> = windows.iter().flat_map(|w| w.from..w.read.end).collect();
                prop_assert_eq!(scored, (1..len.max(1)).collect::<Vec<_>>());
                prop_assert!(windows.iter().all(|w| w.read.len() <= most && w.read.start < w.from));
            }
        }
    }
}
