//! Where a chat's messages come from: a line editor at a terminal, or plain lines from a pipe or file.

use crate::args::values::universal_newlines;
use crate::end::End;
use crate::terminal;
use anyhow::{Context, bail};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;

/// The longest line and the longest message, in bytes.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Begins and ends a message of several lines.
const FENCE: &str = "\"\"\"";

/// What a source of lines gives next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A line, without its end.
    Text(String),
    /// Ctrl-C while it was typed.
    Interrupted,
    /// There is no more.
    End,
}

/// Lines of input.
pub(crate) trait Lines {
    /// The next line; `more` says that it continues a message.
    fn next_line(&mut self, more: bool) -> anyhow::Result<Line>;

    /// A message is complete: it may be remembered.
    fn remember(&mut self, message: &str) {
        let _ = message;
    }
}

/// The source that fits how lmx was started.
pub(crate) fn open(history: Option<PathBuf>) -> anyhow::Result<Box<dyn Lines>> {
    Ok(match terminal::is_interactive() {
        true => Box::new(Editor::new(history)?),
        // Somebody may type while standard output goes elsewhere: then the prompt goes to standard error.
        false => Box::new(Plain {
            reader: std::io::stdin().lock(),
            prompts: std::io::stdin().is_terminal(),
            line: 0,
        }),
    })
}

/// The next message. Blank ones are skipped.
///
/// # Errors
/// A read error, invalid UTF-8, a message beyond its limit, or input that ends within a message.
pub(crate) fn next_message(lines: &mut dyn Lines) -> Result<Line, End> {
    loop {
        let Line::Text(first) = lines.next_line(false)? else { return Ok(Line::End) };
        let message = match first.strip_prefix(FENCE) {
            Some(rest) => fenced(rest, lines)?,
            None => continued(first, lines)?,
        };
        match message {
            Line::Text(text) if text.trim().is_empty() => {}
            Line::Text(text) => {
                lines.remember(&text);
                return Ok(Line::Text(text));
            }
            other => return Ok(other),
        }
    }
}

/// A message whose lines end in a backslash, but for the last.
fn continued(first: String, lines: &mut dyn Lines) -> anyhow::Result<Line> {
    let mut message = first;
    while message.ends_with('\\') {
        message.pop();
        match lines.next_line(true)? {
            Line::Text(line) => append(&mut message, &line)?,
            Line::Interrupted => return Ok(Line::Interrupted),
            Line::End => bail!("the input ended after a line that ends in \\, which says that it goes on"),
        }
    }
    Ok(Line::Text(message))
}

/// A message between fences, whose first line is `first`.
fn fenced(first: &str, lines: &mut dyn Lines) -> anyhow::Result<Line> {
    let mut message = first.to_owned();
    loop {
        if let Some(text) = message.trim_end().strip_suffix(FENCE) {
            return Ok(Line::Text(text.trim_matches('\n').to_owned()));
        }
        match lines.next_line(true)? {
            Line::Text(line) => append(&mut message, &line)?,
            Line::Interrupted => return Ok(Line::Interrupted),
            Line::End => {
                bail!("the input ended within a message that began with {FENCE} (end it with {FENCE})")
            }
        }
    }
}

fn append(message: &mut String, line: &str) -> anyhow::Result<()> {
    message.push('\n');
    message.push_str(line);
    if message.len() > MESSAGE_BYTES_MAX {
        bail!("a message is longer than {MESSAGE_BYTES_MAX} bytes");
    }
    Ok(())
}

/// Lines of a pipe or a file, without any decoration.
struct Plain<R> {
    reader: R,
    /// Ask for each line on standard error.
    prompts: bool,
    /// Lines read so far.
    line: usize,
}

impl<R: BufRead> Lines for Plain<R> {
    fn next_line(&mut self, more: bool) -> anyhow::Result<Line> {
        if self.prompts {
            terminal::prompt(if more { MORE } else { PROMPT });
        }
        self.line += 1;
        let mut bytes = Vec::new();
        let limit = MESSAGE_BYTES_MAX as u64 + 1;
        let read = self.reader.by_ref().take(limit).read_until(b'\n', &mut bytes);
        read.with_context(|| format!("cannot read line {} of standard input", self.line))?;
        if bytes.is_empty() {
            return Ok(Line::End);
        }
        if bytes.len() > MESSAGE_BYTES_MAX {
            bail!("line {} of standard input is longer than {MESSAGE_BYTES_MAX} bytes", self.line);
        }
        let text = std::str::from_utf8(&bytes)
            .with_context(|| format!("line {} of standard input is not UTF-8", self.line))?;
        let text = universal_newlines(text);
        Ok(Line::Text(text.strip_suffix('\n').unwrap_or(&text).to_owned()))
    }
}

/// Before a message, and before a further line of one.
const PROMPT: &str = "› ";
const MORE: &str = "· ";

/// A terminal: line editing, and a history that outlives the session.
struct Editor {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl Editor {
    fn new(history: Option<PathBuf>) -> anyhow::Result<Self> {
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        if let Some(path) = &history
            && path.exists()
            && let Err(error) = editor.load_history(path)
        {
            terminal::note(&format!("cannot read the history in {}: {error}", path.display()));
        }
        Ok(Self { editor, history })
    }
}

impl Lines for Editor {
    fn next_line(&mut self, more: bool) -> anyhow::Result<Line> {
        loop {
            match self.editor.readline(if more { MORE } else { PROMPT }) {
                Ok(text) => return Ok(Line::Text(universal_newlines(&text))),
                Err(ReadlineError::Interrupted) if more => return Ok(Line::Interrupted),
                Err(ReadlineError::Interrupted) => terminal::say("q or Ctrl-D leaves, h helps"),
                Err(ReadlineError::Eof) => return Ok(Line::End),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }

    fn remember(&mut self, message: &str) {
        let added = self.editor.add_history_entry(message).unwrap_or(false);
        let Some(path) = self.history.as_ref().filter(|_| added) else { return };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let saved = folder.map_err(ReadlineError::from).and_then(|()| self.editor.append_history(path));
        if let Err(error) = saved {
            terminal::note(&format!("no history is kept: cannot write {}: {error}", path.display()));
            self.history = None;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn messages(input: &[u8]) -> Result<Vec<String>, String> {
        let mut lines = Plain { reader: input, prompts: false, line: 0 };
        let mut messages = Vec::new();
        loop {
            match next_message(&mut lines) {
                Ok(Line::Text(text)) => messages.push(text),
                Ok(Line::Interrupted | Line::End) => return Ok(messages),
                Err(end) => return Err(end.message().unwrap()),
            }
        }
    }

    #[test]
    fn a_line_is_a_message() {
        assert_eq!(messages(b"one\r\n\n  \ntwo").unwrap(), ["one", "two"]);
        assert_eq!(messages(b"").unwrap(), [""; 0]);
    }

    #[test]
    fn messages_of_several_lines() {
        assert_eq!(messages(b"a\\\nb\\\r\nc\nd\n").unwrap(), ["a\nb\nc", "d"]);
        assert_eq!(messages(b"\"\"\"\na\n\n  b\\\n\"\"\"\nc\n").unwrap(), ["a\n\n  b\\", "c"]);
        assert_eq!(messages(b"\"\"\"one\"\"\"\n\"\"\"x\ny \"\"\"  \n").unwrap(), ["one", "x\ny "]);
    }

    #[test]
    fn input_that_cannot_be_read_is_an_error() {
        for (input, says) in [
            (&b"ok\n\xff\n"[..], "line 2 of standard input is not UTF-8"),
            (b"a\\\n", "ends in \\"),
            (b"\"\"\"a\nb\n", "within a message"),
        ] {
            let error = messages(input).unwrap_err();
            assert!(error.starts_with("error: ") && error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_line_has_a_limit() {
        let long = vec![b'x'; MESSAGE_BYTES_MAX + 1];
        assert!(messages(&long).unwrap_err().contains("longer than"));
        assert_eq!(messages(&long[1..]).unwrap()[0].len(), MESSAGE_BYTES_MAX);
    }
}
