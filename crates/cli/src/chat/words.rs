//! What is typed that is not a message to the model.

/// Said by `/help` and `h`.
pub(crate) const HELP: &str = "\
/help, h         this help
/reset, r        forget the conversation; the system prompt stays
/system TEXT     set the system prompt from now on; without TEXT there is none
/save FILE       write the conversation to FILE as JSON messages
/quit, q         leave; so does the end of input (Ctrl-D)
A line that ends in \\ goes on in the next one; \"\"\" begins a message of several lines and ends it.
A message that begins with / is sent if a blank stands before it. Ctrl-C stops a reply.";

/// A command of the chat.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command<'a> {
    Help,
    Reset,
    /// The new system prompt; `None` for none.
    System(Option<&'a str>),
    /// A file name.
    Save(&'a str),
    Quit,
}

/// The command that `input` is, if it is one: mlx-lm's `q`, `r`, `h`, and all that begins with a slash.
///
/// # Errors
/// A slash with a word that is no command, or a wrong argument: a line to show.
pub(crate) fn command(input: &str) -> Result<Option<Command<'_>>, String> {
    let (word, argument) = match input.split_once(char::is_whitespace) {
        Some((word, argument)) => (word, argument.trim()),
        None => (input, ""),
    };
    let alone = |command| match argument {
        "" => Ok(Some(command)),
        _ => Err(format!("{word} takes no argument, but was given {argument:?}")),
    };
    match (word, input) {
        (_, "h") | ("/help", _) => alone(Command::Help),
        (_, "r") | ("/reset", _) => alone(Command::Reset),
        (_, "q") | ("/quit", _) => alone(Command::Quit),
        ("/system", _) => Ok(Some(Command::System((!argument.is_empty()).then_some(argument)))),
        ("/save", _) if argument.is_empty() => Err("/save needs the name of a file".to_owned()),
        ("/save", _) => Ok(Some(Command::Save(argument))),
        _ if word.starts_with('/') => Err(format!(
            "{word:?} is not a command (/help lists them); to send it as a message, begin with a blank"
        )),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages() {
        for (input, meaning) in [
            ("q", Some(Command::Quit)),
            ("/quit ", Some(Command::Quit)),
            ("r", Some(Command::Reset)),
            ("h", Some(Command::Help)),
            ("/system be brief\nand kind", Some(Command::System(Some("be brief\nand kind")))),
            ("/system", Some(Command::System(None))),
            ("/save a b.json", Some(Command::Save("a b.json"))),
            ("quit", None),
            ("q r", None),
            (" q", None),
            (" /quit", None),
            ("h?", None),
        ] {
            assert_eq!(command(input), Ok(meaning), "{input:?}");
        }
        for input in ["/etc/passwd", "/", "/save", "/reset all", "/QUIT"] {
            assert!(command(input).is_err(), "{input:?}");
        }
    }
}
