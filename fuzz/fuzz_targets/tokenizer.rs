//! A tokenizer's files and a text.
#![no_main]

#[path = "../entry/tokenizer.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    entry::run(data);
});
