//! One layer of a prompt-cache file: what mlx-lm's classes keep, and which positions that is.

use super::PromptCacheError;
use super::file::Entries;
use crate::cache::{Held, KvWindow, Policy};
use half::{bf16, f16};
use lmx_tensor::files::{DType, FileTensor};
use lmx_tensor::kernels::attention::KvType;

/// A longer sequence than any model's: a file that claims more is not worth the table for it.
const POSITIONS_MAX: usize = 1 << 24;

/// The keys and values of a layer, `[1, kv_heads, entries, head_dim]` each.
#[derive(Debug)]
pub(super) struct LayerFile {
    pub(super) keys: FileTensor,
    pub(super) values: FileTensor,
    pub(super) ty: KvType,
    /// Tokens of the sequence.
    pub(super) offset: usize,
    pub(super) kind: Kind,
}

/// The classes that lmx can read; quantized ones come with quantized blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `KVCache`: entry i is position i; what follows the offset is room to grow.
    Full,
    /// `RotatingKVCache`: a ring whose first `keep` entries stay, with the next entry to write.
    Rotating { window: KvWindow, index: usize },
}

impl LayerFile {
    pub(super) fn read(file: &Entries, layer: usize, class: &str) -> Result<Self, PromptCacheError> {
        let keys = file.tensor(&format!("{layer}.0"))?;
        let values = file.tensor(&format!("{layer}.1"))?;
        let ty = file.float(&keys)?;
        if values.dtype() != keys.dtype() || values.shape() != keys.shape() {
            let found = format!("{} {:?}", values.dtype(), values.shape());
            let allowed = format!("like the keys, {} {:?}", keys.dtype(), keys.shape());
            return Err(file.wrong(&format!("tensor \"{layer}.1\""), found, allowed));
        }
        let &[1, _, entries, _] = keys.shape() else {
            let found = format!("{:?}", keys.shape());
            return Err(file.wrong(
                &format!("the shape of tensor \"{layer}.0\""),
                found,
                "[1, heads, tokens, head size]",
            ));
        };
        let offset = file.scalar(&format!("{layer}.2"), POSITIONS_MAX)?;
        let kind = match class {
            "KVCache" => {
                if offset > entries {
                    let field = format!("the offset \"{layer}.2\"");
                    return Err(file.wrong(
                        &field,
                        offset,
                        format!("at most the {entries} entries of the keys"),
                    ));
                }
                Kind::Full
            }
            "RotatingKVCache" => Self::rotating(file, layer, entries, offset)?,
            "QuantizedKVCache" => {
                let allowed = "KVCache or RotatingKVCache: quantized keys and values cannot be read yet";
                return Err(file.wrong(&format!("the class of layer {layer} (1.{layer})"), class, allowed));
            }
            _ => {
                let field = format!("the class of layer {layer} (1.{layer})");
                return Err(file.wrong(&field, format!("{class:?}"), "KVCache or RotatingKVCache"));
            }
        };
        Ok(Self { keys, values, ty, offset, kind })
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

    fn entries(&self) -> usize {
        self.keys.shape().get(2).copied().unwrap_or(0)
    }

    /// What queries of this layer see.
    pub(super) fn policy(&self) -> Policy {
        match self.kind {
            Kind::Full => Policy::Full,
            Kind::Rotating { window, .. } => Policy::Window(window),
        }
    }

    /// The positions that it holds.
    pub(super) fn held(&self) -> Held {
        match self.kind {
            Kind::Rotating { window, .. } if self.offset > self.entries() => {
                let last = self.offset - (self.entries() - window.keep());
                Held { first: 0..window.keep(), last: last..self.offset }
            }
            _ => Held::all(self.offset),
        }
    }

    /// Where the positions of [`LayerFile::held`] are, in their order.
    pub(super) fn order(&self) -> Vec<usize> {
        match self.kind {
            Kind::Rotating { window, index } if self.offset > self.entries() => {
                (0..window.keep()).chain(index..self.entries()).chain(window.keep()..index).collect()
            }
            _ => (0..self.offset).collect(),
        }
    }

    /// Reads the key and value `[kv_heads][head_dim]` of an entry, widened.
    pub(super) fn entry(&self, entry: usize, k: &mut [f32], v: &mut [f32]) {
        let (entries, width) = (self.entries(), self.keys.shape().last().copied().unwrap_or(1).max(1));
        for (tensor, row) in [(&self.keys, k), (&self.values, v)] {
            for (head, to) in row.chunks_exact_mut(width).enumerate() {
                let at = (head * entries + entry) * width;
                match self.ty {
                    KvType::F32 => widen(tensor, at, to, f32::from_le_bytes),
                    KvType::F16 => widen(tensor, at, to, |x| f16::from_le_bytes(x).to_f32()),
                    KvType::Bf16 => widen(tensor, at, to, |x| bf16::from_le_bytes(x).to_f32()),
                }
            }
        }
    }
}

fn widen<const N: usize>(tensor: &FileTensor, at: usize, to: &mut [f32], one: impl Fn([u8; N]) -> f32) {
    let elements = tensor.data().as_chunks::<N>().0.iter().skip(at);
    to.iter_mut().zip(elements).for_each(|(to, &from)| *to = one(from));
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
