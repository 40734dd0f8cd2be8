//! Writing safetensors files.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{DType, FileError, Problem, TensorProblem};

/// What the header of a safetensors file says of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHead {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// Writes a safetensors file with the given entries of text and tensors, whose data `data` gives by index,
/// little-endian, one at a time. The file is written beside `path` and then takes its name: whatever happens,
/// `path` is either what it was or whole.
///
/// # Errors
/// [`Problem::Write`], or data that is not as long as type and shape say.
pub fn write_safetensors(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorHead],
    data: &mut dyn FnMut(usize) -> Vec<u8>,
) -> Result<(), FileError> {
    let beside = beside(path);
    let file: Arc<Path> = path.into();
    let failed = |error| FileError::new(&file, Problem::Write(error));
    let part = OpenOptions::new().write(true).create_new(true).open(&beside).map_err(failed)?;
    let written = write(&part, &file, metadata, tensors, data)
        .and_then(|()| part.sync_all().and_then(|()| fs::rename(&beside, path)).map_err(failed));
    if written.is_err() {
        // What matters is the first error.
        let _ = fs::remove_file(&beside);
    }
    written
}

/// A name in the same folder, so that renaming is one step.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.part", std::process::id()))
}

fn write(
    part: &File,
    file: &Arc<Path>,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorHead],
    data: &mut dyn FnMut(usize) -> Vec<u8>,
) -> Result<(), FileError> {
    let failed = |error| FileError::new(file, Problem::Write(error));
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!(metadata));
    let (mut end, mut sizes) = (0_usize, Vec::with_capacity(tensors.len()));
    for TensorHead { name, dtype, shape } in tensors {
        let elements = shape.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim));
        let size = elements.and_then(|elements| dtype.bytes_of(elements));
        let next = size.and_then(|size| end.checked_add(size));
        let (Some(size), Some(next)) = (size, next) else {
            let shape = shape.iter().map(|&dim| dim as u64).collect();
            return Err(FileError::tensor(file, name, TensorProblem::Overflow { shape, dtype: *dtype }));
        };
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [end, next]});
        header.insert(name.clone(), entry);
        sizes.push(size);
        end = next;
    }
    let mut text = Value::Object(header).to_string();
    // The data begins at a multiple of eight.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let mut out = BufWriter::new(part);
    out.write_all(&(text.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(text.as_bytes()).map_err(failed)?;
    for (index, (head, expected)) in tensors.iter().zip(sizes).enumerate() {
        let bytes = data(index);
        if bytes.len() != expected {
            let (found, shape, dtype) = (bytes.len() as u64, head.shape.clone(), head.dtype);
            let problem = TensorProblem::Size { found, shape, dtype, expected: expected as u64 };
            return Err(FileError::tensor(file, &head.name, problem));
        }
        out.write_all(&bytes).map_err(failed)?;
    }
    out.flush().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::SafetensorsFile;

    fn heads() -> Vec<TensorHead> {
        let head = |name: &str, dtype, shape: &[usize]| TensorHead {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
        };
        vec![
            head("b", DType::F32, &[2, 1]),
            head("a.scalar", DType::I32, &[]),
            head("none", DType::F32, &[0]),
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = std::env::temp_dir().join(format!("lmx-write-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("x");
        fs::write(&path, "what was there").unwrap();
        let metadata = BTreeMap::from([("0.model".to_owned(), "a \"name\"\n".to_owned())]);
        let data = [vec![0, 0, 0x80, 0x3f, 0, 0, 0, 0x40], vec![7, 0, 0, 0], vec![]];

        let short = write_safetensors(&path, &metadata, &heads(), &mut |_| vec![0; 4]).unwrap_err();
        assert!(short.to_string().contains("tensor \"b\": its data is 4 bytes"), "{short}");
        assert_eq!(fs::read(&path).unwrap(), b"what was there");

        write_safetensors(&path, &metadata, &heads(), &mut |index| data[index].clone()).unwrap();
        let file = SafetensorsFile::open(&path).unwrap();
        assert_eq!(*file.metadata(), metadata);
        assert_eq!(file.tensor("b").unwrap().to_f32(&[2, 1]).unwrap(), [1.0, 2.0]);
        assert_eq!(file.tensor("a.scalar").unwrap().data()[..], [7, 0, 0, 0]);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing is left beside it");
        fs::remove_dir_all(&dir).unwrap();
    }
}
