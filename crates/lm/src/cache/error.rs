//! Why the store of keys and values refuses.

/// Why the store refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KvError {
    /// The budget does not hold the blocks that a step needs.
    #[error("the KV budget is spent: {used} of {limit} bytes are in use and {needed} more are needed")]
    OutOfMemory {
        /// Bytes of living blocks.
        used: usize,
        /// The budget.
        limit: usize,
        /// Bytes of the block that could not be had.
        needed: usize,
    },
    /// A trim asked for more than can be undone.
    #[error("cannot trim to position {target}: the nearest reachable position is {reachable}")]
    Unreachable {
        /// The length asked for.
        target: usize,
        /// The nearest length that a sequence can still return to; 0 means starting over. With recurrent state it
        /// is before the target, and the tokens from there to the target are to be run again.
        reachable: usize,
    },
    /// A commit of another number of tokens than the step has left its recurrent state after.
    #[error(
        "the step leaves its recurrent state after {reserved} tokens, so it cannot end after {committed}"
    )]
    PartialStep {
        /// The sequence's length at the end of the reserved step.
        reserved: usize,
        /// The length asked for.
        committed: usize,
    },
    /// A trim asked for a position before which keys and values are read as floats, and they are quantized.
    #[error(
        "cannot trim to position {target}: the sequence is quantized, as it is from position {start} on; the nearest \
        reachable position is {reachable}, and 0 starts over"
    )]
    Quantized {
        /// The length asked for.
        target: usize,
        /// The position from which on quantized keys and values are read.
        start: usize,
        /// The nearest length at or behind the target that the sequence can return to.
        reachable: usize,
    },
    /// A step that would read floats for some tokens and quantized keys and values for others.
    #[error(
        "a step of {tokens} tokens from position {len} passes {start}, from where on keys and values are quantized"
    )]
    PassesStart {
        /// Tokens held.
        len: usize,
        /// Tokens of the step.
        tokens: usize,
        /// Where the step must end; see [`step_limit`](super::KvStore::step_limit).
        start: usize,
    },
    /// A window without room for the query's own position.
    #[error("a window of {size} positions cannot keep the first {keep}: at most {} of them", size.saturating_sub(1))]
    Window {
        /// Positions seen in all.
        size: usize,
        /// Those of them that are the first of the sequence.
        keep: usize,
    },
    /// What a sequence is to hold is not enough to go on from it.
    #[error(
        "{len} tokens of which only the first {first} and those from {last} on are held cannot be continued"
    )]
    Lacking {
        /// Tokens of the sequence.
        len: usize,
        /// How many of the first ones are held.
        first: usize,
        /// Where the last ones begin that are held.
        last: usize,
    },
    /// The sequence is of a model, or of a form, that this store does not keep.
    #[error("the cache holds {found}; it is needed as {expected}")]
    OtherSpec {
        /// What it keeps.
        found: String,
        /// What the store keeps.
        expected: String,
    },
    /// No such sequence.
    #[error("unknown sequence")]
    UnknownSequence,
}
