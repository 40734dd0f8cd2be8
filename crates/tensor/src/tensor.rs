//! (being written)
/// A tensor.
#[derive(Debug)]
pub struct Tensor;
