//! Follows the markers between channels and hands blocks over.

use super::block::{Block, Flow, Held};
use super::emit::{Channel, Emitter};
use super::format::ToolFormat;
use super::framed::FramedCalls;
use super::json_calls::JsonCalls;
use super::{ReplyEnd, ReplyPart, Tools};
use crate::text::ThinkingMarkers;

/// The most bytes of a message's header; what is longer is text.
const HEADER_BYTES_MAX: usize = 1024;
/// Ends a message's header, in the formats that have messages within a reply.
const MESSAGE: &str = "<|message|>";

/// What there is to find in a reply. The default finds nothing: all text is content, as in a text completion.
#[derive(Clone, Debug, Default)]
pub struct ReplyOptions {
    /// Between these texts are thoughts. `None` leaves the markers and the thoughts in the content.
    pub thinking: Option<ThinkingMarkers>,
    /// The reply begins within thoughts: the prompt opened them.
    pub in_reasoning: bool,
    /// How the model writes tool calls. It is also what tells messages apart in the formats that have them.
    pub format: Option<ToolFormat>,
    /// The tools of the request, whose schemas tell the types of arguments.
    pub tools: Tools,
    /// Calls are text: the request's `tool_choice` is `none`.
    pub calls_are_text: bool,
    /// Thoughts are content where a format's messages tell them: without [`thinking`](Self::thinking) they are told by
    /// nothing else.
    pub reasoning_is_content: bool,
}

/// Takes a reply apart as it comes; see the [module](super).
#[derive(Clone, Debug)]
pub struct ReplyParser {
    options: ReplyOptions,
    state: State,
    /// May become a marker.
    held: Held,
    emit: Emitter,
    /// There was nothing but white space in the content.
    fresh: bool,
    content: Markers,
    reasoning: Markers,
}

#[derive(Clone, Debug)]
enum State {
    Text(Channel),
    /// Of a message, from its first marker on.
    Header(String),
    Block(Box<Block>, Channel),
}

/// What is looked for in a channel.
type Markers = Vec<(String, Action)>;

/// What a marker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// The text behind it is of a channel.
    To(Channel),
    /// Tool calls follow.
    Calls,
    /// A message's header follows.
    Header,
}

impl ReplyParser {
    /// A parser for one reply.
    #[must_use]
    pub fn new(options: ReplyOptions) -> Self {
        let (content, reasoning) = markers(&options);
        let state = match options.format {
            _ if options.in_reasoning && options.thinking.is_some() => State::Text(Channel::Reasoning),
            Some(ToolFormat::Harmony | ToolFormat::MuseSpark) if options.in_reasoning => {
                State::Text(Channel::Reasoning)
            }
            Some(ToolFormat::MuseSpark) => State::Header(String::new()),
            _ => State::Text(Channel::Content),
        };
        Self {
            options,
            state,
            held: Held::default(),
            emit: Emitter::default(),
            fresh: true,
            content,
            reasoning,
        }
    }

    /// Whether the text that comes next is of the model's thoughts, unless a marker says otherwise.
    #[must_use]
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Text(Channel::Reasoning))
    }

    /// Takes the next piece of text, cut anywhere between characters; returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> Vec<ReplyPart> {
        for c in text.chars() {
            let mut waiting = vec![c];
            while let Some(c) = waiting.pop() {
                let again = self.step(c);
                waiting.extend(again.chars().rev());
            }
        }
        self.emit.take()
    }

    /// The text has ended: returns what was held back. Nothing must be pushed after it.
    pub fn finish(&mut self, end: ReplyEnd) -> Vec<ReplyPart> {
        let held = self.held.take();
        match std::mem::replace(&mut self.state, State::Text(Channel::Content)) {
            State::Text(channel) => self.text(channel, &held),
            State::Header(header) if end == ReplyEnd::Stop => self.text(Channel::Content, &(header + &held)),
            State::Header(_) => {}
            State::Block(block, origin) => {
                let rest = block.finish(end, &self.options.tools, &mut self.emit);
                self.text(origin, &rest);
            }
        }
        self.emit.take()
    }

    fn text(&mut self, channel: Channel, text: &str) {
        let channel = if self.options.reasoning_is_content { Channel::Content } else { channel };
        self.emit.text(channel, text);
    }

    /// Reads a character; returns what is to be read anew.
    fn step(&mut self, c: char) -> String {
        match &mut self.state {
            State::Text(channel) => {
                let channel = *channel;
                self.text_step(channel, c)
            }
            State::Header(_) => self.header_step(c),
            State::Block(block, origin) => {
                let origin = *origin;
                match block.step(c, &self.options.tools, &mut self.emit) {
                    Flow::More => String::new(),
                    Flow::End => {
                        self.state = State::Text(Channel::Content);
                        String::new()
                    }
                    Flow::Leave { text, again } => {
                        self.fresh = false;
                        self.text(origin, &text);
                        self.state = State::Text(origin);
                        again
                    }
                }
            }
        }
    }

    fn text_step(&mut self, channel: Channel, c: char) -> String {
        self.held.push(c);
        loop {
            let markers = match channel {
                Channel::Content => &self.content,
                Channel::Reasoning => &self.reasoning,
            };
            if let Some(&(_, action)) = markers.iter().find(|(marker, _)| self.held.is(marker)) {
                let marker = self.held.take();
                self.act(action, channel, marker);
                return String::new();
            }
            if markers.iter().any(|(marker, _)| self.held.may_become(&[marker])) {
                return String::new();
            }
            let Some(first) = self.held.shift() else { return String::new() };
            if channel == Channel::Content && self.fresh && !first.is_whitespace() {
                self.fresh = false;
                if first == '{'
                    && self.options.format == Some(ToolFormat::Llama3)
                    && !self.options.calls_are_text
                {
                    let calls = JsonCalls::new(String::new(), "", true);
                    self.state = State::Block(Box::new(Block::Json(calls)), channel);
                    return format!("{first}{}", self.held.take());
                }
            }
            self.text(channel, first.encode_utf8(&mut [0; 4]));
            if self.held.is_empty() {
                return String::new();
            }
        }
    }

    fn act(&mut self, action: Action, channel: Channel, marker: String) {
        self.state = match action {
            Action::To(channel) => State::Text(channel),
            Action::Header if self.options.format == Some(ToolFormat::MuseSpark) => {
                State::Header(String::new())
            }
            Action::Header => State::Header(marker),
            Action::Calls => self.block(channel),
        };
    }

    fn block(&self, origin: Channel) -> State {
        let Some(format) = self.options.format else { return State::Text(origin) };
        let thinking = self.options.thinking.as_ref().filter(|_| origin == Channel::Reasoning);
        State::Block(Box::new(Block::new(format, thinking.map(|markers| markers.end.clone()))), origin)
    }

    fn header_step(&mut self, c: char) -> String {
        let State::Header(header) = &mut self.state else { return String::new() };
        header.push(c);
        if header.ends_with(MESSAGE) {
            let header = std::mem::take(header);
            self.state = self.message(header);
        } else if self.options.format == Some(ToolFormat::MuseSpark)
            && header.ends_with(ToolFormat::MuseSpark.start())
        {
            self.state = match self.options.calls_are_text {
                true => State::Text(Channel::Content),
                false => self.block(Channel::Content),
            };
        } else if header.len() > HEADER_BYTES_MAX {
            let header = std::mem::take(header);
            self.text(Channel::Content, &header);
            self.state = State::Text(Channel::Content);
        }
        String::new()
    }

    /// What a message with this header is.
    fn message(&self, header: String) -> State {
        let recipient = header.split_once("to=").map(|(_, rest)| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            rest[..end].to_owned()
        });
        if self.options.format == Some(ToolFormat::MuseSpark) {
            let to_itself = recipient.as_deref() == Some("self");
            return State::Text(if to_itself { Channel::Reasoning } else { Channel::Content });
        }
        match recipient {
            Some(recipient) if !self.options.calls_are_text => {
                let name = recipient.strip_prefix("functions.").unwrap_or(&recipient).to_owned();
                let call = FramedCalls::message(header, &name);
                State::Block(Box::new(Block::Framed(call)), Channel::Content)
            }
            None if header.contains("analysis") => State::Text(Channel::Reasoning),
            _ => State::Text(Channel::Content),
        }
    }
}

/// The markers that end content, and those that end reasoning.
fn markers(options: &ReplyOptions) -> (Markers, Markers) {
    let (mut content, mut reasoning) = (Vec::new(), Vec::new());
    if let Some(thinking) = &options.thinking {
        content.push((thinking.start.clone(), Action::To(Channel::Reasoning)));
        reasoning.push((thinking.end.clone(), Action::To(Channel::Content)));
    }
    if let Some(format) = options.format {
        let mut both = |marker: &str, action| {
            content.push((marker.to_owned(), action));
            reasoning.push((marker.to_owned(), action));
        };
        match format {
            ToolFormat::Harmony => {
                both("<|channel|>", Action::Header);
                both("<|start|>", Action::Header);
                for end in ["<|end|>", "<|return|>", "<|call|>"] {
                    both(end, Action::To(Channel::Content));
                }
            }
            ToolFormat::MuseSpark => both("<|eom|>", Action::Header),
            _ => {}
        }
        if format == ToolFormat::MuseSpark {
            content.push(("<|eot|>".to_owned(), Action::To(Channel::Content)));
        }
        if !format.start().is_empty() && !options.calls_are_text {
            content.push((format.start().to_owned(), Action::Calls));
            reasoning.push((format.start().to_owned(), Action::Calls));
        }
        if format == ToolFormat::KimiK3 {
            for frame in ["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"] {
                content.push((frame.to_owned(), Action::To(Channel::Content)));
            }
        }
    }
    (content, reasoning)
}
