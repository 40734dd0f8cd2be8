//! How files store quantized weights, unpacked row by row for the kernels to pack.
//!
//! * [`mlx`]: MLX's affine, mxfp4, nvfp4 and mxfp8 tensors, with bits and group inferred from their shapes.
//! * [`gguf`]: the block types of GGUF, Q4_0 to Q6_K.
//!
//! [`Linear`](crate::Linear) is what callers build from them.

pub mod gguf;
pub mod mlx;
mod unpack;
