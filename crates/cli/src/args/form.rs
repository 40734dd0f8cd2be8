//! Flags that say what form a reply must have.

use crate::end::End;
use anyhow::Context;
use clap::Args;
use lmx::grammar::{Form, MAX_SOURCE};
use serde_json::Value;
use std::io::Read;

/// The form of the reply, at most one.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Form of the reply")]
#[group(multiple = false)]
pub(crate) struct FormArgs {
    /// JSON that this schema describes, given as text or as @FILE; 'true' is any JSON
    #[arg(long, value_name = "SCHEMA")]
    json_schema: Option<String>,
    /// Text that this regular expression matches as a whole, given as it is or as @FILE
    #[arg(long, value_name = "REGEX")]
    regex: Option<String>,
    /// Text of a grammar in Lark's notation, given as it is or as @FILE
    #[arg(long, value_name = "LARK")]
    grammar: Option<String>,
}

impl FormArgs {
    /// The form that is asked for, which is known to compile.
    ///
    /// # Errors
    /// [`End`] naming the flag.
    pub(crate) fn form(&self) -> Result<Option<Form>, End> {
        let (flag, form) = if let Some(word) = &self.json_schema {
            let schema = serde_json::from_str(&text("--json-schema", word)?)
                .map_err(|error| End::Usage(format!("--json-schema is not JSON: {error}")))?;
            ("--json-schema", if schema == Value::Bool(true) { Form::Json } else { Form::JsonSchema(schema) })
        } else if let Some(word) = &self.regex {
            ("--regex", Form::Regex(text("--regex", word)?))
        } else if let Some(word) = &self.grammar {
            ("--grammar", Form::Lark(text("--grammar", word)?))
        } else {
            return Ok(None);
        };
        form.check().map_err(|error| End::Usage(format!("{flag}: {error}")))?;
        Ok(Some(form))
    }
}

/// The word itself, or what is in the file that it names.
fn text(flag: &str, word: &str) -> Result<String, End> {
    let Some(path) = word.strip_prefix('@') else { return Ok(word.to_owned()) };
    let mut text = String::new();
    let file = std::fs::File::open(path);
    // One byte more than is allowed: the library says that it is too long.
    let read = file.and_then(|file| file.take(MAX_SOURCE as u64 + 1).read_to_string(&mut text));
    read.with_context(|| format!("{flag}: cannot read {path}"))?;
    Ok(text)
}
