//! Configurations that nobody should write: a corpus and 10,000 mutations of it.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

use std::path::Path;

#[path = "../../../fuzz/entry/config.rs"]
mod entry;
#[path = "../../../tests/hostile/mod.rs"]
mod hostile;

#[test]
fn ten_thousand_mutations_of_configurations() {
    let corpus = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/config"));
    hostile::replay(corpus, 10_000, entry::run);
}
