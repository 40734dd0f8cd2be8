//! One JSON value, read a character at a time and written again as it comes.
//!
//! What is written is JSON as Python's `json.dumps` spaces it (`{"a": [1, 2]}`), with strings and numbers as they were.
//! Mistakes that models make and that have one meaning are put right on the way: a backslash that escapes nothing
//! (`"\d+"`), raw line breaks within strings, half a surrogate pair, `True` and `None`, a comma before a closing
//! bracket. Any other mistake is an error, after which [`JsonText::close`] tells how to end what was written.

/// Brackets within brackets at most; serde_json reads no more than 127.
const DEPTH_MAX: usize = 100;
/// `false` is the longest word there is.
const WORD_MAX: usize = 5;

/// What a character did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The value goes on.
    More,
    /// The value ends with this character.
    Done,
    /// The value ended before this character, which is no part of it.
    Ended,
    /// This character cannot stand here.
    Bad,
}

/// A value that is being read.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonText {
    /// The brackets that are open.
    open: Vec<Bracket>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bracket {
    Object,
    Array,
}

#[derive(Clone, Debug, Default)]
enum State {
    /// A value must begin.
    #[default]
    Value,
    /// Behind `[`: a value, or the end.
    First,
    /// Behind the comma of an array; the comma is not written yet.
    Item,
    /// Behind `{` (`false`) or the comma of an object, which is not written yet (`true`).
    Key(bool),
    /// Behind a key.
    Colon,
    /// Behind a value within brackets.
    Next,
    /// Within a string.
    Text {
        key: bool,
        escape: Escape,
    },
    Word(String),
    Number(Number),
    Done,
}

/// How far an escape in a string has come; nothing of it is written yet.
#[derive(Clone, Debug, Default)]
enum Escape {
    #[default]
    None,
    Backslash,
    /// The hexadecimal digits so far.
    Unicode(String),
    /// The digits of the first half of a surrogate pair, and what is read of the second.
    Pair(String, Half),
}

#[derive(Clone, Debug)]
enum Half {
    None,
    Backslash,
    Unicode(String),
}

impl Half {
    fn text(&self) -> String {
        match self {
            Self::None => String::new(),
            Self::Backslash => "\\".to_owned(),
            Self::Unicode(digits) => format!("\\u{digits}"),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

impl Number {
    fn next(self, c: char) -> Option<Self> {
        Some(match (self, c) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus | Self::Integer, '0'..='9') => Self::Integer,
            (Self::Zero | Self::Integer, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Exponent, '+' | '-') => Self::Sign,
            (Self::Exponent | Self::Sign | Self::Power, '0'..='9') => Self::Power,
            _ => return None,
        })
    }

    fn is_whole(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::Power)
    }
}

impl JsonText {
    /// Reads `c`; what can be written is appended to `out`.
    pub(super) fn step(&mut self, c: char, out: &mut String) -> Step {
        match std::mem::take(&mut self.state) {
            State::Text { key, escape } => self.text(c, key, escape, out),
            State::Word(mut word) => {
                if c.is_ascii_alphabetic() && word.len() < WORD_MAX {
                    word.push(c);
                    self.state = State::Word(word);
                    return Step::More;
                }
                let Some(word) = json_word(&word) else { return self.bad(State::Word(word)) };
                out.push_str(word);
                self.behind_scalar(c, out)
            }
            State::Number(number) => match number.next(c) {
                Some(next) => {
                    out.push(c);
                    self.state = State::Number(next);
                    Step::More
                }
                None if number.is_whole() => self.behind_scalar(c, out),
                None => self.bad(State::Number(number)),
            },
            state if is_space(c) => {
                self.state = state;
                Step::More
            }
            State::Value => self.begin(c, State::Value, out),
            State::First if c == ']' => self.end(out, ']'),
            State::First => self.begin(c, State::First, out),
            State::Item if c == ']' => self.end(out, ']'),
            State::Item => self.begin(c, State::Item, out),
            State::Key(_) if c == '}' => self.end(out, '}'),
            State::Key(comma) if c == '"' => {
                out.push_str(if comma { ", \"" } else { "\"" });
                self.state = State::Text { key: true, escape: Escape::None };
                Step::More
            }
            State::Colon if c == ':' => {
                out.push_str(": ");
                self.state = State::Value;
                Step::More
            }
            State::Next => match (self.open.last(), c) {
                (Some(Bracket::Object), ',') => self.more(State::Key(true)),
                (Some(Bracket::Array), ',') => self.more(State::Item),
                (Some(Bracket::Object), '}') | (Some(Bracket::Array), ']') => self.end(out, c),
                _ => self.bad(State::Next),
            },
            state => self.bad(state),
        }
    }

    fn more(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn bad(&mut self, state: State) -> Step {
        self.state = state;
        Step::Bad
    }

    /// A value begins with `c`; `state` is the one before.
    fn begin(&mut self, c: char, state: State, out: &mut String) -> Step {
        let (next, bracket) = match c {
            '{' => (State::Key(false), Some(Bracket::Object)),
            '[' => (State::First, Some(Bracket::Array)),
            '"' => (State::Text { key: false, escape: Escape::None }, None),
            '-' => (State::Number(Number::Minus), None),
            '0' => (State::Number(Number::Zero), None),
            '1'..='9' => (State::Number(Number::Integer), None),
            'a'..='z' | 'A'..='Z' => (State::Word(c.to_string()), None),
            _ => return self.bad(state),
        };
        if bracket.is_some() && self.open.len() == DEPTH_MAX {
            return self.bad(state);
        }
        if matches!(state, State::Item) {
            out.push_str(", ");
        }
        if !matches!(next, State::Word(_)) {
            out.push(c);
        }
        self.open.extend(bracket);
        self.more(next)
    }

    /// The innermost bracket closes.
    fn end(&mut self, out: &mut String, bracket: char) -> Step {
        out.push(bracket);
        self.open.pop();
        self.behind_value()
    }

    fn behind_value(&mut self) -> Step {
        let done = self.open.is_empty();
        self.state = if done { State::Done } else { State::Next };
        if done { Step::Done } else { Step::More }
    }

    /// A word or a number ended before `c`.
    fn behind_scalar(&mut self, c: char, out: &mut String) -> Step {
        match self.behind_value() {
            Step::Done => Step::Ended,
            _ => self.step(c, out),
        }
    }

    fn text(&mut self, c: char, key: bool, escape: Escape, out: &mut String) -> Step {
        let escape = match escape {
            Escape::None if c == '"' => {
                out.push('"');
                if key {
                    return self.more(State::Colon);
                }
                return self.behind_value();
            }
            Escape::None if c == '\\' => Escape::Backslash,
            Escape::None => {
                push_character(c, out);
                Escape::None
            }
            Escape::Backslash => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => {
                    out.extend(['\\', c]);
                    Escape::None
                }
                'u' => Escape::Unicode(String::new()),
                // The backslash is meant as one.
                _ => {
                    out.push_str("\\\\");
                    return self.text(c, key, Escape::None, out);
                }
            },
            Escape::Unicode(mut digits) if c.is_ascii_hexdigit() => {
                digits.push(c);
                match u16::from_str_radix(&digits, 16) {
                    _ if digits.len() < 4 => Escape::Unicode(digits),
                    Ok(0xD800..=0xDBFF) => Escape::Pair(digits, Half::None),
                    Ok(0xDC00..=0xDFFF) | Err(_) => {
                        out.push_str("\\ufffd");
                        Escape::None
                    }
                    Ok(_) => {
                        out.push_str("\\u");
                        out.push_str(&digits);
                        Escape::None
                    }
                }
            }
            Escape::Unicode(digits) => {
                out.push_str("\\\\u");
                out.push_str(&digits);
                return self.text(c, key, Escape::None, out);
            }
            Escape::Pair(first, half) => match second_half(c, &half) {
                Some(Half::Unicode(second)) if second.len() == 4 => {
                    if let Ok(0xDC00..=0xDFFF) = u16::from_str_radix(&second, 16) {
                        out.extend(["\\u", &first, "\\u", &second]);
                        Escape::None
                    } else {
                        out.push_str("\\ufffd");
                        return self.again(&format!("\\u{second}"), key, out);
                    }
                }
                Some(half) => Escape::Pair(first, half),
                None => {
                    out.push_str("\\ufffd");
                    return self.again(&format!("{}{c}", half.text()), key, out);
                }
            },
        };
        self.more(State::Text { key, escape })
    }

    /// Reads `text` anew within a string.
    fn again(&mut self, text: &str, key: bool, out: &mut String) -> Step {
        self.state = State::Text { key, escape: Escape::None };
        text.chars().fold(Step::More, |_, c| self.step(c, out))
    }

    /// What must follow what was written, so that it is a JSON value.
    pub(super) fn close(&self) -> String {
        let mut text = match &self.state {
            State::Value | State::Word(_) => "null".to_owned(),
            State::Text { key: true, .. } => "\": null".to_owned(),
            State::Text { key: false, .. } => "\"".to_owned(),
            State::Colon => ": null".to_owned(),
            State::Number(number) if !number.is_whole() => "0".to_owned(),
            _ => String::new(),
        };
        let closers = self.open.iter().rev().map(|bracket| match bracket {
            Bracket::Object => '}',
            Bracket::Array => ']',
        });
        text.extend(closers);
        text
    }
}

/// The second half of a surrogate pair with `c`, or `None` if it is none.
fn second_half(c: char, half: &Half) -> Option<Half> {
    match half {
        Half::None if c == '\\' => Some(Half::Backslash),
        Half::Backslash if c == 'u' => Some(Half::Unicode(String::new())),
        Half::Unicode(digits) if c.is_ascii_hexdigit() => Some(Half::Unicode(format!("{digits}{c}"))),
        _ => None,
    }
}

fn push_character(c: char, out: &mut String) {
    match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        _ => out.push(c),
    }
}

fn json_word(word: &str) -> Option<&'static str> {
    Some(match word {
        "true" | "True" => "true",
        "false" | "False" => "false",
        "null" | "None" => "null",
        _ => return None,
    })
}

/// The white space of JSON.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

/// The JSON value that `text` is as a whole, written as [`JsonText`] does.
pub(super) fn json_value(text: &str) -> Option<String> {
    let (mut json, mut out, mut done) = (JsonText::default(), String::new(), false);
    // A number ends where something else begins.
    for c in text.chars().chain([' ']) {
        if done {
            if !is_space(c) {
                return None;
            }
            continue;
        }
        match json.step(c, &mut out) {
            Step::More => {}
            Step::Done => done = true,
            Step::Ended if is_space(c) => done = true,
            Step::Ended | Step::Bad => return None,
        }
    }
    done.then_some(out)
}

/// How far a list or an object goes that a text begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bracketed {
    /// So many bytes.
    Ends(usize),
    /// Further than the text, which ends within one of its strings.
    Open,
    /// There is none, or not all of one.
    None,
}

/// The list or object that `text` begins with, behind white space.
pub(super) fn bracketed(text: &str) -> Bracketed {
    if !text.trim_start_matches(is_space).starts_with(['[', '{']) {
        return Bracketed::None;
    }
    let (mut json, mut out) = (JsonText::default(), String::new());
    for (at, c) in text.char_indices() {
        match json.step(c, &mut out) {
            Step::More => {}
            Step::Done => return Bracketed::Ends(at + c.len_utf8()),
            Step::Ended | Step::Bad => return Bracketed::None,
        }
    }
    if matches!(json.state, State::Text { .. }) { Bracketed::Open } else { Bracketed::None }
}

/// A string as JSON.
pub(super) fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The text of a JSON string, with its quotes.
pub(super) fn json_string_text(json: &str) -> Option<String> {
    serde_json::from_str(json).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn json_is_written_as_python_spaces_it() {
        let text = " {\"a\":[1,-2.50e+3, \"é\\n\"],\n\"b\" : {} ,\"c\":[],\"d\":true,\"e\":null} ";
        let expected = r#"{"a": [1, -2.50e+3, "é\n"], "b": {}, "c": [], "d": true, "e": null}"#;
        assert_eq!(json_value(text).as_deref(), Some(expected));
        assert_eq!(json_value("12345678901234567890123.10").as_deref(), Some("12345678901234567890123.10"));
        assert_eq!(json_value("7").as_deref(), Some("7"));
        assert_eq!(json_value("\"x\"").as_deref(), Some("\"x\""));
    }

    #[test]
    fn mistakes_with_one_meaning_are_put_right() {
        let right = |text: &str| serde_json::from_str::<Value>(&json_value(text).unwrap()).unwrap();
        assert_eq!(right(r#"{"re":"\d+\."}"#), json!({"re": r"\d+\."}));
        assert_eq!(right("[\"a\nb\tc\u{1}\"]"), json!(["a\nb\tc\u{1}"]));
        assert_eq!(right(r#"["\u00e9\ud83d\ude00"]"#), json!(["é😀"]));
        assert_eq!(
            right(r#"["\ud83d", "\ud83dx", "\ude00", "\ud83d\n"]"#),
            json!(["\u{fffd}", "\u{fffd}x", "\u{fffd}", "\u{fffd}\n"])
        );
        assert_eq!(right(r#"["\ud83d\u0041", "\ud83d\ud83d\ude00"]"#), json!(["\u{fffd}A", "\u{fffd}😀"]));
        assert_eq!(right(r#"["C:\users", "\u12"]"#), json!(["C:\\users", "\\u12"]));
        assert_eq!(right(r#"{"a":True,"b":[None,False,],}"#), json!({"a": true, "b": [null, false]}));
    }

    #[test]
    fn anything_else_is_an_error() {
        for text in [
            "",
            "{",
            "[1 2]",
            "{\"a\" 1}",
            "{a:1}",
            "01",
            "1.",
            "-",
            "+1",
            "nul",
            "nulls",
            "tru e",
            "{,}",
            "[,]",
            "]",
            "{\"a\":}",
            "1 2",
            "{} x",
            "'a'",
            "NaN",
        ] {
            assert_eq!(json_value(text), None, "{text}");
        }
        let deep = |n| "[".repeat(n) + &"]".repeat(n);
        assert!(json_value(&deep(DEPTH_MAX)).is_some());
        assert_eq!(json_value(&deep(DEPTH_MAX + 1)), None);
        assert_eq!(json_value(&deep(1_000_000)), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_was_read_can_be_closed(text in r#"[{}\[\],:"\\u0-9dD8eEtrufalsn. -]{0,40}"#) {
            let (mut json, mut out) = (JsonText::default(), String::new());
            for c in text.chars() {
                if matches!(json.step(c, &mut out), Step::Done | Step::Ended | Step::Bad) {
                    break;
                }
            }
            out.push_str(&json.close());
            prop_assert!(serde_json::from_str::<Value>(&out).is_ok() || out.contains(['e', 'E']), "{} from {}", out, text);
        }

        #[test]
        fn a_value_keeps_its_meaning(text in r#"\PC{0,20}"#, n in any::<i64>(), x in -1000..1000i32) {
            let value = json!({"t": text, "list": [n, f64::from(x) / 8.0, {"k": null}], &text: [[], {}]});
            let read = json_value(&value.to_string()).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&read).unwrap(), value);
        }
    }
}
