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

/// Names, kind of split, NFC, ignore_merges, add_bos.
type Row = (&'static [&'static str], Split, bool, bool, bool);

#[derive(Clone, Copy)]
enum Split {
    /// GPT-2's own regex, on single digits or not.
    Gpt2 { digits: bool },
    /// These regexes one after the other.
    Regexes(&'static [&'static str]),
}

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
const DEEPSEEK3: &[&str] = &[
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

const TABLE: &[Row] = &[
    (&["gpt-2", "phi-2"], Split::Gpt2 { digits: false }, false, false, false),
    (&["mpt", "olmo"], Split::Gpt2 { digits: false }, true, false, false),
    (&["smollm", "starcoder", "refact"], Split::Gpt2 { digits: true }, false, false, false),
    (&["command-r"], Split::Gpt2 { digits: true }, true, false, false),
    (&["llama-bpe", "llama3", "llama-v3"], Split::Regexes(&[LLAMA3]), false, true, true),
    (&["smaug-bpe", "dbrx", "chatglm-bpe"], Split::Regexes(&[LLAMA3]), false, false, false),
    (&["glm4"], Split::Regexes(&[LLAMA3]), false, true, false),
    (&["qwen2", "deepseek-r1-qwen"], Split::Regexes(&[QWEN2]), true, false, false),
    (&["qwen35"], Split::Regexes(&[QWEN35]), true, false, false),
    (&["tekken"], Split::Regexes(&[TEKKEN]), false, true, true),
    (&["gpt-4o", "llama4"], Split::Regexes(&[GPT4O]), false, false, false),
    (&["deepseek-v3"], Split::Regexes(DEEPSEEK3), false, false, false),
];

/// All names that [`find`] knows.
pub(crate) fn known() -> String {
    let names: Vec<&str> = TABLE.iter().flat_map(|row| row.0.iter().copied()).collect();
    names.join(", ")
}

pub(crate) fn find(name: &str) -> Option<Pre> {
    let &(_, split, nfc, ignore_merges, add_bos) = TABLE.iter().find(|row| row.0.contains(&name))?;
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let steps = match split {
        Split::Gpt2 { digits: false } => vec![byte_level(true)],
        Split::Gpt2 { digits: true } => {
            vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)]
        }
        Split::Regexes(regexes) => {
            let split = |regex: &&str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            regexes.iter().map(split).chain([byte_level(false)]).collect()
        }
    };
    let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": steps});
    Some(Pre { pre_tokenizer, nfc, ignore_merges, add_bos })
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
