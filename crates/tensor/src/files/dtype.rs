//! How a file stores the elements of a tensor.

use std::fmt;

/// How a file stores elements: the types of safetensors, and those of GGUF that lmx reads.
///
/// The layouts of the quantized GGUF types are described in [`formats::gguf`](crate::formats::gguf).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are the files' own")]
pub enum DType {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
    C64,
    F4,
    F6E2m3,
    F6E3m2,
    F8E4m3,
    F8E5m2,
    F8E8m0,
    F8E4m3Fnuz,
    F8E5m2Fnuz,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

/// The types that a safetensors header may name.
#[rustfmt::skip]
const SAFETENSORS: [DType; 22] = {
    use DType::*;
    [
        Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, Bf16, F32, F64, C64,
        F4, F6E2m3, F6E3m2, F8E4m3, F8E5m2, F8E8m0, F8E4m3Fnuz, F8E5m2Fnuz,
    ]
};

impl DType {
    /// Name, elements of a block, bytes of a block.
    #[rustfmt::skip]
    const fn layout(self) -> (&'static str, usize, usize) {
        match self {
            Self::Bool => ("BOOL", 1, 1),
            Self::U8 => ("U8", 1, 1),
            Self::I8 => ("I8", 1, 1),
            Self::U16 => ("U16", 1, 2),
            Self::I16 => ("I16", 1, 2),
            Self::U32 => ("U32", 1, 4),
            Self::I32 => ("I32", 1, 4),
            Self::U64 => ("U64", 1, 8),
            Self::I64 => ("I64", 1, 8),
            Self::F16 => ("F16", 1, 2),
            Self::Bf16 => ("BF16", 1, 2),
            Self::F32 => ("F32", 1, 4),
            Self::F64 => ("F64", 1, 8),
            Self::C64 => ("C64", 1, 8),
            Self::F4 => ("F4", 2, 1),
            Self::F6E2m3 => ("F6_E2M3", 4, 3),
            Self::F6E3m2 => ("F6_E3M2", 4, 3),
            Self::F8E4m3 => ("F8_E4M3", 1, 1),
            Self::F8E5m2 => ("F8_E5M2", 1, 1),
            Self::F8E8m0 => ("F8_E8M0", 1, 1),
            Self::F8E4m3Fnuz => ("F8_E4M3FNUZ", 1, 1),
            Self::F8E5m2Fnuz => ("F8_E5M2FNUZ", 1, 1),
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q2K => ("Q2_K", 256, 84),
            Self::Q3K => ("Q3_K", 256, 110),
            Self::Q4K => ("Q4_K", 256, 144),
            Self::Q5K => ("Q5_K", 256, 176),
            Self::Q6K => ("Q6_K", 256, 210),
        }
    }

    /// The type's name as its files spell it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.layout().0
    }

    /// How many elements are stored together (1 for plain types), along the last dimension.
    #[must_use]
    pub const fn block_elements(self) -> usize {
        self.layout().1
    }

    /// Bytes of [`block_elements`](Self::block_elements) elements.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        self.layout().2
    }

    /// Bytes of `elements` elements; `None` if they do not fill whole blocks or the number overflows.
    #[must_use]
    pub const fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// The type of this name in a safetensors header.
    #[must_use]
    pub fn from_safetensors(name: &str) -> Option<Self> {
        SAFETENSORS.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The names that a safetensors header may use, for messages.
    #[must_use]
    pub fn safetensors_names() -> String {
        SAFETENSORS.map(Self::name).join(", ")
    }

    /// The type of this id in a GGUF file.
    #[must_use]
    pub const fn from_ggml(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            24 => Self::I8,
            25 => Self::I16,
            26 => Self::I32,
            27 => Self::I64,
            28 => Self::F64,
            30 => Self::Bf16,
            _ => return None,
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::DType;

    #[test]
    fn sizes_are_checked() {
        assert_eq!(DType::Bf16.bytes_of(3), Some(6));
        assert_eq!(DType::Q4_1.bytes_of(64), Some(40));
        assert_eq!(DType::Q4_1.bytes_of(33), None, "not whole blocks");
        assert_eq!(DType::F6E2m3.bytes_of(8), Some(6));
        assert_eq!(DType::F32.bytes_of(usize::MAX / 2), None, "overflow");
    }

    #[test]
    fn names_and_ids_belong_to_their_format() {
        assert_eq!(DType::from_safetensors("BF16"), Some(DType::Bf16));
        assert_eq!(DType::from_safetensors("Q4_0"), None);
        assert_eq!(DType::from_ggml(30), Some(DType::Bf16));
        assert_eq!(DType::from_ggml(20), None);
        assert_eq!(DType::Q6K.to_string(), "Q6_K");
    }
}
