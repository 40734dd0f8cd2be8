//! Tokenizers from GGUF metadata against the same models' tokenizer.json.

use crate::common::text_data::{golden_json, real_model};
use lmx::text::{GgufVocab, Tokenizer};
use lmx_tensor::files::GgufFile;

#[test]
fn ids_equal_those_of_tokenizer_json() {
    for (golden_name, file) in
        [("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"), ("gemma3", "gemma-3-270m-q4_k_m.gguf")]
    {
        let gguf = GgufFile::open(&real_model(file)).unwrap();
        let start = std::time::Instant::now();
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
        println!("{file}: tokenizer built in {:?}", start.elapsed());
        let cases: serde_json::Value = golden_json(&format!("{golden_name}.json"));
        let ids = |v: &serde_json::Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
        for case in cases["encode"].as_array().unwrap() {
            let text = case[0].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&case[1]), "{file}: {text:?}");
        }
        for case in cases["decode"].as_array().unwrap() {
            assert_eq!(tokenizer.decode(&ids(&case[0])), case[1].as_str().unwrap(), "{file}");
        }
    }
}

#[test]
fn roles_and_policies_of_the_real_files() {
    let open = |file| Tokenizer::from_gguf(&GgufFile::open(&real_model(file)).unwrap()).unwrap();
    let smol = open("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert_eq!((smol.bos(), smol.eos(), smol.unk(), smol.pad()), (Some(1), Some(2), Some(0), Some(2)));
    assert!(!smol.adds_bos() && smol.is_control(1) && smol.vocab_size() == 49152);
    let gemma = open("gemma-3-270m-q4_k_m.gguf");
    assert_eq!((gemma.bos(), gemma.eos(), gemma.unk(), gemma.pad()), (Some(2), Some(1), Some(3), Some(0)));
    assert!(gemma.adds_bos() && gemma.vocab_size() == 262_144);
    assert_eq!(gemma.encode("hi", true).unwrap().first(), Some(&2));
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|&s| s.to_owned()).collect()
}

/// `<unk> <s> </s>`, 256 bytes, then pieces whose score falls with their place.
fn sentence_piece<'a>(tokens: &'a [String], add_space_prefix: Option<bool>) -> GgufVocab<'a> {
    let kind = |t: &String| match t.as_str() {
        "<unk>" => 2,
        "<s>" | "</s>" => 3,
        t if t.starts_with("<0x") => 6,
        t if t.contains("user") => 4,
        _ => 1,
    };
    GgufVocab {
        file: "test.gguf".to_owned(),
        model: "llama",
        tokens,
        scores: (0..tokens.len()).map(|i| -(i as f32)).collect(),
        token_types: tokens.iter().map(kind).collect(),
        roles: vec![("bos", 1), ("eos", 2), ("unknown", 0)],
        add_space_prefix,
        ..GgufVocab::default()
    }
}

fn pieces(list: &[&str]) -> Vec<String> {
    let bytes = (0..256).map(|b| format!("<0x{b:02X}>"));
    strings(&["<unk>", "<s>", "</s>"]).into_iter().chain(bytes).chain(strings(list)).collect()
}

fn spelled(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, false).unwrap();
    ids.iter().map(|&id| tokenizer.token(id).unwrap().to_owned()).collect()
}

#[test]
fn sentence_piece_merges_by_score_and_puts_a_space_before_the_text() {
    let tokens = pieces(&["bc", "ab", "abc", "▁", "a", "b", "c", "▁a", "<user x>"]);
    let tokenizer = Tokenizer::from_gguf_vocab(&sentence_piece(&tokens, None)).unwrap();
    assert_eq!(spelled(&tokenizer, "abc"), ["▁", "abc"]);
    assert_eq!(spelled(&tokenizer, "ab a</s>a"), ["▁", "ab", "▁a", "</s>", "▁a"]);
    assert_eq!(spelled(&tokenizer, "é"), ["▁", "<0xC3>", "<0xA9>"]);
    assert_eq!(spelled(&tokenizer, "a<user▁x>"), ["▁a", "<user▁x>"]);
    let ids = tokenizer.encode("ab é", true).unwrap();
    assert_eq!((ids.first(), tokenizer.decode(&ids[1..]).as_str()), (Some(&1), "ab é"));
    assert_eq!(tokenizer.eos_ids(), [2]);
    let roles = vec![("bos", 1), ("eos", 2), ("unknown", 0), ("eot", 5), ("eom", 2)];
    let more = Tokenizer::from_gguf_vocab(&GgufVocab { roles, ..sentence_piece(&tokens, None) }).unwrap();
    assert_eq!(more.eos_ids(), [2, 5]);
    let bare = Tokenizer::from_gguf_vocab(&sentence_piece(&tokens, Some(false))).unwrap();
    assert_eq!(spelled(&bare, "abc"), ["abc"]);
}

#[test]
fn what_is_not_known_or_does_not_fit_is_refused_by_name() {
    let tokens = pieces(&["a"]);
    let spm = sentence_piece(&tokens, None);
    let message = |vocab: GgufVocab<'_>| Tokenizer::from_gguf_vocab(&vocab).err().unwrap().to_string();
    let bpe = |pre| GgufVocab { model: "gpt2", pre, ..spm.clone() };
    let unknown = message(bpe(Some("frobnicate-7")));
    let want = "test.gguf: tokenizer.ggml.pre \"frobnicate-7\" is not supported; known are: gpt-2, ";
    assert!(unknown.starts_with(want), "{unknown}");
    for pre in [None, Some("default")] {
        assert!(message(bpe(pre)).contains("tokenizer.ggml.pre"));
    }
    let model = message(GgufVocab { model: "rwkv", ..spm.clone() });
    assert_eq!(model, "test.gguf: tokenizer.ggml.model \"rwkv\" is not supported; known are: gpt2, llama");
    assert!(message(GgufVocab { scores: Vec::new(), ..spm.clone() }).contains("tokenizer.ggml.scores"));
    assert!(message(GgufVocab { scores: vec![0.0], ..spm.clone() }).contains("of length 1"));
    assert!(message(GgufVocab { token_types: vec![1], ..spm.clone() }).contains("token_type"));
    let roles = vec![("eos", 999)];
    assert!(message(GgufVocab { roles, ..spm.clone() }).contains("tokenizer.ggml.eos_token_id 999"));
    for merges in [strings(&["ab"]), strings(&["a zz"])] {
        let bad = GgufVocab { merges: &merges, ..bpe(Some("smollm")) };
        assert!(message(bad).contains("tokenizer.ggml.merges"));
    }
    // NaN scores and odd types neither panic nor loop.
    let odd = GgufVocab { scores: vec![f32::NAN; tokens.len()], token_types: vec![-7; tokens.len()], ..spm };
    assert!(Tokenizer::from_gguf_vocab(&odd).unwrap().encode("aaa b", true).is_ok());
}
