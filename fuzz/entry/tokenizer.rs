//! Reads any bytes as a tokenizer.json, a tokenizer_config.json and a text, and where a tokenizer comes of it encodes
//! and decodes. Shared by the fuzz target and the replay test.

use lmx::text::{Tokenizer, TokenizerFiles};

/// Stands between the three parts of an input.
const BORDER: &str = "\n=====\n";

/// Whether the input is accepted. None may panic, hang or take memory out of proportion.
pub(crate) fn run(data: &[u8]) -> bool {
    let input = String::from_utf8_lossy(data);
    let mut parts = input.splitn(3, BORDER);
    let mut part = || parts.next().unwrap_or_default();
    let files = TokenizerFiles {
        tokenizer: part().as_bytes().to_vec(),
        config: Some(part().as_bytes().to_vec()).filter(|config| !config.is_empty()),
        ..TokenizerFiles::default()
    };
    let text = part();
    let Ok(tokenizer) = Tokenizer::from_files(&files) else { return false };
    let roles = (tokenizer.bos(), tokenizer.eos_ids(), tokenizer.unk(), tokenizer.pad());
    let _ = (roles, tokenizer.thinking_markers(), tokenizer.tool_format(), tokenizer.lookup(text));
    if let Ok(mut ids) = tokenizer.encode(text, true) {
        // Some more ids, in and out of range.
        ids.extend(data.iter().take(64).map(|&byte| u32::from(byte) * 3));
        let mut detokenizer = tokenizer.detokenizer();
        let mut streamed: String = ids.iter().map(|&id| detokenizer.add(id)).collect();
        streamed.push_str(&detokenizer.finish());
        assert_eq!(streamed, tokenizer.decode(&ids), "streaming shows something else");
    }
    true
}
