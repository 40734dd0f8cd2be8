//! Stop strings, found in the text wherever tokens cut it.

use std::collections::VecDeque;

/// So many stop strings, of so many bytes, may be given.
pub const STOP_STRINGS_MAX: usize = 256;
/// The most bytes of one stop string.
pub const STOP_BYTES_MAX: usize = 4096;

/// Stop strings that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// Too many.
    #[error("{count} stop strings; at most {STOP_STRINGS_MAX} are allowed")]
    TooMany {
        /// How many there are.
        count: usize,
    },
    /// One is empty: it would stop before the first token.
    #[error("stop string {index} is empty")]
    Empty {
        /// Its place, from 0.
        index: usize,
    },
    /// One is too long.
    #[error("stop string {index} has {bytes} bytes; at most {STOP_BYTES_MAX} are allowed")]
    TooLong {
        /// Its place, from 0.
        index: usize,
        /// Its length.
        bytes: usize,
    },
}

/// Finds the first stop string in a text that comes in pieces.
///
/// The first is the one that is complete first; of those complete at the same place the longest counts. So
/// the result does not depend on how the text is cut. Text that may be the beginning of a stop string
/// is held back, nothing else.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    /// A trie of the strings' bytes; the root is node 0.
    nodes: Vec<Node>,
    node: usize,
    /// Text that may be the beginning of a stop string.
    held: String,
    matched: bool,
    /// The stop string that is complete.
    found: String,
}

#[derive(Clone, Debug, Default)]
struct Node {
    next: Vec<(u8, usize)>,
    /// The node of the longest proper suffix that is in the trie.
    suffix: usize,
    /// Bytes from the root.
    depth: usize,
    /// The length of the longest string that ends here.
    ends: usize,
}

/// What a [`StopMatcher`] lets through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that is before any stop string.
    pub text: String,
    /// A stop string is complete; the text ends before it, and nothing more will come.
    pub matched: bool,
}

/// Checks stop strings that a user gives, before anything else is done for him.
///
/// # Errors
/// If there are too many, or one is empty or too long.
pub fn check_stops(stops: &[String]) -> Result<(), StopError> {
    if stops.len() > STOP_STRINGS_MAX {
        return Err(StopError::TooMany { count: stops.len() });
    }
    for (index, stop) in stops.iter().enumerate() {
        match stop.len() {
            0 => return Err(StopError::Empty { index }),
            1..=STOP_BYTES_MAX => {}
            bytes => return Err(StopError::TooLong { index, bytes }),
        }
    }
    Ok(())
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings among them never match.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        let mut matcher = Self {
            nodes: vec![Node::default()],
            node: 0,
            held: String::new(),
            matched: false,
            found: String::new(),
        };
        for stop in stops {
            matcher.add(stop.as_bytes());
        }
        matcher.link();
        matcher
    }

    fn add(&mut self, string: &[u8]) {
        let mut at = 0;
        for (i, &byte) in string.iter().enumerate() {
            at = match self.child(at, byte) {
                Some(child) => child,
                None => {
                    let child = self.nodes.len();
                    self.nodes.push(Node { depth: i + 1, ..Node::default() });
                    if let Some(node) = self.nodes.get_mut(at) {
                        node.next.push((byte, child));
                    }
                    child
                }
            };
        }
        if let Some(node) = self.nodes.get_mut(at) {
            node.ends = string.len();
        }
    }

    /// Sets the suffix links, breadth first (Aho and Corasick).
    fn link(&mut self) {
        let mut queue = VecDeque::from([0]);
        while let Some(at) = queue.pop_front() {
            let next = self.nodes.get(at).map(|node| node.next.clone()).unwrap_or_default();
            for (byte, child) in next {
                let suffix = if at == 0 { 0 } else { self.step(self.suffix(at), byte) };
                let ends = self.nodes.get(suffix).map_or(0, |node| node.ends);
                if let Some(node) = self.nodes.get_mut(child) {
                    node.suffix = suffix;
                    node.ends = node.ends.max(ends);
                }
                queue.push_back(child);
            }
        }
    }

    fn child(&self, at: usize, byte: u8) -> Option<usize> {
        let node = self.nodes.get(at)?;
        node.next.iter().find(|(b, _)| *b == byte).map(|(_, child)| *child)
    }

    fn suffix(&self, at: usize) -> usize {
        self.nodes.get(at).map_or(0, |node| node.suffix)
    }

    fn step(&self, mut at: usize, byte: u8) -> usize {
        loop {
            match self.child(at, byte) {
                Some(child) => return child,
                None if at == 0 => return 0,
                None => at = self.suffix(at),
            }
        }
    }

    /// The stop string that was found.
    #[must_use]
    pub fn found(&self) -> Option<&str> {
        self.matched.then_some(self.found.as_str())
    }

    /// Takes the next piece of text; returns what is safe to show. After a stop nothing more comes.
    pub fn push(&mut self, text: &str) -> StopOutput {
        if self.matched {
            return StopOutput { text: String::new(), matched: true };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            self.node = self.step(self.node, byte);
            let ends = self.nodes.get(self.node).map_or(0, |node| node.ends);
            if ends > 0 {
                self.held.truncate(before + i + 1);
                self.found = self.held.split_off(before + i + 1 - ends);
                self.matched = true;
                return StopOutput { text: std::mem::take(&mut self.held), matched: true };
            }
        }
        let keep = self.nodes.get(self.node).map_or(0, |node| node.depth);
        // A string can begin only where a character does, so the cut is between characters.
        let rest = self.held.split_off(self.held.len() - keep.min(self.held.len()));
        StopOutput { text: std::mem::replace(&mut self.held, rest), matched: false }
    }

    /// The text has ended: returns what was held back.
    pub fn finish(&mut self) -> String {
        self.node = 0;
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test may stop at the first surprise
    use super::*;
    use proptest::prelude::*;

    /// The shown text, and whether it was stopped.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut shown = Vec::new();
        for piece in pieces {
            let output = matcher.push(piece);
            shown.push(output.text);
            if output.matched {
                return (shown, true);
            }
        }
        shown.push(matcher.finish());
        (shown, false)
    }

    #[test]
    fn which_string_was_found_is_told() {
        let mut matcher = StopMatcher::new(&["ab".to_owned(), "éb".to_owned()]);
        assert_eq!(matcher.found(), None);
        assert_eq!(matcher.push("a é").text, "a ");
        assert_eq!((matcher.push("bab").matched, matcher.found()), (true, Some("éb")));
    }

    #[test]
    fn a_stop_string_over_several_pieces() {
        let pieces = ["alpha beta gam", "ma delta", "x"];
        assert_eq!(run(&["gamma d"], &pieces), (vec!["alpha beta ".into(), String::new()], true));
        let held = vec!["alpha beta ".to_owned(), "gamma delta".into(), "x".into(), String::new()];
        assert_eq!(run(&["gammaX"], &pieces), (held, false));
        assert_eq!(run(&["xyz"], &["ax", "y"]), (vec!["a".into(), String::new(), "xy".into()], false));
        assert_eq!(run(&[], &["a"]), (vec!["a".into(), String::new()], false));
    }

    #[test]
    fn the_string_complete_first_counts_and_of_several_the_longest() {
        assert_eq!(run(&["bcd", "abcde"], &["xabcdef"]), (vec!["xa".into()], true));
        assert_eq!(run(&["cd", "abcd"], &["xabcdef"]), (vec!["x".into()], true));
        assert_eq!(run(&["aab"], &["aaab"]), (vec!["a".into()], true));
        assert_eq!(run(&["日本", "本語"], &["x日", "本語"]), (vec!["x".into(), String::new()], true));
    }

    #[test]
    fn nothing_comes_after_a_stop() {
        let mut matcher = StopMatcher::new(&["x".to_owned()]);
        assert!(matcher.push("axb").matched);
        assert_eq!(matcher.push("c"), StopOutput { text: String::new(), matched: true });
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn text_that_cannot_match_is_not_held_back_and_empty_strings_never_match() {
        let mut matcher = StopMatcher::new(&["END".to_owned(), String::new()]);
        assert_eq!(matcher.push("abc E").text, "abc ");
        assert_eq!(matcher.push("x").text, "Ex");
    }

    #[test]
    fn many_long_strings_take_no_long_time() {
        let stops: Vec<String> =
            (0..STOP_STRINGS_MAX).map(|i| "a".repeat(STOP_BYTES_MAX - i) + "b").collect();
        let mut matcher = StopMatcher::new(&stops);
        let start = std::time::Instant::now();
        let text = "a".repeat(1 << 16);
        assert_eq!(matcher.push(&text).text.len(), (1 << 16) - STOP_BYTES_MAX);
        assert_eq!(matcher.push("b"), StopOutput { text: String::new(), matched: true });
        assert!(start.elapsed().as_secs() < 5);
    }

    #[test]
    fn limits_are_named() {
        let check = |stops: &[&str]| check_stops(&stops.iter().map(|&s| s.to_owned()).collect::<Vec<_>>());
        assert_eq!(check(&["a", ""]), Err(StopError::Empty { index: 1 }));
        let long = "x".repeat(STOP_BYTES_MAX + 1);
        let message = check(&[&long]).unwrap_err().to_string();
        assert_eq!(message, "stop string 0 has 4097 bytes; at most 4096 are allowed");
        assert_eq!(check(&[&long[1..]]), Ok(()));
        assert_eq!(check(&["x"; STOP_STRINGS_MAX + 1]), Err(StopError::TooMany { count: 257 }));
    }

    /// By definition: the smallest end of any occurrence, of those the smallest start.
    fn first_stop(text: &str, stops: &[String]) -> Option<usize> {
        let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
        let mut ends = ends.filter_map(|end| {
            let found = stops.iter().filter(|s| text[..end].ends_with(s.as_str()));
            found.map(|s| end - s.len()).min()
        });
        ends.next()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_cut_changes_the_result(
            text in "[ab日é]{0,12}",
            stops in prop::collection::vec("[ab日é]{1,4}", 0..4),
            cuts in prop::collection::vec(any::<bool>(), 12),
        ) {
            let mut matcher = StopMatcher::new(&stops);
            let mut shown = String::new();
            let mut stopped = false;
            let mut piece = String::new();
            for (c, cut) in text.chars().zip(cuts) {
                piece.push(c);
                if cut {
                    let output = matcher.push(&std::mem::take(&mut piece));
                    shown.push_str(&output.text);
                    stopped |= output.matched;
                }
            }
            let output = matcher.push(&piece);
            shown.push_str(&output.text);
            shown.push_str(&matcher.finish());
            stopped |= output.matched;
            let want = first_stop(&text, &stops);
            prop_assert_eq!(&shown, &text[..want.unwrap_or(text.len())]);
            prop_assert_eq!(stopped, want.is_some());
        }
    }
}
