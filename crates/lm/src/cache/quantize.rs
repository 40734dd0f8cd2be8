//! When keys and values are held quantized, and how a sequence's blocks become so.
//!
//! A query at position p reads quantized keys and values, its own included, if and only if p is at or behind the
//! start. So until then a sequence holds floats; when it is to go on from there its blocks are quantized one by one,
//! and what follows is quantized as it is written.

use super::block::{BLOCK, Block};
use super::{KvError, LayerGroup, LayerKv};
use lmx_tensor::kernels::attention::KvQuant;
use std::sync::Arc;

/// Keys and values quantized as by mlx, from a position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvQuantization {
    quant: KvQuant,
    start: usize,
}

/// Why keys and values cannot be quantized so.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KvQuantError {
    /// No such number of bits.
    #[error("keys and values cannot be quantized to {bits} bits: 2, 3, 4, 5, 6 and 8 are possible")]
    Bits {
        /// What was asked for.
        bits: usize,
    },
    /// No such group.
    #[error("keys and values cannot be quantized in groups of {group}: 32, 64 and 128 are possible")]
    Group {
        /// What was asked for.
        group: usize,
    },
    /// A layer's heads are not whole groups.
    #[error(
        "keys and values cannot be quantized in groups of {group}: layer {layer} has heads of {head_dim} dimensions, \
        which take {}", fitting(*head_dim)
    )]
    HeadDim {
        /// The first such layer.
        layer: usize,
        /// Dimensions of its heads.
        head_dim: usize,
        /// What was asked for.
        group: usize,
    },
}

/// The groups that divide `head_dim`, in words.
fn fitting(head_dim: usize) -> String {
    let fits = |group: &&usize| head_dim.is_multiple_of(**group);
    let groups: Vec<String> = KvQuant::GROUPS.iter().filter(fits).map(usize::to_string).collect();
    if groups.is_empty() {
        "no groups at all".to_owned()
    } else {
        format!("groups of {}", groups.join(" or "))
    }
}

impl KvQuantization {
    /// The group of mlx-lm.
    pub const GROUP: usize = 64;
    /// The start of mlx-lm.
    pub const START: usize = 5000;

    /// Codes of `bits` bits for groups of `group` dimensions, read by queries at position `start` and later.
    ///
    /// # Errors
    /// [`KvQuantError`] if there are no such codes or groups.
    pub fn new(bits: usize, group: usize, start: usize) -> Result<Self, KvQuantError> {
        if !KvQuant::BITS.contains(&bits) {
            return Err(KvQuantError::Bits { bits });
        }
        let quant = KvQuant::new(bits, group).ok_or(KvQuantError::Group { group })?;
        Ok(Self { quant, start })
    }

    /// `quant`, read by queries at position `start` and later.
    #[must_use]
    pub fn from_position(quant: KvQuant, start: usize) -> Self {
        Self { quant, start }
    }

    /// Whether the heads of all layers are whole groups.
    ///
    /// # Errors
    /// [`KvQuantError::HeadDim`] naming the first layer that is none.
    pub fn check(self, layers: &[LayerKv]) -> Result<(), KvQuantError> {
        match layers.iter().position(|layer| !self.quant.fits(layer.head_dim)) {
            None => Ok(()),
            Some(layer) => {
                let (head_dim, group) = (layers[layer].head_dim, self.quant.group());
                Err(KvQuantError::HeadDim { layer, head_dim, group })
            }
        }
    }

    /// Bits of a code.
    #[must_use]
    pub fn bits(self) -> usize {
        self.quant.bits()
    }

    /// Dimensions that share a scale and a bias.
    #[must_use]
    pub fn group(self) -> usize {
        self.quant.group()
    }

    /// The first position whose query reads quantized keys and values.
    #[must_use]
    pub fn start(self) -> usize {
        self.start
    }

    /// How a block stores them.
    #[must_use]
    pub fn quant(self) -> KvQuant {
        self.quant
    }
}

/// Quantizes the blocks of a sequence of `len` tokens, whose tables are those of `groups`. A block that another
/// sequence shares stays as it is: this one gets a quantized block beside it. Others give their memory back one by
/// one.
///
/// # Errors
/// [`KvError::OutOfMemory`], with nothing changed.
pub(super) fn quantize_blocks(
    groups: &[LayerGroup],
    quant: KvQuant,
    tables: &mut [Vec<Option<Arc<Block>>>],
    len: usize,
    out_of_memory: impl Fn(usize) -> KvError,
) -> Result<(), KvError> {
    let filled = |number: usize| (len - number * BLOCK).min(BLOCK);
    // What is or was shared comes first, since only that can fail: `out_of_memory` says of how many bytes.
    let mut beside = Vec::new();
    for (index, (table, group)) in tables.iter_mut().zip(groups).enumerate() {
        for (number, slot) in table.iter_mut().enumerate() {
            let Some(block) = slot else { continue };
            let quantized = match block.known_quantized() {
                Some(quantized) => quantized,
                None if Arc::get_mut(block).is_none() => {
                    let quantized = block.quantized_beside(group, quant, filled(number));
                    quantized.ok_or_else(|| out_of_memory(group.block_bytes(Some(quant))))?
                }
                None => continue,
            };
            beside.push((index, number, quantized));
        }
    }
    for (index, number, quantized) in beside {
        tables[index][number] = Some(quantized);
    }
    for (table, group) in tables.iter_mut().zip(groups) {
        for (number, slot) in table.iter_mut().enumerate() {
            let block = slot.as_mut().and_then(Arc::get_mut);
            if let Some(block) = block.filter(|block| block.bytes() == group.block_bytes(None)) {
                block.quantize(group, quant, filled(number));
            }
        }
    }
    Ok(())
}
