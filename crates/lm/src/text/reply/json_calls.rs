//! Calls as JSON: `{"name": "f", "arguments": {…}}`, one, several, or a list of them.

use super::block::{Flow, Held};
use super::emit::Emitter;
use super::json_text::{JsonText, Step, is_space, json_string_text, json_value};

/// Objects around a call (`{"type": "function", "function": {…}}`) at most.
const WRAPPERS_MAX: usize = 4;

/// The keys of a call's arguments: the second as Llama and several fine-tuned models write it.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// One call, read a character at a time. Its arguments are told as they come, once the name is known.
#[derive(Clone, Debug, Default)]
struct CallObject {
    state: CallState,
    name: Option<String>,
    id: Option<String>,
    arguments: Progress,
    wrappers: usize,
    /// There was a key that no call has: without arguments the object is something else.
    strange: bool,
}

#[derive(Clone, Debug, Default)]
enum CallState {
    #[default]
    Open,
    FirstKey,
    NextKey,
    Key(JsonText, String),
    Colon(String),
    Value {
        key: String,
        json: JsonText,
        text: String,
    },
    /// Behind a value.
    Next,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Progress {
    #[default]
    Missing,
    /// They came before the name.
    Waiting(String),
    Streaming,
    Told,
}

impl CallObject {
    /// [`Step::Ended`] does not occur.
    fn step(&mut self, c: char, emit: &mut Emitter) -> Step {
        match std::mem::take(&mut self.state) {
            CallState::Key(mut json, mut text) => {
                let step = json.step(c, &mut text);
                self.state = match step {
                    Step::Done => CallState::Colon(json_string_text(&text).unwrap_or_default()),
                    _ => CallState::Key(json, text),
                };
                if step == Step::Bad { Step::Bad } else { Step::More }
            }
            CallState::Value { key, json, text } => self.value(c, key, json, text, emit),
            state if is_space(c) => self.more(state),
            CallState::Open if c == '{' => self.more(CallState::FirstKey),
            CallState::FirstKey | CallState::NextKey if c == '"' => {
                let (mut json, mut text) = (JsonText::default(), String::new());
                json.step(c, &mut text);
                self.more(CallState::Key(json, text))
            }
            CallState::FirstKey | CallState::NextKey | CallState::Next if c == '}' => self.close(emit),
            CallState::Next if c == ',' => self.more(CallState::NextKey),
            CallState::Colon(key) if c == ':' => {
                self.more(CallState::Value { key, json: JsonText::default(), text: String::new() })
            }
            state => {
                self.state = state;
                Step::Bad
            }
        }
    }

    fn more(&mut self, state: CallState) -> Step {
        self.state = state;
        Step::More
    }

    fn value(
        &mut self,
        c: char,
        key: String,
        mut json: JsonText,
        mut text: String,
        emit: &mut Emitter,
    ) -> Step {
        let begins = text.is_empty() && c == '{';
        if begins && matches!(key.as_str(), "function" | "tool") && self.name.is_none() {
            self.wrappers += 1;
            let step = if self.wrappers > WRAPPERS_MAX { Step::Bad } else { Step::More };
            self.state = CallState::FirstKey;
            return step;
        }
        let is_arguments = ARGUMENTS.contains(&key.as_str());
        if begins
            && is_arguments
            && self.arguments == Progress::Missing
            && let Some(name) = &self.name
        {
            emit.start(name, self.id.take());
            self.arguments = Progress::Streaming;
        }
        let before = text.len();
        let step = json.step(c, &mut text);
        // A second value of the key, after the first was told, is not one that streams.
        if is_arguments && self.arguments == Progress::Streaming {
            emit.arguments(&text[before..]);
        }
        match step {
            Step::More => self.more(CallState::Value { key, json, text }),
            Step::Bad => {
                self.state = CallState::Value { key, json, text };
                Step::Bad
            }
            Step::Done | Step::Ended => {
                self.state = CallState::Next;
                if self.take_value(&key, &text, emit).is_none() {
                    return Step::Bad;
                }
                if step == Step::Ended { self.step(c, emit) } else { Step::More }
            }
        }
    }

    /// A value is complete. `None` if it cannot be that of its key.
    fn take_value(&mut self, key: &str, text: &str, emit: &mut Emitter) -> Option<()> {
        match key {
            "name" | "function" | "tool" if self.name.is_none() => {
                self.name = Some(json_string_text(text).filter(|name| !name.is_empty())?);
            }
            "id" => self.id = json_string_text(text),
            _ if ARGUMENTS.contains(&key) => match self.arguments {
                Progress::Missing => self.arguments = Progress::Waiting(object(text)?),
                Progress::Streaming => self.arguments = Progress::Told,
                Progress::Waiting(_) | Progress::Told => return None,
            },
            "type" | "index" => {}
            _ => self.strange = true,
        }
        if let (Some(name), Progress::Waiting(arguments)) = (&self.name, &self.arguments) {
            emit.start(name, self.id.take());
            emit.arguments(arguments);
            self.arguments = Progress::Told;
        }
        Some(())
    }

    /// A closing brace.
    fn close(&mut self, emit: &mut Emitter) -> Step {
        if self.wrappers > 0 {
            self.wrappers -= 1;
            return self.more(CallState::Next);
        }
        if self.arguments == Progress::Missing
            && !self.strange
            && let Some(name) = &self.name
        {
            emit.start(name, self.id.take());
            emit.arguments("{}");
            self.arguments = Progress::Told;
        }
        if self.arguments != Progress::Told {
            self.state = CallState::Next;
            return Step::Bad;
        }
        emit.end(true);
        Step::Done
    }

    fn has_begun(&self) -> bool {
        matches!(self.arguments, Progress::Streaming | Progress::Told)
    }

    /// Ends a call that has begun, where the text broke off; returns whether all of its arguments are there.
    fn abandon(&mut self, emit: &mut Emitter) -> bool {
        let complete = self.arguments == Progress::Told;
        if let CallState::Value { json, .. } = &self.state
            && !complete
        {
            emit.arguments(&json.close());
        }
        emit.end(complete);
        complete
    }
}

/// The object that arguments stand for: itself, a string that holds one, or none.
fn object(json: &str) -> Option<String> {
    let text = match json_string_text(json) {
        Some(text) if text.trim().is_empty() => return Some("{}".to_owned()),
        Some(text) => json_value(&text)?,
        None if json == "null" => return Some("{}".to_owned()),
        None => json.to_owned(),
    };
    text.starts_with('{').then_some(text)
}

/// The calls of a block.
#[derive(Clone, Debug)]
pub(super) struct JsonCalls {
    /// The marker behind the block; empty if it has none.
    end: &'static str,
    /// The object must have arguments to be a call: nothing else marks it as one.
    bare: bool,
    list: bool,
    state: ListState,
    /// What was read and is part of no call yet, the marker before the block included.
    raw: String,
    held: Held,
    calls: usize,
}

#[derive(Clone, Debug)]
enum ListState {
    Start,
    Call(Box<CallObject>),
    /// Behind a call.
    Between,
    /// Behind a comma of a list.
    Item,
    /// Behind a list.
    Behind,
}

impl JsonCalls {
    /// `raw` is what came before: the start marker.
    pub(super) fn new(raw: String, end: &'static str, bare: bool) -> Self {
        Self { end, bare, list: false, state: ListState::Start, raw, held: Held::default(), calls: 0 }
    }

    pub(super) fn step(&mut self, c: char, emit: &mut Emitter) -> Flow {
        self.raw.push(c);
        match std::mem::replace(&mut self.state, ListState::Start) {
            ListState::Call(call) => self.call(call, c, emit),
            state => self.outside(state, c, emit),
        }
    }

    fn call(&mut self, mut call: Box<CallObject>, c: char, emit: &mut Emitter) -> Flow {
        let begun = call.has_begun();
        let step = call.step(c, emit);
        if !begun && call.has_begun() {
            self.raw.clear();
        }
        match step {
            Step::Done => {
                self.calls += 1;
                self.raw.clear();
                self.state = ListState::Between;
                Flow::More
            }
            Step::Bad if !call.has_begun() => self.leave(&c.to_string()),
            Step::Bad => {
                let complete = call.abandon(emit);
                self.raw = c.to_string();
                if !complete {
                    return self.leave(&c.to_string());
                }
                self.calls += 1;
                self.outside(ListState::Between, c, emit)
            }
            Step::More | Step::Ended => {
                self.state = ListState::Call(call);
                Flow::More
            }
        }
    }

    fn outside(&mut self, state: ListState, c: char, emit: &mut Emitter) -> Flow {
        if self.held.is_empty() {
            match (&state, c) {
                (_, c) if is_space(c) => return self.more(state),
                (ListState::Start | ListState::Item, '{') => return self.begin(c, emit),
                (ListState::Between, '{') if !self.list => return self.begin(c, emit),
                (ListState::Start, '[') if !self.bare => {
                    self.list = true;
                    return self.more(ListState::Item);
                }
                (ListState::Between, ',') if self.list => return self.more(ListState::Item),
                (ListState::Between, ',' | ';') => return self.more(ListState::Between),
                (ListState::Between | ListState::Item, ']') if self.list && self.calls > 0 => {
                    return self.more(ListState::Behind);
                }
                _ => {}
            }
        }
        self.state = state;
        self.held.push(c);
        if self.calls == 0 || !self.held.may_become(&[self.end]) {
            let held = self.held.take();
            return self.leave(&held);
        }
        if self.held.is(self.end) { Flow::End } else { Flow::More }
    }

    fn more(&mut self, state: ListState) -> Flow {
        self.state = state;
        Flow::More
    }

    fn begin(&mut self, c: char, emit: &mut Emitter) -> Flow {
        let mut call = Box::<CallObject>::default();
        call.strange = self.bare;
        call.step(c, emit);
        self.more(ListState::Call(call))
    }

    /// The block is over: its raw text goes back to where it came from, and `again` is to be read anew.
    fn leave(&mut self, again: &str) -> Flow {
        let mut text = std::mem::take(&mut self.raw);
        text.truncate(text.len().saturating_sub(again.len()));
        Flow::Leave { text, again: again.to_owned() }
    }

    /// The text has ended; returns what of it is no call.
    pub(super) fn finish(mut self, emit: &mut Emitter) -> String {
        if let ListState::Call(call) = &mut self.state {
            if call.has_begun() {
                call.abandon(emit);
                return String::new();
            }
            return self.raw;
        }
        if self.calls > 0 { String::new() } else { self.raw }
    }
}
