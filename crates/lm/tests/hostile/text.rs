//! Tokenizer files and templates that nobody should write: a corpus and 10,000 mutations of each.

use std::path::{Path, PathBuf};

#[path = "../../../../fuzz/entry/template.rs"]
mod template;
#[path = "../../../../fuzz/entry/tokenizer.rs"]
mod tokenizer;

fn seeds(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target)
}

#[test]
fn ten_thousand_mutations_of_tokenizers() {
    crate::replay::replay(&seeds("tokenizer"), 10_000, tokenizer::run);
}

#[test]
fn ten_thousand_mutations_of_templates() {
    crate::replay::replay(&seeds("template"), 10_000, template::run);
}

#[test]
fn valid_seeds_are_accepted() {
    for (target, run) in [("tokenizer", tokenizer::run as fn(&[u8]) -> bool), ("template", template::run)] {
        for file in std::fs::read_dir(seeds(target)).unwrap().map(|entry| entry.unwrap().path()) {
            let valid = file.file_name().unwrap().to_str().unwrap().starts_with("valid");
            assert_eq!(run(&std::fs::read(&file).unwrap()), valid, "{}", file.display());
        }
    }
}
