//! Tensors, weight containers, eager ops and checkpoint file readers.
//!
//! * [`files`]: safetensors and GGUF readers that parse and validate everything, then lend slices.
//! * [`formats`]: how MLX and GGUF store quantized weights, turned into kernel matrices.
//! * [`Linear`]: a weight matrix in its stored format, dense or quantized.
//! * [`adapter`]: low-rank additions to weight matrices, chosen row by row.
//! * [`ops`]: the operations a forward pass is made of, on [`Tensor`]s of a [`Device`].

pub mod adapter;
mod device;
pub mod files;
pub mod formats;
pub mod linear;
pub mod ops;
mod release;
mod tensor;

pub use adapter::RowAdapters;
pub use device::Device;
pub use linear::{Dense, Linear, LinearId, Rows, Weight};
pub use lmx_kernels as kernels;
pub use ops::OpError;
pub use tensor::Tensor;
