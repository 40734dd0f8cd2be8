//! What stands between the markers of tool calls.

use super::emit::Emitter;
use super::format::{Body, ToolFormat};
use super::framed::{FramedCalls, MISTRAL};
use super::json_calls::JsonCalls;
use super::json_text::is_space;
use super::{ReplyEnd, Tools};

/// End markers within values (a text about tool calls) at most.
const INNER_MARKERS_MAX: usize = 64;

/// What a character did to a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// The block goes on.
    More,
    /// The block ended with this character.
    End,
    /// The block ended before: `text` was none of it, and `again` is to be read anew, whose last character is the one
    /// that was read.
    Leave {
        /// Of the channel from which the block came.
        text: String,
        /// Shorter than a marker, or the start of another block.
        again: String,
    },
}

/// The characters that may become a marker.
#[derive(Clone, Debug, Default)]
pub(super) struct Held(String);

impl Held {
    pub(super) fn push(&mut self, c: char) {
        self.0.push(c);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn is(&self, marker: &str) -> bool {
        !marker.is_empty() && self.0 == marker
    }

    /// Whether it is the beginning of one of `markers`.
    pub(super) fn may_become(&self, markers: &[&str]) -> bool {
        markers.iter().any(|marker| marker.starts_with(&self.0))
    }

    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.0)
    }

    /// Removes and returns the first character.
    pub(super) fn shift(&mut self) -> Option<char> {
        let first = self.0.chars().next()?;
        self.0.drain(..first.len_utf8());
        Some(first)
    }
}

/// A block that is being read.
#[derive(Clone, Debug)]
pub(super) enum Block {
    Json(JsonCalls),
    Framed(FramedCalls),
    /// Mistral's, before the first character that tells which of the two it is.
    Either(String),
    Whole(Whole),
}

impl Block {
    /// Begins behind the start marker of `format`; `abort` is the end of the thoughts in which the block began.
    pub(super) fn new(format: ToolFormat, abort: Option<String>) -> Self {
        let raw = format.start().to_owned();
        match format.body() {
            Body::Json => Self::Json(JsonCalls::new(raw, format.end(), false)),
            Body::Framed(frame) if frame.or_json => Self::Either(raw),
            Body::Framed(frame) => Self::Framed(FramedCalls::new(raw, frame)),
            Body::Whole(_) | Body::Channels => {
                Self::Whole(Whole { format, body: String::new(), held: Held::default(), abort, inner: 0 })
            }
        }
    }

    pub(super) fn step(&mut self, c: char, tools: &Tools, emit: &mut Emitter) -> Flow {
        match self {
            Self::Json(json) => json.step(c, emit),
            Self::Framed(framed) => framed.step(c, emit),
            Self::Whole(whole) => whole.step(c, tools, emit),
            Self::Either(raw) if is_space(c) => {
                raw.push(c);
                Flow::More
            }
            Self::Either(raw) => {
                let raw = std::mem::take(raw);
                *self = match c {
                    '[' | '{' => Self::Json(JsonCalls::new(raw, "", false)),
                    _ => Self::Framed(FramedCalls::new(raw, &MISTRAL)),
                };
                self.step(c, tools, emit)
            }
        }
    }

    /// The text has ended; returns what of it is no call.
    pub(super) fn finish(self, end: ReplyEnd, tools: &Tools, emit: &mut Emitter) -> String {
        match self {
            Self::Json(json) => json.finish(emit),
            Self::Framed(framed) => framed.finish(emit),
            Self::Either(raw) => raw,
            Self::Whole(mut whole) => {
                let held = whole.held.take();
                if end == ReplyEnd::Stop && held.is_empty() && whole.calls(tools, emit) {
                    return String::new();
                }
                whole.raw() + &held
            }
        }
    }
}

/// A block that is read when its end has come.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    format: ToolFormat,
    body: String,
    held: Held,
    abort: Option<String>,
    /// End markers that belong to values.
    inner: usize,
}

impl Whole {
    fn raw(&self) -> String {
        format!("{}{}", self.format.start(), self.body)
    }

    /// Tells the calls, if the body is some.
    fn calls(&self, tools: &Tools, emit: &mut Emitter) -> bool {
        let calls = self.format.parse_body(&self.body, tools);
        calls.iter().flatten().for_each(|call| emit.call(call));
        calls.is_ok()
    }

    fn step(&mut self, c: char, tools: &Tools, emit: &mut Emitter) -> Flow {
        self.held.push(c);
        loop {
            let (start, end) = (self.format.start(), self.format.end());
            let abort = self.abort.as_deref().unwrap_or_default();
            let marker = [end, start, abort].into_iter().find(|marker| self.held.is(marker));
            if let Some(marker) = marker {
                return self.marker(marker.to_owned(), tools, emit);
            }
            if self.held.is_empty() || self.held.may_become(&[end, start, abort]) {
                return Flow::More;
            }
            self.body.extend(self.held.shift());
        }
    }

    fn marker(&mut self, marker: String, tools: &Tools, emit: &mut Emitter) -> Flow {
        let held = self.held.take();
        let is_end = marker == self.format.end();
        if self.inner < INNER_MARKERS_MAX && self.format.is_within_value(&self.body, tools) {
            self.inner += 1;
            self.body.push_str(&held);
            return Flow::More;
        }
        if !is_end {
            return Flow::Leave { text: self.raw(), again: held };
        }
        if self.calls(tools, emit) {
            return Flow::End;
        }
        Flow::Leave { text: self.raw() + &held, again: String::new() }
    }
}
