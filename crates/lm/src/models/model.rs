//! The seam between the engine and a network.

use crate::cache::{KvError, KvSpec, KvStore, LayerKv, SequenceId, StateSlot};
use crate::checkpoint::ExpertPlace;
use lmx_tensor::adapter::AdapterWeights;
use lmx_tensor::kernels::attention::KvType;
use lmx_tensor::{Device, Linear, OpError, RowAdapters, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// What one engine step runs: a ragged batch, no padding. Row `i` of a forward pass is `tokens[i]`.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// Token ids of all rows.
    pub tokens: Vec<u32>,
    /// The rows' absolute positions in their sequences.
    pub positions: Vec<u32>,
    /// The sequences of the batch, in order of their rows.
    pub sequences: Vec<StepSequence>,
    /// Which rows run with which adapter.
    pub adapters: RowAdapters,
}

/// One sequence's part of a step: consecutive tokens that follow those which the cache holds.
#[derive(Clone, Debug)]
pub struct StepSequence {
    /// Whose cache is read and extended.
    pub id: SequenceId,
    /// Its rows of the batch.
    pub rows: Range<usize>,
    /// The absolute position of its first row, which is the number of tokens that the cache holds.
    pub first_position: usize,
    /// Whether the request exceeds the model's original context (longrope's long factors apply).
    pub long_context: bool,
}

impl StepInputs {
    /// Appends `tokens` of sequence `id`, whose cache holds `first_position` tokens.
    pub fn push(&mut self, id: SequenceId, first_position: usize, tokens: &[u32], long_context: bool) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((first_position..).take(tokens.len()).map(|p| p as u32));
        let rows = start..self.tokens.len();
        self.sequences.push(StepSequence { id, rows, first_position, long_context });
    }

    /// Has the last sequence run with `adapter`.
    pub fn adapt(&mut self, adapter: &Arc<AdapterWeights>) {
        if let Some(last) = self.sequences.last() {
            self.adapters.push(adapter, last.rows.clone());
        }
    }
}

/// A forward pass that failed.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// An op refused its shapes.
    #[error(transparent)]
    Op(#[from] OpError),
    /// The cache refused.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A token that the embedding has no row for.
    #[error("token id {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// The number of ids.
        vocab: usize,
    },
}

/// What [`Model::visit_linears`] calls.
pub type LinearVisitor<'v, 'a> = dyn FnMut(&str, LinearRole, &'a Linear) + 'v;

/// What a matrix is of its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearRole {
    /// All of it.
    Whole,
    /// All of it: a table of rows for tokens, which may be the head too.
    Embedding,
    /// All of it, but its rows are brought to length 1 for the products.
    Normed,
    /// The matrix of those outputs of the module that begin with number `first`, of `of` in all.
    Outputs {
        /// The first of them.
        first: usize,
        /// Outputs of the module.
        of: usize,
    },
    /// The matrix of one of its experts.
    Expert(ExpertPlace),
}

/// A network that the engine can run.
pub trait Model: Send {
    /// Runs the rows of `step` through all layers, extending the caches (whose room has been reserved), and
    /// returns the residual stream after the last one, `[rows, hidden]`. The caller commits the tokens.
    ///
    /// # Errors
    /// [`ForwardError`]; the caches then hold what they held before.
    fn hidden(&self, step: &StepInputs, kv: &mut KvStore) -> Result<Tensor, ForwardError>;

    /// The given rows of `hidden` behind the final norm, `[rows.len(), hidden]`.
    ///
    /// # Errors
    /// [`ForwardError`].
    fn final_norm(&self, hidden: &Tensor, rows: &[usize]) -> Result<Tensor, ForwardError>;

    /// The final norm and the head: logits of the given rows of `hidden`, `[rows.len(), vocab]`. `adapters` are those
    /// of the step that `hidden` is from.
    ///
    /// # Errors
    /// [`ForwardError`].
    fn head(&self, hidden: &Tensor, rows: &[usize], adapters: &RowAdapters) -> Result<Tensor, ForwardError>;

    /// The keys and values of each layer that has them, first to last.
    fn layer_kv(&self) -> Vec<LayerKv>;

    /// The slots of recurrent state of all layers, first to last; most models have none.
    fn states(&self) -> Vec<StateSlot> {
        Vec::new()
    }

    /// The device that it runs on.
    fn device(&self) -> &Device;

    /// Visits every weight matrix with the name of its module, spelled as in mlx-lm's checkpoints, and what it is of that.
    fn visit_linears<'a>(&'a self, visit: &mut LinearVisitor<'_, 'a>);

    /// The longest sequence that the model was made for, in tokens.
    fn context_length(&self) -> usize;

    /// The number of token ids.
    fn vocab(&self) -> usize;

    /// The numbers of the vector of a token: `hidden` in shapes.
    fn width(&self) -> usize;

    /// Beyond this many tokens (prompt and reply) a request counts as long-context.
    fn original_context(&self) -> Option<usize>;
}

/// What a model keeps of each sequence, keys and values stored as `ty`.
#[must_use]
pub fn kv_spec(model: &dyn Model, ty: KvType) -> KvSpec {
    KvSpec::new(&model.layer_kv(), ty).with_states(model.states())
}
