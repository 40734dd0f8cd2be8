//! Added tokens: texts such as `<|im_start|>` that are found in the input before the model sees it.
//!
//! Tokens with `normalized` unset are looked for in the text as it came; the others afterwards in the
//! normalized pieces between, in their own normalized form. The longest token at the leftmost place wins.

use aho_corasick::{AhoCorasick, AhoCorasickKind, Input, MatchKind};
use hashbrown::HashMap;
use serde::Deserialize;

/// A token with the way it is matched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    /// Matches only where no word character touches it.
    pub(crate) single_word: bool,
    /// Takes the white space on its left with it.
    pub(crate) lstrip: bool,
    /// Takes the white space on its right with it.
    pub(crate) rstrip: bool,
    /// Is looked for in the normalized text.
    pub(crate) normalized: bool,
    /// Marks structure (BOS, end of turn) rather than text.
    pub(crate) special: bool,
}

/// A piece of a text: an added token, or text between.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) id: Option<u32>,
}

/// All added tokens of a tokenizer.
pub(crate) struct AddedTokens {
    tokens: HashMap<u32, AddedToken>,
    by_content: HashMap<String, u32>,
    /// What a token with `normalized` is matched by and decodes to, where that differs from its content.
    normal_form: HashMap<u32, String>,
    raw: Option<Matcher>,
    normal: Option<Matcher>,
}

struct Matcher {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl AddedTokens {
    /// `normalize` is the tokenizer's normalizer.
    pub(crate) fn new(
        tokens: HashMap<u32, AddedToken>,
        mut normalize: impl FnMut(&str) -> Option<String>,
    ) -> Result<Self, aho_corasick::BuildError> {
        let by_content = tokens.iter().map(|(&id, t)| (t.content.clone(), id)).collect();
        let normal_form: HashMap<u32, String> = tokens
            .iter()
            .filter(|(_, token)| token.normalized)
            .filter_map(|(&id, t)| Some((id, normalize(&t.content).filter(|n| *n != t.content)?)))
            .collect();
        let form = |id: u32, token: &AddedToken| {
            normal_form.get(&id).cloned().unwrap_or_else(|| token.content.clone())
        };
        let of_kind = |normalized: bool| {
            let mut list: Vec<(u32, String)> = tokens
                .iter()
                .filter(|(_, t)| t.normalized == normalized && !t.content.is_empty())
                .map(|(&id, t)| (id, form(id, t)))
                .filter(|(_, form)| !form.is_empty())
                .collect();
            list.sort_unstable();
            list
        };
        let (raw, normal) = (Matcher::new(of_kind(false))?, Matcher::new(of_kind(true))?);
        Ok(Self { raw, normal, tokens, by_content, normal_form })
    }

    pub(crate) fn get(&self, id: u32) -> Option<&AddedToken> {
        self.tokens.get(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &AddedToken)> {
        self.tokens.iter().map(|(&id, token)| (id, token))
    }

    pub(crate) fn id(&self, content: &str) -> Option<u32> {
        self.by_content.get(content).copied()
    }

    /// The text that the decoder gets for a token.
    pub(crate) fn piece(&self, id: u32) -> Option<&str> {
        let form = self.normal_form.get(&id);
        form.or_else(|| self.tokens.get(&id).map(|t| &t.content)).map(String::as_str)
    }

    /// Cuts a text at the tokens that match text as it came.
    pub(crate) fn split(&self, text: &str, hidden: &dyn Fn(u32, usize, usize) -> bool) -> Vec<Piece> {
        self.split_by(self.raw.as_ref(), text, hidden)
    }

    /// Cuts a normalized text at the tokens that match normalized text.
    pub(crate) fn split_normalized(
        &self,
        text: &str,
        hidden: &dyn Fn(u32, usize, usize) -> bool,
    ) -> Vec<Piece> {
        self.split_by(self.normal.as_ref(), text, hidden)
    }

    /// `hidden(id, start, end)` says that a match is to be read as text; the search goes on inside it.
    fn split_by(
        &self,
        matcher: Option<&Matcher>,
        text: &str,
        hidden: &dyn Fn(u32, usize, usize) -> bool,
    ) -> Vec<Piece> {
        let mut pieces = Vec::new();
        // Where the next piece begins, and where the search for a match goes on.
        let (mut done, mut from) = (0, 0);
        while let Some((id, token, mut start, mut end)) = self.next_match(matcher, text, from) {
            if hidden(id, start, end) {
                from = start + text.get(start..).and_then(|t| t.chars().next()).map_or(1, char::len_utf8);
                continue;
            }
            from = end;
            let (before, after) = (text.get(..start).unwrap_or(""), text.get(end..).unwrap_or(""));
            let touched = before.ends_with(word_character) || after.starts_with(word_character);
            if token.single_word && touched {
                continue;
            }
            if token.lstrip {
                start = before.trim_end().len().max(done);
            }
            if token.rstrip {
                end += after.len() - after.trim_start().len();
            }
            // White space taken by the last token's `rstrip` may hold a whole further token.
            if start < done {
                continue;
            }
            if done < start {
                pieces.push(Piece { start: done, end: start, id: None });
            }
            pieces.push(Piece { start, end, id: Some(id) });
            done = end;
        }
        if done < text.len() {
            pieces.push(Piece { start: done, end: text.len(), id: None });
        }
        pieces
    }

    fn next_match(
        &self,
        matcher: Option<&Matcher>,
        text: &str,
        from: usize,
    ) -> Option<(u32, &AddedToken, usize, usize)> {
        let matcher = matcher?;
        if from > text.len() {
            return None;
        }
        let found = matcher.automaton.find(Input::new(text).range(from..))?;
        let id = *matcher.ids.get(found.pattern().as_usize())?;
        Some((id, self.tokens.get(&id)?, found.start(), found.end()))
    }
}

impl Matcher {
    fn new(list: Vec<(u32, String)>) -> Result<Option<Self>, aho_corasick::BuildError> {
        if list.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // A table of 1 KiB a state, the default for few patterns, would let a file of long added
            // tokens take gigabytes.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(list.iter().map(|(_, form)| form))?;
        Ok(Some(Self { automaton, ids: list.into_iter().map(|(id, _)| id).collect() }))
    }
}

fn word_character(c: char) -> bool {
    // What `\w` matches; the error is for builds without the Unicode tables.
    regex_syntax::try_is_word_character(c).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test may stop at the first surprise
    use super::*;

    fn token(content: &str) -> AddedToken {
        AddedToken { content: content.to_owned(), ..AddedToken::default() }
    }

    fn split(tokens: Vec<AddedToken>, text: &str) -> Vec<(String, Option<u32>)> {
        let tokens = tokens.into_iter().enumerate().map(|(i, t)| (i as u32, t)).collect();
        let added = AddedTokens::new(tokens, |s| Some(s.to_lowercase())).unwrap();
        let pieces = added.split(text, &|_, _, _| false);
        pieces.iter().map(|p| (text[p.start..p.end].to_owned(), p.id)).collect()
    }

    fn own(list: &[(&str, Option<u32>)]) -> Vec<(String, Option<u32>)> {
        list.iter().map(|(s, id)| ((*s).to_owned(), *id)).collect()
    }

    #[test]
    fn longest_token_at_the_leftmost_place() {
        let tokens = vec![token("<a"), token("<a>"), token("b")];
        let want = own(&[("x", None), ("<a>", Some(1)), ("<a", Some(0)), ("b", Some(2)), ("é", None)]);
        assert_eq!(split(tokens, "x<a><abé"), want);
    }

    #[test]
    fn strips_and_single_words() {
        let strip = AddedToken { lstrip: true, rstrip: true, ..token("<m>") };
        let want = own(&[("a", None), (" <m> \n", Some(0)), ("<m>  ", Some(0)), ("b", None)]);
        assert_eq!(split(vec![strip], "a <m> \n<m>  b"), want);
        let word = AddedToken { single_word: true, ..token("cat") };
        let want = own(&[("cats ", None), ("cat", Some(0)), ("!", None)]);
        assert_eq!(split(vec![word], "cats cat!"), want);
    }

    #[test]
    fn hidden_matches_are_text_and_the_search_goes_on_inside() {
        let tokens = HashMap::from_iter([(0, token("<<x>")), (1, token("<x>"))]);
        let added = AddedTokens::new(tokens, |_| None).unwrap();
        let pieces = added.split("<<x>", &|id, _, _| id == 0);
        let want = vec![Piece { start: 0, end: 1, id: None }, Piece { start: 1, end: 4, id: Some(1) }];
        assert_eq!(pieces, want);
    }

    #[test]
    fn normalized_tokens_match_in_their_normal_form() {
        let mark = AddedToken { normalized: true, ..token("<END>") };
        let added = AddedTokens::new(HashMap::from_iter([(4, mark)]), |s| Some(s.to_lowercase())).unwrap();
        assert_eq!(added.split("a<END>", &|_, _, _| false).len(), 1);
        assert_eq!(added.split_normalized("a<end>", &|_, _, _| false).len(), 2);
        assert_eq!((added.piece(4), added.id("<END>")), (Some("<end>"), Some(4)));
    }
}
