//! Keys and values of running sequences.
//!
//! They live in reference-counted blocks of [`BLOCK`] tokens. Layers of the same shape and policy form a group; a
//! block of a group holds one slab of keys and values for each of its layers, and a sequence holds one list of
//! blocks per group, indexed by absolute block number. From that follow without copies: growth, forking (the
//! partial last block is copied when written), trimming, ragged batches and bounded memory.
//!
//! Layers whose memory is a state (a convolution's last inputs) rather than keys and values have named slots of f32,
//! of which snapshots are kept at some positions (`state.rs`).
//!
//! A sequence knows exactly how many tokens it holds; [`KvStore::trim`] removes exactly as many as asked for, or
//! says which position it can return to. What sequences leave behind, others that begin like them take over
//! ([`KvStore::with_prefixes`]), in a later process too ([`KvStore::keep_prefixes_in`]).
//!
//! From a position on that the user sets a sequence's blocks hold small integers in place of floats, under any policy.

mod block;
mod census;
mod disk;
mod error;
mod prefix;
mod quantize;
mod sharing;
mod spec;
mod state;
mod store;
mod transfer;
mod write;

pub use block::{BLOCK, BlockBudget};
pub use census::{Census, GroupCensus};
pub use disk::{PrefixDirError, PrefixDirOptions, PrefixDirWarning};
pub use error::KvError;
pub use prefix::{KindStats, PrefixCacheOptions, PrefixStats, PrefixTokens, SegmentKind};
pub use quantize::{KvQuantError, KvQuantization};
pub use spec::{KvSpec, KvWindow, LayerGroup, LayerKv, Policy};
pub use state::{SNAPSHOT, StateSlot};
pub use store::{KvStore, SequenceId};
pub use transfer::Held;
