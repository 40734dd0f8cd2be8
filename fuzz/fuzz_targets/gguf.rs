//! A GGUF file.
#![no_main]

#[path = "../entry/files.rs"]
mod files;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Refusal is as good as acceptance.
    let _ = files::gguf(&data.to_vec().into());
});
