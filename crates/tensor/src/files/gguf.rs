//! The GGUF format, versions 2 and 3, little-endian: a header, metadata, tensor descriptions, and their data.
//!
//! Everything is checked on opening: counts and lengths against the file before memory is taken for them,
//! names for uniqueness, types, shapes, offsets, alignment and overlaps. As in llama.cpp there are no arrays of
//! arrays.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::error::excerpt;
use super::tensor::sized;
use super::{Bytes, DType, FileError, FileTensor, Problem, TENSOR_NAME_BYTES_MAX, TensorProblem};

pub mod metadata;
mod reader;

pub use metadata::{Array, Metadata, Value};
use reader::Reader;

/// The most tensors that a file may have. Real ones have a few thousand.
pub const TENSORS_MAX: u64 = 1 << 16;

/// The most dimensions that a GGUF tensor may have.
pub const RANK_MAX: u32 = 4;

/// The largest alignment that a file may ask for, in bytes.
pub const ALIGNMENT_MAX: u64 = 1 << 16;

const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;

/// A GGUF file, checked.
#[derive(Debug)]
pub struct GgufFile {
    file: Arc<Path>,
    version: u32,
    metadata: Metadata,
    data: Bytes,
    tensors: BTreeMap<String, Entry>,
}

/// A tensor's description.
#[derive(Debug)]
struct Entry {
    dtype: DType,
    /// Outermost first; the file has the innermost first.
    shape: Vec<usize>,
    /// Within the data section.
    range: Range<usize>,
}

impl GgufFile {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// A file that cannot be read, or anything in it that is not as the format says or that lmx cannot read.
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
    /// Anything that is not as the format says or that lmx cannot read.
    pub fn parse(path: &Path, bytes: &Bytes) -> Result<Self, FileError> {
        let file: Arc<Path> = path.into();
        let fail = |problem| FileError::new(&file, problem);
        let mut reader = Reader::new(bytes);
        let (version, tensor_count, key_count) = read_header(&mut reader).map_err(fail)?;
        let metadata = Metadata::read(&file, &mut reader, key_count)?;
        let alignment = alignment(&metadata)?;
        let mut tensors = BTreeMap::new();
        for index in 0..tensor_count {
            let (name, entry) = read_entry(&mut reader, index, alignment).map_err(fail)?;
            if tensors.contains_key(&name) {
                return Err(FileError::tensor(&file, &name, TensorProblem::Duplicate));
            }
            tensors.insert(name, entry);
        }
        // A file without tensors need not be padded up to its (empty) data section.
        let start = reader.position().next_multiple_of(alignment as usize).min(bytes.len());
        let data = bytes.slice(start..bytes.len()).unwrap_or_else(|| Bytes::from(Vec::new()));
        check_ranges(&tensors, data.len()).map_err(fail)?;
        Ok(Self { file, version, metadata, data, tensors })
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The format's version, 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
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

    /// Lends a tensor. Its shape is outermost first, as in Hugging Face checkpoints.
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

/// Version, number of tensors, number of metadata keys.
fn read_header(reader: &mut Reader<'_>) -> Result<(u32, u64, u64), Problem> {
    let magic = reader.bytes(4, || "the magic number".to_owned())?;
    if magic != b"GGUF" {
        return Err(Problem::Value {
            what: "the magic number".to_owned(),
            found: format!("\"{}\"", magic.escape_ascii()),
            allowed: "\"GGUF\"".to_owned(),
        });
    }
    let version = reader.u32(|| "the version".to_owned())?;
    if !matches!(version, 2 | 3) {
        let big_endian = matches!(version.swap_bytes(), 1..=3);
        return Err(Problem::Value {
            what: "the GGUF version".to_owned(),
            found: if big_endian { "big-endian".to_owned() } else { version.to_string() },
            allowed: "2 or 3, little-endian".to_owned(),
        });
    }
    let tensors = reader.u64(|| "the number of tensors".to_owned())?;
    limit("the number of tensors", tensors, TENSORS_MAX)?;
    let keys = reader.u64(|| "the number of metadata keys".to_owned())?;
    limit("the number of metadata keys", keys, metadata::KEYS_MAX)?;
    Ok((version, tensors, keys))
}

fn limit(what: &str, value: u64, max: u64) -> Result<(), Problem> {
    if value <= max {
        return Ok(());
    }
    Err(Problem::Value { what: what.to_owned(), found: value.to_string(), allowed: format!("up to {max}") })
}

fn alignment(metadata: &Metadata) -> Result<u64, FileError> {
    let alignment = metadata.get_u64(ALIGNMENT_KEY)?.unwrap_or(ALIGNMENT_DEFAULT);
    if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX {
        return Ok(alignment);
    }
    Err(metadata.value_error(
        ALIGNMENT_KEY,
        alignment.to_string(),
        format!("a power of two up to {ALIGNMENT_MAX}"),
    ))
}

/// Reads and checks one tensor description, but for its place relative to the others.
fn read_entry(reader: &mut Reader<'_>, index: u64, alignment: u64) -> Result<(String, Entry), Problem> {
    let name =
        reader.text(TENSOR_NAME_BYTES_MAX as u64, || format!("the name of tensor {index}"))?.to_owned();
    let what = |part: &str| format!("{part} of tensor {name:?}");
    let problem = |problem| Problem::Tensor { tensor: name.clone(), problem };
    let rank = reader.u32(|| what("the number of dimensions"))?;
    if rank > RANK_MAX {
        return Err(problem(TensorProblem::Value {
            what: "the number of dimensions",
            found: rank.to_string(),
            allowed: format!("up to {RANK_MAX}"),
        }));
    }
    let mut dims = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        dims.push(reader.u64(|| what("a dimension"))?);
    }
    dims.reverse();
    let id = reader.u32(|| what("the type"))?;
    let dtype = DType::from_ggml(id).ok_or_else(|| problem(unknown_type(id)))?;
    let offset = reader.u64(|| what("the offset"))?;
    let columns = dims.last().copied().unwrap_or(1);
    if !columns.is_multiple_of(dtype.block_elements() as u64) {
        return Err(problem(TensorProblem::Value {
            what: "the last dimension",
            found: columns.to_string(),
            allowed: format!("a multiple of {} for type {dtype}", dtype.block_elements()),
        }));
    }
    let Some((bytes, shape)) = sized(dtype, &dims) else {
        return Err(problem(TensorProblem::Overflow { shape: dims, dtype }));
    };
    if !offset.is_multiple_of(alignment) {
        return Err(problem(TensorProblem::Value {
            what: "the offset",
            found: offset.to_string(),
            allowed: format!("a multiple of the alignment {alignment}"),
        }));
    }
    let start = usize::try_from(offset).ok();
    let Some((start, end)) = start.and_then(|start| Some((start, start.checked_add(bytes)?))) else {
        let end = offset.saturating_add(bytes as u64);
        return Err(problem(TensorProblem::Range { begin: offset, end, available: reader.length() as u64 }));
    };
    Ok((name, Entry { dtype, shape, range: start..end }))
}

fn unknown_type(id: u32) -> TensorProblem {
    let found = match GGML_UNSUPPORTED.iter().find(|(known, _)| *known == id) {
        Some((_, name)) => format!("{id} ({name})"),
        None => id.to_string(),
    };
    TensorProblem::Value { what: "the type", found, allowed: GGML_SUPPORTED.to_owned() }
}

const GGML_SUPPORTED: &str =
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and plain integers";

/// Types that other programs read, so that the message can name them.
const GGML_UNSUPPORTED: [(u32, &str); 16] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

/// Checks that the tensors lie within the data section and apart from each other.
fn check_ranges(tensors: &BTreeMap<String, Entry>, available: usize) -> Result<(), Problem> {
    let mut sorted: Vec<(&String, &Range<usize>)> =
        tensors.iter().map(|(name, e)| (name, &e.range)).collect();
    sorted.sort_by_key(|(_, range)| (range.start, range.end));
    let (mut taken, mut last) = (0, "");
    for (name, range) in sorted {
        let problem = if range.end > available {
            let (begin, end) = (range.start as u64, range.end as u64);
            TensorProblem::Range { begin, end, available: available as u64 }
        } else if range.start < taken {
            TensorProblem::Overlap { other: excerpt(last) }
        } else {
            (taken, last) = (range.end, name);
            continue;
        };
        return Err(Problem::Tensor { tensor: name.clone(), problem });
    }
    Ok(())
}
