//! Words to meaning: the command line is parsed by clap into the `…Args` structs, which `validate` turns into
//! `…Options` that hold only values that are in range. Nothing here touches a model.
//!
//! Names, defaults and spellings are those of mlx-lm 0.32, so that its users change one word in a script.

pub(crate) mod adapter;
pub(crate) mod benchmark;
pub(crate) mod cache_prompt;
pub(crate) mod chat;
pub(crate) mod choices;
mod compat;
pub(crate) mod evaluate;
mod form;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod model;
pub(crate) mod perplexity;
pub(crate) mod prompts;
pub(crate) mod refused;
pub(crate) mod sampling;
pub(crate) mod server;
mod speculation;
pub(crate) mod values;

use crate::end::End;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;

/// Run large language models on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "lmx",
    version,
    max_term_width = 100,
    disable_help_subcommand = true,
    infer_long_args = true,
    args_override_self = true,
    after_help = "Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.\nFor a command's flags: lmx COMMAND --help"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands of lmx.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt and print the text as it is made
    Generate(Box<generate::GenerateArgs>),
    /// Talk with a model
    Chat(Box<chat::ChatArgs>),
    /// Run the beginning of a prompt and write its keys and values to a file, which generate continues
    #[command(visible_alias = "cache_prompt")]
    CachePrompt(Box<cache_prompt::CachePromptArgs>),
    /// Serve models to programs that speak OpenAI's or Anthropic's protocol
    Server(Box<server::ServerArgs>),
    /// Evaluate a model on tasks of lm-evaluation-harness, which must be installed
    Evaluate(Box<evaluate::EvaluateArgs>),
    /// Measure how fast a model runs on this machine, alone or beside a server
    Benchmark(Box<benchmark::BenchmarkArgs>),
    /// Measure how well a model, or two, predict a text
    Perplexity(Box<perplexity::PerplexityArgs>),
    /// Say what a model is and what it will need, without running it
    Inspect(Box<inspect::InspectArgs>),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
}

/// `lmx completions SHELL`
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell to complete in
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// The command of `words` (the program's name first). Prints help or the version itself, and ends with `Done`.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Command, End> {
    let words = compat::as_clap_reads(words.into_iter().collect());
    let help = match words.get(1).and_then(|word| word.to_str()) {
        Some(name) if command_line().find_subcommand(name).is_some() => format!("lmx {name} --help"),
        _ => "lmx --help".to_owned(),
    };
    Cli::try_parse_from(words).map(|cli| cli.command).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => End::after_print(error.print()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            End::Usage(format!("no command is given (see {help})"))
        }
        _ => End::Usage(format!("{} (see {help})", compat::one_line(&error))),
    })
}

/// The whole command line, for completion scripts.
pub(crate) fn command_line() -> clap::Command {
    Cli::command()
}
