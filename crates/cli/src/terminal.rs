//! The two output streams. Standard output holds the model's text (or one JSON object, or a table that was asked
//! for) and nothing else; everything said about it goes to standard error.

use crate::end::{End, single_line};
use std::io::{self, IsTerminal, Write};

/// A line on standard error. If nobody can read it there is nobody to tell, so errors are dropped.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", single_line(line));
}

/// A line about something that is true and may not be expected.
pub(crate) fn note(line: &str) {
    say(&format!("note: {line}"));
}

/// Asks for input on standard error, without ending the line.
pub(crate) fn prompt(text: &str) {
    let mut err = io::stderr().lock();
    let _ = write!(err, "{text}").and_then(|()| err.flush());
}

/// Text that a command was asked for, on standard output.
pub(crate) fn print(text: &str) -> Result<(), End> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(End::of_write)
}

/// Whether a person sees standard error.
pub(crate) fn is_watched() -> bool {
    io::stderr().is_terminal()
}

/// Whether a person types into standard input and sees standard output.
pub(crate) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// A reply on its way to standard output: each piece is shown at once.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    started: bool,
}

impl Reply {
    /// Shows a piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Result<(), End> {
        if text.is_empty() {
            return Ok(());
        }
        self.started = true;
        print(text)
    }

    /// Ends the reply with a newline; an empty reply prints nothing at all.
    pub(crate) fn finish(&self) -> Result<(), End> {
        if self.started { print("\n") } else { Ok(()) }
    }
}
