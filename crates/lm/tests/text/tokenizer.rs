//! Tokenizers against HF `tokenizers` and `transformers` (data by tests/gen/text_tokenizers.py).

use crate::common::text_data::{golden, golden_json, real_model, small};
use lmx::text::{Tokenizer, TokenizerFiles};
use proptest::prelude::*;
use serde::Deserialize;
use std::sync::OnceLock;

const KINDS: [&str; 7] = ["byte_level", "split_nfc", "llama", "gemma", "metaspace", "unigram", "word_level"];

#[derive(Deserialize)]
struct Cases {
    /// Text, ids without and with the tokenizer's frame.
    encode: Vec<(String, Vec<u32>, Vec<u32>)>,
    decode: Vec<(Vec<u32>, String)>,
}

fn check(name: &str, tokenizer: &Tokenizer, cases: &Cases) {
    for (text, bare, framed) in &cases.encode {
        assert_eq!(&tokenizer.encode(text, false).unwrap(), bare, "{name}: {text:?}");
        // lmx never doubles what the text already starts with.
        if bare.first() != framed.first() || tokenizer.bos().is_none() {
            assert_eq!(&tokenizer.encode(text, true).unwrap(), framed, "{name}: {text:?}");
        }
    }
    for (ids, text) in &cases.decode {
        assert_eq!(&tokenizer.decode(ids), text, "{name}: {ids:?}");
    }
    assert!(cases.encode.len() > 90 && cases.decode.len() > 100, "{name}: too few cases");
}

#[test]
fn small_tokenizers_agree_with_hf() {
    for kind in KINDS {
        check(kind, &small(kind), &golden_json(&format!("{kind}/cases.json")));
    }
}

#[test]
fn real_tokenizers_agree_with_hf() {
    for (name, folder) in [("smollm2", "SmolLM2-135M-Instruct"), ("gemma3", "gemma-3-270m")] {
        let start = std::time::Instant::now();
        let tokenizer = Tokenizer::from_folder(&real_model(folder)).unwrap();
        println!("{folder}: loaded in {:?}", start.elapsed());
        check(name, &tokenizer, &golden_json(&format!("{name}.json")));
    }
}

#[test]
fn exactly_one_bos() {
    let gemma = small("gemma");
    let bos = gemma.bos().unwrap();
    assert!(gemma.adds_bos());
    for text in ["hi", "<s>hi"] {
        let ids = gemma.encode(text, true).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{text}");
        assert_eq!(ids.first(), Some(&bos));
    }
    // A BOS that the text itself holds later stays.
    let ids = gemma.encode("hi<s>", true).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 2);
    let none = small("byte_level");
    assert!(!none.adds_bos());
    assert_eq!(none.encode("hi", true).unwrap(), none.encode("hi", false).unwrap());
}

#[test]
fn roles_and_lookup() {
    let t = small("byte_level");
    let ids = (t.bos(), t.eos(), t.unk(), t.pad());
    assert_eq!(ids, (Some(1), Some(2), Some(0), Some(2)));
    assert_eq!((t.token(1), t.id("<|im_end|>")), (Some("<|im_start|>"), Some(2)));
    assert!(t.is_control(1) && !t.is_control(t.id("<think>").unwrap()) && !t.is_control(50));
    assert_eq!(t.lookup("<|im_end|>").unwrap(), 2);
    assert_eq!(t.lookup("17").unwrap(), 17);
    let last = t.vocab_size() - 1;
    assert_eq!(t.lookup(&last.to_string()).unwrap() as usize, last);
    assert_eq!(t.lookup("zzz").unwrap_err().to_string(), "\"zzz\" is not a token for this tokenizer");
    for word in ["-1", &(last + 1).to_string(), "99999999999999999999"] {
        let message = t.lookup(word).unwrap_err().to_string();
        let want = format!("token id {word} is out of range; this tokenizer has ids from 0 to {last}");
        assert_eq!(message, want);
    }
    assert!(t.lookup("").is_err());
}

fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut detokenizer = tokenizer.detokenizer();
    let mut shown = String::new();
    for &id in ids {
        shown.push_str(&detokenizer.add(id));
    }
    shown.push_str(&detokenizer.finish());
    shown
}

#[test]
fn a_complete_character_is_shown_with_the_token_that_completes_it() {
    for kind in KINDS {
        let tokenizer = small(kind);
        for text in ["ď 👩‍🚀 日本語 é", "    .", " ,b", "\n\n  x", "if x:\n    y()\n", "👍🎉", "日本"]
        {
            let ids = tokenizer.encode(text, false).unwrap();
            let mut detokenizer = tokenizer.detokenizer();
            let mut shown = String::new();
            for n in 1..=ids.len() {
                shown.push_str(&detokenizer.add(ids[n - 1]));
                let so_far = tokenizer.decode(&ids[..n]);
                let complete = so_far.trim_end_matches('\u{FFFD}');
                assert_eq!(shown, complete, "{kind}: {text:?} after {n} tokens");
            }
        }
    }
}

/// Our tokenizer beside the `tokenizers` crate's own reading of the same file.
fn both() -> &'static [(&'static str, Tokenizer, tokenizers::Tokenizer)] {
    static BOTH: OnceLock<Vec<(&str, Tokenizer, tokenizers::Tokenizer)>> = OnceLock::new();
    BOTH.get_or_init(|| {
        let theirs = |kind| tokenizers::Tokenizer::from_file(golden().join(kind).join("tokenizer.json"));
        KINDS.iter().map(|&kind| (kind, small(kind), theirs(kind).unwrap())).collect()
    })
}

/// Whether every run of byte tokens is UTF-8 or holds no whole character at all. Of other runs the crate
/// shows nothing but U+FFFD; lmx keeps the characters, since it cannot take back what it has shown.
fn byte_runs_are_plain(tokenizer: &Tokenizer, ids: &[u32]) -> bool {
    let byte = |id: &u32| {
        let digits = tokenizer.token(*id)?.strip_prefix("<0x")?.strip_suffix('>')?;
        u8::from_str_radix(digits, 16).ok()
    };
    // Ids without a token are skipped and do not end a run.
    let ids: Vec<u32> = ids.iter().copied().filter(|&id| tokenizer.token(id).is_some()).collect();
    ids.chunk_by(|a, b| byte(a).is_some() && byte(b).is_some()).all(|run| {
        let bytes: Vec<u8> = run.iter().filter_map(byte).collect();
        let text = String::from_utf8_lossy(&bytes);
        !text.contains('\u{FFFD}') || text.chars().all(|c| c == '\u{FFFD}')
    })
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Text as models see it: letters, spaces, line ends, emoji, marks, tokens spelled out.
fn texts() -> impl Strategy<Value = String> {
    let parts = prop::sample::select(vec![
        " ",
        "  ",
        "\n",
        "\t",
        "a",
        "the",
        " boat",
        "'s",
        "12",
        "é",
        "e\u{301}",
        "日本",
        "👩‍🚀",
        "▁",
        "Ġ",
        "<s>",
        "</s>",
        "<think>",
        "<mark>",
        "snip",
        "NORM",
        "<NORM>",
        "<|im_end|>",
        "<0x41>",
        "<unk>",
        "\u{0}",
        "x=1;",
    ]);
    prop_oneof![any::<String>(), prop::collection::vec(parts, 0..30).prop_map(|list| list.concat())]
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn random_ids_stream_to_what_the_crate_decodes(seed in prop::collection::vec(any::<u32>(), 0..40)) {
        for (kind, tokenizer, crate_s) in both() {
            // One in eight ids is out of range, one in eight a byte token where there are any.
            let size = tokenizer.vocab_size() as u32;
            let ids: Vec<u32> = seed.iter().map(|&s| match s % 8 {
                0 => s,
                1 => tokenizer.id(&format!("<0x{:02X}>", s >> 24)).unwrap_or(s % size),
                _ => (s >> 3) % size,
            }).collect();
            let streamed = stream(tokenizer, &ids);
            prop_assert_eq!(&streamed, &tokenizer.decode(&ids), "{}", kind);
            if byte_runs_are_plain(tokenizer, &ids) {
                prop_assert_eq!(streamed, crate_s.decode(&ids, false).unwrap(), "{}", kind);
            }
        }
    }

    #[test]
    fn any_text_gets_the_ids_that_the_crate_gives(text in texts()) {
        for (kind, tokenizer, crate_s) in both() {
            let ids = tokenizer.encode(&text, false).unwrap();
            let theirs = crate_s.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(&ids[..], theirs.get_ids(), "{}", kind);
            if *kind == "gemma" && !text.contains(['▁', '<']) {
                prop_assert_eq!(tokenizer.decode(&ids), text.clone());
            }
        }
    }
}

#[test]
fn damaged_files_are_errors_that_name_the_file() {
    let mut files = TokenizerFiles::read(&golden().join("llama")).unwrap();
    let whole = files.tokenizer.clone();
    for cut in (0..whole.len()).step_by(whole.len() / 200) {
        files.tokenizer = whole[..cut].to_vec();
        let message = Tokenizer::from_files(&files).err().unwrap().to_string();
        assert!(message.starts_with("tokenizer.json: "), "{message}");
    }
    files.tokenizer = whole;
    files.config = Some(b"{".to_vec());
    let message = Tokenizer::from_files(&files).err().unwrap().to_string();
    assert!(message.starts_with("tokenizer_config.json: "), "{message}");
    let missing = Tokenizer::from_folder(&golden()).err().unwrap().to_string();
    assert!(missing.contains("tokenizer.json"), "{missing}");
}
