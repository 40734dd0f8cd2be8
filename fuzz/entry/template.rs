//! Reads any bytes as a chat template and renders a conversation with it. Shared by the fuzz target and the replay test.

use lmx::text::{ChatTemplate, RenderOptions, SpecialTokens};
use serde_json::json;

/// Whether the input is accepted. None may panic, hang or take memory out of proportion.
pub(crate) fn run(data: &[u8]) -> bool {
    let source = String::from_utf8_lossy(data);
    let Ok(template) = ChatTemplate::new(&source, &SpecialTokens::default(), true) else { return false };
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": " Hi {{ x }}\r\n"}, {"type": "image"}]}),
        json!({"role": "assistant", "content": "<think>hm</think>Yes", "reasoning": "r", "tool_calls":
            [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, null, true]}}}]}),
        json!({"role": "tool", "content": "é"}),
        json!({"role": "user", "content": "And?"}),
    ];
    for (add_generation_prompt, continue_final_message) in [(true, false), (false, true)] {
        let options = RenderOptions {
            add_generation_prompt,
            continue_final_message,
            tools: Some(vec![
                json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}),
            ]),
            ..RenderOptions::default()
        };
        let _ = template.render(&messages, &options);
    }
    true
}
