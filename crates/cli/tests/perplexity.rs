//! `lmx perplexity` from its words to its numbers, on tiny models.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use common::model::Model;
use common::{Outcome, lmx, outcome, run};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/eval")
        .join(name)
        .to_str()
        .unwrap()
        .to_owned()
}

fn measure(model: &Model, words: &[&str]) -> Outcome {
    run(&[&["perplexity", "--model", model.path(), "--threads", "1"], words].concat())
}

fn json(model: &Model, words: &[&str]) -> Value {
    serde_json::from_str(measure(model, &[words, &["--json"]].concat()).assert_ok()).unwrap()
}

/// A file that is gone when the test is over.
fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path: PathBuf = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn one_number_for_any_batch_and_all_that_repeats_it() {
    let model = Model::random();
    let data = golden("paragraphs.jsonl");
    for protocol in [
        &["--protocol", "windows", "--sequence-length", "50"][..],
        &["--protocol", "documents", "--sequence-length", "200", "--stride", "150", "--num-samples", "5"],
        &["--protocol", "strided", "--sequence-length", "64", "--stride", "40", "--num-samples", "12"],
    ] {
        let words = [&["--data", data.as_str(), "--num-samples", "9"], protocol].concat();
        let told = json(&model, &words);
        for batch in ["1", "3", "16"] {
            let other =
                json(&model, &[&words[..], &["--batch-size", batch, "--prefill-step-size", "33"]].concat());
            for key in ["models", "protocol", "data", "windows", "tokens_read", "tokens_scored"] {
                assert_eq!(told[key], other[key], "{protocol:?}, batch {batch}");
            }
        }
        let result = &told["models"][0];
        let scored = told["tokens_scored"].as_u64().unwrap();
        let mean = result["mean_loss"].as_f64().unwrap();
        assert!((result["perplexity"].as_f64().unwrap() - mean.exp()).abs() < 1e-9);
        assert_eq!(result["tokens_scored"].as_u64(), Some(scored));
        assert!(
            result["fingerprints"]["tensors"].is_string() && result["fingerprints"]["tokenizer"].is_string()
        );
        assert_eq!(told["data"]["blake3"].as_str().unwrap().len(), 64);
        match told["protocol"]["name"].as_str().unwrap() {
            "windows" => {
                assert_eq!((scored, told["windows"].as_u64()), (9 * 49, Some(9)));
                // Every token is a byte, but for the ends of texts.
                let text = &result["text"];
                assert_eq!(text["bytes"], text["tokens"]);
                let bits = mean / 2_f64.ln();
                assert!((text["bits_per_byte"].as_f64().unwrap() - bits).abs() < 0.2, "{text}");
            }
            "documents" => assert_eq!(told["data"]["records_used"].as_u64(), Some(5)),
            _ => assert_eq!(scored, 63 + 11 * 40),
        }
    }
    let table = measure(&model, &["--data", &data, "--sequence-length", "50", "--num-samples", "2"]);
    let table = table.assert_ok();
    for part in [
        "EVALUATION RESULTS",
        "Perplexity: ",
        " ± ",
        "Bits per byte: ",
        "Total samples: 2",
        "windows, 50 tokens",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
}

#[test]
fn the_seed_orders_the_records_and_bos_stands_where_it_is_asked_for() {
    let model = Model::random();
    let data = golden("paragraphs.jsonl");
    let words = ["--data", data.as_str(), "--sequence-length", "50", "--num-samples", "4"];
    let told = |more: &[&str]| json(&model, &[&words[..], more].concat());
    assert_eq!(told(&["--seed", "123"])["models"], told(&[])["models"]);
    assert_ne!(told(&["--seed", "7"])["models"], told(&[])["models"]);
    let always = told(&["--bos", "always"]);
    // The tokenizer has no BOS: the end of sequence takes its place, and the first token of a row is scored too.
    assert_eq!(
        (always["tokens_scored"].as_u64(), always["protocol"]["prefix_token"].is_u64()),
        (Some(200), true)
    );
    let documents = ["--protocol", "documents"];
    let (auto, never) = (told(&documents), told(&[&documents[..], &["--bos", "never"]].concat()));
    let scored = |told: &Value| told["tokens_scored"].as_u64().unwrap();
    assert_eq!(scored(&auto), scored(&never) + 4 * auto["windows"].as_u64().unwrap().min(1));
}

#[test]
fn every_kind_of_file_gives_the_same() {
    let model = Model::random();
    for (name, words) in [
        ("texts", &["--sequence-length", "20"][..]),
        ("texts", &["--protocol", "documents"]),
        ("texts", &["--protocol", "strided", "--sequence-length", "30"]),
        ("chats", &["--sequence-length", "16"]),
        ("chats", &["--protocol", "documents"]),
    ] {
        let told = |kind: &str| {
            let path = golden(&format!("{name}.{kind}"));
            json(&model, &[&["--data", path.as_str()], words].concat())
        };
        let (lines, parquet) = (told("jsonl"), told("parquet"));
        assert_eq!(lines["models"], parquet["models"], "{name} {words:?}");
        let empty = if name == "texts" { 1 } else { 0 };
        assert_eq!(parquet["data"]["records_empty"].as_u64(), Some(empty));
        assert_eq!(parquet["data"]["records_used"].as_u64(), Some(if name == "texts" { 4 } else { 3 }));
        let notices = parquet["notices"].to_string();
        assert!(notices.contains("makes") || words.contains(&"documents"), "{notices}");
        assert_eq!(notices.contains("1 records without text"), empty == 1, "{notices}");
    }
    let dir = tempfile::tempdir().unwrap();
    let text = file(&dir, "a.md", "One river runs to the sea.\n");
    let list = file(&dir, "a.json", r#"[{"text": "One river runs to the sea.\n"}]"#);
    let words = ["--protocol", "documents", "--data"];
    assert_eq!(
        json(&model, &[&words[..], &[text.as_str()]].concat())["models"],
        json(&model, &[&words[..], &[list.as_str()]].concat())["models"]
    );
    let zstd = golden("texts-zstd.parquet");
    measure(&model, &["--data", &zstd]).assert_error(1, &["texts-zstd.parquet", "zstd"]);
}

#[test]
fn a_data_set_is_found_in_the_hub_cache_and_in_a_folder() {
    let model = Model::random();
    let dir = tempfile::tempdir().unwrap();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repository = dir.path().join("datasets--org--name");
    let data = repository.join("snapshots").join(commit).join("data");
    std::fs::create_dir_all(&data).unwrap();
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::write(repository.join("refs/main"), commit).unwrap();
    std::fs::copy(golden("texts.parquet"), data.join("train-00000-of-00001.parquet")).unwrap();
    std::fs::copy(golden("chats.jsonl"), data.join("test.jsonl")).unwrap();
    let named = |path: &str, split: &str| {
        let words = ["perplexity", "--model", model.path(), "--data-path", path, "--split", split];
        let more = ["--protocol", "documents", "--json"];
        outcome(lmx(&[&words[..], &more[..]].concat()).env("HF_HUB_CACHE", dir.path()), b"")
    };
    for (split, file) in [("train", "texts.parquet"), ("test", "chats.jsonl")] {
        let direct = json(&model, &["--protocol", "documents", "--data", &golden(file)]);
        for path in ["org/name", data.to_str().unwrap()] {
            let told: Value = serde_json::from_str(named(path, split).assert_ok()).unwrap();
            assert_eq!(told["models"], direct["models"], "{path} {split}");
        }
    }
    named("org/name", "validation").assert_error(1, &["validation", "--split"]);
    named("org/other", "train").assert_error(1, &["org/other", "downloads nothing", "--data"]);
}

#[test]
fn a_second_model_is_measured_on_the_same_tokens() {
    let model = Model::random();
    let data = golden("paragraphs.jsonl");
    let words = ["--data", data.as_str(), "--sequence-length", "60", "--num-samples", "5"];
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("cost.svg");
    let same = json(&model, &[&words[..], &["--against", model.path()]].concat());
    let against = &same["against"];
    assert_eq!((against["kl"]["mean"].as_f64(), against["same_top"].as_f64()), (Some(0.0), Some(1.0)));
    assert_eq!(against["loss_difference"]["mean"].as_f64(), Some(0.0));
    let adapter = Model::adapter_saying(b'e');
    let adapter = adapter.path().to_str().unwrap();
    let with = ["--adapter-path", adapter, "--against", model.path(), "--plot", plot.to_str().unwrap()];
    let told = json(&model, &[&words[..], &with[..]].concat());
    let value = |of: &Value, key: &str| of[key].as_f64().unwrap();
    let (first, second) = (&told["models"][0], &told["models"][1]);
    assert!(first["adapter"].is_string() && second["adapter"].is_null());
    assert_eq!(second["perplexity"], same["models"][0]["perplexity"]);
    let difference = value(second, "mean_loss") - value(first, "mean_loss");
    assert!((told["against"]["loss_difference"]["mean"].as_f64().unwrap() - difference).abs() < 1e-9);
    assert!(told["against"]["kl"]["mean"].as_f64().unwrap() > 1e-6);
    let drawn = std::fs::read_to_string(&plot).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("likeliest token") && !drawn.contains("NaN"));
    let table = measure(&model, &[&words[..], &["--against", model.path()]].concat());
    assert!(table.assert_ok().contains("Same likeliest token: 100.00 %"), "{table:?}");
}

#[test]
fn what_cannot_be_measured_is_named() {
    let model = Model::random();
    let dir = tempfile::tempdir().unwrap();
    let short = file(&dir, "short.txt", "too short");
    measure(&model, &["--data", &short])
        .assert_error(1, &["short.txt", "tokens", "512", "--sequence-length"]);
    for (name, text, says) in [
        ("none.jsonl", "", &["no records"][..]),
        ("kind.jsonl", r#"{"body": "x"}"#, &["body", "text, messages, or prompt and completion"]),
        ("mixed.jsonl", "{\"text\": \"a\"}\n{\"other\": 1}\n", &["record 1", "text is missing"]),
        ("list.jsonl", "[1]\n", &["JSON object"]),
        ("number.jsonl", r#"{"text": 5}"#, &["record 0", "text must be a string"]),
        ("broken.parquet", "PAR1 not at all", &["broken.parquet"]),
        ("empty.jsonl", r#"{"text": " "}"#, &["0 tokens"]),
    ] {
        let path = file(&dir, name, text);
        measure(&model, &["--data", &path, "--protocol", "documents"]).assert_error(1, says);
    }
    let missing = dir.path().join("missing.txt");
    measure(&model, &["--data", missing.to_str().unwrap()]).assert_error(1, &["missing.txt"]);
    let words = ["--data", &golden("texts.jsonl"), "--sequence-length", "200000"];
    measure(&model, &words).assert_error(2, &["--sequence-length 200000", "131072"]);
    let other = Model::script(&[b"ab"], common::model::Then::End);
    let data = golden("texts.jsonl");
    let words = ["--data", data.as_str(), "--protocol", "documents", "--against", other.path()];
    let outcome = measure(&model, &words);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
}

#[test]
fn words_that_are_wrong_are_refused_before_anything_is_read() {
    for (words, says) in [
        (&["--num-samples", "0"][..], &["--num-samples 0", "-1 for all"][..]),
        (&["--num-samples", "-2"], &["--num-samples -2"]),
        (&["--sequence-length", "1"], &["--sequence-length 1", "2 or more"]),
        (&["--stride", "5"], &["--stride", "--protocol strided"]),
        (&["--protocol", "strided", "--stride", "0"], &["--stride 0"]),
        (&["--protocol", "rows"], &["--protocol", "windows, documents, strided"]),
        (&["--bos", "maybe"], &["--bos"]),
        (&["--batch-size", "0"], &["--batch-size", "at least 1"]),
        (&["--seed", "4294967296"], &["--seed"]),
        (&["--plot", "x.svg"], &["--against"]),
        (&["--against", "b", "--plot", "/nonexistent/x.svg"], &["--plot", "/nonexistent"]),
        (&["--data", "a", "--data-path", "b"], &["--data"]),
        (&["--kv-bits", "7"], &["--kv-bits 7"]),
    ] {
        run(&[&["perplexity", "--model", "/nonexistent/model"], words].concat()).assert_error(2, says);
    }
    run(&["perplexity"]).assert_error(2, &["--model"]);
}
