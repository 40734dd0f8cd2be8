//! What can go wrong between text and tokens.

use std::path::PathBuf;

/// A tokenizer file that cannot be read or used, or a text that cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file is not there or cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is larger than any tokenizer file.
    #[error("{file}: {bytes} bytes; at most {limit} are read")]
    TooLarge {
        /// The file.
        file: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file is not the JSON (or UTF-8) that it should be.
    #[error("{file}: {why}")]
    Parse {
        /// The file.
        file: String,
        /// What the parser says.
        why: String,
    },
    /// A field has a value that cannot be used.
    #[error("{file}: {field} {value}: {why}")]
    Invalid {
        /// The file or metadata.
        file: String,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What is allowed.
        why: String,
    },
    /// A field has a value that lmx does not know.
    #[error("{file}: {field} {value:?} is not supported; known are: {known}")]
    Unknown {
        /// The file or metadata.
        file: String,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What is known.
        known: String,
    },
    /// A word given by the user is no token.
    #[error("{word:?} is not a token for this tokenizer")]
    NotAToken {
        /// The word.
        word: String,
    },
    /// A token id given by the user is out of range.
    #[error("token id {id} is out of range; this tokenizer has ids from 0 to {last}")]
    IdOutOfRange {
        /// The id.
        id: String,
        /// The largest id.
        last: u32,
    },
    /// The tokenizer cannot encode a text.
    #[error("the text cannot be tokenized: {why}")]
    Encode {
        /// Why.
        why: String,
    },
}

impl TokenizerError {
    pub(crate) fn invalid(file: &str, field: &str, value: impl ToString, why: impl ToString) -> Self {
        let (value, why) = (value.to_string(), why.to_string());
        Self::Invalid { file: file.to_owned(), field: field.to_owned(), value, why }
    }

    pub(crate) fn unknown(file: &str, field: &str, value: impl ToString, known: impl ToString) -> Self {
        let (value, known) = (value.to_string(), known.to_string());
        Self::Unknown { file: file.to_owned(), field: field.to_owned(), value, known }
    }
}
