//! Packed tensors leave nothing of their file mapped in memory.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;
use std::sync::Arc;

use lmx_tensor::files::{Bytes, DType, FileTensor};
use lmx_tensor::formats::mlx::MlxTensors;
use lmx_tensor::kernels::{Exec, Isa};
use lmx_tensor::{Linear, Rows};

const ROWS: usize = 4096;
const COLS: usize = 2048;

/// Resident bytes of the map of `path`.
fn resident(path: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let path = path.to_str().unwrap();
    let mut map = maps.lines().skip_while(|line| !line.ends_with(path));
    let line = map.find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn load(length: usize, build: impl Fn(&Bytes) -> Linear) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    std::fs::write(&path, (0..length).map(|i| (i * 7) as u8).collect::<Vec<u8>>()).unwrap();
    let bytes = Bytes::map(&path).unwrap().unwrap();
    let linear = build(&bytes);
    assert!(linear.bytes() >= length);
    // What a fault brings in around a border page may be left.
    let left = resident(&path);
    assert!(left < length / 8, "{left} of {length} bytes are still mapped in");
}

fn tensor(bytes: &Bytes, from: usize, dtype: DType, shape: [usize; 2]) -> FileTensor {
    let length = dtype.bytes_of(shape.iter().product()).unwrap();
    let data = bytes.slice(from..from + length).unwrap();
    FileTensor::new(Arc::from(Path::new("weights")), "w", dtype, shape.to_vec(), data).unwrap()
}

#[test]
fn gguf_rows_in_any_order() {
    let orders = [(0..ROWS).collect::<Vec<usize>>(), (0..ROWS).map(|row| row ^ 1).rev().collect()];
    for order in orders {
        let rows = Rows::reordered(order, ROWS);
        load(ROWS * COLS / 32 * 18, |bytes| {
            let tensor = tensor(bytes, 0, DType::Q4_0, [ROWS, COLS]);
            Linear::from_tensor(&Exec::new(Isa::best(), 2), &tensor, &rows, COLS).unwrap()
        });
    }
}

#[test]
fn parts_of_a_fused_matrix() {
    load(ROWS * COLS / 32 * 34, |bytes| {
        let tensor = tensor(bytes, 0, DType::Q8_0, [ROWS, COLS]);
        let exec = Exec::new(Isa::best(), 2);
        let part = |rows| Linear::from_tensor(&exec, &tensor, &Rows::range(rows, ROWS), COLS).unwrap();
        drop(part(0..1000));
        drop(part(1000..ROWS));
        part(0..ROWS)
    });
}

#[test]
fn mlx_codes_scales_and_biases() {
    let (codes, scales) = (ROWS * COLS / 2, ROWS * COLS / 64 * 2);
    load(codes + 2 * scales, |bytes| {
        let tensors = MlxTensors {
            weight: tensor(bytes, 0, DType::U32, [ROWS, COLS / 8]),
            scales: tensor(bytes, codes, DType::Bf16, [ROWS, COLS / 64]),
            biases: Some(tensor(bytes, codes + scales, DType::Bf16, [ROWS, COLS / 64])),
            global_scale: None,
        };
        Linear::from_mlx(&Exec::new(Isa::best(), 2), &tensors, &Rows::all(ROWS), COLS, None).unwrap()
    });
}
