//! The blocks that decoders share.

pub(super) mod attention;
pub(super) mod mlp;
pub(super) mod rotary;
