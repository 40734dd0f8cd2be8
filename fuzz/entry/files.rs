//! What a program may do with the bytes of an untrusted file: parse them and, if they are accepted, use
//! everything. Shared by the fuzz targets and by the tests of malformed files in crates/tensor.
#![allow(dead_code, unreachable_pub, reason = "each user takes what it needs")]

use std::path::Path;

use lmx_tensor::files::{Bytes, FileError, FileTensor, GgufFile, SafetensorsFile};
use lmx_tensor::formats::mlx::MlxTensors;
use lmx_tensor::kernels::{Exec, Isa};
use lmx_tensor::{Linear, Rows};

/// Parses a safetensors file and builds whatever its tensors allow.
pub fn safetensors(bytes: &Bytes) -> Result<SafetensorsFile, FileError> {
    let exec = &Exec::new(Isa::best(), 1);
    let file = SafetensorsFile::parse(Path::new("case"), bytes)?;
    for name in file.names() {
        let tensor = file.tensor(name)?;
        matrix(exec, &tensor);
        let Some(module) = name.strip_suffix(".scales") else { continue };
        let Ok(weight) = file.tensor(&format!("{module}.weight")) else { continue };
        let tensors = MlxTensors {
            weight,
            scales: tensor,
            biases: file.tensor(&format!("{module}.biases")).ok(),
            global_scale: file.tensor(&format!("{module}.global_scale")).ok(),
        };
        let rows = tensors.weight.shape().first().copied().unwrap_or(0);
        for cols in [0, 32, 64, 96, 128] {
            use_all(Linear::from_mlx(exec, &tensors, &Rows::all(rows), cols, None));
        }
    }
    Ok(file)
}

/// Parses a GGUF file and builds whatever its tensors allow.
pub fn gguf(bytes: &Bytes) -> Result<GgufFile, FileError> {
    let exec = &Exec::new(Isa::best(), 1);
    let file = GgufFile::parse(Path::new("case"), bytes)?;
    for (key, _) in file.metadata().iter() {
        let metadata = file.metadata();
        // Each is an error but for the one of the right type.
        let _ = (metadata.get_str(key), metadata.get_u32(key), metadata.get_f32(key), metadata.get_bool(key));
        let _ = (metadata.get_strs(key), metadata.get_ints(key), metadata.get_f32s(key));
    }
    for name in file.names() {
        matrix(exec, &file.tensor(name)?);
    }
    Ok(file)
}

fn matrix(exec: &Exec, tensor: &FileTensor) {
    // Any outcome is right but a panic.
    let _ = tensor.to_f32(tensor.shape());
    if let &[rows, cols] = tensor.shape() {
        use_all(Linear::from_tensor(exec, tensor, &Rows::all(rows), cols));
    }
}

fn use_all(linear: Result<Linear, FileError>) {
    let Ok(linear) = linear else { return };
    let mut row = vec![0.0; linear.in_features()];
    for index in 0..linear.out_features() {
        linear.dequantize_row(index, &mut row);
    }
}
