//! The safetensors format: eight bytes of header length, a JSON header, and the tensors' bytes.
//!
//! Read as strictly as the format is specified: the tensors cover the data section without gap or overlap and
//! the file ends with it, so that a file cut short by an interrupted download is never taken for whole. Unlike
//! the reference reader, a name that occurs twice is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};

use super::error::excerpt;
use super::tensor::sized;
use super::{
    Bytes, DType, FileError, FileTensor, Problem, TENSOR_NAME_BYTES_MAX, TENSOR_RANK_MAX, TensorProblem,
};

/// The longest header that is accepted, in bytes (the limit of the reference reader).
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

const LENGTH_BYTES: usize = 8;
const METADATA: &str = "__metadata__";

/// A safetensors file, checked.
#[derive(Debug)]
pub struct SafetensorsFile {
    file: Arc<Path>,
    /// The data section.
    data: Bytes,
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    dtype: DType,
    shape: Vec<usize>,
    range: Range<usize>,
}

impl SafetensorsFile {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// A file that cannot be read, or anything in it that is not as the format says.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file: Arc<Path> = path.into();
        let bytes = Bytes::map(path)
            .map_err(|error| FileError::new(&file, error))?
            .ok_or_else(|| FileError::new(&file, Problem::NotAFile))?;
        Self::parse(&file, &bytes)
    }

    /// Checks a file that is in memory. `path` is for messages.
    ///
    /// # Errors
    /// Anything that is not as the format says.
    pub fn parse(path: &Path, bytes: &Bytes) -> Result<Self, FileError> {
        let file: Arc<Path> = path.into();
        let (header, data) = split(bytes).map_err(|problem| FileError::new(&file, problem))?;
        let header = parse_header(header).map_err(|problem| FileError::new(&file, problem))?;
        let mut tensors = BTreeMap::new();
        for (name, raw) in header.tensors {
            let entry = raw.check(data.len()).map_err(|problem| FileError::tensor(&file, &name, problem))?;
            if tensors.contains_key(&name) {
                return Err(FileError::tensor(&file, &name, TensorProblem::Duplicate));
            }
            tensors.insert(name, entry);
        }
        check_cover(&tensors, data.len()).map_err(|problem| FileError::new(&file, problem))?;
        Ok(Self { file, data, metadata: header.metadata, tensors })
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The free-form text entries of the header.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Lends a tensor.
    ///
    /// # Errors
    /// [`TensorProblem::Missing`].
    pub fn tensor(&self, name: &str) -> Result<FileTensor, FileError> {
        let missing = || FileError::tensor(&self.file, name, TensorProblem::Missing);
        let entry = self.tensors.get(name).ok_or_else(missing)?;
        let data = self.data.slice(entry.range.clone()).ok_or_else(missing)?;
        FileTensor::new(Arc::clone(&self.file), name, entry.dtype, entry.shape.clone(), data)
    }
}

/// Header and data section.
fn split(bytes: &Bytes) -> Result<(&[u8], Bytes), Problem> {
    let truncated = |what: &str, needs: u64, at: usize| Problem::Truncated {
        what: what.to_owned(),
        needs,
        at: at as u64,
        length: bytes.len() as u64,
    };
    let length = bytes.first_chunk().ok_or_else(|| truncated("the header length", 8, 0))?;
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(Problem::Value {
            what: "the header length".to_owned(),
            found: length.to_string(),
            allowed: format!("up to {HEADER_BYTES_MAX} bytes"),
        });
    }
    let end = LENGTH_BYTES + length as usize;
    match (bytes.get(LENGTH_BYTES..end), bytes.slice(end..bytes.len())) {
        (Some(header), Some(data)) => Ok((header, data)),
        _ => Err(truncated("the header", length, LENGTH_BYTES)),
    }
}

/// Checks that the tensors fill the data section, each byte once.
fn check_cover(tensors: &BTreeMap<String, Entry>, available: usize) -> Result<(), Problem> {
    let mut sorted: Vec<(&String, &Range<usize>)> =
        tensors.iter().map(|(name, e)| (name, &e.range)).collect();
    sorted.sort_by_key(|(_, range)| (range.start, range.end));
    let (mut covered, mut last) = (0, "");
    for (name, range) in sorted {
        if range.start < covered {
            let problem = TensorProblem::Overlap { other: excerpt(last) };
            return Err(Problem::Tensor { tensor: name.clone(), problem });
        }
        if range.start > covered {
            return Err(Problem::Layout(format!(
                "bytes {covered} to {} before tensor {name:?} belong to no tensor",
                range.start
            )));
        }
        (covered, last) = (range.end, name);
    }
    if covered != available {
        return Err(Problem::Layout(format!(
            "the tensors end at byte {covered}, the data section has {available} bytes"
        )));
    }
    Ok(())
}

/// A tensor as the header describes it, before any check.
#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    fn check(self, available: usize) -> Result<Entry, TensorProblem> {
        let Some(dtype) = DType::from_safetensors(&self.dtype) else {
            return Err(TensorProblem::Value {
                what: "dtype",
                found: format!("{:?}", excerpt(&self.dtype)),
                allowed: DType::safetensors_names(),
            });
        };
        if self.shape.len() > TENSOR_RANK_MAX {
            return Err(TensorProblem::Value {
                what: "the number of dimensions",
                found: self.shape.len().to_string(),
                allowed: format!("up to {TENSOR_RANK_MAX}"),
            });
        }
        let Some((size, shape)) = sized(dtype, &self.shape) else {
            return Err(TensorProblem::Overflow { shape: self.shape, dtype });
        };
        let (begin, end) = self.data_offsets;
        if begin > end || end > available as u64 {
            return Err(TensorProblem::Range { begin, end, available: available as u64 });
        }
        let range = begin as usize..end as usize;
        if range.len() != size {
            return Err(TensorProblem::Size {
                found: range.len() as u64,
                shape,
                dtype,
                expected: size as u64,
            });
        }
        Ok(Entry { dtype, shape, range })
    }
}

#[derive(Default)]
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawEntry)>,
}

fn parse_header(header: &[u8]) -> Result<Header, Problem> {
    let text = std::str::from_utf8(header).map_err(|_| Problem::Utf8 { what: "the header".to_owned() })?;
    let mut parsed = Header::default();
    let mut place = String::new();
    let mut json = serde_json::Deserializer::from_str(text);
    let outcome = HeaderSeed { header: &mut parsed, place: &mut place }.deserialize(&mut json);
    match outcome.and_then(|()| json.end()) {
        Ok(()) => Ok(parsed),
        Err(error) if place.is_empty() => Err(Problem::Json(excerpt(&error.to_string()))),
        Err(error) => {
            Err(Problem::Json(format!("entry {:?}: {}", excerpt(&place), excerpt(&error.to_string()))))
        }
    }
}

/// Reads the header in one pass and keeps the name of the entry that it is in, for messages.
struct HeaderSeed<'a> {
    header: &'a mut Header,
    place: &'a mut String,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to descriptions")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name.len() > TENSOR_NAME_BYTES_MAX {
                return Err(A::Error::custom(format!(
                    "a tensor name has {} bytes; allowed is up to {TENSOR_NAME_BYTES_MAX}",
                    name.len()
                )));
            }
            self.place.clone_from(&name);
            if name == METADATA {
                if std::mem::replace(&mut seen_metadata, true) {
                    return Err(A::Error::custom("occurs twice"));
                }
                self.header.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
            } else {
                let entry = map.next_value()?;
                self.header.tensors.push((name, entry));
            }
            self.place.clear();
        }
        Ok(())
    }
}
