//! Keys and values in and out of the store, and sequences from one store to another.

use super::block::{BLOCK, Block};
use super::error::KvError;
use super::spec::KvWindow;
use super::state::States;
use super::store::{KvStore, Sequence, SequenceId};
use super::{KvQuantization, LayerGroup, Policy};
use lmx_tensor::kernels::attention::{KvCodes, KvQuant, KvShape, read_codes, read_kv, write_codes, write_kv};
use std::ops::Range;
use std::sync::Arc;

/// The positions of a sequence whose keys and values a layer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The first ones.
    pub first: Range<usize>,
    /// The last ones; they begin where `first` ends if nothing is lacking.
    pub last: Range<usize>,
}

impl Held {
    /// All of a sequence of `len` tokens.
    #[must_use]
    pub fn all(len: usize) -> Self {
        Self { first: 0..0, last: 0..len }
    }

    /// The positions, in order.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.first.clone().chain(self.last.clone())
    }

    /// The number of positions.
    #[must_use]
    pub fn count(&self) -> usize {
        self.first.len() + self.last.len()
    }

    /// Whether positions between the two parts are lacking.
    #[must_use]
    pub fn has_gap(&self) -> bool {
        self.first.end < self.last.start
    }
}

/// A layer's bytes of a block, with their form.
type Slab<Bytes> = (KvShape, Option<KvQuant>, Bytes);

impl KvStore {
    /// Which positions the layers of `group` hold of a sequence. Of a window's first positions those that it
    /// keeps are named only, once others were dropped.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn held(&self, id: SequenceId, group: usize) -> Result<Held, KvError> {
        let sequence = self.get(id)?;
        let policy = self.spec.groups[group].policy;
        let kept = policy.kept().div_ceil(BLOCK);
        let dropped = sequence.tables[group].iter().skip(kept).take_while(|block| block.is_none()).count();
        let start = if dropped == 0 { 0 } else { (kept + dropped) * BLOCK };
        let start = start.max(sequence.gaps[group]);
        if start == 0 {
            return Ok(Held::all(sequence.len));
        }
        Ok(Held { first: 0..policy.kept(), last: start..sequence.len })
    }

    /// Reads the key and value `[kv_heads][head_dim]` of one position that `layer` holds as floats, widened. False if
    /// it does not hold the position so.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn read(
        &self,
        id: SequenceId,
        layer: usize,
        position: usize,
        k: &mut [f32],
        v: &mut [f32],
    ) -> Result<bool, KvError> {
        let slab = self.slab_of(id, layer, position)?.filter(|(_, quant, _)| quant.is_none());
        if let Some((shape, _, slab)) = slab {
            read_kv(&shape, slab, position % BLOCK, k, v);
        }
        Ok(slab.is_some())
    }

    /// As [`KvStore::read`], where it holds the position quantized.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn read_codes(
        &self,
        id: SequenceId,
        layer: usize,
        position: usize,
        k: &mut KvCodes,
        v: &mut KvCodes,
    ) -> Result<bool, KvError> {
        let Some((shape, Some(quant), slab)) = self.slab_of(id, layer, position)? else { return Ok(false) };
        read_codes(&shape, quant, slab, position % BLOCK, k, v);
        Ok(true)
    }

    /// The layer's slab that holds the position, if one does.
    fn slab_of(&self, id: SequenceId, layer: usize, position: usize) -> Result<Option<Slab<&[u8]>>, KvError> {
        let (group, place) = self.spec.layers[layer];
        let shape = self.spec.groups[group].shape;
        let sequence = self.get(id)?;
        let block = sequence.tables[group].get(position / BLOCK).and_then(Option::as_ref);
        let bytes = shape.slab_bytes(sequence.quant);
        Ok(block.map(|block| (shape, sequence.quant, block.slab(place, bytes))))
    }

    /// Starts a sequence of `len` tokens which, for each group, holds the given positions, all zero until
    /// [`KvStore::put`] fills them; quantized as the store's spec says if `quantized`, then until
    /// [`KvStore::put_codes`] does.
    ///
    /// # Errors
    /// [`KvError::OutOfMemory`], [`KvError::Lacking`] if a group would not hold all that the next query sees.
    pub fn add_holding(&mut self, len: usize, held: &[Held], quantized: bool) -> Result<SequenceId, KvError> {
        let quant = self.spec.quantization.filter(|_| quantized).map(KvQuantization::quant);
        let mut tables = Vec::with_capacity(held.len());
        let mut gaps = Vec::with_capacity(held.len());
        for (group, held) in self.spec.groups.iter().zip(held) {
            check_held(group, len, held)?;
            let mut table = vec![None; len.div_ceil(BLOCK)];
            for range in [&held.first, &held.last] {
                for slot in &mut table[range.start / BLOCK..range.end.div_ceil(BLOCK)] {
                    if slot.is_none() {
                        let bytes = group.block_bytes(quant);
                        let (used, limit) = (self.budget.used(), self.budget.limit());
                        let block = Block::new(bytes, &self.budget);
                        let block = block.ok_or(KvError::OutOfMemory { used, limit, needed: bytes })?;
                        *slot = Some(Arc::new(block));
                    }
                }
            }
            tables.push(table);
            gaps.push(if held.has_gap() { held.last.start } else { 0 });
        }
        Ok(self.push(Sequence { gaps, ..Sequence::new(len, quant, tables, States::default()) }))
    }

    /// Stores the key and value `[kv_heads][head_dim]` of one position of a sequence that
    /// [`KvStore::add_holding`] started and that nothing else shares.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn put(
        &mut self,
        id: SequenceId,
        layer: usize,
        position: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), KvError> {
        let slab = self.slab_to_fill(id, layer, position)?;
        debug_assert!(matches!(slab, Some((_, None, _))), "position {position} is not held as floats");
        if let Some((shape, None, slab)) = slab {
            write_kv(&shape, slab, position % BLOCK, k, v);
        }
        Ok(())
    }

    /// As [`KvStore::put`], where the sequence is quantized.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn put_codes(
        &mut self,
        id: SequenceId,
        layer: usize,
        position: usize,
        k: &KvCodes,
        v: &KvCodes,
    ) -> Result<(), KvError> {
        let slab = self.slab_to_fill(id, layer, position)?;
        debug_assert!(matches!(slab, Some((_, Some(_), _))), "position {position} is not held quantized");
        if let Some((shape, Some(quant), slab)) = slab {
            write_codes(&shape, quant, slab, position % BLOCK, k, v);
        }
        Ok(())
    }

    /// The layer's slab that holds the position, if nothing else shares it.
    fn slab_to_fill(
        &mut self,
        id: SequenceId,
        layer: usize,
        position: usize,
    ) -> Result<Option<Slab<&mut [u8]>>, KvError> {
        let (group, place) = self.spec.layers[layer];
        let shape = self.spec.groups[group].shape;
        let sequence = self.get_mut(id)?;
        let (quant, bytes) = (sequence.quant, shape.slab_bytes(sequence.quant));
        let block = sequence.tables[group].get_mut(position / BLOCK).and_then(Option::as_mut);
        let block = block.and_then(Arc::get_mut);
        Ok(block.map(|block| (shape, quant, block.slab_mut(place, bytes))))
    }

    /// A fork of a sequence in another store, with which it shares its blocks; they stay counted against this
    /// store's budget.
    ///
    /// # Errors
    /// [`KvError::OtherSpec`] if the other store keeps something else, [`KvError::UnknownSequence`].
    pub fn fork_into(&self, id: SequenceId, other: &mut Self) -> Result<SequenceId, KvError> {
        if self.spec != other.spec {
            let (found, expected) = (self.spec.to_string(), other.spec.to_string());
            return Err(KvError::OtherSpec { found, expected });
        }
        Ok(other.push(self.get(id)?.clone()))
    }

    /// Bytes of the blocks that a sequence holds, shared ones included.
    #[must_use]
    pub fn bytes_of(&self, id: SequenceId) -> usize {
        let blocks = |s: &Sequence| s.tables.iter().flatten().flatten().map(|b| b.bytes()).sum();
        self.get(id).map_or(0, blocks)
    }
}

/// That `held` is what a sequence of `len` tokens may consist of.
fn check_held(group: &LayerGroup, len: usize, held: &Held) -> Result<(), KvError> {
    let ordered =
        held.first.start == 0 && held.first.end <= held.last.start && held.last.start <= held.last.end;
    let seen = match group.policy {
        Policy::Full => !held.has_gap(),
        Policy::Window(window) => !held.has_gap() || sees_only(window, len, held),
        Policy::Chunk(size) => held.first.is_empty() && held.last.start <= len - len % size,
    };
    if ordered && held.last.end == len && seen {
        return Ok(());
    }
    let (first, last) = (held.first.end, held.last.start);
    Err(KvError::Lacking { len, first, last })
}

/// Whether the query at `len` sees nothing between the two parts.
fn sees_only(window: KvWindow, len: usize, held: &Held) -> bool {
    held.first.end == window.keep()
        && held.last.start <= (len + 1).saturating_sub(window.size() - window.keep())
}
