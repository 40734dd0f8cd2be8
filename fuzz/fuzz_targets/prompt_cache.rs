//! A prompt-cache file.
#![no_main]

#[path = "../entry/prompt_cache.rs"]
mod prompt_cache;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Refusal is as good as acceptance.
    let _ = prompt_cache::run(data);
});
