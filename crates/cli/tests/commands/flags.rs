//! Every flag of `lmx generate` changes what comes out, with a draft model as without one.

use crate::common::model::{Model, Then};
use crate::common::run;
use serde_json::{Value, json};

/// What other tests show: flags that choose what is run or where, that say the same in other words or never change a
/// result, and those of speculation itself.
const ELSEWHERE: [&str; 22] = [
    // Below.
    "--kv-memory",
    "--model",
    "--revision",
    "--help",
    "--verbose",
    "--json",
    "--threads",
    "--prefill-step-size",
    "--ngram-spec",
    "--ngram-n",
    "--draft-model",
    "--num-draft-tokens",
    "--prompts-file",
    "--output",
    "--decode-concurrency",
    "--prompt-concurrency",
    "--prompt-cache-file",
    "--prompt-cache-size",
    "--prompt-cache-bytes",
    "--prompt-cache-dir",
    "--prompt-cache-dir-bytes",
    // Changes a result only where there is a template that has variables.
    "--chat-template-config",
];

/// A flag, the words that it needs to be of any use, and the word after it.
type Row<'a> = (&'a str, &'a [&'a str], &'a [&'a str]);

const SAMPLED: [Row<'static>; 24] = [
    ("--prompt", &[], &["another"]),
    ("--system-prompt", &[], &["Be brief."]),
    ("--use-default-chat-template", &[], &[]),
    ("--prefill-response", &[], &["So"]),
    ("--ignore-chat-template", &[], &[]),
    ("--trust-remote-code", &[], &[]),
    ("--max-tokens", &[], &["5"]),
    ("--seed", &[], &["6"]),
    ("--temp", &[], &["0.2"]),
    ("--filter-tempered", &["--temp", "3", "--min-p", "0.5"], &[]),
    ("--top-p", &[], &["0.1"]),
    ("--min-p", &[], &["0.9"]),
    ("--min-tokens-to-keep", &["--min-p", "1"], &["200"]),
    ("--top-k", &[], &["1"]),
    ("--xtc-probability", &["--xtc-threshold", "0.001"], &["1"]),
    ("--xtc-threshold", &["--xtc-probability", "1"], &["0.0001"]),
    ("--repetition-penalty", &["--temp", "0"], &["30"]),
    ("--repetition-context-size", &["--temp", "0", "--repetition-penalty", "30"], &["1"]),
    ("--presence-penalty", &["--temp", "0"], &["9"]),
    ("--presence-context-size", &["--temp", "0", "--presence-penalty", "9"], &["1"]),
    ("--frequency-penalty", &["--temp", "0"], &["9"]),
    ("--frequency-context-size", &["--temp", "0", "--frequency-penalty", "9"], &["1"]),
    ("--logit-bias", &[], &["{\"65\": 100}"]),
    ("--n", &[], &["2"]),
];

const OTHERS: [Row<'static>; 13] = [
    ("--json-schema", &[], &["true"]),
    ("--regex", &[], &["[a-f]{3}"]),
    ("--grammar", &[], &["start: /[0-9]{4}/"]),
    ("--best-of", &[], &["3"]),
    ("--score", &["--best-of", "3"], &["length-normalized"]),
    ("--vote", &["--n", "2"], &[]),
    ("--answer", &["--n", "2", "--vote"], &["."]),
    ("--kv-dtype", &[], &["bf16"]),
    ("--max-kv-size", &[], &["20"]),
    ("--kv-keep", &["--max-kv-size", "20"], &["9"]),
    ("--kv-bits", &["--kv-group-size", "32", "--quantized-kv-start", "0"], &["2"]),
    ("--kv-group-size", &["--kv-bits", "2", "--quantized-kv-start", "0"], &["32"]),
    ("--quantized-kv-start", &["--kv-bits", "2", "--kv-group-size", "32"], &["0"]),
];

/// What a run gives, but for times and counts of guesses; or its error.
fn result(model: &Model, words: &[&str]) -> Value {
    let fixed = ["generate", "--model", model.path(), "--json", "-m", "24", "--temp", "1", "--seed", "5"];
    let outcome = run(&[&fixed[..], words].concat());
    if outcome.code != Some(0) {
        return json!(outcome.stderr);
    }
    let mut object: Value = serde_json::from_str(outcome.assert_ok()).unwrap();
    let timed = ["prompt_tps", "generation_tps", "ttft_ms", "peak_memory_bytes"];
    for key in timed.into_iter().chain(["drafted_tokens", "accepted_tokens", "draft_seconds", "draft_stop"]) {
        object.as_object_mut().unwrap().remove(key);
    }
    object
}

fn check(model: &Model, (flag, needs, value): &Row<'_>) {
    let with = [*needs, &[*flag], *value].concat();
    let (without, plain) = (result(model, needs), result(model, &with));
    assert_ne!(plain, without, "{flag} changes nothing");
    let drafted = result(model, &[&with[..], &["--draft-model", model.path()]].concat());
    assert_eq!(drafted, plain, "{flag} does something else with a draft model");
    let guessed = result(model, &[&with[..], &["--ngram-spec", "--ngram-n", "1"]].concat());
    assert_eq!(guessed, plain, "{flag} does something else with --ngram-spec");
}

#[test]
fn every_flag_acts_with_a_draft_as_without() {
    let model = Model::random();
    SAMPLED.iter().chain(&OTHERS).for_each(|row| check(&model, row));
    // Those whose values depend on the model or its reply.
    let adapter = Model::adapter_saying(b'x');
    let reply = result(&model, &[]);
    let (text, third) = (reply["text"].as_str().unwrap(), reply["token_ids"][2].to_string());
    let letter = text.chars().skip(1).find(char::is_ascii_alphanumeric).unwrap().to_string();
    let rest: [Row<'_>; 3] = [
        ("--adapter-path", &[], &[adapter.path().to_str().unwrap()]),
        ("--extra-eos-token", &[], &[&third]),
        ("--stop", &[], &[&letter]),
    ];
    rest.iter().for_each(|row| check(&model, row));
    for words in [&[][..], &["--draft-model", model.path()]] {
        let error = result(&model, &[words, &["--kv-memory", "2KB"]].concat());
        assert!(error.as_str().unwrap().contains("does not fit into memory"), "{error}");
    }

    let help = run(&["generate", "--help"]);
    let flags = help.assert_ok().split_whitespace().filter_map(|word| word.strip_prefix("--"));
    let named = |flag: &str| {
        let flag = format!("--{flag}");
        let mut rows = SAMPLED.iter().chain(&OTHERS).chain(&rest);
        ELSEWHERE.contains(&&*flag) || rows.any(|row| row.0 == flag)
    };
    let refused = ["image", "quantize-activations"];
    let forgotten: Vec<&str> = flags
        .map(|flag| flag.trim_end_matches(|c: char| !c.is_ascii_lowercase()))
        .filter(|flag| !refused.contains(flag) && !named(flag))
        .collect();
    assert!(forgotten.is_empty(), "flags that no test is about: {forgotten:?}");
}

#[test]
fn variables_of_a_template_act_with_a_draft_too() {
    let model = Model::script(&[b"yes", b"no"], Then::End);
    model.edit("tokenizer_config.json", |config| {
        config["chat_template"] = json!("{{ greeting | default('hello') }}<|assistant|>");
    });
    check(&model, &("--chat-template-config", &[], &[r#"{"greeting": "good morning"}"#]));
}

#[test]
fn variables_that_the_template_does_not_read_are_told_of() {
    let model = Model::script(&[b"yes"], Then::End);
    let words = |variables| {
        ["generate", "--model", model.path(), "--prompt", "x", "--chat-template-config", variables]
    };
    let idle = run(&words(r#"{"greeting": 1}"#));
    assert_eq!(idle.assert_ok(), "yes\n");
    assert!(
        idle.stderr.contains("--chat-template-config: the chat template takes no variable greeting"),
        "{idle:?}"
    );
    let granted = run(&words(r#"{"enable_thinking": false}"#));
    assert!(!granted.stderr.contains("--chat-template-config"), "{granted:?}");
}
