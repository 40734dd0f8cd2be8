//! A reply as a list of blocks, each a text, thoughts or a call, in the order in which the model wrote them: what the
//! protocols that have such lists send.

use crate::reply::{Parts, Shape};
use lmx::engine::{Event, FinishReason};
use lmx::text::reply::ReplyPart;

/// What a block is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Text for the user.
    Text,
    /// The model's thoughts.
    Thoughts,
    /// A call of a function; the block's text is its arguments.
    Call { id: String, name: String },
}

/// One of a reply's blocks.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) kind: Kind,
    pub(crate) text: String,
    /// Whether the model wrote all of it.
    pub(crate) complete: bool,
}

/// What happens to a block. The last block alone changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Open,
    More(String),
    Close,
}

/// A reply, while it comes.
pub(crate) struct Blocks {
    parts: Parts,
    list: Vec<Block>,
    /// Whether the last one is being written.
    open: bool,
    /// White space that begins a text if a text follows: by itself, between calls, it is none.
    blank: String,
}

impl Blocks {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self { parts: Parts::new(shape), list: Vec::new(), open: false, blank: String::new() }
    }

    /// Takes what a token released; returns which blocks change, and how. At the reply's end the last one is closed.
    pub(crate) fn push(&mut self, event: &Event) -> Vec<(usize, Change)> {
        let mut changes = Vec::new();
        for part in self.parts.push(event) {
            self.part(part, &mut changes);
        }
        if let Some(finish) = event.finish {
            let blank = std::mem::take(&mut self.blank);
            if self.list.is_empty() && !blank.is_empty() {
                self.more(Kind::Text, blank, &mut changes);
            }
            self.close(finish == FinishReason::Stop, &mut changes);
        }
        changes
    }

    fn part(&mut self, part: ReplyPart, changes: &mut Vec<(usize, Change)>) {
        if let ReplyPart::Content(text) = &part {
            let in_text = self.open && self.list.last().is_some_and(|block| block.kind == Kind::Text);
            if !in_text && text.trim().is_empty() {
                self.blank.push_str(text);
                return;
            }
        }
        let blank = std::mem::take(&mut self.blank);
        match part {
            ReplyPart::Content(text) => self.more(Kind::Text, blank + &text, changes),
            ReplyPart::Reasoning(text) => self.more(Kind::Thoughts, text, changes),
            ReplyPart::ToolCallStart { index, name, .. } => {
                self.begin(Kind::Call { id: self.parts.call_id(index).to_owned(), name }, changes);
            }
            ReplyPart::ToolCallArguments { text, .. } => self.add(text, changes),
            ReplyPart::ToolCallEnd { complete, .. } => self.close(complete, changes),
        }
    }

    /// Adds text to a block of this kind.
    fn more(&mut self, kind: Kind, text: String, changes: &mut Vec<(usize, Change)>) {
        if !self.open || self.list.last().is_none_or(|block| block.kind != kind) {
            self.begin(kind, changes);
        }
        self.add(text, changes);
    }

    fn begin(&mut self, kind: Kind, changes: &mut Vec<(usize, Change)>) {
        self.close(true, changes);
        changes.push((self.list.len(), Change::Open));
        self.list.push(Block { kind, text: String::new(), complete: false });
        self.open = true;
    }

    fn add(&mut self, text: String, changes: &mut Vec<(usize, Change)>) {
        let index = self.list.len().saturating_sub(1);
        if let Some(block) = self.list.last_mut() {
            block.text.push_str(&text);
            changes.push((index, Change::More(text)));
        }
    }

    fn close(&mut self, complete: bool, changes: &mut Vec<(usize, Change)>) {
        let index = self.list.len().saturating_sub(1);
        if let (true, Some(block)) = (self.open, self.list.last_mut()) {
            (block.complete, self.open) = (complete, false);
            changes.push((index, Change::Close));
        }
    }

    /// Adds a text of nothing, for a reply that has no blocks.
    pub(crate) fn add_empty(&mut self) -> Vec<(usize, Change)> {
        let mut changes = Vec::new();
        self.begin(Kind::Text, &mut changes);
        self.close(true, &mut changes);
        changes
    }

    /// The blocks up to here.
    pub(crate) fn list(&self) -> &[Block] {
        &self.list
    }

    /// What the reply is made of.
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }
}
