//! Between text and tokens.

mod added;
mod bpe;
mod decoder;
mod eos;
mod error;
mod folder;
mod gguf;
mod parts;
mod post;
mod pre;
mod special;
mod stop;
mod template;
mod tokenizer;
mod tokenizer_json;
mod vocab;

pub use eos::{EosSet, EosSource};
pub use error::TokenizerError;
pub use folder::TokenizerFiles;
pub use gguf::GgufVocab;
pub use special::SpecialTokens;
pub use stop::{StopMatcher, StopOutput};
pub use tokenizer::{Detokenizer, Tokenizer};
