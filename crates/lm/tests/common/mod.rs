//! What several test programs share.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test program uses a part")]

pub(crate) mod golden_cases;
pub(crate) mod logits;
pub(crate) mod running;
pub(crate) mod schedule_requests;
pub(crate) mod text_data;
pub(crate) mod tiny;
