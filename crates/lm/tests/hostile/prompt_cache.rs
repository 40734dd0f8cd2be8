//! Prompt-cache files that nobody should write: a corpus and 10,000 mutations of it.

use std::path::{Path, PathBuf};

#[path = "../../../../fuzz/entry/prompt_cache.rs"]
mod entry;

fn seeds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/prompt_cache")
}

#[test]
fn ten_thousand_mutations_of_prompt_caches() {
    crate::replay::replay(&seeds(), 10_000, entry::run);
}

#[test]
fn valid_seeds_are_accepted() {
    for file in std::fs::read_dir(seeds()).unwrap().map(|entry| entry.unwrap().path()) {
        let valid = file.file_name().unwrap().to_str().unwrap().starts_with("valid");
        assert_eq!(entry::run(&std::fs::read(&file).unwrap()), valid, "{}", file.display());
    }
}
