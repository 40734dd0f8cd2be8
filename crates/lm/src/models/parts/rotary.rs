//! The rotary tables of one step, computed once for all layers.

use crate::models::StepInputs;
use crate::models::rope::Rope;

/// Cosines and sines of a step's rows, for each rope of the model.
#[derive(Debug)]
pub(in crate::models) struct Rotary {
    tables: Vec<Table>,
}

/// `[rows][dims / 2]` each.
#[derive(Debug)]
pub(in crate::models) struct Table {
    pub(in crate::models) dims: usize,
    pub(in crate::models) traditional: bool,
    pub(in crate::models) cos: Vec<f32>,
    pub(in crate::models) sin: Vec<f32>,
}

impl Rotary {
    pub(in crate::models) fn for_step(ropes: &[Rope], step: &StepInputs) -> Self {
        let table = |rope: &Rope| {
            let half = rope.dims() / 2;
            let mut cos = vec![0.0; step.tokens.len() * half];
            let mut sin = cos.clone();
            for sequence in &step.sequences {
                for row in sequence.rows.clone() {
                    let range = row * half..(row + 1) * half;
                    let (cos, sin) = (&mut cos[range.clone()], &mut sin[range]);
                    rope.fill(step.positions[row], sequence.long_context, cos, sin);
                }
            }
            Table { dims: rope.dims(), traditional: rope.traditional(), cos, sin }
        };
        Self { tables: ropes.iter().map(table).collect() }
    }

    pub(in crate::models) fn table(&self, rope: usize) -> &Table {
        &self.tables[rope]
    }
}
