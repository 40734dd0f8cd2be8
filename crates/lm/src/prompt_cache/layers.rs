//! One layer of a prompt-cache file: what mlx-lm's classes keep, and which positions that is.

use super::PromptCacheError;
use super::file::Entries;
use crate::cache::{Held, KvWindow, Policy};
use half::{bf16, f16};
use lmx_tensor::files::{DType, FileTensor};
use lmx_tensor::kernels::attention::{KvCodes, KvQuant, KvType};

/// A longer sequence than any model's: a file that claims more is not worth the table for it.
const POSITIONS_MAX: usize = 1 << 24;

/// The keys and values of a layer.
#[derive(Debug)]
pub(super) struct LayerFile {
    keys: Rows,
    values: Rows,
    pub(super) ty: KvType,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Tokens that there is room for.
    entries: usize,
    /// Tokens of the sequence.
    pub(super) offset: usize,
    pub(super) kind: Kind,
}

/// Keys or values, `[1, kv_heads, entries, width]` each.
#[derive(Debug)]
struct Rows {
    /// Floats, or codes in words of 32 bits.
    main: FileTensor,
    /// The scales and the biases of codes.
    factors: Option<[FileTensor; 2]>,
}

/// The classes that lmx can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `KVCache`: entry i is position i; what follows the offset is room to grow.
    Full,
    /// `RotatingKVCache`: a ring whose first `keep` entries stay, with the next entry to write.
    Rotating { window: KvWindow, index: usize },
    /// `QuantizedKVCache`: as `Full`, quantized.
    Quantized(KvQuant),
}

impl Rows {
    /// Reads the tensors `name`, or if they are quantized `name.0` and on, for which the values must be like the keys.
    fn read(
        file: &Entries,
        layer: usize,
        quantized: bool,
        side: usize,
        like: Option<&Self>,
    ) -> Result<Self, PromptCacheError> {
        let name = format!("{layer}.{side}");
        let rows = if quantized {
            let part = |n: usize| file.tensor(&format!("{name}.{n}"));
            Self { main: part(0)?, factors: Some([part(1)?, part(2)?]) }
        } else {
            Self { main: file.tensor(&name)?, factors: None }
        };
        for (own, like) in rows.tensors().zip(like.into_iter().flat_map(Self::tensors)) {
            if own.dtype() != like.dtype() || own.shape() != like.shape() {
                let found = format!("{} {:?}", own.dtype(), own.shape());
                let allowed = format!("like the keys, {} {:?}", like.dtype(), like.shape());
                return Err(file.wrong(&format!("tensor {:?}", own.name()), found, allowed));
            }
        }
        Ok(rows)
    }

    fn tensors(&self) -> impl Iterator<Item = &FileTensor> {
        std::iter::once(&self.main).chain(self.factors.iter().flatten())
    }
}

impl LayerFile {
    pub(super) fn read(file: &Entries, layer: usize, class: &str) -> Result<Self, PromptCacheError> {
        let quantized = class == "QuantizedKVCache";
        if !quantized && !matches!(class, "KVCache" | "RotatingKVCache") {
            let field = format!("the class of layer {layer} (1.{layer})");
            let allowed = "KVCache, RotatingKVCache or QuantizedKVCache";
            return Err(file.wrong(&field, format!("{class:?}"), allowed));
        }
        let keys = Rows::read(file, layer, quantized, 0, None)?;
        let &[1, kv_heads, entries, width] = keys.main.shape() else {
            let (field, found) = (format!("the shape of tensor {:?}", keys.main.name()), keys.main.shape());
            return Err(file.wrong(&field, format!("{found:?}"), "[1, heads, tokens, width]"));
        };
        let offset = file.scalar(&format!("{layer}.2"), POSITIONS_MAX)?;
        if class != "RotatingKVCache" && offset > entries {
            let allowed = format!("at most the {entries} entries of the keys");
            return Err(file.wrong(&format!("the offset \"{layer}.2\""), offset, allowed));
        }
        let (kind, ty, head_dim) = match &keys.factors {
            Some(factors) => {
                let quant = Self::quant(file, layer)?;
                let (ty, head_dim) = codes_of(file, quant, &keys.main, factors)?;
                (Kind::Quantized(quant), ty, head_dim)
            }
            None if class == "RotatingKVCache" => {
                (Self::rotating(file, layer, entries, offset)?, file.float(&keys.main)?, width)
            }
            None => (Kind::Full, file.float(&keys.main)?, width),
        };
        let values = Rows::read(file, layer, quantized, 1, Some(&keys))?;
        Ok(Self { keys, values, ty, kv_heads, head_dim, entries, offset, kind })
    }

    /// How the file says that a layer is quantized.
    fn quant(file: &Entries, layer: usize) -> Result<KvQuant, PromptCacheError> {
        let group = file.scalar(&format!("{layer}.3"), POSITIONS_MAX)?;
        let bits = file.scalar(&format!("{layer}.4"), POSITIONS_MAX)?;
        if !KvQuant::BITS.contains(&bits) {
            let allowed = "2, 3, 4, 5, 6 or 8";
            return Err(file.wrong(&format!("the bits \"{layer}.4\""), bits, allowed));
        }
        KvQuant::new(bits, group)
            .ok_or_else(|| file.wrong(&format!("the group size \"{layer}.3\""), group, "32, 64 or 128"))
    }

    fn rotating(
        file: &Entries,
        layer: usize,
        entries: usize,
        offset: usize,
    ) -> Result<Kind, PromptCacheError> {
        let keep = file.scalar(&format!("{layer}.3"), POSITIONS_MAX)?;
        let size = file.scalar(&format!("{layer}.4"), POSITIONS_MAX)?;
        let index = file.scalar(&format!("{layer}.5"), POSITIONS_MAX)?;
        let window = KvWindow::new(size, keep).map_err(|_| {
            let field = format!("the kept entries \"{layer}.3\"");
            file.wrong(&field, keep, format!("less than the size \"{layer}.4\", which is {size}"))
        })?;
        // Never full: entry i is position i. Else the ring is full, or was cut to begin with.
        let begun = offset == index && offset <= entries;
        let ring =
            offset > entries && (index == entries || entries == size) && (keep..=entries).contains(&index);
        if begun || ring {
            return Ok(Kind::Rotating { window, index });
        }
        let field = format!("the place to write \"{layer}.5\"");
        let allowed = format!("one that suits {entries} entries, {keep} of them kept, after {offset} tokens");
        Err(file.wrong(&field, index, allowed))
    }

    /// What queries of this layer see.
    pub(super) fn policy(&self) -> Policy {
        match self.kind {
            Kind::Full | Kind::Quantized(_) => Policy::Full,
            Kind::Rotating { window, .. } => Policy::Window(window),
        }
    }

    /// How it is quantized, if it is.
    pub(super) fn quantized(&self) -> Option<KvQuant> {
        match self.kind {
            Kind::Quantized(quant) => Some(quant),
            Kind::Full | Kind::Rotating { .. } => None,
        }
    }

    /// The positions that it holds.
    pub(super) fn held(&self) -> Held {
        match self.kind {
            Kind::Rotating { window, .. } if self.offset > self.entries => {
                let last = self.offset - (self.entries - window.keep());
                Held { first: 0..window.keep(), last: last..self.offset }
            }
            _ => Held::all(self.offset),
        }
    }

    /// Where the positions of [`LayerFile::held`] are, in their order.
    pub(super) fn order(&self) -> Vec<usize> {
        match self.kind {
            Kind::Rotating { window, index } if self.offset > self.entries => {
                (0..window.keep()).chain(index..self.entries).chain(window.keep()..index).collect()
            }
            _ => (0..self.offset).collect(),
        }
    }

    /// Reads the key and value `[kv_heads][head_dim]` of an entry of floats, widened.
    pub(super) fn entry(&self, entry: usize, k: &mut [f32], v: &mut [f32]) {
        for (rows, to) in [(&self.keys, k), (&self.values, v)] {
            for (head, to) in to.chunks_exact_mut(self.head_dim.max(1)).enumerate() {
                let row = row(&rows.main, head * self.entries + entry);
                match self.ty {
                    KvType::F32 => widen(row, to, f32::from_le_bytes),
                    KvType::F16 => widen(row, to, |x| f16::from_le_bytes(x).to_f32()),
                    KvType::Bf16 => widen(row, to, |x| bf16::from_le_bytes(x).to_f32()),
                }
            }
        }
    }

    /// The key and value of a quantized entry.
    pub(super) fn codes(&self, entry: usize, k: &mut KvCodes, v: &mut KvCodes) {
        for (rows, to) in [(&self.keys, k), (&self.values, v)] {
            for (tensor, to) in rows.tensors().zip([&mut to.codes, &mut to.scales, &mut to.biases]) {
                // Words of codes are little-endian: their bytes are the stream.
                let width = to.len() / self.kv_heads.max(1);
                for (head, to) in to.chunks_exact_mut(width.max(1)).enumerate() {
                    let row = row(tensor, head * self.entries + entry);
                    to.iter_mut().zip(row).for_each(|(to, &from)| *to = from);
                }
            }
        }
    }
}

/// The bytes of one row of a tensor.
fn row(tensor: &FileTensor, index: usize) -> &[u8] {
    let width = tensor.shape().last().and_then(|&width| tensor.dtype().bytes_of(width)).unwrap_or(0);
    tensor.data().get(index * width..).and_then(|rows| rows.get(..width)).unwrap_or_default()
}

/// The float type and the head size of quantized keys, whose tensors must agree on them.
fn codes_of(
    file: &Entries,
    quant: KvQuant,
    codes: &FileTensor,
    factors: &[FileTensor; 2],
) -> Result<(KvType, usize), PromptCacheError> {
    if codes.dtype() != DType::U32 {
        let field = format!("the type of tensor {:?}", codes.name());
        return Err(file.wrong(&field, codes.dtype(), "U32"));
    }
    let scales = &factors[0];
    let ty = file.float(scales)?;
    let (words, outer) = codes.shape().split_last().map_or((0, &[][..]), |(&words, outer)| (words, outer));
    let groups = scales.shape().last().copied().unwrap_or(0);
    let head_dim = groups.saturating_mul(quant.group());
    for tensor in factors {
        let wanted = [outer, &[groups]].concat();
        if tensor.shape() != wanted || tensor.dtype() != scales.dtype() {
            let found = format!("{} {:?}", tensor.dtype(), tensor.shape());
            let allowed = format!("{} {wanted:?}, as of the codes", scales.dtype());
            return Err(file.wrong(&format!("tensor {:?}", tensor.name()), found, allowed));
        }
    }
    if head_dim.checked_mul(quant.bits()) != words.checked_mul(32) {
        let allowed = format!(
            "{} bits for each of {groups} groups of {}: {} words",
            quant.bits(),
            quant.group(),
            head_dim.saturating_mul(quant.bits()) / 32
        );
        let field = format!("the shape of tensor {:?}", codes.name());
        return Err(file.wrong(&field, format!("{:?}", codes.shape()), allowed));
    }
    Ok((ty, head_dim))
}

fn widen<const N: usize>(row: &[u8], to: &mut [f32], one: impl Fn([u8; N]) -> f32) {
    to.iter_mut().zip(row.as_chunks::<N>().0).for_each(|(to, &from)| *to = one(from));
}

/// A key or value row as the file stores it.
pub(super) fn narrow(ty: KvType, row: &[f32], to: &mut Vec<u8>) {
    match ty {
        KvType::F32 => to.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        KvType::F16 => to.extend(row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        KvType::Bf16 => to.extend(row.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
    }
}

/// The file's name for a type.
pub(super) fn dtype(ty: KvType) -> DType {
    match ty {
        KvType::F32 => DType::F32,
        KvType::F16 => DType::F16,
        KvType::Bf16 => DType::Bf16,
    }
}
