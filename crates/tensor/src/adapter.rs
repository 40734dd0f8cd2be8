//! Low-rank additions to weight matrices, chosen row by row: LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language
//! Models", 2021) and DoRA (Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024).
//!
//! The matrices themselves stay as they are, quantized or not, and are multiplied with every row of a batch; what an
//! adapter adds is computed for its own rows alone. So rows with different adapters, or with none, run together, and
//! none changes another's result.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::ops::{self, OpError};
use crate::{Device, Linear, LinearId, Tensor};

/// Rows of a matrix whose lengths are computed at a time.
const NORM_ROWS: usize = 256;

/// What an adapter adds to one matrix `W`: `W + up · down`, and with DoRA each of its rows is then given another length.
#[derive(Debug)]
pub struct LowRank {
    /// `[rank, in_features]`
    down: Linear,
    /// `[out_features, rank]`, the adapter's scale included.
    up: Linear,
    /// DoRA's factor on each output.
    factors: Option<Vec<f32>>,
}

impl LowRank {
    /// `up · down`, `[out_features, rank] · [rank, in_features]`.
    ///
    /// # Errors
    /// [`OpError`] if the two have another rank.
    pub fn new(down: Linear, up: Linear) -> Result<Self, OpError> {
        OpError::unless(up.in_features() == down.out_features(), "low_rank", || {
            format!("rank {} and rank {}", up.in_features(), down.out_features())
        })?;
        Ok(Self { down, up, factors: None })
    }

    /// With rows of the adapted `base` that have the given lengths, one for each of its outputs.
    ///
    /// # Errors
    /// [`OpError`] if the matrices differ in shape, or there are not so many lengths.
    pub fn with_row_lengths(self, device: &Device, base: &Linear, lengths: &[f32]) -> Result<Self, OpError> {
        let shape = |matrix: &Linear| [matrix.out_features(), matrix.in_features()];
        let own = [self.up.out_features(), self.down.in_features()];
        OpError::unless(shape(base) == own && lengths.len() == own[0], "low_rank", || {
            format!("{own:?} beside {:?} with {} lengths", shape(base), lengths.len())
        })?;
        let norms = self.row_norms(device, base)?;
        let factors = lengths.iter().zip(norms).map(|(length, norm)| length / norm).collect();
        Ok(Self { factors: Some(factors), ..self })
    }

    /// The length of each row of `base + up · down`, in blocks of rows, since the sum may be large.
    fn row_norms(&self, device: &Device, base: &Linear) -> Result<Vec<f32>, OpError> {
        let (rank, width) = (self.down.out_features(), base.in_features());
        let mut columns = vec![0.0; rank * width];
        let mut row = vec![0.0; width];
        for r in 0..rank {
            self.down.dequantize_row(r, &mut row);
            row.iter().enumerate().for_each(|(column, &value)| columns[column * rank + r] = value);
        }
        let columns = Linear::from_values(width, rank, &columns);
        let mut norms = Vec::with_capacity(base.out_features());
        for first in (0..base.out_features()).step_by(NORM_ROWS) {
            let rows = first..base.out_features().min(first + NORM_ROWS);
            let sum = ops::linear(&self.up_rows(device, rows.clone()), &columns, &RowAdapters::default())?;
            for (index, added) in rows.zip(sum.data().chunks_exact(width)) {
                base.dequantize_row(index, &mut row);
                let square = |(w, d): (&f32, &f32)| f64::from(w + d).powi(2);
                norms.push(row.iter().zip(added).map(square).sum::<f64>().sqrt() as f32);
            }
        }
        Ok(norms)
    }

    fn up_rows(&self, device: &Device, rows: impl ExactSizeIterator<Item = usize>) -> Tensor {
        let rank = self.up.in_features();
        let mut picked = Tensor::zeros(device, rows.len(), rank);
        for (to, row) in picked.data_mut().chunks_exact_mut(rank).zip(rows) {
            self.up.dequantize_row(row, to);
        }
        picked
    }

    /// The rank of what is added.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.up.in_features()
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let factors = self.factors.as_ref().map_or(0, |factors| size_of_val(factors.as_slice()));
        self.down.bytes() + self.up.bytes() + factors
    }

    fn down(&self, x: &Tensor) -> Result<Tensor, OpError> {
        ops::linear(x, &self.down, &RowAdapters::default())
    }
}

/// What an adapter adds to the matrices of a model.
#[derive(Debug, Default)]
pub struct AdapterWeights {
    parts: BTreeMap<LinearId, LowRank>,
}

impl AdapterWeights {
    /// Adds `part` to `matrix`, in place of an earlier one.
    pub fn insert(&mut self, matrix: LinearId, part: LowRank) {
        self.parts.insert(matrix, part);
    }

    /// The matrices that are changed.
    pub fn matrices(&self) -> impl Iterator<Item = LinearId> {
        self.parts.keys().copied()
    }

    /// Bytes of all parts.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.values().map(LowRank::bytes).sum()
    }
}

/// Which rows of a batch run with which adapter; most batches have none.
#[derive(Clone, Debug, Default)]
pub struct RowAdapters {
    groups: Vec<Group>,
}

#[derive(Clone, Debug)]
struct Group {
    adapter: Arc<AdapterWeights>,
    /// Ascending.
    rows: Vec<usize>,
}

impl RowAdapters {
    /// `rows`, which come after all that have an adapter already, run with `adapter`.
    pub fn push(&mut self, adapter: &Arc<AdapterWeights>, rows: Range<usize>) {
        match self.groups.iter_mut().find(|group| Arc::ptr_eq(&group.adapter, adapter)) {
            Some(group) => group.rows.extend(rows),
            None => self.groups.push(Group { adapter: Arc::clone(adapter), rows: rows.collect() }),
        }
    }

    /// Those of the given rows, which are from now on counted in the given order.
    #[must_use]
    pub fn select(&self, rows: &[usize]) -> Self {
        let pick = |group: &Group| {
            let own = rows.iter().enumerate().filter(|(_, row)| group.rows.binary_search(row).is_ok());
            Group { adapter: Arc::clone(&group.adapter), rows: own.map(|(index, _)| index).collect() }
        };
        let groups = self.groups.iter().map(pick).filter(|group| !group.rows.is_empty());
        Self { groups: groups.collect() }
    }

    /// Makes of `outs`, the products of `x` with `weights`, the products with the adapted matrices.
    pub(crate) fn apply<const N: usize>(
        &self,
        x: &Tensor,
        weights: [&Linear; N],
        outs: &mut [Tensor; N],
    ) -> Result<(), OpError> {
        for Group { adapter, rows } in &self.groups {
            let picked = if rows.len() == x.rows() { None } else { Some(ops::select_rows(x, rows)?) };
            for (weight, out) in weights.into_iter().zip(outs.iter_mut()) {
                let Some(part) = adapter.parts.get(&weight.id()) else { continue };
                let down = part.down(picked.as_ref().unwrap_or(x))?;
                let added = ops::linear(&down, &part.up, &Self::default())?;
                match picked {
                    // All rows: in parallel.
                    None => *out = ops::add(out, &added)?,
                    Some(_) => ops::add_rows(out, rows, &added)?,
                }
                if let Some(factors) = &part.factors {
                    for &row in rows {
                        out.row_mut(row).iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes of `out`, the rows of `table` for `tokens`, those of the adapted table.
    pub(crate) fn apply_to_embeddings(
        &self,
        tokens: &[u32],
        table: &Linear,
        out: &mut Tensor,
    ) -> Result<(), OpError> {
        for Group { adapter, rows } in &self.groups {
            let Some(part) = adapter.parts.get(&table.id()) else { continue };
            let own: Vec<usize> = rows.iter().map(|&row| tokens[row] as usize).collect();
            let device = out.device().clone();
            let up = part.up_rows(&device, own.iter().copied());
            let mut sums = Tensor::zeros(&device, own.len(), out.cols());
            let mut down = vec![0.0; out.cols()];
            for r in 0..part.rank() {
                part.down.dequantize_row(r, &mut down);
                for row in 0..own.len() {
                    let up = up.data()[row * part.rank() + r];
                    sums.row_mut(row).iter_mut().zip(&down).for_each(|(sum, &down)| *sum += up * down);
                }
            }
            ops::add_rows(out, rows, &sums)?;
            if let Some(factors) = &part.factors {
                for (&row, &token) in rows.iter().zip(&own) {
                    out.row_mut(row).iter_mut().for_each(|value| *value *= factors[token]);
                }
            }
        }
        Ok(())
    }
}
