//! Readers of checkpoint files: they parse, validate everything, then lend slices of the file.
//!
//! Files are untrusted. Every length, count, offset, shape and name is checked before a slice of it exists, and
//! memory grows only in proportion to the file. Whatever is wrong is a [`FileError`] that names the file, the
//! tensor or key, the value found and what is allowed.
//!
//! * [`safetensors::SafetensorsFile`] and [`gguf::GgufFile`] are the two formats.
//! * [`FileTensor`] is what both lend: a [`DType`], a shape, and the [`Bytes`].

#![deny(clippy::indexing_slicing)]

mod bytes;
mod dtype;
mod error;
pub mod gguf;
pub mod safetensors;
mod tensor;
mod write;

pub use bytes::Bytes;
pub use dtype::DType;
pub use error::{FileError, Problem, TensorProblem};
pub use gguf::GgufFile;
pub use safetensors::SafetensorsFile;
pub use tensor::FileTensor;
pub(crate) use tensor::widen;
pub use write::{TensorHead, write_safetensors};

/// The longest tensor name that is accepted, in bytes. Real names have less than a hundred.
pub const TENSOR_NAME_BYTES_MAX: usize = 1024;

/// The most dimensions that a tensor may have.
pub const TENSOR_RANK_MAX: usize = 8;
