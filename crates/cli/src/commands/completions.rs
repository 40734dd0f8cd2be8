//! `lmx completions SHELL`: a script that completes lmx's words in a shell.

use crate::args::{CompletionsArgs, command_line};
use crate::end::End;
use crate::terminal;

/// Prints the script.
pub(crate) fn run(args: &CompletionsArgs) -> Result<(), End> {
    // Through a buffer: clap_complete panics where the output is closed.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command_line(), "lmx", &mut script);
    terminal::print(&String::from_utf8_lossy(&script))
}
