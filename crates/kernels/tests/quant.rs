//! Quantized matmul: against f64, and bit for bit between instruction sets, row counts and threads.
#![allow(clippy::unwrap_used, reason = "tests")]

mod quant_data;

use lmx_kernels::quant::{Codes, Format, Product, QuantMatrix, ScaleType, Scales, ShapeError, matmul};
use lmx_kernels::{Exec, Isa};
use proptest::prelude::*;
use quant_data::{fill_scales, formats, multiple, random_input, random_matrix, scale_type};

fn run(exec: &Exec, weight: &QuantMatrix, x: &[f32], rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.rows()];
    matmul(exec, x, rows, &mut [Product { weight, out: &mut out }]);
    out
}

fn scalar() -> Exec {
    Exec::new(Isa::SCALAR, 1)
}

#[test]
fn matmul_is_close_to_f64() {
    let exec = scalar();
    for format in formats() {
        // An odd number of groups, so that nothing is whole but they.
        let (outputs, cols, rows) = (40, ((384 / multiple(&format)) | 1) * multiple(&format), 3);
        let (matrix, weights) = random_matrix(&exec, outputs, cols, format, 5);
        for outliers in [false, true] {
            let x = random_input(rows, cols, outliers, 6);
            let (mut error, mut size) = (0.0, 0.0);
            for (got, x) in run(&exec, &matrix, &x, rows).chunks(outputs).zip(x.chunks(cols)) {
                for (got, weights) in got.iter().zip(&weights) {
                    let want: f64 = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w).sum();
                    error += (f64::from(*got) - want).powi(2);
                    size += want * want;
                }
            }
            let relative = (error / size).sqrt();
            let bound = if outliers { 3e-4 } else { 5e-5 };
            assert!(relative < bound, "{format:?}, outliers {outliers}: rms error {relative:.1e}");
        }
    }
}

#[test]
fn rows_dequantize_to_the_weights_of_the_format() {
    let exec = scalar();
    for format in formats() {
        let (outputs, cols) = (19, 3 * multiple(&format));
        let (matrix, weights) = random_matrix(&exec, outputs, cols, format, 7);
        for (row, weights) in weights.iter().enumerate() {
            let mut out = vec![f32::NAN; cols];
            matrix.dequantize_row(row, &mut out);
            for (k, (got, want)) in out.iter().zip(weights).enumerate() {
                let size = want.abs().max(16.0); // a sum of terms of this size may cancel
                assert!(
                    (f64::from(*got) - want).abs() < 1e-6 * size,
                    "{format:?} row {row} input {k}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn packing_is_the_same_on_every_level_and_with_any_threads() {
    for format in formats() {
        // Several parts for the threads, and at the end a block that is not full.
        let (outputs, cols) = (150, 3 * multiple(&format));
        let rows = |exec: &Exec| {
            let (matrix, _) = random_matrix(exec, outputs, cols, format, 3);
            let mut out = vec![f32::NAN; outputs * cols];
            out.chunks_mut(cols).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
            out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let want = rows(&scalar());
        for (isa, threads) in Isa::all().zip([3, 1, 2, 3]) {
            assert!(rows(&Exec::new(isa, threads)) == want, "{format:?} on {isa} with {threads} threads");
        }
    }
}

#[test]
fn memory_is_the_stored_bit_width() {
    let exec = scalar();
    let plain = |bits, group, scales| Format { codes: Codes::Uint { bits, zero: 0 }, group, scales };
    for (format, bits_per_weight) in [
        (plain(4, 64, Scales::Affine(ScaleType::F16)), 4.5),
        (plain(3, 32, Scales::Affine(ScaleType::Bf16)), 4.0),
        (plain(5, 128, Scales::Affine(ScaleType::F32)), 5.5),
        (plain(4, 32, Scales::SuperAffine), 4.625),
        (Format { codes: Codes::E2m1, group: 32, scales: Scales::E8m0 }, 4.25),
    ] {
        let (matrix, _) = random_matrix(&exec, 32, 512, format, 1);
        assert_eq!(matrix.bytes() as f64 * 8.0, 32.0 * 512.0 * bits_per_weight, "{format:?}");
        assert_eq!((matrix.rows(), matrix.cols(), *matrix.format()), (32, 512, format));
    }
}

#[test]
fn zero_and_tiny_activations_give_zeros() {
    let exec = scalar();
    for format in formats() {
        let cols = 2 * multiple(&format);
        let (matrix, _) = random_matrix(&exec, 17, cols, format, 2);
        for x in [0.0, -0.0, 1e-38, -1e-45] {
            let out = run(&exec, &matrix, &vec![x; cols], 1);
            assert!(out.iter().all(|v| *v == 0.0), "{format:?}: {x} gives {out:?}");
        }
    }
}

#[test]
fn one_value_that_is_not_finite_makes_its_row_nan_and_no_other() {
    let exec = scalar();
    for format in formats() {
        let cols = 2 * multiple(&format);
        let (matrix, _) = random_matrix(&exec, 17, cols, format, 2);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random_input(3, cols, false, 4);
            x[cols + 5] = bad;
            for (row, out) in run(&exec, &matrix, &x, 3).chunks(17).enumerate() {
                assert!(out.iter().all(|v| v.is_nan() == (row == 1)), "{format:?} row {row}: {out:?}");
            }
        }
    }
}

#[test]
fn huge_activations_keep_their_scale() {
    let exec = scalar();
    let format = Format {
        codes: Codes::Uint { bits: 8, zero: 128 },
        group: 32,
        scales: Scales::Symmetric(ScaleType::F32),
    };
    let matrix = QuantMatrix::pack(&exec, 1, 32, format, &|_, row| {
        row.codes.fill(129);
        fill_scales(ScaleType::F32, &mut row.scales, || 0.5);
    })
    .unwrap();
    let mut x = vec![0.0; 32];
    x[3] = f32::MAX;
    let relative = run(&exec, &matrix, &x, 1)[0] / (f32::MAX * 0.5);
    assert!((relative - 1.0).abs() < 1e-6, "{relative}");
}

#[test]
fn bad_formats_and_shapes_are_refused() {
    let exec = scalar();
    let pack = |format, rows, cols| QuantMatrix::pack(&exec, rows, cols, format, &|_, _| {}).map(|_| ());
    let codes = Codes::Uint { bits: 4, zero: 0 };
    let good = Format { codes, group: 32, scales: Scales::Affine(ScaleType::F16) };
    assert_eq!(pack(good, 3, 96), Ok(()));
    assert_eq!(pack(good, 3, 100), Err(ShapeError::Cols { cols: 100, multiple: 32 }));
    let k_quant = Format { scales: Scales::SuperAffine, ..good };
    assert_eq!(pack(k_quant, 3, 288), Err(ShapeError::Cols { cols: 288, multiple: 256 }));
    assert_eq!(
        pack(good, usize::MAX / 64, 1 << 20),
        Err(ShapeError::Size { rows: usize::MAX / 64, cols: 1 << 20 })
    );
    for bad in [
        Format { codes: Codes::Uint { bits: 7, zero: 0 }, ..good },
        Format { codes: Codes::Uint { bits: 4, zero: 8 }, ..good },
        Format { codes: Codes::Uint { bits: 8, zero: 0 }, scales: Scales::Symmetric(ScaleType::F16), ..good },
        Format { group: 48, ..good },
        Format { group: 16, ..good },
        Format { codes: Codes::Uint { bits: 8, zero: 0 }, ..k_quant },
        Format { group: 64, ..k_quant },
        Format { codes: Codes::E2m1, ..good },
        Format { scales: Scales::E8m0, ..good },
    ] {
        assert!(matches!(pack(bad, 3, 256), Err(ShapeError::Format { .. })), "{bad:?}");
    }
}

#[test]
fn empty_shapes_work() {
    let exec = scalar();
    let format =
        Format { codes: Codes::Uint { bits: 4, zero: 0 }, group: 32, scales: Scales::Affine(ScaleType::F16) };
    let none = QuantMatrix::pack(&exec, 0, 32, format, &|_, _| {}).unwrap();
    assert!(run(&exec, &none, &[1.0; 64], 2).is_empty());
    let (some, _) = random_matrix(&exec, 5, 32, format, 1);
    assert!(run(&exec, &some, &[], 0).is_empty());
    let no_inputs = QuantMatrix::pack(&exec, 5, 0, format, &|_, _| {}).unwrap();
    assert_eq!(run(&exec, &no_inputs, &[], 2), [0.0; 10]);
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The law of the kernels: no instruction set, row count or number of threads changes a bit.
    #[test]
    fn every_way_gives_the_bits_of_one_scalar_row(
        format in 0..formats().len(),
        outputs in 1..70usize,
        groups in 1..60usize,
        rows in 1..=40usize,
        threads in 1..=2usize,
        outliers: bool,
        bad_row in proptest::option::of(0..40usize),
        seed: u64,
    ) {
        let format = formats()[format];
        let cols = groups * multiple(&format);
        let (matrix, _) = random_matrix(&scalar(), outputs, cols, format, seed);
        let mut x = random_input(rows, cols, outliers, seed);
        if let Some(row) = bad_row.filter(|row| *row < rows) {
            x[row * cols + seed as usize % cols] = f32::INFINITY;
        }
        let want: Vec<f32> = x.chunks(cols).flat_map(|x| run(&scalar(), &matrix, x, 1)).collect();
        for isa in Isa::all() {
            let got = run(&Exec::new(isa, threads), &matrix, &x, rows);
            prop_assert!(same_bits(&got, &want), "{isa} differs for {format:?}");
        }
    }
}

#[test]
fn several_products_share_an_input() {
    let x = random_input(3, 512, false, 1);
    let all: Vec<_> = formats().into_iter().filter(|f| 512 % multiple(f) == 0).collect();
    for isa in Isa::all() {
        let exec = Exec::new(isa, 2);
        let matrices: Vec<_> =
            all.iter().enumerate().map(|(i, f)| random_matrix(&exec, 9 * i, 512, *f, 3).0).collect();
        let mut outs: Vec<_> = matrices.iter().map(|m| vec![f32::NAN; 3 * m.rows()]).collect();
        let mut products: Vec<_> =
            matrices.iter().zip(&mut outs).map(|(weight, out)| Product { weight, out }).collect();
        matmul(&exec, &x, 3, &mut products);
        for (matrix, out) in matrices.iter().zip(&outs) {
            assert!(same_bits(out, &run(&scalar(), matrix, &x, 3)), "{isa}: {:?}", matrix.format());
        }
    }
}

/// Row r of the matrix has scale byte r; all its codes are 1.
#[test]
fn every_scale_byte_is_read_alike() {
    for (scales, group) in [(Scales::E8m0, 32), (Scales::E4m3 { global: 1.0 }, 16)] {
        let format = Format { codes: Codes::E2m1, group, scales };
        let matrix = QuantMatrix::pack(&scalar(), 256, group, format, &|row, buf| {
            buf.codes.fill(2);
            buf.sub_scales.fill(row as u8);
        })
        .unwrap();
        let mut x = vec![0.0; group];
        x[3] = 1.0;
        let want = run(&scalar(), &matrix, &x, 1);
        for (byte, got) in want.iter().enumerate() {
            let mut weights = vec![0.0; group];
            matrix.dequantize_row(byte, &mut weights);
            let nan = if group == 32 { byte == 255 } else { byte & 127 == 127 };
            assert_eq!(weights[3].is_nan(), nan, "{scales:?} {byte}");
            // Below 1e-30 the scale times that of the activations is subnormal; from 2^99 on sums of a span may overflow.
            let close = (weights[3] - got).abs() <= (1e-6 * weights[3].abs()).max(1e-36);
            let overflow = got.is_infinite() && weights[3] >= 2f32.powi(99);
            assert!(nan || close || overflow, "{scales:?} {byte}: {got}");
            if group == 32 && !nan {
                assert_eq!(f64::from(weights[3]), 2f64.powi(byte as i32 - 127));
            }
        }
        for isa in Isa::all() {
            for rows in [1, 5] {
                let got = run(&Exec::new(isa, 1), &matrix, &x.repeat(rows), rows);
                assert!(same_bits(&got, &want.repeat(rows)), "{isa}, {rows} rows, {scales:?}");
            }
        }
    }
}

/// The largest codes, scales and activations: the integer sums must not overflow.
#[test]
fn extreme_values_do_not_overflow() {
    for format in formats() {
        let cols = 2 * multiple(&format).max(64);
        for codes in [0u8, 255] {
            let matrix = QuantMatrix::pack(&scalar(), 3, cols, format, &|row, buf| {
                buf.codes.fill(codes);
                fill_scales(scale_type(&format), &mut buf.scales, || 1.0);
                fill_scales(scale_type(&format), &mut buf.biases, || -1.0);
                let signed = matches!(format.scales, Scales::SuperSymmetric);
                let largest = if matches!(format.scales, Scales::SuperAffine) { 63 } else { 127 };
                buf.sub_scales.fill(if signed && row == 1 { 128 } else { largest });
                buf.sub_mins.fill(63);
            })
            .unwrap();
            let mut weights = vec![0.0; cols];
            for sign in [1.0, -1.0] {
                let x = vec![sign; cols];
                let want = run(&scalar(), &matrix, &x, 1);
                for (row, got) in want.iter().enumerate() {
                    matrix.dequantize_row(row, &mut weights);
                    let exact: f64 = weights.iter().map(|w| f64::from(*w) * f64::from(sign)).sum();
                    let close = (f64::from(*got) - exact).abs() <= 1e-5 * exact.abs();
                    assert!(close || exact.is_nan(), "{format:?}, codes {codes}: {got} for {exact}");
                }
                for isa in Isa::all() {
                    for rows in [1, 4, 16] {
                        let got = run(&Exec::new(isa, 1), &matrix, &x.repeat(rows), rows);
                        assert!(same_bits(&got, &want.repeat(rows)), "{isa}, {rows} rows of {format:?}");
                    }
                }
            }
        }
    }
}
