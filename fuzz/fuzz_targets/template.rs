//! A chat template.
#![no_main]

#[path = "../entry/template.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    entry::run(data);
});
