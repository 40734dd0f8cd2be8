//! The `lmx` command line.

mod adapters;
mod args;
mod benchmark;
mod cached;
mod chat;
mod commands;
mod data;
mod device;
mod end;
mod env;
mod evaluate;
mod interrupt;
mod perplexity;
mod plot;
mod progress;
mod prompts;
mod report;
mod running;
mod session;
mod terminal;

use args::Command;
use end::End;
use std::process::ExitCode;

fn main() -> ExitCode {
    let end = match run() {
        Ok(()) => End::Done,
        Err(end) => end,
    };
    if let Some(message) = end.message() {
        terminal::say(&message);
    }
    ExitCode::from(end.exit_code())
}

fn run() -> Result<(), End> {
    let command = args::parse(std::env::args_os())?;
    interrupt::listen()?;
    match command {
        Command::Generate(args) => commands::generate::run(&args.validate()?),
        Command::Chat(args) => commands::chat::run(&args.validate()?),
        Command::CachePrompt(args) => commands::cache_prompt::run(args.validate()?),
        Command::Server(args) => commands::server::run(args.validate()?),
        Command::Evaluate(args) => commands::evaluate::run(&args.validate()?),
        Command::Benchmark(args) => commands::benchmark::run(&*args.validate()?),
        Command::Perplexity(args) => commands::perplexity::run(args.validate()?),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Completions(args) => commands::completions::run(&args),
    }
}
