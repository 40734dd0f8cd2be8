//! Pieces of grammars in llguidance's notation.

use crate::text::reply::json_text::json_string;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Texts that are tokens of their own in some vocabularies.
const MARKERS: [&str; 53] = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
    "<|python_tag|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|eom|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<longcat_arg_key>",
    "</longcat_arg_key>",
    "<longcat_arg_value>",
    "</longcat_arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
    "<longcat_think>",
    "</longcat_think>",
    "<|think:start|>",
    "<|think:end|>",
    "<|channel>",
    "<channel|>",
];

/// A part of a text, as a vocabulary has it.
enum Piece<'t> {
    Text(&'t str),
    Control(u32),
}

/// Text in which markers act: each begins what follows it. A grammar of channels is a machine with a state for each.
pub(super) struct Channel<'a> {
    /// The name of its rule.
    pub(super) name: &'a str,
    /// The regular expression of its first text, which must match the empty text too.
    pub(super) text: &'a str,
    /// Markers, and the rules that follow them.
    pub(super) triggers: &'a [(&'a str, String)],
    /// Markers that must not occur.
    pub(super) banned: &'a [&'a str],
    /// Control tokens that are part of the text.
    pub(super) controls: &'a [u32],
    /// The rule of the text behind such a token; most often the channel itself.
    pub(super) after: &'a str,
}

/// Any text.
pub(super) const ANY: &str = "/(?s:.*)/";

/// A grammar that is being written.
pub(super) struct Lark<'a> {
    pub(super) rules: Vec<String>,
    tokens: Vec<String>,
    control: &'a dyn Fn(&str) -> Option<u32>,
}

impl<'a> Lark<'a> {
    pub(super) fn new(control: &'a dyn Fn(&str) -> Option<u32>) -> Self {
        Self { rules: Vec::new(), tokens: Vec::new(), control }
    }

    /// The grammar, from its first rule on.
    pub(super) fn finish(self, start: &str) -> String {
        let tokens = self.tokens.iter().enumerate().map(|(i, token)| format!("T{i}: {token}"));
        let lines = std::iter::once(format!("start: {start}")).chain(self.rules).chain(tokens);
        lines.collect::<Vec<_>>().join("\n") + "\n"
    }

    /// The name of a regular expression.
    fn token(&mut self, token: String) -> String {
        let known = self.tokens.iter().position(|known| *known == token);
        let index = known.unwrap_or_else(|| {
            self.tokens.push(token);
            self.tokens.len() - 1
        });
        format!("T{index}")
    }

    fn pieces<'t>(&self, mut text: &'t str) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
        while !text.is_empty() {
            let found = MARKERS
                .iter()
                .filter_map(|marker| Some((text.find(marker)?, marker.len(), (self.control)(marker)?)))
                .min_by_key(|&(at, length, _)| (at, std::cmp::Reverse(length)));
            let plain = found.map_or(text.len(), |(at, ..)| at);
            if plain > 0 {
                pieces.push(Piece::Text(&text[..plain]));
            }
            let (_, length, id) = found.unwrap_or_default();
            if found.is_some() {
                pieces.push(Piece::Control(id));
            }
            text = &text[plain + length..];
        }
        pieces
    }

    /// A text in which markers are what the vocabulary has for them.
    pub(super) fn text(&self, text: &str) -> String {
        joined(&self.pieces(text))
    }

    /// Any text up to `end`, and `end`.
    pub(super) fn text_until(&mut self, rule: &str, end: &str, banned: &[&str]) -> String {
        let pieces = self.pieces(end);
        let banned = banned.iter().copied();
        match pieces.as_slice() {
            [Piece::Control(_), ..] => {
                let text = self.token(without(ANY, banned.chain([end])));
                self.rules.push(format!("{rule}: {text} {}", joined(&pieces)));
            }
            [Piece::Text(first), rest @ ..] if !rest.is_empty() => {
                let text = self.token(without(ANY, banned.chain([end])));
                let text = self.token(format!("{text} {}", json_string(first)));
                self.rules.push(format!("{rule}: {text} {}", joined(rest)));
            }
            _ => {
                let text = self.token(without(ANY, banned));
                self.rules.push(format!("{rule}[suffix={}]: {text}", json_string(end)));
            }
        }
        rule.to_owned()
    }

    /// Writes the rules of a channel. It may end anywhere.
    pub(super) fn channel(&mut self, channel: &Channel<'_>) {
        let Channel { name, text, triggers, banned, controls, after } = *channel;
        let mut behind = vec!["\"\"".to_owned()];
        // By the first control token of markers, what of them follows it.
        let mut begun: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let (mut spelled, mut heads) = (Vec::new(), Vec::new());
        let markers = triggers.iter().map(|(marker, then)| (*marker, Some(then)));
        for (marker, then) in markers.chain(banned.iter().map(|marker| (*marker, None))) {
            let pieces = self.pieces(marker);
            let mut pieces = pieces.iter().skip_while(|piece| matches!(piece, Piece::Text(_)));
            let first = pieces.next();
            match (first, then) {
                (Some(Piece::Control(id)), then) => {
                    let rest: Vec<&Piece<'_>> = pieces.collect();
                    let follows = match rest.first() {
                        Some(Piece::Text(text)) => json_string(text),
                        _ => String::new(),
                    };
                    begun.entry(*id).or_default().push(follows);
                    let rest = joined(rest);
                    behind.extend(then.map(|then| format!("<[{id}]> {rest} {then}")));
                    spelled.push(marker);
                }
                (_, Some(then)) => heads.push((marker, then)),
                (_, None) => spelled.push(marker),
            }
        }
        let free = ranges(controls.iter().copied().filter(|id| !begun.contains_key(id)));
        behind.extend(free.map(|free| format!("<[{free}]> {after}")));
        for (id, follows) in begun {
            if follows.iter().all(|follows| !follows.is_empty()) {
                let other = follows.iter().map(|follows| format!("~({follows} {ANY})"));
                let other = other.fold("/(?s:.+)/".to_owned(), |all, not| format!("{all} & {not}"));
                behind.push(format!("<[{id}]> {} {name}_behind", self.token(other)));
            }
        }
        let text = without(text, spelled);
        let some = self.token(format!("/(?s:.+)/ & {text}"));
        let any = self.token(text);
        let mut all = vec![format!("{some} {name}_behind"), format!("{name}_behind")];
        for (i, (marker, then)) in heads.into_iter().enumerate() {
            self.rules.push(format!("{name}_{i}[lazy]: {any} {}", json_string(marker)));
            all.push(format!("{name}_{i} {then}"));
        }
        self.rules.push(format!("{name}: {}", all.join(" | ")));
        self.rules.push(format!("{name}_behind: {}", behind.join(" | ")));
    }
}

fn written(piece: &Piece<'_>) -> String {
    match piece {
        Piece::Text(text) => json_string(text),
        Piece::Control(id) => format!("<[{id}]>"),
    }
}

fn joined<'t>(pieces: impl IntoIterator<Item = &'t Piece<'t>>) -> String {
    pieces.into_iter().map(written).collect::<Vec<_>>().join(" ")
}

/// The terminal `text` where it has none of `markers` in it.
fn without<'m>(text: &str, markers: impl IntoIterator<Item = &'m str>) -> String {
    let not = |all, marker| format!("{all} & ~({ANY} {} {ANY})", json_string(marker));
    markers.into_iter().fold(text.to_owned(), not)
}

/// Ascending numbers, in words; `None` if there are none.
fn ranges(ids: impl Iterator<Item = u32>) -> Option<String> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for id in ids {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(id) => *last = id,
            _ => ranges.push((id, id)),
        }
    }
    let words: Vec<String> = ranges.iter().map(|(first, last)| format!("{first}-{last}")).collect();
    (!words.is_empty()).then(|| words.join(","))
}

/// JSON of a schema, spaced as models were trained on it: a free choice of white space could go on for ever.
pub(super) fn json_rule(schema: &Value) -> String {
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        let spacing = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        object.insert("x-guidance".to_owned(), spacing);
    }
    format!("%json {schema}")
}
