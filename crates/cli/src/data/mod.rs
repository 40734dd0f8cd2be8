//! Data sets: records out of text, JSON and parquet files, or of a hub data set that is in the local cache.

mod files;
mod table;

use anyhow::{Context, anyhow};
use serde_json::{Map, Value};
use std::path::PathBuf;
use table::Table;

/// A record as the model will read it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Record {
    Text(String),
    Chat { messages: Vec<Value>, tools: Option<Vec<Value>> },
}

/// What the fields of a data set mean: as mlx-lm tells it, by the first record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Completions,
    Chat,
    Text,
}

/// An open data set.
pub(crate) struct Data {
    /// Where the order of records comes from.
    pub(crate) seed: u32,
    /// What the user named.
    pub(crate) source: String,
    /// Its files, in their order.
    pub(crate) files: Vec<PathBuf>,
    /// BLAKE3 of all their bytes, in that order.
    pub(crate) hash: String,
    table: Table,
    kind: Kind,
}

impl Data {
    /// Opens a file.
    ///
    /// # Errors
    /// A file that cannot be read, that holds no records, or whose records are of no known kind.
    pub(crate) fn file(path: &std::path::Path, seed: u32) -> anyhow::Result<Self> {
        Self::of(path.display().to_string(), vec![path.to_owned()], seed)
    }

    /// Opens the split of a folder, or of a hub data set that is in the local cache.
    ///
    /// # Errors
    /// As [`Data::file`]; a data set that is not there, or has no such split.
    pub(crate) fn named(name: &str, split: &str, seed: u32) -> anyhow::Result<Self> {
        Self::of(name.to_owned(), files::of(name, split)?, seed)
    }

    fn of(source: String, files: Vec<PathBuf>, seed: u32) -> anyhow::Result<Self> {
        let hash = files::hash(&files)?;
        let table = Table::open(&files)?;
        if table.len() == 0 {
            return Err(anyhow!("{source}: there are no records"));
        }
        let kind = match table.get(0)? {
            table::Row::Text(_) => Kind::Text,
            table::Row::Object(object) => Self::kind(&object).with_context(|| source.clone())?,
        };
        Ok(Self { seed, source, files, hash, table, kind })
    }

    fn kind(first: &Map<String, Value>) -> anyhow::Result<Kind> {
        let has = |key: &str| first.contains_key(key);
        match () {
            () if has("prompt") && has("completion") => Ok(Kind::Completions),
            () if has("messages") => Ok(Kind::Chat),
            () if has("text") => Ok(Kind::Text),
            () => {
                let keys: Vec<&str> = first.keys().map(String::as_str).collect();
                Err(anyhow!(
                    "a record must have text, messages, or prompt and completion; the first one has {}",
                    if keys.is_empty() { "nothing".to_owned() } else { keys.join(", ") }
                ))
            }
        }
    }

    /// How many records there are.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// A record.
    ///
    /// # Errors
    /// One that cannot be read, or has not the fields of the first.
    pub(crate) fn record(&self, index: usize) -> anyhow::Result<Record> {
        let row = self.table.get(index);
        let record = row.and_then(|row| match row {
            table::Row::Text(text) => Ok(Record::Text(text)),
            table::Row::Object(object) => record(self.kind, object),
        });
        record.with_context(|| format!("{}, record {index}", self.source))
    }
}

fn record(kind: Kind, mut object: Map<String, Value>) -> anyhow::Result<Record> {
    let mut text = |key: &str| match object.remove(key) {
        Some(Value::String(text)) => Ok(text),
        // Columns of tables have nulls where there is nothing.
        Some(Value::Null) => Ok(String::new()),
        Some(_) => Err(anyhow!("{key} must be a string")),
        None => Err(anyhow!("{key} is missing")),
    };
    let messages = match kind {
        Kind::Text => return Ok(Record::Text(text("text")?)),
        Kind::Completions => {
            let (prompt, completion) = (text("prompt")?, text("completion")?);
            [("user", prompt), ("assistant", completion)]
                .map(|(role, content)| serde_json::json!({"role": role, "content": content}))
                .into()
        }
        Kind::Chat => match object.remove("messages") {
            Some(Value::Array(messages)) => messages,
            Some(_) => return Err(anyhow!("messages must be a list")),
            None => return Err(anyhow!("messages is missing")),
        },
    };
    let tools = match object.remove("tools") {
        Some(Value::Array(tools)) if !tools.is_empty() => Some(tools),
        _ => None,
    };
    Ok(Record::Chat { messages, tools })
}
