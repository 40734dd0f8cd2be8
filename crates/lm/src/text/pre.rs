//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.
//!
//! A GGUF file says only which pre-tokenizer its tokenizer.json had; what it does is knowledge of the
//! reader. Each entry here is that of the models' own tokenizer.json. An unknown name is an error:
//! a wrong split costs quality and nobody would see why.

use serde_json::{Value, json};

/// What goes with a name.
#[derive(Debug)]
pub(crate) struct Pre {
    /// The pre-tokenizer as in tokenizer.json.
    pub(crate) pre_tokenizer: Value,
    /// Text is brought to Unicode normal form C first.
    pub(crate) nfc: bool,
    pub(crate) ignore_merges: bool,
    /// Whether BOS is added when `tokenizer.ggml.add_bos_token` does not say.
    pub(crate) add_bos: bool,
}

/// Names, steps, NFC, ignore_merges, add_bos.
type Row = (&'static [&'static str], &'static [Step], bool, bool, bool);

#[derive(Clone, Copy)]
enum Step {
    /// A regex; what it matches and what is between become words.
    Split(&'static str),
    /// Digits become words of their own, one by one or in runs.
    Digits { individual: bool },
    /// Runs of punctuation become words of their own.
    Punctuation,
    /// Bytes become characters; before that GPT-2's own regex cuts the text, if so said.
    ByteLevel { regex: bool },
}

use Step::{ByteLevel, Digits, Punctuation, Split};

const GPT2: &[Step] = &[ByteLevel { regex: true }];
const GPT2_DIGITS: &[Step] = &[Digits { individual: true }, ByteLevel { regex: true }];
const BYTES: Step = ByteLevel { regex: false };

/// cl100k of tiktoken, which Llama 3 took over: numbers in groups of up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Combining marks belong to words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's: a word is cut where lower case turns to upper case.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// o200k of tiktoken.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CJK: &str = "[一-龥ࠀ-一가-퟿]+";
const DEEPSEEK_CODER: &[Step] = &[
    Split("[\r\n]"),
    Split(r"\s?\p{L}+"),
    Split(r"\s?\p{P}+"),
    Split(CJK),
    Digits { individual: true },
    BYTES,
];
const DEEPSEEK3: &[Step] = &[
    Split(r"\p{N}{1,3}"),
    Split("[一-龥぀-ゟ゠-ヿ]+"),
    Split(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
    ),
    BYTES,
];
const FALCON: &[Step] =
    &[Punctuation, ByteLevel { regex: true }, Digits { individual: false }, Split("[0-9][0-9][0-9]")];

const TABLE: &[Row] = &[
    (&["gpt-2", "phi-2"], GPT2, false, false, false),
    (&["mpt", "olmo"], GPT2, true, false, false),
    (&["smollm", "starcoder", "refact"], GPT2_DIGITS, false, false, false),
    (&["command-r"], GPT2_DIGITS, true, false, false),
    (&["llama-bpe", "llama3", "llama-v3"], &[Split(LLAMA3), BYTES], false, true, true),
    (&["smaug-bpe", "dbrx", "chatglm-bpe"], &[Split(LLAMA3), BYTES], false, false, false),
    (&["glm4"], &[Split(LLAMA3), BYTES], false, true, false),
    (&["qwen2", "deepseek-r1-qwen"], &[Split(QWEN2), BYTES], true, false, false),
    (&["qwen35"], &[Split(QWEN35), BYTES], false, false, false),
    (&["tekken"], &[Split(TEKKEN), BYTES], false, true, true),
    (&["gpt-4o", "llama4"], &[Split(GPT4O), BYTES], false, false, false),
    (&["deepseek-coder"], DEEPSEEK_CODER, false, false, false),
    (&["deepseek-v3"], DEEPSEEK3, false, false, false),
    (&["falcon"], FALCON, false, false, false),
];

/// All names that [`find`] knows.
pub(crate) fn known() -> String {
    let names: Vec<&str> = TABLE.iter().flat_map(|row| row.0.iter().copied()).collect();
    names.join(", ")
}

pub(crate) fn find(name: &str) -> Option<Pre> {
    let &(_, steps, nfc, ignore_merges, add_bos) = TABLE.iter().find(|row| row.0.contains(&name))?;
    let steps: Vec<Value> = steps.iter().map(|&step| as_json(step)).collect();
    let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": steps});
    Some(Pre { pre_tokenizer, nfc, ignore_merges, add_bos })
}

fn as_json(step: Step) -> Value {
    match step {
        Split(regex) => {
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
        }
        Digits { individual } => json!({"type": "Digits", "individual_digits": individual}),
        Punctuation => json!({"type": "Punctuation", "behavior": "Contiguous"}),
        ByteLevel { regex } => {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_builds() {
        for row in TABLE {
            for name in row.0 {
                let pre = find(name).map(|p| p.pre_tokenizer).unwrap_or_default();
                assert!(matches!(crate::text::parts::pre_tokenizer("", &pre), Ok(Some(_))), "{name}");
            }
        }
        assert!(find("default").is_none() && find("").is_none());
        assert!(known().contains("smollm, starcoder"));
    }
}
