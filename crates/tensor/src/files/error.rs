//! What can be wrong with a checkpoint file.

use std::io;
use std::path::Path;
use std::sync::Arc;

use lmx_kernels::quant::ShapeError;
use thiserror::Error;

use super::DType;

/// Why a file, or one of its tensors, was refused. The message is one line that starts with the file.
#[derive(Debug, Error)]
#[error("{}: {problem}", .file.display())]
pub struct FileError {
    /// The file.
    pub file: Arc<Path>,
    /// What is wrong with it. Not an error source, since the message has it already.
    pub problem: Problem,
}

impl FileError {
    /// The error that `file` has a problem.
    #[must_use]
    pub fn new(file: &Arc<Path>, problem: impl Into<Problem>) -> Self {
        Self { file: Arc::clone(file), problem: problem.into() }
    }

    pub(crate) fn tensor(file: &Arc<Path>, tensor: &str, problem: TensorProblem) -> Self {
        Self::new(file, Problem::Tensor { tensor: tensor.to_owned(), problem })
    }
}

/// What is wrong with a file. Names and texts out of the file are quoted, escaped and cut.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Problem {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("cannot be written: {0}")]
    Write(io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error(
        "is truncated or corrupt: {what} needs {needs} bytes from byte {at} on, the file has {length} in all"
    )]
    Truncated { what: String, needs: u64, at: u64, length: u64 },
    #[error("{what} is {found}; allowed is {allowed}")]
    Value { what: String, found: String, allowed: String },
    #[error("{what} is not valid UTF-8")]
    Utf8 { what: String },
    #[error("the header is not the JSON of a safetensors file: {0}")]
    Json(String),
    #[error("metadata key {0:?} occurs twice")]
    DuplicateKey(String),
    #[error("metadata key {0:?} is missing")]
    MissingKey(String),
    #[error("tensor data is not what the header describes: {0}")]
    Layout(String),
    #[error("tensor {tensor:?}: {problem}")]
    Tensor { tensor: String, problem: TensorProblem },
}

/// What is wrong with a tensor of a file.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TensorProblem {
    #[error("is missing")]
    Missing,
    #[error("occurs twice")]
    Duplicate,
    #[error("{what} is {found}; allowed is {allowed}")]
    Value { what: &'static str, found: String, allowed: String },
    #[error("shape {shape:?} with type {dtype} has more bytes than can be counted")]
    Overflow { shape: Vec<u64>, dtype: DType },
    #[error(
        "its data is bytes {begin} to {end} of the data section, which has {available} bytes: is the file cut short?"
    )]
    Range { begin: u64, end: u64, available: u64 },
    #[error("its data is {found} bytes, but shape {shape:?} of type {dtype} takes {expected}")]
    Size { found: u64, shape: Vec<usize>, dtype: DType, expected: u64 },
    #[error("its data overlaps that of tensor {other:?}")]
    Overlap { other: String },
    #[error("expected shape {expected:?}, found {found:?}")]
    Shape { expected: Vec<usize>, found: Vec<usize> },
    #[error("expected a matrix of {expected} rows, found shape {found:?}")]
    Rows { expected: usize, found: Vec<usize> },
    #[error("type {found} cannot be used here; allowed is {allowed}")]
    DType { found: DType, allowed: &'static str },
    #[error("{0}")]
    Pack(#[from] ShapeError),
}

/// A text of a file as it may stand in a message: no more than a line.
pub(crate) fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 120;
    let mut short: String = text.chars().take(CHARS_MAX).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
