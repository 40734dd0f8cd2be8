//! minijinja set up to render as transformers' Jinja does.

use super::TemplateError;
use super::{filters, json, python};
use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use std::fmt::Write as _;

/// Steps and bytes (64 to a unit) that one rendering may take: thousands of times what templates take.
const FUEL: u64 = 10_000_000;
/// A prompt of this many bytes has more tokens than any model's context.
pub(super) const OUTPUT_BYTES_MAX: usize = 32 << 20;

/// The message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

pub(super) fn environment() -> Result<Environment<'static>, TemplateError> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|error| TemplateError::from_engine(&error))?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(print);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(python::method);
    filters::add(&mut env);
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    env.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.to_vec()));
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = message.to_string();
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    Ok(env)
}

/// `strftime_now(format)` for the given time.
pub(super) fn strftime(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    let mut text = String::new();
    // An unknown specifier is a formatting error, which `to_string` would turn into a panic.
    write!(text, "{}", now.format(format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now: bad format {format:?}"))
    })?;
    Ok(text)
}

fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            out.write_str(&json::python_text(value)).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// The source as minijinja is to see it. Jinja reads any line end as `\n`.
pub(super) fn prepare(source: &str) -> String {
    without_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n"))
}

/// minijinja has no `{% generation %}`, with which transformers marks what the assistant said; what
/// stands in it is printed, in a scope of its own.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}");
        match name.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

impl TemplateError {
    pub(super) fn from_engine(error: &Error) -> Self {
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        while let Some(inner) = cause {
            if let Some(Raised(message)) = inner.downcast_ref() {
                return Self::Raised { message: message.clone() };
            }
            cause = inner.source();
        }
        let line = error.line().map_or(0, |line| line);
        let why =
            error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind()));
        match error.kind() {
            ErrorKind::SyntaxError | ErrorKind::BadEscape => Self::Syntax { line, why },
            ErrorKind::OutOfFuel | ErrorKind::WriteFailure => Self::TooLong,
            _ => Self::Render { line, why },
        }
    }
}
