//! The blocks that decoders share.

pub(super) mod attention;
pub(super) mod conv;
pub(super) mod experts;
pub(super) mod feed_forward;
pub(super) mod mixer;
pub(super) mod mlp;
pub(super) mod rotary;
pub(super) mod short_conv;
