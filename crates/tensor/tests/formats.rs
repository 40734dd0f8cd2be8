//! Weights read from files are what mlx and gguf-py decode them to (tests/gen/quant_*.py at the root wrote the
//! files), whichever rows are asked for, and tensors that do not fit are refused by name.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is a failed test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lmx_tensor::files::{Bytes, DType, FileError, FileTensor, GgufFile, SafetensorsFile};
use lmx_tensor::formats::mlx::{MlxTensors, Mode, Quantization};
use lmx_tensor::kernels::{Exec, Isa};
use lmx_tensor::{Linear, Rows, Weight};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/formats").join(name)
}

fn exec() -> Exec {
    Exec::new(Isa::best(), 2)
}

fn decode(linear: &Linear) -> Vec<f32> {
    let mut values = vec![f32::NAN; linear.out_features() * linear.in_features()];
    for (row, out) in values.chunks_exact_mut(linear.in_features()).enumerate() {
        linear.dequantize_row(row, out);
    }
    values
}

fn mlx_case(file: &SafetensorsFile, case: &str) -> MlxTensors {
    let part = |part: &str| file.tensor(&format!("{case}.{part}"));
    MlxTensors {
        weight: part("weight").unwrap(),
        scales: part("scales").unwrap(),
        biases: part("biases").ok(),
        global_scale: part("global_scale").ok(),
    }
}

/// Every value within `ulps` of the row's largest magnitude.
fn assert_close(found: &[f32], expected: &[f32], ulps: f32, case: &str) {
    assert_eq!(found.len(), expected.len(), "{case}");
    let largest = expected.iter().fold(0f32, |max, value| max.max(value.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= ulps * f32::EPSILON * largest,
            "{case}, element {index}: {found} instead of {expected}"
        );
    }
}

#[test]
fn mlx_tensors_decode_as_in_mlx() {
    let file = SafetensorsFile::open(&golden("mlx.safetensors")).unwrap();
    let cases: Vec<&str> = file.names().filter_map(|name| name.strip_suffix(".expected")).collect();
    assert_eq!(cases.len(), 3 * 6 * 3 + 4);
    for case in cases {
        let tensors = mlx_case(&file, case);
        let linear = Linear::from_mlx(&exec(), &tensors, &Rows::all(3), 128, None).unwrap();
        let expected = file.tensor(&format!("{case}.expected")).unwrap().to_f32(&[3, 128]).unwrap();
        // Half-precision scales times codes are exact, so one rounding is left, the same everywhere. mlx scales
        // the E4M3 scales of nvfp4 by global_scale in another order.
        let ulps = if case.ends_with("float32") || case == "nvfp4_global" { 1.0 } else { 0.0 };
        assert_close(&decode(&linear), &expected, ulps, case);
        assert_eq!((linear.out_features(), linear.in_features(), linear.parameters()), (3, 128, 3 * 128));
        let (name, stored) = (linear.format_name(), tensors.weight.data().len());
        assert!(linear.bytes() >= stored + tensors.scales.data().len(), "{case}: {} bytes", linear.bytes());
        match case.split('.').collect::<Vec<_>>()[..] {
            ["affine", bits, group, _] => assert_eq!(name, format!("affine {bits}-bit group {group}")),
            ["mxfp4"] => assert_eq!(name, "mxfp4 4-bit group 32"),
            ["mxfp8"] => assert_eq!(name, "mxfp8 8-bit group 32"),
            _ => assert_eq!(name, "nvfp4 4-bit group 16"),
        }
    }
}

#[test]
fn gguf_tensors_decode_as_in_gguf_py() {
    let file = GgufFile::open(&golden("blocks.gguf")).unwrap();
    let expected = SafetensorsFile::open(&golden("blocks.safetensors")).unwrap();
    assert_eq!(file.names().count(), 13);
    for name in file.names() {
        let tensor = file.tensor(name).unwrap();
        let &[rows, cols] = tensor.shape() else { panic!("{name} is no matrix") };
        let linear = Linear::from_tensor(&exec(), &tensor, &Rows::all(rows), cols).unwrap();
        let values = expected.tensor(name).unwrap().to_f32(&[rows, cols]).unwrap();
        assert_eq!(decode(&linear), values, "{name}");
        assert_eq!(format!("{}.weight", linear.format_name().to_lowercase()), name);
        let dense = matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::Bf16);
        assert_eq!(matches!(linear.weight(), Weight::Dense(_)), dense, "{name}");
    }
}

#[test]
fn rows_are_cut_and_reordered() {
    let gguf = GgufFile::open(&golden("blocks.gguf")).unwrap();
    let mlx = SafetensorsFile::open(&golden("mlx.safetensors")).unwrap();
    let bias_bytes = [1f32, 2., 3.].iter().flat_map(|value| value.to_le_bytes()).collect();
    let bias = tensor("q.bias", DType::F32, &[3], bias_bytes).unwrap();
    for (rows, taken) in [
        (Rows::all(3), vec![0, 1, 2]),
        (Rows::range(1..3, 3), vec![1, 2]),
        (Rows::range(2..2, 3), vec![]),
        (Rows::reordered(vec![2, 0, 1], 3), vec![2, 0, 1]),
    ] {
        let check = |case: &str, build: &dyn Fn(&Rows) -> Linear| {
            let (all, some) = (build(&Rows::all(3)), build(&rows).with_bias(&bias, &rows).unwrap());
            let (all, cols) = (decode(&all), all.in_features());
            let expected: Vec<f32> =
                taken.iter().flat_map(|&row| &all[row * cols..][..cols]).copied().collect();
            assert_eq!(decode(&some), expected, "{case} {rows:?}");
            let biases: Vec<f32> = taken.iter().map(|&row| row as f32 + 1.).collect();
            assert_eq!(some.bias(), Some(&biases[..]));
            assert_eq!(some.parameters(), taken.len() * (cols + 1));
        };
        for name in ["f32.weight", "bf16.weight", "q4_1.weight", "q8_0.weight", "q6_k.weight"] {
            let tensor = gguf.tensor(name).unwrap();
            check(name, &|rows| Linear::from_tensor(&exec(), &tensor, rows, tensor.shape()[1]).unwrap());
        }
        for case in ["affine.4.64.bfloat16", "affine.3.32.float16", "nvfp4", "mxfp8"] {
            let tensors = mlx_case(&mlx, case);
            check(case, &|rows| Linear::from_mlx(&exec(), &tensors, rows, 128, None).unwrap());
        }
    }
}

#[test]
fn dense_rows_stay_in_the_map() {
    let file = GgufFile::open(&golden("blocks.gguf")).unwrap();
    let tensor = file.tensor("bf16.weight").unwrap();
    let linear = Linear::from_tensor(&exec(), &tensor, &Rows::range(1..3, 3), 64).unwrap();
    let Weight::Dense(dense) = linear.weight() else { panic!("bf16 is dense") };
    assert_eq!(dense.view().data.as_ptr(), tensor.data()[2 * 64..].as_ptr());
    assert_eq!(linear.bytes(), 2 * 2 * 64);
}

/// The vectors of mlx for w\[i\] = (((37·i + 11) mod 64) - 31) / 16, i = 0…31, one group of 32.
#[test]
fn known_words_decode() {
    let affine: [(f32, &[u32], [u8; 8]); 6] = [
        (0.96875, &[0xdcbb72dd, 0x2ddcb762], [1, 3, 1, 3, 2, 0, 3, 1]),
        (0.484375, &[0xdf54cef1, 0xe343eb19, 0x33bca89d], [1, 6, 3, 7, 4, 1, 5, 2]),
        (0.2421875, &[0x4b18f5c3, 0xe4b29f6d, 0x8f5c3a07, 0x29f6d3a1], [3, 12, 5, 15, 8, 1, 11, 4]),
        (
            0.12109375,
            &[0x450f2f26, 0x497d9a3d, 0xcc0ee26e, 0xa27f5582, 0x1c7ecd1e],
            [6, 25, 11, 30, 16, 2, 21, 7],
        ),
        (
            0.060546875,
            &[0x20f16c8b, 0xf6753aa1, 0xe12b478f, 0x712a601c, 0xda437fb5, 0x1a2f98d0],
            [11, 50, 22, 60, 32, 4, 42, 14],
        ),
        (
            0.014_903_846,
            &[0xf358c92e, 0x3bac1182, 0x8fff65d6, 0xe247b91d, 0x2a9b0071, 0x7eef54c5, 0xd237a80d, 0x198afc60],
            [46, 201, 88, 243, 130, 17, 172, 59],
        ),
    ];
    let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    for (scale, words, codes) in affine {
        let tensors = MlxTensors {
            weight: tensor("p.weight", DType::U32, &[1, words.len()], bytes(words)).unwrap(),
            scales: tensor("p.scales", DType::F32, &[1, 1], scale.to_le_bytes().to_vec()).unwrap(),
            biases: Some(
                tensor("p.biases", DType::F32, &[1, 1], (-1.9375f32).to_le_bytes().to_vec()).unwrap(),
            ),
            global_scale: None,
        };
        let linear = Linear::from_mlx(&exec(), &tensors, &Rows::all(1), 32, None).unwrap();
        let expected = codes.map(|code| scale * f32::from(code) - 1.9375);
        assert_eq!(decode(&linear)[..8], expected, "{} words", words.len());
    }
    let floats: [(&[u8], &[u32], [f32; 8]); 3] = [
        (&[126], &[0xc2d05a4c, 0x5b3d16a4, 0x05b4d1e9, 0xd06a4c2d], [-1., 1., -0.5, 1.5, 0., -1.5, 0.5, -1.]),
        (
            &[42, 42],
            &[0xd4f07c5e, 0x6d5e17b6, 0x07c5e2fa, 0xe17b6e4f],
            [-1.25, 0.9375, -0.625, 1.875, 0., -1.875, 0.625, -0.9375],
        ),
        (
            &[120],
            &[0x76ea70f2, 0xf06af600, 0x5c77e672, 0x74ee6df4, 0xf264f8e0, 0xd075eb70, 0x72f169f6, 0xf45876e8],
            [-1.25, 1., -0.625, 1.75, 0., -1.75, 0.625, -1.],
        ),
    ];
    for (scales, words, expected) in floats {
        let tensors = MlxTensors {
            weight: tensor("p.weight", DType::U32, &[1, words.len()], bytes(words)).unwrap(),
            scales: tensor("p.scales", DType::U8, &[1, scales.len()], scales.to_vec()).unwrap(),
            biases: None,
            global_scale: None,
        };
        let linear = Linear::from_mlx(&exec(), &tensors, &Rows::all(1), 32, None).unwrap();
        assert_eq!(decode(&linear)[..8], expected, "{}", linear.format_name());
    }
}

fn tensor(name: &str, dtype: DType, shape: &[usize], data: Vec<u8>) -> Result<FileTensor, FileError> {
    let file: Arc<Path> = Path::new("m.safetensors").into();
    FileTensor::new(file, name, dtype, shape.to_vec(), Bytes::from(data))
}

fn zeros(name: &str, dtype: DType, shape: &[usize]) -> FileTensor {
    let bytes = shape.iter().product::<usize>() / dtype.block_elements() * dtype.block_bytes();
    tensor(name, dtype, shape, vec![0; bytes]).unwrap()
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let refused = |tensor: FileTensor, rows: Rows, cols| {
        Linear::from_tensor(&exec(), &tensor, &rows, cols).unwrap_err().to_string()
    };
    assert_eq!(
        refused(zeros("q.weight", DType::Bf16, &[4, 8]), Rows::all(8), 4),
        "m.safetensors: tensor \"q.weight\": expected shape [8, 4], found [4, 8]"
    );
    assert_eq!(
        refused(zeros("q.weight", DType::I8, &[4, 8]), Rows::all(4), 8),
        "m.safetensors: tensor \"q.weight\": type I8 cannot be used here; \
         allowed is F32, F16, BF16 or a quantized GGUF type"
    );
    let linear =
        Linear::from_tensor(&exec(), &zeros("q.weight", DType::F16, &[4, 8]), &Rows::all(4), 8).unwrap();
    assert_eq!(
        linear.with_bias(&zeros("q.bias", DType::F16, &[8]), &Rows::all(4)).unwrap_err().to_string(),
        "m.safetensors: tensor \"q.bias\": expected shape [4], found [8]"
    );
}

#[test]
fn mlx_tensors_that_do_not_fit_are_refused_by_name() {
    let valid = || MlxTensors {
        weight: zeros("p.weight", DType::U32, &[4, 16]),
        scales: zeros("p.scales", DType::F16, &[4, 2]),
        biases: Some(zeros("p.biases", DType::F16, &[4, 2])),
        global_scale: None,
    };
    let refused = |tensors: MlxTensors, declared| {
        let message =
            Linear::from_mlx(&exec(), &tensors, &Rows::all(4), 128, declared).unwrap_err().to_string();
        message.strip_prefix("m.safetensors: tensor ").unwrap().to_owned()
    };
    assert!(Linear::from_mlx(&exec(), &valid(), &Rows::all(4), 128, None).is_ok());
    let allowed = "allowed is affine 2, 3, 4, 5, 6 or 8 bits with groups of 32, 64 or 128; mxfp4 4 bits with groups \
        of 32; nvfp4 4 bits with groups of 16; mxfp8 8 bits with groups of 32";
    for (tensors, message) in [
        (
            MlxTensors { weight: zeros("p.weight", DType::I32, &[4, 16]), ..valid() },
            "\"p.weight\": type I32 cannot be used here; allowed is U32".to_owned(),
        ),
        (
            MlxTensors { weight: zeros("p.weight", DType::U32, &[5, 16]), ..valid() },
            "\"p.weight\": expected a matrix of 4 rows, found shape [5, 16]".to_owned(),
        ),
        (
            MlxTensors { weight: zeros("p.weight", DType::U32, &[4, 28]), ..valid() },
            format!(
                "\"p.weight\": the quantization is 28 words and 2 scales of type F16 for 128 inputs; {allowed}"
            ),
        ),
        (
            MlxTensors { weight: zeros("p.weight", DType::U32, &[4, 17]), ..valid() },
            format!(
                "\"p.weight\": the quantization is 17 words and 2 scales of type F16 for 128 inputs; {allowed}"
            ),
        ),
        (
            MlxTensors { scales: zeros("p.scales", DType::F16, &[4]), ..valid() },
            "\"p.scales\": expected a matrix of 4 rows, found shape [4]".to_owned(),
        ),
        (
            MlxTensors { scales: zeros("p.scales", DType::F16, &[4, 0]), ..valid() },
            format!(
                "\"p.weight\": the quantization is 16 words and 0 scales of type F16 for 128 inputs; {allowed}"
            ),
        ),
        (
            MlxTensors { scales: zeros("p.scales", DType::U8, &[4, 4]), ..valid() },
            "\"p.biases\": the quantization of its layer is mxfp4 4-bit group 32; allowed is affine"
                .to_owned(),
        ),
        (
            MlxTensors { biases: None, ..valid() },
            "\"p.scales\": type F16 cannot be used here; allowed is U8 where there are no biases".to_owned(),
        ),
        (
            MlxTensors { biases: Some(zeros("p.biases", DType::F16, &[4, 1])), ..valid() },
            "\"p.biases\": expected shape [4, 2], found [4, 1]".to_owned(),
        ),
        (
            MlxTensors { biases: Some(zeros("p.biases", DType::U8, &[4, 2])), ..valid() },
            "\"p.biases\": type U8 cannot be used here; allowed is F32, F16 or BF16".to_owned(),
        ),
        (
            MlxTensors { global_scale: Some(zeros("p.global_scale", DType::F32, &[])), ..valid() },
            "\"p.global_scale\": the quantization of its layer is affine 4-bit group 64; allowed is nvfp4"
                .to_owned(),
        ),
        (
            MlxTensors {
                scales: zeros("p.scales", DType::U8, &[4, 8]),
                biases: None,
                global_scale: Some(zeros("p.global_scale", DType::F32, &[1])),
                ..valid()
            },
            "\"p.global_scale\": the global scale is 0; allowed is a finite number above 0".to_owned(),
        ),
    ] {
        assert_eq!(refused(tensors, None), message);
    }
    let declared = Quantization { mode: Mode::Affine, bits: 4, group: 32 };
    assert_eq!(
        refused(valid(), Some(declared)),
        "\"p.weight\": the quantization is affine 4-bit group 64; \
         allowed is affine 4-bit group 32, as the configuration says"
    );
}

#[test]
fn biases_of_another_type_than_the_scales_stay_exact() {
    // 1 + 2^-7 is exact in bfloat16, 1 + 2^-10 in float16 only.
    let tensors = MlxTensors {
        weight: zeros("p.weight", DType::U32, &[1, 4]),
        scales: tensor("p.scales", DType::Bf16, &[1, 1], vec![0x81, 0x3f]).unwrap(),
        biases: Some(tensor("p.biases", DType::F16, &[1, 1], vec![0x01, 0x3c]).unwrap()),
        global_scale: None,
    };
    let linear = Linear::from_mlx(&exec(), &tensors, &Rows::all(1), 32, None).unwrap();
    assert_eq!(decode(&linear)[0], 1.0 + 2f32.powi(-10));
}
