//! `lmx chat` with piped input, on tiny models.

use crate::common::model::{Model, Then};
use crate::common::{Outcome, lmx, run_with_input};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

/// Says "Yes." to everything.
fn yes() -> Model {
    Model::script(&[b"Yes", b"."], Then::End)
}

fn chat(model: &Model, words: &[&str], input: &str) -> Outcome {
    run_with_input(&[&["chat", "--model", model.path()], words].concat(), input.as_bytes())
}

/// Prompt and cached tokens of each turn, from the lines on stderr.
fn turns(outcome: &Outcome) -> Vec<(usize, usize)> {
    let number = |text: &str| text.split_whitespace().next().unwrap().parse().unwrap();
    let lines = outcome.stderr.lines().filter_map(|line| line.split_once("· prompt "));
    lines.map(|(_, rest)| (number(rest), number(rest.split_once(", ").unwrap().1))).collect()
}

#[test]
fn each_line_gets_a_reply() {
    let outcome = chat(&yes(), &[], "hi\n");
    assert_eq!(outcome.assert_ok(), "Yes.\n");
    let outcome = chat(&yes(), &[], "one\r\n\ntwo");
    assert_eq!(outcome.assert_ok(), "Yes.\nYes.\n");
    assert_eq!(chat(&yes(), &[], "").assert_ok(), "");
}

/// After a turn the cache holds the template of the whole conversation, so that the next turn finds all of it: the
/// system block once, and closed turns, also where the reply was cut.
#[test]
fn the_cache_holds_the_template_of_the_conversation() {
    let outcome = chat(&yes(), &["--system-prompt", "be"], "hi\nho\n");
    outcome.assert_ok();
    let system = "sbe..".len();
    let user = "uhi..".len();
    // <|assistant|>Yes.<|end|>\n, whose text is encoded as four bytes when it comes back.
    let assistant = 1 + "Yes.".len() + 2;
    let first = system + user + 1;
    let held = system + user + assistant;
    assert_eq!(turns(&outcome), [(first, 0), (held + user + 1, held)]);
    let cut = chat(&yes(), &["--system-prompt", "be", "-m", "1"], "hi\nho\n");
    assert_eq!(cut.assert_ok(), "Yes\nYes\n");
    assert_eq!(turns(&cut), [(first, 0), (held - 1 + user + 1, held - 1)]);
    assert_eq!(cut.stderr.matches("note: the reply was cut after 1 tokens").count(), 2, "{cut:?}");
}

#[test]
fn commands_are_not_sent() {
    let outcome = chat(&yes(), &[], "h\n/help\nhi\nr\nhi\n/reset\nhi\nq\nnever\n");
    assert_eq!(outcome.assert_ok(), "Yes.\nYes.\nYes.\n");
    assert_eq!(outcome.stderr.matches("/save FILE").count(), 2, "{outcome:?}");
    let fresh = "uhi..".len() + 1;
    assert_eq!(turns(&outcome), [(fresh, 0); 3]);
    let system = chat(&yes(), &[], "/system be\nhi\n/system\n/reset\nhi\n/quit\n");
    assert_eq!(turns(&system), [(fresh + 5, 0), (fresh, 0)]);
    let unknown = chat(&yes(), &[], "/hep\nhi\n");
    unknown.assert_error(1, &["/hep", "/help"]);
}

#[test]
fn messages_of_several_lines() {
    let joined = chat(&yes(), &[], "a\\\nb\n");
    assert_eq!((joined.assert_ok(), turns(&joined)), ("Yes.\n", vec![("ua.b..".len() + 1, 0)]));
    let fenced = chat(&yes(), &[], "\"\"\"\na\n\nb\n\"\"\"\n");
    assert_eq!((fenced.assert_ok(), turns(&fenced)), ("Yes.\n", vec![("ua..b..".len() + 1, 0)]));
}

#[test]
fn the_conversation_can_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let path = file.to_str().unwrap();
    let input = format!("hi\n/save {path}\nho\n/save {path}\n");
    chat(&yes(), &["--system-prompt", "be"], &input).assert_ok();
    let saved: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let turn = |text: &str| [message("user", text), message("assistant", "Yes.")];
    assert_eq!(saved, json!([&[message("system", "be")][..], &turn("hi"), &turn("ho")].concat()));
    let again = chat(&yes(), &[], &format!("/save {path}\n"));
    again.assert_error(1, &["talk.json"]);
    assert_eq!(serde_json::from_slice::<Value>(&std::fs::read(&file).unwrap()).unwrap(), saved);
}

#[test]
fn input_that_cannot_be_used() {
    let model = yes();
    run_with_input(&["chat", "--model", model.path()], b"\xff\n").assert_error(1, &["line 1", "UTF-8"]);
    model.edit("config.json", |config| config["max_position_embeddings"] = json!(16));
    let long = format!("{}\n", "x".repeat(30));
    chat(&model, &[], &long).assert_error(1, &["34", "16"]);
    model.edit("tokenizer_config.json", |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    chat(&model, &[], "hi\n").assert_error(1, &["no chat template", "--use-default-chat-template"]);
}

#[test]
fn ctrl_c_stops_the_reply_and_keeps_the_session() {
    let model = Model::script(&[b"tick", b" tock\n"], Then::Loop);
    let mut command = lmx(&["chat", "--model", model.path(), "-m", "-1"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    for question in ["one\n", "two\n"] {
        stdin.write_all(question.as_bytes()).unwrap();
        let mut line = String::new();
        while line != "tick tock\n" {
            line.clear();
            assert_ne!(stdout.read_line(&mut line).unwrap(), 0);
        }
        crate::common::interrupt(&child);
        // The reply ends with an empty line, or within one.
        while line.ends_with("tock\n") {
            line.clear();
            stdout.read_line(&mut line).unwrap();
        }
    }
    drop(stdin);
    stdout.read_to_string(&mut String::new()).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stderr.matches("note: the reply was stopped").count(), 2, "{stderr}");
    // The second turn found the stopped reply of the first in the cache.
    let cached = stderr.lines().rev().find_map(|line| line.split_once("tokens, ")).unwrap().1;
    assert!(!cached.starts_with("0 cached"), "{stderr}");
}

#[test]
fn a_closed_pipe_ends_it_quietly() {
    let model = Model::script(&[b"tick", b" tock\n"], Then::Loop);
    let mut command = lmx(&["chat", "--model", model.path(), "-m", "-1"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"hi\n").unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
    drop(stdin);
}
