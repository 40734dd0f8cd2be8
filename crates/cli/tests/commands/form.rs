//! `--json-schema`, `--regex` and `--grammar`.

use crate::common::model::Model;
use crate::common::{Outcome, run, run_with_input};
use serde_json::Value;

fn generate(model: &Model, words: &[&str]) -> Outcome {
    let common = ["generate", "--model", model.path(), "--seed", "1", "--temp", "1", "--json"];
    run(&[&common, words].concat())
}

fn json_of(outcome: &Outcome) -> Value {
    serde_json::from_str(outcome.assert_ok()).unwrap()
}

#[test]
fn the_reply_has_the_form() {
    let model = Model::random();
    let reply = json_of(&generate(&model, &["--regex", "(yes|no), (sir|madam)"]));
    let text = reply["text"].as_str().unwrap();
    assert!(["yes, sir", "yes, madam", "no, sir", "no, madam"].contains(&text), "{text}");
    assert_eq!(reply["finish_reason"], "stop");

    let schema = r#"{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": false}"#;
    let file = model.file("schema.json");
    std::fs::write(&file, schema).unwrap();
    let from_file = format!("@{}", file.display());
    for schema in [schema, &from_file] {
        let reply = json_of(&generate(&model, &["--json-schema", schema, "-m", "400"]));
        let value: Value = serde_json::from_str(reply["text"].as_str().unwrap()).unwrap();
        assert!(value["ok"].is_boolean(), "{value}");
    }
    let reply = json_of(&generate(&model, &["--grammar", "start: \"a\" | \"b\" start"]));
    assert!(reply["text"].as_str().unwrap().trim_start_matches('b') == "a", "{reply}");
    let cut = json_of(&generate(&model, &["--regex", "x{200}", "-m", "5"]));
    assert_eq!((&cut["text"], &cut["finish_reason"]), (&"xxxxx".into(), &"length".into()));
}

#[test]
fn every_reply_of_a_chat_has_it() {
    let model = Model::random();
    let words = ["chat", "--model", model.path(), "--regex", "[ab]{3}", "--no-history"];
    let outcome = run_with_input(&words, b"one\ntwo\n");
    let replies: Vec<&str> = outcome.assert_ok().lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(replies.len(), 2, "{outcome:?}");
    assert!(replies.iter().all(|reply| reply.len() == 3 && reply.chars().all(|c| "ab".contains(c))));
}

#[test]
fn what_cannot_be_used_is_refused_before_the_model_is_looked_for() {
    let refused = |words: &[&str], parts: &[&str]| {
        run(&[&["generate", "--model", "no-such-model"], words].concat()).assert_error(2, parts);
    };
    refused(&["--json-schema", "{"], &["--json-schema", "not JSON"]);
    refused(&["--json-schema", r#"{"type": "strin"}"#], &["--json-schema", "strin"]);
    refused(&["--json-schema", r#"{"not": {"type": "string"}}"#], &["--json-schema", "not"]);
    refused(&["--regex", "(a"], &["--regex"]);
    refused(&["--regex", ""], &["--regex", "empty"]);
    refused(&["--grammar", "start: missing"], &["--grammar", "missing"]);
    refused(&["--regex", "a", "--json-schema", "true"], &["--regex", "--json-schema"]);
    let words = ["generate", "--model", "no-such-model", "--grammar", "@no-such-file"];
    run(&words).assert_error(1, &["--grammar", "no-such-file"]);
}
