//! Texts that are filled in: what stands before and behind the gap, in the order in which models were trained on it.

use crate::error::{ApiError, ApiResult};
use crate::model::Model;

/// The tokens around the text before the gap, the text behind it, and the gap, by families of models.
const MARKERS: [[&str; 3]; 6] = [
    // Qwen2.5-Coder, CodeGemma.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder, Granite.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    // SantaCoder.
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // DeepSeek-Coder.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    // GLM-4.
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    // Code Llama.
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
];

/// Codestral's, which has what stands behind the gap first and no token for the gap.
const SUFFIX_FIRST: [&str; 2] = ["[SUFFIX]", "[PREFIX]"];

/// The tokens of a prompt for what stands between `before` and `behind`.
///
/// # Errors
/// 400 naming `suffix` if the model has no tokens for it.
pub(crate) fn prompt(model: &Model, before: &[u32], behind: &str) -> ApiResult<Vec<u32>> {
    let tokenizer = &model.tokenizer;
    let encode = |text: &str, special: bool| {
        let encoded = tokenizer.encode(text, special);
        encoded.map_err(|error| ApiError::field("suffix", format!("suffix: {error}")))
    };
    model.check_length("suffix", std::iter::once(behind))?;
    let behind = encode(behind, false)?;
    // What the model wants before texts, but does not want twice.
    let mut prompt = encode("", true)?;
    let before = before.strip_prefix(prompt.as_slice()).unwrap_or(before);
    let ids = |names: &[&str]| names.iter().map(|name| tokenizer.id(name)).collect::<Option<Vec<u32>>>();
    if let Some([prefix, suffix, middle]) = MARKERS.iter().find_map(|names| ids(names)).as_deref() {
        prompt.push(*prefix);
        prompt.extend_from_slice(before);
        prompt.push(*suffix);
        prompt.extend(behind);
        prompt.push(*middle);
    } else if let Some([suffix, prefix]) = ids(&SUFFIX_FIRST).as_deref() {
        prompt.push(*suffix);
        prompt.extend(behind);
        prompt.push(*prefix);
        prompt.extend_from_slice(before);
    } else {
        let why = "suffix: this model has no tokens for texts that are to be filled in";
        return Err(ApiError::field("suffix", why));
    }
    Ok(prompt)
}
