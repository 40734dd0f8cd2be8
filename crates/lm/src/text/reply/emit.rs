//! Collects the parts of a reply.

use super::{ReplyPart, ToolCall};

/// The channel of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    Content,
    Reasoning,
}

/// Parts that are ready, and which calls there were before.
#[derive(Clone, Debug, Default)]
pub(super) struct Emitter {
    parts: Vec<ReplyPart>,
    /// The calls that have begun.
    calls: usize,
    ids: Vec<String>,
}

impl Emitter {
    pub(super) fn take(&mut self) -> Vec<ReplyPart> {
        std::mem::take(&mut self.parts)
    }

    pub(super) fn text(&mut self, channel: Channel, text: &str) {
        if text.is_empty() {
            return;
        }
        match (self.parts.last_mut(), channel) {
            (Some(ReplyPart::Content(last)), Channel::Content)
            | (Some(ReplyPart::Reasoning(last)), Channel::Reasoning) => last.push_str(text),
            (_, Channel::Content) => self.parts.push(ReplyPart::Content(text.to_owned())),
            (_, Channel::Reasoning) => self.parts.push(ReplyPart::Reasoning(text.to_owned())),
        }
    }

    /// An id that came before is no id.
    pub(super) fn start(&mut self, name: &str, id: Option<String>) {
        let id = id.filter(|id| !id.is_empty() && !self.ids.contains(id));
        self.ids.extend(id.clone());
        self.parts.push(ReplyPart::ToolCallStart { index: self.calls, id, name: name.to_owned() });
        self.calls += 1;
    }

    pub(super) fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.parts.last_mut() {
            Some(ReplyPart::ToolCallArguments { text: last, .. }) => last.push_str(text),
            _ => {
                let index = self.calls.saturating_sub(1);
                self.parts.push(ReplyPart::ToolCallArguments { index, text: text.to_owned() });
            }
        }
    }

    pub(super) fn end(&mut self, complete: bool) {
        self.parts.push(ReplyPart::ToolCallEnd { index: self.calls.saturating_sub(1), complete });
    }

    pub(super) fn call(&mut self, call: &ToolCall) {
        self.start(&call.name, call.id.clone());
        self.arguments(&call.arguments);
        self.end(call.complete);
    }
}
