//! (being written)
/// A rotary position encoding.
#[derive(Clone, Debug)]
pub struct Rope;
