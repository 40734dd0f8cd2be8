//! `lmx cache-prompt` and `lmx generate --prompt-cache-file`, on tiny models.

use crate::common::model::Model;
use crate::common::{Outcome, run, run_with_input};
use serde_json::{Value, json};
use std::path::Path;

/// More than a block of 32 tokens; each byte is one.
const BEGINNING: &str = "In the beginning there was a long prompt, and it had many words.";

fn cache(model: &Model, file: &str, words: &[&str]) -> Outcome {
    let fixed = ["cache-prompt", "--model", model.path(), "--prompt", BEGINNING, "--prompt-cache-file", file];
    run(&[&fixed, words].concat())
}

/// Generates from a file, without naming a model.
fn generate(file: &str, words: &[&str]) -> Value {
    let fixed = ["generate", "--prompt-cache-file", file, "--json", "-m", "8"];
    serde_json::from_str(run(&[&fixed, words].concat()).assert_ok()).unwrap()
}

fn generate_error(file: &str, words: &[&str], code: i32, says: &[&str]) {
    run(&[&["generate", "--prompt-cache-file", file], words].concat()).assert_error(code, says);
}

/// Changes the header of a safetensors file.
fn edit(file: &str, change: impl FnOnce(&mut Value)) {
    let bytes = std::fs::read(file).unwrap();
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string();
    let length = u64::try_from(header.len()).unwrap().to_le_bytes();
    std::fs::write(file, [&length, header.as_bytes(), &bytes[8 + length_of(&bytes)..]].concat()).unwrap();
}

fn length_of(bytes: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap()
}

#[test]
fn a_cached_prompt_goes_on_as_one_turn() {
    let model = Model::random();
    let file = model.file("cache.safetensors");
    let file = file.to_str().unwrap();
    for bound in [&[][..], &["--max-kv-size", "40", "--kv-keep", "3"]] {
        let made = cache(&model, file, bound);
        assert_eq!(made.assert_ok(), "");
        // <|user|> and the bytes.
        let count = BEGINNING.len() + 1;
        assert!(made.stderr.contains(&format!("Processed {count} tokens")), "{made:?}");
        let before = std::fs::read(file).unwrap();
        for (more, words) in [(" And more.", &[][..]), (" And.", &["--prefill-response", "Well"])] {
            let warm = generate(file, &[&["-p", more], words].concat());
            let whole = format!("{BEGINNING}{more}");
            let fixed = ["generate", "--model", model.path(), "--json", "-m", "8", "-p", &whole];
            let cold: Value =
                serde_json::from_str(run(&[&fixed, words, bound].concat()).assert_ok()).unwrap();
            for key in ["text", "token_ids", "prompt_tokens", "finish_reason"] {
                assert_eq!(warm[key], cold[key], "{key}: {warm}");
            }
            assert_eq!((&warm["cached_tokens"], &cold["cached_tokens"]), (&json!(count), &json!(0)));
            assert!(warm["notices"].to_string().contains(&format!("all {count} tokens")), "{warm}");
            assert_eq!(warm["model"], model.path());
        }
        assert_eq!(std::fs::read(file).unwrap(), before, "generate does not change the file");
    }
}

#[test]
fn a_file_that_does_not_say_its_tokens_goes_on_unverified() {
    let model = Model::random();
    let file = model.file("cache");
    let file = file.to_str().unwrap();
    cache(&model, file, &[]).assert_ok();
    let known = generate(file, &["-p", " And <|end|> more."]);
    // What mlx-lm writes.
    edit(file, |header| {
        let metadata = header["__metadata__"].as_object_mut().unwrap();
        metadata.retain(|key, _| !key.starts_with("0.lmx_"));
    });
    let unknown = generate(file, &["-p", " And <|end|> more."]);
    for key in ["text", "token_ids", "prompt_tokens", "cached_tokens"] {
        assert_eq!(known[key], unknown[key], "{key}");
    }
    assert!(unknown["notices"].to_string().contains("unverified"), "{unknown}");
    assert!(!known["notices"].to_string().contains("unverified"), "{known}");
    // Names cannot be compared by weights.
    generate_error(file, &["--model", "elsewhere"], 2, &["--model", "elsewhere", model.path()]);
}

#[test]
fn a_text_without_a_template_goes_on_too() {
    let model = Model::random();
    model.edit("tokenizer_config.json", |config| {
        drop(config.as_object_mut().unwrap().remove("chat_template"))
    });
    let file = model.file("cache");
    let file = file.to_str().unwrap();
    let made = cache(&model, file, &[]);
    assert!(made.stderr.contains("no chat template"), "{made:?}");
    let warm = generate(file, &["-p", " And more."]);
    let count = BEGINNING.len();
    assert_eq!((&warm["prompt_tokens"], &warm["cached_tokens"]), (&json!(count + 10), &json!(count)));
    let whole = format!("{BEGINNING} And more.");
    let cold = run(&["generate", "--model", model.path(), "--json", "-m", "8", "-p", &whole]);
    let cold: Value = serde_json::from_str(cold.assert_ok()).unwrap();
    assert_eq!(warm["token_ids"], cold["token_ids"]);
}

#[test]
fn flags_that_contradict_the_file_are_refused_with_both_values() {
    let model = Model::random();
    let (plain, bound) = (model.file("plain"), model.file("bound"));
    let (plain, bound) = (plain.to_str().unwrap(), bound.to_str().unwrap());
    cache(&model, plain, &["--kv-dtype", "f16"]).assert_ok();
    cache(&model, bound, &["--max-kv-size", "40"]).assert_ok();
    generate_error(plain, &["--kv-dtype", "f32"], 2, &["--kv-dtype", "f32", "f16"]);
    generate_error(plain, &["--max-kv-size", "40"], 2, &["--max-kv-size", "40", "no bound"]);
    generate_error(bound, &["--max-kv-size", "50"], 2, &["--max-kv-size", "50", "40", "first 4"]);
    generate_error(plain, &["--system-prompt", "be brief"], 2, &["--system-prompt"]);
    // What agrees, and what is taken over.
    let taken = generate(plain, &["--kv-dtype", "f16"]);
    assert_eq!(taken["token_ids"], generate(plain, &[])["token_ids"]);
    let notices = generate(bound, &["--max-kv-size", "40"])["notices"].to_string();
    assert!(notices.contains("first 4 and the last 36"), "{notices}");
    let other = Model::random();
    let edited = |change: &dyn Fn(&Model)| {
        let copy = Model::random();
        change(&copy);
        copy
    };
    // The same weights elsewhere are the same model.
    run(&["generate", "--prompt-cache-file", plain, "--model", other.path(), "-m", "2"]).assert_ok();
    let template = edited(&|m| {
        m.edit("tokenizer_config.json", |c| c["chat_template"] = json!("{{ messages[0].content }}"));
    });
    let config = edited(&|m| m.edit("config.json", |c| c["rms_norm_eps"] = json!(1e-4)));
    let weights = edited(&|m| {
        let path = m.file("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(path, bytes).unwrap();
    });
    for (model, says) in [(template, "template"), (config, "config.json"), (weights, "weights")] {
        generate_error(plain, &["--model", model.path()], 1, &[plain, says]);
    }
}

#[test]
fn quantized_keys_and_values_are_taken_over_from_the_file() {
    let model = Model::random();
    let (file, floats) = (model.file("quantized"), model.file("floats"));
    let (file, floats) = (file.to_str().unwrap(), floats.to_str().unwrap());
    let count = BEGINNING.len() + 1;
    for start in ["0", "40"] {
        let flags = ["--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", start];
        let made = cache(&model, file, &flags);
        made.assert_ok();
        assert!(made.stderr.contains("4 bits in groups of 32"), "{made:?}");
        let warm = generate(file, &["-p", " And more."]);
        let whole = format!("{BEGINNING} And more.");
        let fixed = ["generate", "--model", model.path(), "--json", "-m", "8", "-p", &whole];
        let cold: Value = serde_json::from_str(run(&[&fixed[..], &flags].concat()).assert_ok()).unwrap();
        for key in ["text", "token_ids", "prompt_tokens", "kv_format", "kv_quantized_from"] {
            assert_eq!(warm[key], cold[key], "{key}: {warm}");
        }
        assert_eq!(warm["cached_tokens"], json!(count));
        let notices = warm["notices"].to_string();
        let says =
            format!("positions from {start} on read keys and values of 4 bits in groups of 32 (as in ");
        assert!(notices.contains(&says) && notices.contains("quantized"), "{notices}");
        let agreed = generate(file, &[&["-p", " And more."], &flags[..]].concat());
        assert_eq!(agreed["token_ids"], cold["token_ids"]);
    }
    let conflicts: [(&[&str], [&str; 3]); 4] = [
        (&["--kv-bits", "8"], ["--kv-bits", "8", "4"]),
        (&["--kv-bits", "4", "--kv-group-size", "64"], ["--kv-group-size", "64", "32"]),
        (&["--kv-bits", "4", "--quantized-kv-start", "41"], ["--quantized-kv-start", "41", "40"]),
        (&["--max-kv-size", "40"], ["--max-kv-size", "40", "no bound"]),
    ];
    for (flags, says) in conflicts {
        generate_error(file, flags, 2, &says);
    }
    // Floats are quantized where it is asked for; what has passed that is said.
    cache(&model, floats, &[]).assert_ok();
    let flags = ["--kv-bits", "2", "--kv-group-size", "32", "--quantized-kv-start"];
    let late = generate(floats, &[&flags[..], &["40"]].concat());
    let notices = late["notices"].to_string();
    assert!(notices.contains("(--kv-bits)") && notices.contains("from position 40 on"), "{notices}");
    let later = generate(floats, &[&flags[..], &["66"]].concat());
    assert_eq!(later["kv_quantized_from"], 66);
    assert!(!later["notices"].to_string().contains("over floats"), "{later}");
    // A prompt that does not come to the start is floats.
    let made = cache(&model, file, &["--kv-bits", "4", "--kv-group-size", "32"]);
    made.assert_ok();
    assert!(made.stderr.contains("--kv-bits has no effect"), "{made:?}");
    // Windows have no place in such a file: known before there are any weights.
    std::fs::remove_file(model.file("model.safetensors")).unwrap();
    let window = ["--kv-bits", "4", "--kv-group-size", "32", "--max-kv-size", "40"];
    cache(&model, file, &window).assert_error(2, &["--kv-bits", "--max-kv-size"]);
}

#[test]
fn a_model_with_windows_is_refused_for_quantized_files() {
    let model = Model::random();
    model.edit("config.json", |config| {
        config["model_type"] = json!("mistral");
        config["sliding_window"] = json!(16);
    });
    let file = model.file("cache");
    let file = file.to_str().unwrap();
    cache(&model, file, &[]).assert_ok();
    let flags = ["--kv-bits", "4", "--kv-group-size", "32"];
    cache(&model, file, &flags).assert_error(2, &["--kv-bits", "window"]);
}

#[test]
fn bad_files_and_flags_are_named() {
    let model = Model::random();
    let file = model.file("cache");
    let file = file.to_str().unwrap();
    generate_error(file, &[], 1, &[file]);
    std::fs::write(file, "no safetensors").unwrap();
    generate_error(file, &[], 1, &[file]);
    cache(&model, file, &["--kv-bits", "7"]).assert_error(2, &["--kv-bits 7"]);
    cache(&model, file, &["--kv-memory", "1KB"]).assert_error(1, &["memory"]);
    cache(&model, file, &["--eos-token", "zzz-not-a-token"]).assert_error(1, &["zzz-not-a-token"]);
    assert_eq!(std::fs::read_to_string(file).unwrap(), "no safetensors", "a failure leaves it as it was");
    run(&["cache-prompt", "--prompt", "x"]).assert_error(2, &["--prompt-cache-file"]);
    let nowhere = model.file("no/such/folder/file");
    cache(&model, nowhere.to_str().unwrap(), &[]).assert_error(1, &["cannot be written"]);
    // The other spelling, from standard input.
    let words = [
        "cache_prompt",
        "--model",
        model.path(),
        "--prompt",
        "-",
        "--prompt-cache-file",
        file,
        "--eos-token",
        "a",
    ];
    run_with_input(&words, b"read\\n").assert_ok();
    let header = std::fs::read(file).unwrap();
    let text = String::from_utf8_lossy(&header[..length_of(&header) + 8]).into_owned();
    assert!(text.contains("read\\\\\\\\n") && text.contains("eos_token"), "{text}");
    assert!(Path::new(file).exists());
}
