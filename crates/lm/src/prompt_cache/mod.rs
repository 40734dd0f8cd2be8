//! The keys and values of one sequence as a value: to go on from, to fork, to trim, and to keep in a file.
//!
//! [`make_prompt_cache`] begins an empty one, [`PromptCache::extend`] runs tokens into it, and
//! [`Request::cache`](crate::engine::Request::cache) continues it in an engine. [`PromptCacheFile`] is mlx-lm's
//! file, read and written.

mod file;
mod identity;
mod layers;
mod notes;
mod save;

pub use file::PromptCacheFile;
pub use identity::Identity;
pub use notes::Notes;
pub use save::check_savable;

use crate::adapter::Adapter;
use crate::cache::{
    BlockBudget, Census, KvError, KvQuantError, KvQuantization, KvSpec, KvStore, KvWindow, SequenceId,
};
use crate::models::{ForwardError, Model, StepInputs, kv_spec};
use lmx_tensor::Tensor;
use lmx_tensor::files::FileError;
use lmx_tensor::kernels::attention::KvType;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// How a prompt cache is kept.
#[derive(Clone, Copy, Debug)]
pub struct PromptCacheOptions {
    /// How keys and values are stored.
    pub kv_type: KvType,
    /// What queries see of each layer that would see everything; `None` for everything.
    pub window: Option<KvWindow>,
    /// From which position on keys and values are quantized, and how; `None` for never.
    pub quantization: Option<KvQuantization>,
    /// Most bytes of keys and values, forks included.
    pub memory: usize,
    /// Prompt and reply will exceed the model's original context: rope factors may depend on it.
    pub long_context: bool,
}

impl Default for PromptCacheOptions {
    fn default() -> Self {
        Self {
            kv_type: KvType::F16,
            window: None,
            quantization: None,
            memory: usize::MAX,
            long_context: false,
        }
    }
}

/// An empty cache for `model`.
///
/// # Errors
/// [`KvQuantError::HeadDim`] if keys and values of this model cannot be quantized as the options say.
pub fn make_prompt_cache(
    model: &dyn Model,
    options: &PromptCacheOptions,
) -> Result<PromptCache, KvQuantError> {
    let spec = kv_spec(model, options.kv_type);
    let spec = match options.window {
        Some(window) => spec.bounded(window),
        None => spec,
    };
    let spec = match options.quantization {
        Some(how) => spec.quantized(how)?,
        None => spec,
    };
    Ok(PromptCache::new(spec, BlockBudget::new(options.memory), options.long_context))
}

/// Why a prompt cache cannot be read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum PromptCacheError {
    /// The file is damaged, or cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is no prompt cache that lmx can use.
    #[error("{}: {field} is {found}; allowed is {allowed}", .file.display())]
    Entry {
        /// The file.
        file: PathBuf,
        /// The entry or tensor.
        field: String,
        /// What it is.
        found: String,
        /// What it may be.
        allowed: String,
    },
    /// The file is of another model, or of another form.
    #[error("{}: made with {field} {found}, but here it is {expected}", .file.display())]
    Mismatch {
        /// The file.
        file: PathBuf,
        /// What differs.
        field: String,
        /// What the file says.
        found: String,
        /// What it would have to be.
        expected: String,
    },
    /// The cache holds no token.
    #[error("the prompt cache is empty: there is nothing to save")]
    Empty,
    /// The cache holds what files have no place for.
    #[error("a prompt cache with {what} cannot be kept in a file")]
    Unsupported {
        /// What that is.
        what: &'static str,
    },
    /// The cache's memory.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The model's files.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// The tokenizer's files.
    #[error(transparent)]
    Tokenizer(#[from] crate::text::TokenizerError),
}

/// The keys and values of one sequence. It knows how many tokens it holds, and which, unless it is from a file that
/// does not say.
pub struct PromptCache {
    kv: KvStore,
    id: SequenceId,
    /// `None` if they are not known.
    tokens: Option<Vec<u32>>,
    long_context: bool,
    adapter: Option<Adapter>,
}

impl PromptCache {
    /// An empty one whose blocks count against `budget`.
    pub(crate) fn new(spec: KvSpec, budget: Arc<BlockBudget>, long_context: bool) -> Self {
        let mut kv = KvStore::with_budget(spec, budget);
        let id = kv.add();
        Self { kv, id, tokens: Some(Vec::new()), long_context, adapter: None }
    }

    /// One that holds what sequence `of` of a store does, whose tokens are `tokens`.
    pub(crate) fn of(
        store: &KvStore,
        of: SequenceId,
        tokens: Option<Vec<u32>>,
        long_context: bool,
    ) -> Result<Self, KvError> {
        let mut kv = KvStore::with_budget(store.spec().clone(), Arc::clone(store.budget()));
        let id = store.fork_into(of, &mut kv)?;
        Ok(Self { kv, id, tokens, long_context, adapter: None })
    }

    /// The same, of tokens that were run with `adapter`.
    pub(crate) fn made_with(self, adapter: Option<Adapter>) -> Self {
        Self { adapter, ..self }
    }

    /// The adapter that its tokens were run with.
    #[must_use]
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Tokens held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kv.len(self.id)
    }

    /// Whether no token is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Which tokens are held; `None` if the file that they are from does not say.
    #[must_use]
    pub fn tokens(&self) -> Option<&[u32]> {
        self.tokens.as_deref()
    }

    /// Whether it is for sequences that exceed the model's original context.
    #[must_use]
    pub fn long_context(&self) -> bool {
        self.long_context
    }

    /// The layers, and how their keys and values are kept.
    #[must_use]
    pub fn spec(&self) -> &KvSpec {
        self.kv.spec()
    }

    /// Runs `tokens` through `model` after those that are held. Returns the residual stream after the last
    /// layer, `[tokens, hidden]`, of which [`Model::head`] makes logits.
    ///
    /// # Errors
    /// [`ForwardError`]; the cache then holds what it held before, or if the tokens pass the position from which on it
    /// is quantized, perhaps those up to there too: [`PromptCache::len`] tells.
    pub fn extend(&mut self, model: &dyn Model, tokens: &[u32]) -> Result<Tensor, ForwardError> {
        let (before, behind) = tokens.split_at(self.kv.step_limit(self.id, tokens.len()));
        let head = self.step(model, before)?;
        if behind.is_empty() {
            return Ok(head);
        }
        let tail = self.step(model, behind)?;
        let all = [head.data(), tail.data()].concat();
        Ok(Tensor::from_slice(head.device(), head.rows() + tail.rows(), head.cols(), &all)?)
    }

    /// Runs tokens that read the same kind of keys and values.
    fn step(&mut self, model: &dyn Model, tokens: &[u32]) -> Result<Tensor, ForwardError> {
        let mut step = StepInputs::default();
        step.push(self.id, self.len(), tokens, self.long_context);
        self.adapter.iter().for_each(|adapter| step.adapt(adapter.weights()));
        self.kv.reserve(self.id, tokens.len())?;
        let hidden = model.hidden(&step, &mut self.kv)?;
        self.kv.commit(self.id, tokens.len())?;
        if let Some(known) = &mut self.tokens {
            known.extend_from_slice(tokens);
        }
        Ok(hidden)
    }

    /// Whether the last `tokens` tokens can be removed: windows may have dropped what the shorter one would need.
    #[must_use]
    pub fn can_trim(&self, tokens: usize) -> bool {
        self.len().checked_sub(tokens).is_some_and(|target| self.kv.can_trim_to(self.id, target))
    }

    /// Removes the last `tokens` tokens, exactly.
    ///
    /// # Errors
    /// [`KvError::Unreachable`], which names the nearest length that it can return to; nothing is changed.
    pub fn trim(&mut self, tokens: usize) -> Result<(), KvError> {
        self.kv.trim(self.id, tokens)?;
        let len = self.kv.len(self.id);
        self.tokens.iter_mut().for_each(|known| known.truncate(len));
        Ok(())
    }

    /// A second one with the same tokens. They share all blocks; writing to a shared one copies it.
    ///
    /// # Errors
    /// None that can happen: the sequence exists.
    pub fn fork(&self) -> Result<Self, KvError> {
        let fork = Self::of(&self.kv, self.id, self.tokens.clone(), self.long_context)?;
        Ok(fork.made_with(self.adapter.clone()))
    }

    /// Bytes of keys and values, shared ones included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.kv.bytes_of(self.id)
    }

    /// Bytes of all blocks that count against this cache's memory: its own and those of its forks.
    #[must_use]
    pub fn memory_used(&self) -> usize {
        self.kv.budget().used()
    }

    /// What each group of layers holds.
    ///
    /// # Errors
    /// None that can happen: the sequence exists.
    pub fn census(&self) -> Result<Census, KvError> {
        self.kv.census(self.id)
    }

    /// A fork of it in another store.
    pub(crate) fn fork_into(&self, store: &mut KvStore) -> Result<SequenceId, KvError> {
        self.kv.fork_into(self.id, store)
    }
}

impl fmt::Display for PromptCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.census().map_or(Ok(()), |census| census.fmt(f))
    }
}

impl fmt::Debug for PromptCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PromptCache")
            .field("len", &self.len())
            .field("spec", self.spec())
            .finish_non_exhaustive()
    }
}
