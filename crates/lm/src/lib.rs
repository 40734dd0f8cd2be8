//! Run large language models: load a checkpoint, generate, stream, batch.

pub mod cache;
pub mod checkpoint;
pub mod engine;
pub mod models;
pub mod sample;
pub mod text;
