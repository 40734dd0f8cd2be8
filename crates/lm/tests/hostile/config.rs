//! Configurations that nobody should write: a corpus and 10,000 mutations of it.

use std::path::Path;

#[path = "../../../../fuzz/entry/config.rs"]
mod entry;

#[test]
fn ten_thousand_mutations_of_configurations() {
    let corpus = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/config"));
    crate::replay::replay(corpus, 10_000, entry::run);
}
