//! Calls whose name stands before their JSON: `<begin> name <separator> {…} <end>`.

use super::block::{Flow, Held};
use super::emit::Emitter;
use super::json_text::{JsonText, Step, is_space};

/// The most bytes of a name with what is written around it.
const HEADER_BYTES_MAX: usize = 512;

/// A name, and the id that the model gave the call.
type Named = (String, Option<String>);

/// How a format frames its calls.
#[derive(Debug)]
pub(super) struct Frame {
    /// Before a call; the first may be without it.
    pub(super) begin: &'static str,
    /// Between name and arguments.
    pub(super) separator: &'static str,
    /// Behind a call; empty if nothing is.
    pub(super) end: &'static str,
    /// Behind all calls; empty if nothing is.
    pub(super) section_end: &'static str,
    /// The arguments may stand in a code block, behind their function's name.
    pub(super) code_block: bool,
    /// The block ends with the first call.
    pub(super) single: bool,
    /// A block that begins with a bracket is JSON calls.
    pub(super) or_json: bool,
    /// Name and id, from the text before the separator and that between it and the arguments.
    pub(super) header: fn(&str, &str) -> Option<Named>,
}

/// `functions.NAME:0`, which is the id too.
pub(super) const KIMI_K2: Frame = Frame {
    begin: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    end: "<|tool_call_end|>",
    section_end: "<|tool_calls_section_end|>",
    code_block: false,
    single: false,
    or_json: false,
    header: |header, between| {
        let (name, number) = header.rsplit_once(':')?;
        let name = name.strip_prefix("functions.").unwrap_or(name);
        let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        (digits && between.is_empty()).then(|| named(name, Some(header)))?
    },
};

/// `NAME<sep>{…}` (V3.1), or `function<sep>NAME`, then the arguments in a code block (V3, R1).
pub(super) const DEEPSEEK: Frame = Frame {
    begin: "<｜tool▁call▁begin｜>",
    separator: "<｜tool▁sep｜>",
    end: "<｜tool▁call▁end｜>",
    section_end: "<｜tool▁calls▁end｜>",
    code_block: true,
    single: false,
    or_json: false,
    header: |header, between| match between.strip_suffix("```json").or(between.strip_suffix("```")) {
        _ if between.is_empty() => named(header, None),
        Some(name) if header == "function" => named(name.trim(), None),
        _ => None,
    },
};

/// `NAME[ARGS]{…}`, `NAME[CALL_ID]ID[ARGS]{…}`.
pub(super) const MISTRAL: Frame = Frame {
    begin: "[TOOL_CALLS]",
    separator: "[ARGS]",
    end: "",
    section_end: "",
    code_block: false,
    single: false,
    or_json: true,
    header: |header, between| match header.split_once("[CALL_ID]") {
        _ if !between.is_empty() => None,
        Some((name, id)) => named(name, Some(id)),
        None => named(header, None),
    },
};

/// The body of a message to a function, whose name the message's header told.
pub(super) const MESSAGE: Frame = Frame {
    begin: "",
    separator: "",
    end: "",
    section_end: "",
    code_block: false,
    single: true,
    or_json: false,
    header: |name, between| match between {
        "" => named(name, None),
        _ => None,
    },
};

fn named(name: &str, id: Option<&str>) -> Option<Named> {
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':');
    (!name.is_empty() && name.chars().all(fits)).then(|| (name.to_owned(), id.map(str::to_owned)))
}

/// The calls of a block.
#[derive(Clone, Debug)]
pub(super) struct FramedCalls {
    frame: &'static Frame,
    state: State,
    /// What was read and is part of no call yet, the marker before the block included.
    raw: String,
    held: Held,
    calls: usize,
}

#[derive(Clone, Debug)]
enum State {
    /// Before a call.
    Between,
    Header(String),
    /// Behind the separator.
    Prelude(String, String),
    Arguments(JsonText),
    /// Behind the arguments.
    Behind,
}

impl FramedCalls {
    /// `raw` is what came before: the start marker.
    pub(super) fn new(raw: String, frame: &'static Frame) -> Self {
        Self { frame, state: State::Between, raw, held: Held::default(), calls: 0 }
    }

    /// One call of a function whose name is known.
    pub(super) fn message(raw: String, name: &str) -> Self {
        let state = State::Prelude(name.to_owned(), String::new());
        Self { frame: &MESSAGE, state, raw, held: Held::default(), calls: 0 }
    }

    pub(super) fn step(&mut self, c: char, emit: &mut Emitter) -> Flow {
        self.raw.push(c);
        match std::mem::replace(&mut self.state, State::Between) {
            State::Between => self.between(c),
            State::Header(header) => self.header(header, c),
            State::Prelude(header, prelude) => self.prelude(header, prelude, c, emit),
            State::Arguments(json) => self.arguments(json, c, emit),
            State::Behind => self.behind(c),
        }
    }

    fn more(&mut self, state: State) -> Flow {
        self.state = state;
        Flow::More
    }

    fn between(&mut self, c: char) -> Flow {
        if self.held.is_empty() && is_space(c) {
            return Flow::More;
        }
        self.held.push(c);
        let Frame { begin, section_end, .. } = *self.frame;
        let section_end = if self.calls > 0 { section_end } else { "" };
        if self.held.is(begin) {
            self.held.take();
            return self.more(State::Header(String::new()));
        }
        if self.held.is(section_end) {
            return Flow::End;
        }
        if self.held.may_become(&[begin, section_end]) {
            return Flow::More;
        }
        // Kimi K2 may leave the marker before its only call out, Mistral before any.
        let held = self.held.take();
        if self.frame.or_json || self.calls == 0 { self.read_header(&held) } else { self.leave(&held) }
    }

    /// Reads `text` as the beginning of a header.
    fn read_header(&mut self, text: &str) -> Flow {
        let mut header = String::new();
        for c in text.chars() {
            if !fits_header(&header, c) {
                return self.leave(text);
            }
            header.push(c);
        }
        self.more(State::Header(header))
    }

    fn header(&mut self, mut header: String, c: char) -> Flow {
        self.held.push(c);
        if self.held.is(self.frame.separator) {
            self.held.take();
            return self.more(State::Prelude(header.trim().to_owned(), String::new()));
        }
        if self.held.may_become(&[self.frame.separator]) {
            return self.more(State::Header(header));
        }
        let held = self.held.take();
        for c in held.chars() {
            if !fits_header(&header, c) {
                return self.leave(&held);
            }
            header.push(c);
        }
        self.more(State::Header(header))
    }

    fn prelude(&mut self, header: String, mut prelude: String, c: char, emit: &mut Emitter) -> Flow {
        if c == '{' {
            let Some((name, id)) = (self.frame.header)(&header, prelude.trim()) else {
                return self.leave("{");
            };
            emit.start(&name, id);
            self.raw.clear();
            return self.arguments(JsonText::default(), c, emit);
        }
        let fits = is_space(c) || c == '`' || (self.frame.code_block && fits_header("", c));
        if !fits || prelude.len() > HEADER_BYTES_MAX {
            return self.leave(&c.to_string());
        }
        prelude.push(c);
        self.more(State::Prelude(header, prelude))
    }

    fn arguments(&mut self, mut json: JsonText, c: char, emit: &mut Emitter) -> Flow {
        let mut text = String::new();
        let step = json.step(c, &mut text);
        emit.arguments(&text);
        match step {
            Step::More | Step::Ended => self.more(State::Arguments(json)),
            Step::Done => {
                emit.end(true);
                self.raw.clear();
                self.calls += 1;
                if self.frame.single { Flow::End } else { self.more(State::Behind) }
            }
            Step::Bad => {
                emit.arguments(&json.close());
                emit.end(false);
                self.raw = c.to_string();
                self.leave(&c.to_string())
            }
        }
    }

    fn behind(&mut self, c: char) -> Flow {
        let Frame { begin, end, section_end, .. } = *self.frame;
        if self.held.is_empty() && (is_space(c) || c == '`' && self.frame.code_block) {
            return self.more(State::Behind);
        }
        if end.is_empty() {
            return self.between(c);
        }
        self.held.push(c);
        if self.held.is(end) {
            self.held.take();
            self.raw.clear();
            return self.more(State::Between);
        }
        if self.held.is(section_end) {
            return Flow::End;
        }
        if self.held.is(begin) {
            self.held.take();
            return self.more(State::Header(String::new()));
        }
        if self.held.may_become(&[end, section_end, begin]) {
            return self.more(State::Behind);
        }
        let held = self.held.take();
        self.leave(&held)
    }

    /// The block is over: its raw text goes back to where it came from, and `again` is to be read anew.
    fn leave(&mut self, again: &str) -> Flow {
        let mut text = std::mem::take(&mut self.raw);
        text.truncate(text.len().saturating_sub(again.len()));
        Flow::Leave { text, again: again.to_owned() }
    }

    /// The text has ended; returns what of it is no call.
    pub(super) fn finish(self, emit: &mut Emitter) -> String {
        match self.state {
            State::Arguments(json) => {
                emit.arguments(&json.close());
                emit.end(false);
                String::new()
            }
            State::Between | State::Behind if self.calls > 0 => String::new(),
            _ => self.raw,
        }
    }
}

/// Whether `c` may follow `header` before a separator: prose and markup fail early, so that they are not held back.
fn fits_header(header: &str, c: char) -> bool {
    let part_of_name = c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':' | '[' | ']');
    let space_before = header.ends_with(is_space) && !header.trim().is_empty();
    header.len() < HEADER_BYTES_MAX && (is_space(c) || part_of_name && !space_before)
}
