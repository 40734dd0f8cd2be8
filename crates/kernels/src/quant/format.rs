//! What the codes and scales of a quantized matrix mean, and the sizes that follow from it.

use super::ShapeError;

/// How plain scales and biases are stored, in files and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// What a code of a weight stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// An unsigned integer q of 2, 3, 4, 5, 6 or 8 bits; its value is q - zero.
    Uint {
        /// Bits of a code.
        bits: u8,
        /// The code of the value 0. With [`Scales::Affine`] and [`Scales::SuperAffine`] it is 0; with the others
        /// all of q - zero lies in -128..=127.
        zero: u8,
    },
    /// Four bits: sign (bit 3) and magnitude 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats, FP4).
    E2m1,
}

/// How the weights of a group get their scale. `v` is the value of the code ([`Codes`]), `q` the code itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    /// w = s·v, one s a group.
    Symmetric(ScaleType),
    /// w = s·q + b, one s and b a group.
    Affine(ScaleType),
    /// w = d·sc·v: d in f16 for 256 inputs, sc in i8 for a group of 16; 3 or 6 bits (Q3_K, Q6_K).
    SuperSymmetric,
    /// w = d·sc·q - dmin·m: d, dmin in f16 for 256 inputs, sc, m of at most 6 bits for a group; 2 bits in groups of
    /// 16 (Q2_K), 4 or 5 in groups of 32 (Q4_K, Q5_K).
    SuperAffine,
    /// w = 2^(byte - 127)·v, byte 255 is NaN; only with [`Codes::E2m1`] in groups of 32 (mxfp4).
    E8m0,
    /// w = e4m3(byte)·global·v; only with [`Codes::E2m1`] in groups of 16 (nvfp4).
    E4m3 {
        /// The scale of the whole tensor; 1 if it has none.
        global: f32,
    },
}

/// The format of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Format {
    /// Meaning of a code.
    pub codes: Codes,
    /// Inputs that share a scale: 32, 64 or 128 with plain scales; what the format prescribes with the others.
    pub group: usize,
    /// Scales of a group.
    pub scales: Scales,
}

/// Inputs of a super-block: what one d (and dmin) spans.
pub(super) const SUPER: usize = 256;
/// Outputs of a block: the lanes of the widest vector.
pub(super) const LANES: usize = 16;
/// Inputs of a chunk: for every bit width its planes fill whole vectors of 64 bytes.
pub(super) const CHUNK: usize = 32;
/// Largest sub-scale and sub-min of [`Scales::SuperAffine`].
pub(super) const SUB_MAX: u8 = 63;

/// How the scale of a group lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ScaleCode {
    F32,
    F16,
    Bf16,
    E8m0,
    E4m3,
}

impl ScaleCode {
    pub(super) const fn bytes(self) -> usize {
        match self {
            ScaleCode::F32 => 4,
            ScaleCode::F16 | ScaleCode::Bf16 => 2,
            ScaleCode::E8m0 | ScaleCode::E4m3 => 1,
        }
    }
}

impl From<ScaleType> for ScaleCode {
    fn from(ty: ScaleType) -> Self {
        match ty {
            ScaleType::F32 => ScaleCode::F32,
            ScaleType::F16 => ScaleCode::F16,
            ScaleType::Bf16 => ScaleCode::Bf16,
        }
    }
}

/// The two arithmetics (module documentation of [`super`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Super,
}

/// Where everything lies in a packed block of 16 outputs x `unit` inputs; all offsets in bytes.
///
/// Codes come first, in chunks of 32 inputs: 8 vectors of 64 bytes (byte 4·lane + i of vector j is the code of
/// output `lane`, input 4·j + i), cut into bit planes of 8, 4, 2 or 1 bits, 8 / width vectors to a plane vector.
/// Then, for each group, 16 scales, and 16 biases or mins; a super-block ends with 16 d and 16 dmin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) kind: Kind,
    pub(super) affine: bool,
    /// Bits of a stored code.
    pub(super) bits: usize,
    /// Codes are E2M1: a decoded code is 2·value + 12, and scales are halved.
    pub(super) e2m1: bool,
    /// What is subtracted from a decoded code: the code of the value 0, or the middle code of plain affine formats.
    pub(super) zero: i32,
    pub(super) group: usize,
    /// Inputs of one exact integer sum: the group, at most 64.
    pub(super) step: usize,
    /// Inputs of a block.
    pub(super) unit: usize,
    pub(super) scale: ScaleCode,
    /// Multiplies E8M0 and E4M3 scales.
    pub(super) factor: f32,
    /// Of the group scales (plain) or sub-scales (super).
    pub(super) scales_at: usize,
    /// Of the group biases (plain) or sub-mins (super).
    pub(super) biases_at: usize,
    /// Of d, and of dmin 32 bytes later (super only).
    pub(super) d_at: usize,
    /// Bytes of a block.
    pub(super) block: usize,
}

/// Widths of the bit planes of a code, from its lowest bit up.
pub(super) const fn planes(bits: usize) -> &'static [usize] {
    match bits {
        2 => &[2],
        3 => &[2, 1],
        4 => &[4],
        5 => &[4, 1],
        6 => &[4, 2],
        _ => &[8],
    }
}

impl Layout {
    pub(super) fn new(format: &Format) -> Result<Self, ShapeError> {
        let bad = |reason| Err(ShapeError::Format { format: *format, reason });
        let Format { codes, group, scales } = *format;
        let kind = match scales {
            Scales::SuperSymmetric | Scales::SuperAffine => Kind::Super,
            _ => Kind::Plain,
        };
        let affine = matches!(scales, Scales::Affine(_) | Scales::SuperAffine);
        let float_scales = matches!(scales, Scales::E8m0 | Scales::E4m3 { .. });
        let (bits, zero, e2m1) = match codes {
            Codes::Uint { bits, zero } => (usize::from(bits), i32::from(zero), false),
            Codes::E2m1 => (4, 12, true),
        };
        if !matches!(bits, 2..=6 | 8) {
            return bad("codes have 2, 3, 4, 5, 6 or 8 bits");
        }
        if !matches!(group, 16 | 32 | 64 | 128) {
            return bad("groups have 16, 32, 64 or 128 inputs");
        }
        if e2m1 != float_scales {
            return bad("E2M1 codes go with E8M0 or E4M3 scales");
        }
        let largest = if e2m1 { 24 } else { (1 << bits) - 1 };
        if affine && zero != 0 {
            return bad("affine codes have zero 0");
        }
        if zero > largest || (!affine && (zero > 128 || largest - zero > 127)) {
            return bad("values of codes lie in -128..=127");
        }
        let usual = match scales {
            Scales::SuperSymmetric => group == 16 && matches!(bits, 3 | 6),
            Scales::SuperAffine => matches!((bits, group), (2, 16) | (4 | 5, 32)),
            Scales::E8m0 => group == 32,
            Scales::E4m3 { .. } => group == 16,
            Scales::Symmetric(_) | Scales::Affine(_) => group >= 32,
        };
        if !usual {
            return bad("bits and group are those of no K-quant, mxfp4, nvfp4 or plain group of 32, 64, 128");
        }
        // Plain affine codes are centred, so that they fit an int8.
        let zero = if affine && kind == Kind::Plain { 1 << (bits - 1) } else { zero };
        let (scale, factor) = match scales {
            Scales::Symmetric(ty) | Scales::Affine(ty) => (ty.into(), 1.0),
            Scales::SuperSymmetric | Scales::SuperAffine => (ScaleCode::F16, 1.0),
            // The decoded code is twice the value.
            Scales::E8m0 => (ScaleCode::E8m0, 0.5),
            Scales::E4m3 { global } => (ScaleCode::E4m3, 0.5 * global),
        };
        let unit = match kind {
            Kind::Super => SUPER,
            Kind::Plain => group.max(64),
        };
        let per_group = LANES * if kind == Kind::Super { 1 } else { scale.bytes() };
        let scales_at = unit / CHUNK * 64 * bits;
        let biases_at = scales_at + unit / group * per_group;
        let d_at = biases_at + if affine { unit / group * per_group } else { 0 };
        let block = match kind {
            Kind::Super => d_at + if affine { 4 * LANES } else { 2 * LANES },
            Kind::Plain => d_at,
        };
        let step = group.min(64);
        Ok(Self {
            kind,
            affine,
            bits,
            e2m1,
            zero,
            group,
            step,
            unit,
            scale,
            factor,
            scales_at,
            biases_at,
            d_at,
            block,
        })
    }

    /// The largest magnitude of v.
    pub(super) fn largest_value(&self) -> i32 {
        let largest_code = if self.e2m1 { 24 } else { (1 << self.bits) - 1 };
        self.zero.max(largest_code - self.zero)
    }

    /// What the number of inputs must be a multiple of.
    pub(super) fn cols_multiple(&self) -> usize {
        match self.kind {
            Kind::Super => SUPER,
            Kind::Plain => self.group,
        }
    }
}
