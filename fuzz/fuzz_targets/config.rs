//! A model's configuration.
#![no_main]

#[path = "../entry/config.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    entry::run(data);
});
