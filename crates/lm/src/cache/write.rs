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
    ///
    /// # Panics
    /// If `k` or `v` has fewer rows than are named.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvSpec, LayerKv, Policy};
    use lmx_tensor::kernels::Isa;
    use lmx_tensor::kernels::attention::KvType;

    /// Three sequences of 0, 30 and 64 tokens, and room for 40 more of each.
    fn store() -> (KvStore, Vec<SequenceId>) {
        let full = LayerKv { kv_heads: 1, head_dim: 2, policy: Policy::Full };
        let mut store = KvStore::new(KvSpec::new(&[full, full], KvType::F32), usize::MAX);
        let ids = [0, 30, 64].map(|tokens| {
            let id = store.add();
            store.reserve(id, tokens).unwrap();
            store.commit(id, tokens).unwrap();
            store.reserve(id, 40).unwrap();
            id
        });
        (store, ids.to_vec())
    }

    fn held(store: &KvStore, ids: &[SequenceId]) -> Vec<Vec<u8>> {
        let layers = (0..2).flat_map(|layer| ids.iter().map(move |id| (layer, *id)));
        layers
            .map(|(layer, id)| {
                store.slabs(id, layer).unwrap().into_iter().flatten().flatten().copied().collect()
            })
            .collect()
    }

    #[test]
    fn a_step_of_several_sequences_is_each_of_them_alone() {
        let k: Vec<f32> = (1..=160).map(|i| i as f32).collect();
        let v: Vec<f32> = k.iter().map(|k| -k).collect();
        let exec = Exec::new(Isa::best(), 2);
        let (mut together, ids) = store();
        // In another order than the store has them.
        let rows = [(ids[2], 0..1), (ids[0], 1..40), (ids[1], 40..80)];
        together.write(&exec, 1, &rows, &k, &v).unwrap();
        let (mut alone, ids) = store();
        let empty = held(&alone, &ids);
        for (id, rows) in [(ids[2], 0..1), (ids[0], 1..40), (ids[1], 40..80)] {
            let (k, v) = (&k[2 * rows.start..2 * rows.end], &v[2 * rows.start..2 * rows.end]);
            alone.write(&exec, 1, &[(id, 0..rows.len())], k, v).unwrap();
        }
        assert_eq!(held(&together, &ids), held(&alone, &ids));
        // The first layer is as it was, the second one of each sequence is not.
        let changed =
            held(&alone, &ids).iter().zip(&empty).map(|(now, then)| now != then).collect::<Vec<_>>();
        assert_eq!(changed, [false, false, false, true, true, true]);
    }

    #[test]
    fn an_unknown_sequence_writes_nothing() {
        let (mut store, ids) = store();
        let before = held(&store, &ids);
        let gone = store.add();
        store.remove(gone);
        let rows = [(ids[0], 0..1), (gone, 1..2)];
        let written = store.write(&Exec::new(Isa::best(), 1), 0, &rows, &[1.0; 4], &[2.0; 4]);
        assert_eq!(written, Err(KvError::UnknownSequence));
        assert_eq!(held(&store, &ids), before);
    }
}
