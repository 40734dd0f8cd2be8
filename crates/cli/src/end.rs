//! How a command ends when it does not simply end well, and the exit codes.

use std::io;

/// Why a command stopped.
#[derive(Debug)]
pub(crate) enum End {
    /// All that was asked for has been printed (help, version).
    Done,
    /// The words of the command line, or what they mean together, are wrong.
    Usage(String),
    /// Something failed.
    Failed(anyhow::Error),
    /// Ctrl-C.
    Interrupted,
    /// The reader of standard output has gone, as `head` does; it has what it wanted.
    ClosedPipe,
}

impl End {
    /// 0 done, 1 failed, 2 bad usage, 130 interrupted.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            End::Done | End::ClosedPipe => 0,
            End::Failed(_) => 1,
            End::Usage(_) => 2,
            End::Interrupted => crate::interrupt::EXIT_CODE,
        }
    }

    /// The one line for standard error, if there is something to say.
    pub(crate) fn message(&self) -> Option<String> {
        let message = match self {
            End::Usage(message) => message.clone(),
            End::Failed(error) => format!("{error:#}"),
            End::Done | End::Interrupted | End::ClosedPipe => return None,
        };
        Some(single_line(&format!("error: {message}")))
    }

    /// The end after an attempt to print the last thing.
    pub(crate) fn after_print(result: io::Result<()>) -> Self {
        result.map_or_else(End::of_write, |()| End::Done)
    }

    /// The end that an error of writing to standard output means.
    pub(crate) fn of_write(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => End::ClosedPipe,
            _ => End::Failed(anyhow::Error::new(error).context("cannot write to standard output")),
        }
    }
}

impl From<anyhow::Error> for End {
    fn from(error: anyhow::Error) -> Self {
        End::Failed(error)
    }
}

/// `text` on one line and without control characters: file names and model files must not steer the terminal.
pub(crate) fn single_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' => line.push(' '),
            c if c.is_control() => line.extend(c.escape_unicode()),
            c => line.push(c),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_escapes() {
        let end = End::Failed(anyhow::anyhow!("cannot open \u{1b}[31mx").context("line one\nline two"));
        let message = end.message().unwrap_or_default();
        assert_eq!(message, "error: line one line two: cannot open \\u{1b}[31mx");
    }
}
