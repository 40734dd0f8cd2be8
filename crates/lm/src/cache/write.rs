//! The keys and values of a step, written block by block on all threads.

use super::block::BLOCK;
use super::error::KvError;
use super::store::{KvStore, SequenceId};
use lmx_tensor::kernels::Exec;
use lmx_tensor::kernels::attention::{KvQuant, KvShape, write_kv, write_quantized};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What goes into one block of one sequence.
struct Piece<'a> {
    shape: KvShape,
    quant: Option<KvQuant>,
    slab: &'a mut [u8],
    /// Of the first token.
    slot: usize,
    /// `[tokens][kv_heads][head_dim]`.
    k: &'a [f32],
    v: &'a [f32],
}

impl Piece<'_> {
    fn write(&mut self) {
        let width = self.shape.kv_heads * self.shape.head_dim;
        for (i, (k, v)) in self.k.chunks_exact(width).zip(self.v.chunks_exact(width)).enumerate() {
            match self.quant {
                None => write_kv(&self.shape, self.slab, self.slot + i, k, v),
                Some(quant) => write_quantized(&self.shape, quant, self.slab, self.slot + i, k, v),
            }
        }
    }
}

impl KvStore {
    /// Stores the keys and values `k`, `v` (`[rows][kv_heads][head_dim]`) of `layer`, counted among those that have keys
    /// and values: of each sequence, once, its `rows`, at the positions after its length. The room must have been reserved.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`]; nothing is written then.
    pub fn write(
        &mut self,
        exec: &Exec,
        layer: usize,
        rows: &[(SequenceId, Range<usize>)],
        k: &[f32],
        v: &[f32],
    ) -> Result<(), KvError> {
        rows.iter().try_for_each(|(id, _)| self.get(*id).map(drop))?;
        let (group, place) = self.spec.layers[layer];
        let layers = &self.spec.groups[group];
        let (shape, width) = (layers.shape, layers.shape.kv_heads * layers.shape.head_dim);
        let mut pieces = Vec::with_capacity(rows.len());
        for sequence in &mut self.sequences {
            let Some((_, rows)) = rows.iter().find(|(id, _)| *id == sequence.id) else { continue };
            let (quant, bytes) = (sequence.quant, layers.slab_bytes(sequence.quant));
            let positions = sequence.len..sequence.len + rows.len();
            let blocks = sequence.tables[group].iter_mut().enumerate();
            let touched = positions.start / BLOCK..positions.end.div_ceil(BLOCK);
            for (number, block) in blocks.take(touched.end).skip(touched.start) {
                let first = positions.start.max(number * BLOCK);
                let end = positions.end.min((number + 1) * BLOCK);
                // `reserve` made the block unique; a block that is not is a bug of the caller.
                let block = block.as_mut().and_then(Arc::get_mut);
                debug_assert!(block.is_some(), "positions {first}..{end} were not reserved");
                let Some(block) = block else { continue };
                let row = |position: usize| (rows.start + position - positions.start) * width;
                let floats = row(first)..row(end);
                pieces.push(Mutex::new(Piece {
                    shape,
                    quant,
                    slab: block.slab_mut(place, bytes),
                    slot: first % BLOCK,
                    k: &k[floats.clone()],
                    v: &v[floats],
                }));
            }
        }
        exec.pool.for_each(pieces.len(), &|index| {
            pieces[index].lock().unwrap_or_else(PoisonError::into_inner).write();
        });
        Ok(())
    }
}
