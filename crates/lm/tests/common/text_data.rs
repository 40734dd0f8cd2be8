//! The data of the text tests: tests/golden/text, and the real models.

use lmx::text::Tokenizer;
use std::path::{Path, PathBuf};

/// The folder of the golden data.
pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text")
}

/// A file of the golden data, read as JSON.
pub(crate) fn golden_json<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = golden().join(name);
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

/// One of the small tokenizers.
pub(crate) fn small(kind: &str) -> Tokenizer {
    Tokenizer::from_folder(&golden().join(kind)).unwrap()
}

/// A real model's folder or file.
///
/// # Panics
/// If it is missing; the message says how to get it.
pub(crate) fn real_model(name: &str) -> PathBuf {
    let models = std::env::var_os("LMX_TEST_MODELS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models"), PathBuf::from);
    let path = models.join(name);
    assert!(path.exists(), "{} is missing: run scripts/test, or set LMX_TEST_MODELS", path.display());
    path
}
