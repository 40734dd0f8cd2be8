//! Words that are wrong, or mean nothing yet: refused by name with exit code 2, before a model is looked for.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use common::{run, run_with_input};

/// Runs `lmx generate` with a model that does not exist, so that anything but a usage error would say so.
#[track_caller]
fn refused(words: &[&str], says: &[&str]) {
    let words = [&["generate", "--model", "/nonexistent/model"], words].concat();
    run(&words).assert_error(2, says);
}

#[test]
fn flags_of_mlx_lm_that_lmx_does_not_have() {
    for words in [&["--quantize-activations"][..], &["--image", "a.png", "b.png"]] {
        refused(words, &[words[0], "not supported yet"]);
    }
    refused(&["-qa"], &["--quantize-activations", "-qa"]);
}

#[test]
fn values_that_are_wrong() {
    for (words, says) in [
        (&["--temp", "warm"][..], &["--temp", "warm", "a number"][..]),
        (&["--temp", "-1"], &["--temp", "-1", "0 or more"]),
        (&["--temp", "nan"], &["--temp", "NaN"]),
        (&["--top-p", "1.5"], &["--top-p", "1.5", "[0, 1]"]),
        (&["--min-p", "-0.1"], &["--min-p", "-0.1", "[0, 1]"]),
        (&["--top-k", "-1"], &["--top-k", "-1", "0 or more"]),
        (&["--min-tokens-to-keep", "0"], &["--min-tokens-to-keep", "1 or more"]),
        (&["--xtc-probability", "2"], &["--xtc-probability", "[0, 1]"]),
        (&["--xtc-threshold", "0.6"], &["--xtc-threshold", "0.6", "0.5"]),
        (&["--repetition-penalty", "-1"], &["--repetition-penalty", "-1"]),
        (&["--presence-penalty", "inf"], &["--presence-penalty", "inf"]),
        (&["--presence-context-size", "9"], &["--presence-penalty"]),
        (&["--logit-bias", "[1]"], &["--logit-bias", "JSON object"]),
        (&["--logit-bias", r#"{"the": 1}"#], &["--logit-bias", "token ids"]),
        (&["--chat-template-config", "{"], &["--chat-template-config", "not valid JSON"]),
        (&["--chat-template-config", "[]"], &["--chat-template-config", "an array"]),
        (&["--max-tokens", "0"], &["--max-tokens", "use -1 for no limit"]),
        (&["-m", "1.5"], &["--max-tokens", "1.5", "whole number"]),
        (&["--seed", "-1"], &["--seed", "-1"]),
        (&["--threads", "0"], &["--threads", "from 1"]),
        (&["--max-kv-size", "0"], &["--max-kv-size", "at least 1"]),
        (&["--max-kv-size", "4"], &["--max-kv-size 4", "above --kv-keep", "4"]),
        (&["--max-kv-size", "9", "--kv-keep", "9"], &["--max-kv-size 9", "--kv-keep", "9"]),
        (&["--kv-keep", "2"], &["--max-kv-size"]),
        (&["--kv-bits", "7"], &["--kv-bits 7", "2, 3, 4, 5, 6 and 8"]),
        (&["--kv-bits", "-4"], &["--kv-bits", "0 or more"]),
        (&["--kv-bits", "8", "--kv-group-size", "16"], &["--kv-group-size 16", "32, 64 and 128"]),
        (&["--kv-bits", "8", "--quantized-kv-start", "-1"], &["--quantized-kv-start", "0 or more"]),
        (&["--kv-group-size", "64"], &["--kv-bits"]),
        (&["--quantized-kv-start", "0"], &["--kv-bits"]),
        (&["--prefill-step-size", "0"], &["--prefill-step-size", "at least 1"]),
        (&["--kv-dtype", "f64"], &["--kv-dtype", "f64", "auto, f32, f16, bf16"]),
        (&["--verbose", "maybe"], &["--verbose", "maybe", "true or false"]),
        (&["--stop", ""], &["--stop"]),
        (&["--prompt"], &["--prompt"]),
        (&["--ignore-chat-template", "--use-default-chat-template"], &["--ignore-chat-template"]),
        (&["--no-such-flag"], &["--no-such-flag", "lmx generate --help"]),
        (&["--max", "1"], &["--max"]),
        (&["stray"], &["stray"]),
    ] {
        refused(words, says);
    }
}

#[test]
fn commands_that_do_not_exist() {
    run(&[]).assert_error(2, &["no command", "lmx --help"]);
    run(&["evaporate"]).assert_error(2, &["evaporate", "lmx --help"]);
}

/// What argparse accepts is accepted: prefixes, `=`, two-letter flags, repeated flags (the last one counts), values
/// that begin with a dash. A usage error further on shows that these were read.
#[test]
fn words_are_read_as_argparse_reads_them() {
    for words in [
        &["--max-tok", "5"][..],
        &["--te", "0.5", "--see", "1", "--ve", "t", "--tr", "--xtc-p", "0.1"],
        &["--max-tokens=5"],
        &["-m", "-1"],
        &["--max-tokens", "-1"],
        &["--temp", "0.1", "--temp", "1e-1"],
        &["--prompt", "- a list\n- of two"],
        &["-p", "-"],
        &["--verbose"],
        &["--verbose", "F"],
        &["--extra-eos-token", "a", "b", "--seed", "1"],
        &["--trust-remote-code"],
    ] {
        let words =
            [&["generate", "--model", "/nonexistent/model"], words, &["--quantize-activations"]].concat();
        run(&words).assert_error(2, &["--quantize-activations (-qa) is not supported"]);
    }
}

#[test]
fn version_and_completions() {
    let version = run(&["--version"]);
    assert_eq!(version.assert_ok(), format!("lmx {}\n", env!("CARGO_PKG_VERSION")));
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]);
        assert!(script.assert_ok().contains("prefill-response"), "{shell}");
    }
    run(&["completions", "tcsh"]).assert_error(2, &["tcsh", "bash"]);
}

#[test]
fn help_shows_every_flag() {
    for command in
        ["", "generate", "chat", "cache-prompt", "server", "perplexity", "evaluate", "benchmark", "inspect"]
    {
        let words: Vec<&str> = [command, "--help"].into_iter().filter(|word| !word.is_empty()).collect();
        let help = run(&words);
        let name = if command.is_empty() { "lmx" } else { command };
        insta::assert_snapshot!(format!("help_{name}"), help.assert_ok());
    }
}

#[test]
fn a_missing_model_is_named() {
    for command in ["generate", "chat", "server", "benchmark", "inspect"] {
        let outcome = run_with_input(&[command, "--model", "/nonexistent/model"], b"hi\n");
        outcome.assert_error(1, &["/nonexistent/model"]);
    }
}

#[test]
fn nothing_is_downloaded() {
    let outcome = run(&["generate", "--model", "org/name"]);
    outcome.assert_error(1, &["org/name", "/nonexistent/hub", "downloads nothing", "hf download org/name"]);
}
