//! A reply's text, taken apart as it comes: content, reasoning, tool calls.
//!
//! [`ReplyParser`] takes pieces of text, cut anywhere, and says what they are as soon as that is certain. It reads
//! character by character and decides by nothing else than the text up to there, so the parts of a reply join to the
//! same [`Reply`] however the text was cut; the reply without streaming is the text in one piece.
//!
//! ```text
//! pieces ─► parser: markers between channels ─┬─► content, reasoning
//!                                             └─► block: one of
//!    json_calls   {"name": …, "arguments": {…}}     streamed
//!    framed       name <separator> {…} <end>        streamed
//!    whole        collected, then read at its end by tags, braces, literal or xtml
//! ```
//!
//! What looks like a tool call and is none comes back as the text that it is, markers included. Where arguments had
//! begun to stream before they broke off, they are closed so that they are JSON, and the call is told to be incomplete.

mod block;
mod braces;
mod emit;
mod format;
mod framed;
mod grammar;
mod json_calls;
mod json_text;
mod literal;
mod parser;
mod tags;
mod tools;
mod xtml;

#[cfg(test)]
mod tests;

pub use format::ToolFormat;
pub use grammar::{CallGrammar, CallGrammarError};
pub use parser::{ReplyOptions, ReplyParser};
pub use tools::{Tool, Tools};

/// A part of a reply. Adjacent parts of the same kind are one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyPart {
    /// Text for the user.
    Content(String),
    /// Text of the model's thoughts.
    Reasoning(String),
    /// A tool call begins. Its arguments follow, then its end, before anything else comes.
    ToolCallStart {
        /// Its place among the reply's calls, from 0.
        index: usize,
        /// The id that the model gave it, unique within the reply; most models give none.
        id: Option<String>,
        /// The function.
        name: String,
    },
    /// More of a call's arguments; joined they are the text of a JSON object.
    ToolCallArguments {
        /// The call.
        index: usize,
        /// The piece.
        text: String,
    },
    /// The call has ended.
    ToolCallEnd {
        /// The call.
        index: usize,
        /// Whether the model wrote all of it. If not, its last value was cut off and closed by lmx, and the call should
        /// not be carried out.
        complete: bool,
    },
}

/// Why a reply's text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyEnd {
    /// The model ended it, or a stop string did: a tool call without its end marker counts if nothing else misses.
    Stop,
    /// Too many tokens, or it was cancelled: a tool call that is collected to its end is text.
    Cut,
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The model's own id.
    pub id: Option<String>,
    /// The function.
    pub name: String,
    /// The text of a JSON object.
    pub arguments: String,
    /// Whether the model wrote all of it: see [`ReplyPart::ToolCallEnd`].
    pub complete: bool,
}

impl ToolCall {
    fn new(name: &str, arguments: String) -> Self {
        Self { id: None, name: name.to_owned(), arguments, complete: true }
    }
}

/// A whole reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Text for the user.
    pub content: String,
    /// The model's thoughts.
    pub reasoning: String,
    /// The calls.
    pub tool_calls: Vec<ToolCall>,
}

impl Reply {
    /// Takes a whole text apart.
    #[must_use]
    pub fn parse(text: &str, end: ReplyEnd, options: ReplyOptions) -> Self {
        let mut parser = ReplyParser::new(options);
        let mut reply = Self::default();
        parser.push(text).into_iter().chain(parser.finish(end)).for_each(|part| reply.add(part));
        reply
    }

    /// Adds the next part.
    pub fn add(&mut self, part: ReplyPart) {
        match part {
            ReplyPart::Content(text) => self.content.push_str(&text),
            ReplyPart::Reasoning(text) => self.reasoning.push_str(&text),
            ReplyPart::ToolCallStart { id, name, .. } => {
                self.tool_calls.push(ToolCall { id, name, arguments: String::new(), complete: false });
            }
            ReplyPart::ToolCallArguments { index, text } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
            ReplyPart::ToolCallEnd { index, complete } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.complete = complete;
                }
            }
        }
    }

    /// Whether there is a call to carry out: then `finish_reason` is `tool_calls` rather than `stop`.
    #[must_use]
    pub fn calls_tools(&self) -> bool {
        self.tool_calls.iter().any(|call| call.complete)
    }
}

/// Why the text between the markers of a tool call is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// Nothing in it is a call.
    #[error("there is no call")]
    NoCall,
    /// Something else should stand at a place.
    #[error("expected {expected}, found {found:?}")]
    Expected {
        /// What should stand there.
        expected: &'static str,
        /// The first characters of what does.
        found: String,
    },
    /// It ends within a value.
    #[error("the value {value:?} has no end")]
    Unfinished {
        /// The first characters of the value.
        value: String,
    },
    /// Arguments without names, which no schema knows.
    #[error("{name} is called with an argument that has no name")]
    Positional {
        /// The function.
        name: String,
    },
}
