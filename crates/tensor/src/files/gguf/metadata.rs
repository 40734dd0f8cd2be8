//! The metadata of a GGUF file: keys with typed values.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::super::error::excerpt;
use super::super::{FileError, Problem};
use super::reader::Reader;

/// The most metadata keys that a file may have.
pub const KEYS_MAX: u64 = 1 << 16;

/// The longest key, in bytes.
pub const KEY_BYTES_MAX: u64 = (1 << 16) - 1;

/// The longest text value, in bytes. Chat templates have some ten thousand.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// The longest array. Vocabularies have some hundred thousand tokens and merges.
pub const ARRAY_LENGTH_MAX: u64 = 1 << 24;

/// A metadata value. Integers and floats are widened.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Value {
    Uint(u64),
    Int(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    Array(Array),
}

/// A metadata array; its elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Array {
    Uint(Vec<u64>),
    Int(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Text(Vec<String>),
}

/// All metadata of a file. The getters return `None` for an absent key and an error for one of another type.
#[derive(Debug)]
pub struct Metadata {
    file: Arc<Path>,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn read(file: &Arc<Path>, reader: &mut Reader<'_>, count: u64) -> Result<Self, FileError> {
        let mut values = BTreeMap::new();
        for index in 0..count {
            let (key, value) = read_pair(reader, index).map_err(|problem| FileError::new(file, problem))?;
            if values.contains_key(&key) {
                return Err(FileError::new(file, Problem::DuplicateKey(excerpt(&key))));
            }
            values.insert(key, value);
        }
        Ok(Self { file: Arc::clone(file), values })
    }

    /// All keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key, whatever its type.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A text.
    ///
    /// # Errors
    /// The key's value has another type.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, FileError> {
        self.typed(key, "a string", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A non-negative integer of any width.
    ///
    /// # Errors
    /// The key's value has another type or is negative.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, FileError> {
        self.typed(key, "a non-negative integer", |value| match value {
            Value::Uint(number) => Some(*number),
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        })
    }

    /// A non-negative integer below 2³².
    ///
    /// # Errors
    /// The key's value has another type or is out of range.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, FileError> {
        let wide = self.get_u64(key)?;
        wide.map(u32::try_from).transpose().map_err(|_| {
            let found = wide.map(|wide| wide.to_string()).unwrap_or_default();
            self.value_error(key, found, format!("up to {}", u32::MAX))
        })
    }

    /// A float.
    ///
    /// # Errors
    /// The key's value has another type.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, FileError> {
        self.typed(key, "a float", |value| match value {
            Value::F32(number) => Some(*number),
            Value::F64(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// A truth value.
    ///
    /// # Errors
    /// The key's value has another type.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, FileError> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// An array of texts.
    ///
    /// # Errors
    /// The key's value has another type.
    pub fn get_strs(&self, key: &str) -> Result<Option<&[String]>, FileError> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::Text(texts)) => Some(texts.as_slice()),
            _ => None,
        })
    }

    /// An array of integers of any width that fit an `i64`.
    ///
    /// # Errors
    /// The key's value has another type.
    pub fn get_ints(&self, key: &str) -> Result<Option<Vec<i64>>, FileError> {
        self.typed(key, "an array of integers", |value| match value {
            Value::Array(Array::Int(numbers)) => Some(numbers.clone()),
            Value::Array(Array::Uint(numbers)) => numbers.iter().map(|&n| i64::try_from(n).ok()).collect(),
            _ => None,
        })
    }

    /// An array of floats.
    ///
    /// # Errors
    /// The key's value has another type.
    pub fn get_f32s(&self, key: &str) -> Result<Option<Vec<f32>>, FileError> {
        self.typed(key, "an array of floats", |value| match value {
            Value::Array(Array::F32(numbers)) => Some(numbers.clone()),
            Value::Array(Array::F64(numbers)) => Some(numbers.iter().map(|&n| n as f32).collect()),
            _ => None,
        })
    }

    /// The error that a key is missing, for callers that need it.
    #[must_use]
    pub fn missing_error(&self, key: &str) -> FileError {
        FileError::new(&self.file, Problem::MissingKey(key.to_owned()))
    }

    /// The error that the value of a key is not what is allowed.
    #[must_use]
    pub fn value_error(&self, key: &str, found: String, allowed: String) -> FileError {
        FileError::new(&self.file, Problem::Value { what: format!("metadata key {key:?}"), found, allowed })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        allowed: &str,
        get: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FileError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match get(value) {
            Some(got) => Ok(Some(got)),
            None => Err(self.value_error(key, value.describe(), allowed.to_owned())),
        }
    }
}

impl Value {
    /// The value for a message: short, with its type.
    fn describe(&self) -> String {
        match self {
            Self::Uint(number) => number.to_string(),
            Self::Int(number) => number.to_string(),
            Self::F32(number) => format!("{number:?}"),
            Self::F64(number) => format!("{number:?}"),
            Self::Bool(truth) => truth.to_string(),
            Self::Text(text) => format!("the string {:?}", excerpt(text)),
            Self::Array(Array::Uint(_) | Array::Int(_)) => "an array of integers".to_owned(),
            Self::Array(Array::F32(_) | Array::F64(_)) => "an array of floats".to_owned(),
            Self::Array(Array::Bool(_)) => "an array of bools".to_owned(),
            Self::Array(Array::Text(_)) => "an array of strings".to_owned(),
        }
    }
}

/// The type ids of metadata values.
mod id {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const TEXT: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

fn read_pair(reader: &mut Reader<'_>, index: u64) -> Result<(String, Value), Problem> {
    let key = reader.text(KEY_BYTES_MAX, || format!("metadata key {index}"))?.to_owned();
    let what = || format!("the value of metadata key {:?}", excerpt(&key));
    let type_id = reader.u32(what)?;
    let value = read_value(reader, type_id, &what)?;
    Ok((key, value))
}

fn read_value(reader: &mut Reader<'_>, type_id: u32, what: &dyn Fn() -> String) -> Result<Value, Problem> {
    Ok(match type_id {
        id::U8 => Value::Uint(u8::from_le_bytes(reader.array(what)?).into()),
        id::I8 => Value::Int(i8::from_le_bytes(reader.array(what)?).into()),
        id::U16 => Value::Uint(u16::from_le_bytes(reader.array(what)?).into()),
        id::I16 => Value::Int(i16::from_le_bytes(reader.array(what)?).into()),
        id::U32 => Value::Uint(reader.u32(what)?.into()),
        id::I32 => Value::Int(i32::from_le_bytes(reader.array(what)?).into()),
        id::U64 => Value::Uint(reader.u64(what)?),
        id::I64 => Value::Int(i64::from_le_bytes(reader.array(what)?)),
        id::F32 => Value::F32(f32::from_le_bytes(reader.array(what)?)),
        id::F64 => Value::F64(f64::from_le_bytes(reader.array(what)?)),
        id::BOOL => Value::Bool(truth(u8::from_le_bytes(reader.array(what)?), what)?),
        id::TEXT => Value::Text(reader.text(TEXT_BYTES_MAX, what)?.to_owned()),
        id::ARRAY => Value::Array(read_array(reader, what)?),
        _ => return Err(type_error(type_id, "0 to 12", what)),
    })
}

fn read_array(reader: &mut Reader<'_>, what: &dyn Fn() -> String) -> Result<Array, Problem> {
    let type_id = reader.u32(what)?;
    let count = reader.u64(what)?;
    if count > ARRAY_LENGTH_MAX {
        return Err(Problem::Value {
            what: format!("the array length of {}", what()),
            found: count.to_string(),
            allowed: format!("up to {ARRAY_LENGTH_MAX}"),
        });
    }
    Ok(match type_id {
        id::U8 => Array::Uint(numbers(reader, count, what, |b| u8::from_le_bytes(b).into())?),
        id::I8 => Array::Int(numbers(reader, count, what, |b| i8::from_le_bytes(b).into())?),
        id::U16 => Array::Uint(numbers(reader, count, what, |b| u16::from_le_bytes(b).into())?),
        id::I16 => Array::Int(numbers(reader, count, what, |b| i16::from_le_bytes(b).into())?),
        id::U32 => Array::Uint(numbers(reader, count, what, |b| u32::from_le_bytes(b).into())?),
        id::I32 => Array::Int(numbers(reader, count, what, |b| i32::from_le_bytes(b).into())?),
        id::U64 => Array::Uint(numbers(reader, count, what, u64::from_le_bytes)?),
        id::I64 => Array::Int(numbers(reader, count, what, i64::from_le_bytes)?),
        id::F32 => Array::F32(numbers(reader, count, what, f32::from_le_bytes)?),
        id::F64 => Array::F64(numbers(reader, count, what, f64::from_le_bytes)?),
        id::BOOL => {
            Array::Bool(reader.bytes(count, what)?.iter().map(|&b| truth(b, what)).collect::<Result<_, _>>()?)
        }
        id::TEXT => {
            let mut texts = Vec::new();
            for index in 0..count {
                let element = || format!("element {index} of {}", what());
                texts.push(reader.text(TEXT_BYTES_MAX, element)?.to_owned());
            }
            Array::Text(texts)
        }
        _ => return Err(type_error(type_id, "0 to 8 and 10 to 12 (no array of arrays)", what)),
    })
}

fn numbers<const N: usize, T>(
    reader: &mut Reader<'_>,
    count: u64,
    what: &dyn Fn() -> String,
    decode: fn([u8; N]) -> T,
) -> Result<Vec<T>, Problem> {
    let bytes = reader.bytes(count.saturating_mul(N as u64), what)?;
    Ok(bytes.as_chunks().0.iter().map(|&chunk| decode(chunk)).collect())
}

fn truth(byte: u8, what: &dyn Fn() -> String) -> Result<bool, Problem> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Problem::Value {
            what: what(),
            found: byte.to_string(),
            allowed: "0 or 1 (a bool)".to_owned(),
        }),
    }
}

fn type_error(type_id: u32, allowed: &str, what: &dyn Fn() -> String) -> Problem {
    Problem::Value {
        what: format!("the type of {}", what()),
        found: type_id.to_string(),
        allowed: allowed.to_owned(),
    }
}
