//! Rows of files, read when they are asked for: data sets may be larger than memory.

use anyhow::{Context, anyhow};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::{Map, Value};
use std::fs::File;
use std::path::{Path, PathBuf};

/// A row.
pub(super) enum Row {
    /// All of a text file.
    Text(String),
    Object(Map<String, Value>),
}

/// The rows of some files, one after the other.
pub(super) struct Table {
    parts: Vec<Part>,
    len: usize,
}

/// Rows that lie together.
enum Part {
    Text(String),
    /// Lines of JSON, not parsed yet.
    Lines(Vec<String>),
    Objects(Vec<Value>),
    Parquet {
        file: Box<SerializedFileReader<File>>,
        rows: usize,
        path: PathBuf,
    },
}

impl Part {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
        if extension == "parquet" {
            let file = File::open(path)?;
            let file = Box::new(SerializedFileReader::new(file)?);
            let rows = usize::try_from(file.metadata().file_metadata().num_rows())?;
            return Ok(Part::Parquet { file, rows, path: path.to_owned() });
        }
        let text = std::fs::read_to_string(path)?;
        match extension.as_str() {
            // Files of this name hold a list, or lines.
            "json" if text.trim_start().starts_with('[') => Ok(Part::Objects(serde_json::from_str(&text)?)),
            "json" | "jsonl" => {
                let lines = text.lines().filter(|line| !line.trim().is_empty());
                Ok(Part::Lines(lines.map(str::to_owned).collect()))
            }
            _ => Ok(Part::Text(text)),
        }
    }

    fn len(&self) -> usize {
        match self {
            Part::Text(_) => 1,
            Part::Lines(lines) => lines.len(),
            Part::Objects(objects) => objects.len(),
            Part::Parquet { rows, .. } => *rows,
        }
    }

    fn get(&self, index: usize) -> anyhow::Result<Row> {
        let object = match self {
            Part::Text(text) => return Ok(Row::Text(text.clone())),
            Part::Lines(lines) => serde_json::from_str(lines.get(index).map_or("", String::as_str))?,
            Part::Objects(objects) => objects.get(index).cloned().unwrap_or_default(),
            Part::Parquet { file, path, .. } => {
                parquet_row(file, index).with_context(|| path.display().to_string())?
            }
        };
        match object {
            Value::Object(object) => Ok(Row::Object(object)),
            other => Err(anyhow!("a record must be a JSON object, found {:.40}", other.to_string())),
        }
    }
}

/// A row out of its row group.
fn parquet_row(file: &SerializedFileReader<File>, index: usize) -> anyhow::Result<Value> {
    let mut index = index;
    for (group, metadata) in file.metadata().row_groups().iter().enumerate() {
        let rows = usize::try_from(metadata.num_rows())?;
        if index < rows {
            let group = file.get_row_group(group)?;
            let row = group.get_row_iter(None)?.nth(index).context("the row group ends early")??;
            return Ok(row.to_json_value());
        }
        index -= rows;
    }
    Err(anyhow!("there is no such row"))
}

impl Table {
    /// # Errors
    /// A file that is not what its name says.
    pub(super) fn open(files: &[PathBuf]) -> anyhow::Result<Self> {
        let open =
            |path: &PathBuf| Part::open(path).with_context(|| format!("cannot read {}", path.display()));
        let parts: Vec<Part> = files.iter().map(open).collect::<anyhow::Result<_>>()?;
        let len = parts.iter().map(Part::len).sum();
        Ok(Self { parts, len })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// # Errors
    /// A row that is not there, or is no object.
    pub(super) fn get(&self, index: usize) -> anyhow::Result<Row> {
        let mut index = index;
        for part in &self.parts {
            if index < part.len() {
                return part.get(index);
            }
            index -= part.len();
        }
        Err(anyhow!("there is no such record"))
    }
}
