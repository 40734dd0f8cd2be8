//! (being written)
/// A weight matrix.
#[derive(Debug)]
pub struct Linear;
