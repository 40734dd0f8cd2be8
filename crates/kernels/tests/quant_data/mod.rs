//! Random quantized matrices of every format, with their weights in f64.
#![allow(dead_code, reason = "each test crate uses its own part")]

use lmx_kernels::Exec;
use lmx_kernels::quant::{Codes, Format, QuantMatrix, RowBuf, ScaleType, Scales};

/// A small deterministic generator (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() & 0xff_ffff) as f32 / 0x100_0000 as f32
    }

    /// Roughly normal, variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

fn uint(bits: u8, zero: u8) -> Codes {
    Codes::Uint { bits, zero }
}

/// Every format that the library loads, and the corners of the others.
pub(crate) fn formats() -> Vec<Format> {
    let mut all = Vec::new();
    let types = [ScaleType::F32, ScaleType::F16, ScaleType::Bf16];
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, group) in [32, 64, 128].into_iter().enumerate() {
            all.push(Format { codes: uint(bits, 0), group, scales: Scales::Affine(types[(i + j) % 3]) });
        }
        let codes = uint(bits, 1 << (bits - 1));
        all.push(Format { codes, group: 32, scales: Scales::Symmetric(types[i % 3]) });
        all.push(Format { codes, group: 128, scales: Scales::Symmetric(ScaleType::F16) });
    }
    all.push(Format { codes: uint(2, 0), group: 16, scales: Scales::SuperAffine });
    all.push(Format { codes: uint(3, 4), group: 16, scales: Scales::SuperSymmetric });
    all.push(Format { codes: uint(4, 0), group: 32, scales: Scales::SuperAffine });
    all.push(Format { codes: uint(5, 0), group: 32, scales: Scales::SuperAffine });
    all.push(Format { codes: uint(6, 32), group: 16, scales: Scales::SuperSymmetric });
    all.push(Format { codes: Codes::E2m1, group: 32, scales: Scales::E8m0 });
    all.push(Format { codes: Codes::E2m1, group: 16, scales: Scales::E4m3 { global: 0.37 } });
    all
}

/// What the number of inputs must be a multiple of.
pub(crate) fn multiple(format: &Format) -> usize {
    match format.scales {
        Scales::SuperSymmetric | Scales::SuperAffine => 256,
        _ => format.group,
    }
}

/// Fills a row's scales or biases with values in the scale type.
pub(crate) fn fill_scales(ty: ScaleType, scales: &mut [u8], mut value: impl FnMut() -> f32) {
    match ty {
        ScaleType::F32 => scales.as_chunks_mut().0.iter_mut().for_each(|s| *s = value().to_le_bytes()),
        ScaleType::F16 => {
            let scales = scales.as_chunks_mut().0.iter_mut();
            scales.for_each(|s| *s = half::f16::from_f32(value()).to_le_bytes());
        }
        ScaleType::Bf16 => {
            let scales = scales.as_chunks_mut().0.iter_mut();
            scales.for_each(|s| *s = half::bf16::from_f32(value()).to_le_bytes());
        }
    }
}

/// Value `index` of a row's scales or biases.
fn scale_at(ty: ScaleType, scales: &[u8], index: usize) -> f64 {
    f64::from(match ty {
        ScaleType::F32 => f32::from_le_bytes(scales.as_chunks().0[index]),
        ScaleType::F16 => half::f16::from_le_bytes(scales.as_chunks().0[index]).to_f32(),
        ScaleType::Bf16 => half::bf16::from_le_bytes(scales.as_chunks().0[index]).to_f32(),
    })
}

/// The type of the scales of a format, or of d and dmin.
pub(crate) fn scale_type(format: &Format) -> ScaleType {
    match format.scales {
        Scales::Symmetric(ty) | Scales::Affine(ty) => ty,
        _ => ScaleType::F16,
    }
}

/// One random row: codes over their whole range, scales of both signs.
pub(crate) fn random_row(format: &Format, random: &mut Random, row: &mut RowBuf) {
    let bits = match format.codes {
        Codes::Uint { bits, .. } => bits,
        Codes::E2m1 => 4,
    };
    row.codes.fill_with(|| (random.bits() & ((1 << bits) - 1)) as u8);
    let size = 1.0 / f32::from(1u16 << (bits - 1));
    let ty = scale_type(format);
    fill_scales(ty, &mut row.scales, || {
        let sign = if random.bits() & 4 == 0 { -1.0 } else { 1.0 };
        sign * size * (0.5 + random.unit())
    });
    match format.scales {
        Scales::Affine(_) => fill_scales(ty, &mut row.biases, || 2.0 * random.unit() - 1.0),
        Scales::SuperSymmetric => row.sub_scales.fill_with(|| random.bits() as u8),
        Scales::SuperAffine => {
            fill_scales(ty, &mut row.biases, || random.unit() - 0.5);
            row.sub_scales.fill_with(|| random.bits() as u8 & 63);
            row.sub_mins.fill_with(|| random.bits() as u8 & 63);
        }
        Scales::E8m0 => row.sub_scales.fill_with(|| 120 + (random.bits() & 7) as u8),
        // Every finite E4M3 value, subnormals and both signs included.
        Scales::E4m3 { .. } => row.sub_scales.fill_with(|| match random.bits() as u8 {
            nan if nan & 0x7f == 0x7f => 0x38,
            byte => byte,
        }),
        Scales::Symmetric(_) => {}
    }
}

/// The weights of a row, straight from the definitions of the formats.
pub(crate) fn weights(format: &Format, row: &RowBuf) -> Vec<f64> {
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let e4m3 = |byte: u8| {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
        let size =
            if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
        if byte >> 7 == 1 { -size } else { size }
    };
    let weight = |(k, &code): (usize, &u8)| {
        let (group, block) = (k / format.group, k / 256);
        let scale = |index| scale_at(scale_type(format), &row.scales, index);
        let bias = |index| scale_at(scale_type(format), &row.biases, index);
        let value = match format.codes {
            Codes::Uint { zero, .. } => f64::from(code) - f64::from(zero),
            Codes::E2m1 if code >> 3 == 1 => -magnitudes[usize::from(code & 7)],
            Codes::E2m1 => magnitudes[usize::from(code & 7)],
        };
        match format.scales {
            Scales::Symmetric(_) => scale(group) * value,
            Scales::Affine(_) => scale(group) * value + bias(group),
            Scales::SuperSymmetric => scale(block) * f64::from(row.sub_scales[group] as i8) * value,
            Scales::SuperAffine => {
                scale(block) * f64::from(row.sub_scales[group]) * value
                    - bias(block) * f64::from(row.sub_mins[group])
            }
            Scales::E8m0 => 2f64.powi(i32::from(row.sub_scales[group]) - 127) * value,
            Scales::E4m3 { global } => e4m3(row.sub_scales[group]) * f64::from(global) * value,
        }
    };
    row.codes.iter().enumerate().map(weight).collect()
}

/// A random matrix and its weights in f64, row by row.
pub(crate) fn random_matrix(
    exec: &Exec,
    rows: usize,
    cols: usize,
    format: Format,
    seed: u64,
) -> (QuantMatrix, Vec<Vec<f64>>) {
    let fill = |row: usize, buf: &mut RowBuf| {
        random_row(&format, &mut Random::new(seed ^ ((row as u64) << 20)), buf);
    };
    let all = std::sync::Mutex::new(vec![Vec::new(); rows]);
    let matrix = QuantMatrix::pack(exec, rows, cols, format, &|row, buf| {
        fill(row, buf);
        all.lock().unwrap()[row] = weights(&format, buf);
    })
    .unwrap();
    (matrix, all.into_inner().unwrap())
}

/// Activations like those of a model: normal, with some outliers of 1000 times the size if asked.
pub(crate) fn random_input(rows: usize, cols: usize, outliers: bool, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let value = |_| {
        let v = random.normal();
        if outliers && random.bits().is_multiple_of(200) { 1000.0 * v } else { v }
    };
    (0..rows * cols).map(value).collect()
}
