//! Between text and tokens.

mod added;
mod bpe;
mod chat;
mod decoder;
mod eos;
mod error;
mod folder;
mod gguf;
mod markers;
mod parts;
mod post;
mod pre;
pub mod reply;
mod special;
mod stop;
mod template;
mod tokenizer;
mod tokenizer_json;
mod vocab;

pub use chat::{ChatError, ChatPrompt, SpecialContent};
pub use eos::{EosSet, EosSource};
pub use error::TokenizerError;
pub use folder::TokenizerFiles;
pub use gguf::GgufVocab;
pub use markers::ThinkingMarkers;
pub use special::SpecialTokens;
pub use stop::{STOP_BYTES_MAX, STOP_STRINGS_MAX, StopError, StopMatcher, StopOutput, check_stops};
pub use template::{ChatTemplate, RenderOptions, THINKING, TemplateError};
pub use tokenizer::{Detokenizer, Tokenizer};
