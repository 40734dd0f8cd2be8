//! Stop strings, matched on text: a match may lie across any number of tokens.

/// Finds the first of several stop strings in text that arrives in pieces, and holds back what may become part of
/// one. What it releases, joined, is the text before the first match, however the text was cut.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text not yet released: the longest end of what arrived that begins some stop string.
    held: String,
    matched: bool,
}

/// What a [`StopMatcher`] released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that may be shown.
    pub text: String,
    /// Whether a stop string is complete; the text ends before it, and nothing more will be released.
    pub matched: bool,
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings among them never match.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { stops, held: String::new(), matched: false }
    }

    /// Adds a piece of text. Of several matches the one that ends first counts; of those that end together, the
    /// one that begins first.
    pub fn push(&mut self, piece: &str) -> StopOutput {
        if self.matched {
            return StopOutput { text: String::new(), matched: true };
        }
        if self.stops.is_empty() {
            return StopOutput { text: piece.to_owned(), matched: false };
        }
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        if let Some((_, start)) = found.min() {
            self.matched = true;
            self.held.truncate(start);
            return StopOutput { text: std::mem::take(&mut self.held), matched: true };
        }
        let keep = self.longest_beginning();
        let held = self.held.split_off(self.held.len() - keep);
        StopOutput { text: std::mem::replace(&mut self.held, held), matched: false }
    }

    /// Ends the text: releases what was held back for a match that did not come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes of the longest end of the held text that is a beginning of a stop string.
    fn longest_beginning(&self) -> usize {
        let longest = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most)
                .rev()
                .find(|&n| self.held.as_bytes().ends_with(stop.as_bytes().get(..n).unwrap_or_default()))
        };
        let bytes = self.stops.iter().filter_map(longest).max().unwrap_or(0);
        // A character is never split: a stop string's first bytes may be those of another character.
        (0..=bytes).rev().find(|&n| self.held.is_char_boundary(self.held.len() - n)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::{StopMatcher, StopOutput};
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let StopOutput { text: released, matched } = matcher.push(piece);
            text.push_str(&released);
            if matched {
                return (text, true);
            }
        }
        text.push_str(&matcher.finish());
        (text, false)
    }

    #[test]
    fn a_match_across_pieces_ends_before_it() {
        assert_eq!(run(&["gamma d"], &["alpha beta gam", "ma delta"]), ("alpha beta ".into(), true));
        assert_eq!(
            run(&["gammaX"], &["alpha beta gam", "ma delta"]),
            ("alpha beta gamma delta".into(), false)
        );
        assert_eq!(run(&["\n\n"], &["a\n", "\nb"]), ("a".into(), true));
        assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".into(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
    }

    #[test]
    fn text_that_cannot_match_is_not_held_back() {
        let mut matcher = StopMatcher::new(&["END".to_owned()]);
        assert_eq!(matcher.push("abc E").text, "abc ");
        assert_eq!(matcher.push("x").text, "Ex");
    }

    /// The definition: the match that ends first, among those the one that begins first.
    fn reference(stops: &[String], text: &str) -> (String, bool) {
        let ends = (0..=text.len()).filter(|&end| text.is_char_boundary(end));
        for end in ends {
            let starts = stops.iter().filter(|s| !s.is_empty() && text[..end].ends_with(s.as_str()));
            if let Some(start) = starts.map(|s| end - s.len()).min() {
                return (text[..start].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn every_cut_gives_the_same_text(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            text in "[abcé]{0,24}",
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).collect();
            at.retain(|&c| text.is_char_boundary(c));
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let stops_ref: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops_ref, &pieces), reference(&stops, &text));
        }
    }
}
