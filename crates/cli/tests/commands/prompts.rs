//! `lmx generate --prompts-file`.

use crate::common::model::{Model, Then};
use crate::common::{Outcome, lmx, run};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// As many as run together.
const COUNT: usize = 32;

/// Requests that differ in all that can differ.
fn request(index: usize) -> Value {
    let temperature = [0.0, 0.8, 1.3][index % 3];
    let mut line = json!({"seed": index, "max_tokens": 3 + index * 5 % 40, "temperature": temperature});
    match index % 4 {
        0 => line["messages"] = json!([{"role": "user", "content": format!("{index} times")}]),
        1 => line["token_ids"] = json!((0..=index).collect::<Vec<usize>>()),
        2 => line["regex"] = json!("[a-f]{2,9}"),
        _ => line["repetition_penalty"] = json!(1.4),
    }
    if index % 4 >= 2 {
        line["prompt"] = json!("word ".repeat(1 + index % 7));
        line["id"] = json!(format!("r{index}"));
    }
    line
}

fn write_requests(path: &Path, lines: &[String]) {
    std::fs::write(path, lines.join("\n")).unwrap();
}

fn requests() -> Vec<String> {
    (0..COUNT).map(|index| request(index).to_string()).collect()
}

fn generate(model: &Model, file: &Path, words: &[&str]) -> Outcome {
    let file = file.to_str().unwrap();
    run(&[&["generate", "--model", model.path(), "--prompts-file", file], words].concat())
}

fn replies(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What does not depend on the clock.
fn essence(reply: &Value) -> Value {
    let keys = ["index", "id", "text", "token_ids", "finish_reason", "prompt_tokens", "seed", "notices"];
    keys.iter().map(|&key| (key.to_owned(), reply[key].clone())).collect()
}

#[test]
fn every_line_gets_the_reply_that_it_would_get_alone() {
    let model = Model::random();
    let file = model.file("requests.jsonl");
    write_requests(&file, &requests());
    let outcome = generate(&model, &file, &[]);
    let together = replies(outcome.assert_ok());
    assert_eq!(together.len(), COUNT);
    for part in ["Replies: 32 of 32", "tokens-per-sec", "Peak memory"] {
        assert!(outcome.stderr.contains(part), "{outcome:?}");
    }
    let one_by_one = generate(&model, &file, &["--decode-concurrency", "1", "--threads", "1"]);
    for (index, (reply, alone)) in together.iter().zip(replies(one_by_one.assert_ok())).enumerate() {
        assert_eq!(essence(reply), essence(&alone));
        assert_eq!((&reply["index"], &reply["id"]), (&json!(index), &request(index)["id"]));
    }
    // And the reply that the command line gives for the same words.
    let line = request(3);
    let words = ["generate", "--model", model.path(), "--json", "--prompt", line["prompt"].as_str().unwrap()];
    let flags = ["--seed", "3", "--max-tokens", "18", "--temp", "0", "--repetition-penalty", "1.4"];
    let solo: Value = serde_json::from_str(run(&[&words[..], &flags].concat()).assert_ok()).unwrap();
    assert_eq!(solo["token_ids"], together[3]["token_ids"]);
}

#[test]
fn a_bad_line_fails_alone() {
    let model = Model::script(&[b"Hi", b"!"], Then::End);
    let file = model.file("requests.jsonl");
    let lines = [
        r#"{"prompt": "a"}"#,
        r#"{"prompt": "a", "temprature": 1, "id": 5}"#,
        "",
        r#"{"prompt": "a", "top_p": 7, "id": "x"}"#,
        "not JSON",
        r#"{"prompt": "a", "regex": "("}"#,
        r#"{"token_ids": [99999]}"#,
        r#"{"prompt": "a", "max_tokens": 0}"#,
        r#"{"prompt": "b", "max_tokens": null}"#,
    ];
    write_requests(&file, &lines.map(str::to_owned));
    let outcome = generate(&model, &file, &["--verbose", "false"]);
    assert_eq!(outcome.code, Some(1));
    assert_eq!(outcome.stderr, "error: 6 of 8 requests failed; their lines say why\n");
    let replies = replies(&outcome.stdout);
    let (null, named) = (Value::Null, json!("x"));
    let parts = [
        (1, "temprature", &json!(5)),
        (2, "top_p", &named),
        (3, "line 5", &null),
        (4, "regular", &null),
        (5, "99999", &null),
        (6, "max_tokens", &null),
    ];
    for (index, part, id) in parts {
        // A line that is wrong otherwise keeps its id.
        assert_eq!((&replies[index]["index"], &replies[index]["id"]), (&json!(index), id));
        let error = replies[index]["error"].as_str().unwrap();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!((&replies[0]["text"], &replies[7]["text"]), (&json!("Hi!"), &json!("Hi!")));
    assert_eq!(replies.len(), 8);
}

/// An option and a value that it cannot have.
const WRONG: [(&str, &str); 54] = [
    ("id", "[1]"),
    ("id", "true"),
    ("prompt", "7"),
    ("messages", "\"hi\""),
    ("messages", "[]"),
    ("token_ids", "[]"),
    ("token_ids", "[-1]"),
    ("token_ids", "[1.5]"),
    ("token_ids", "[99999]"),
    ("system_prompt", "1"),
    ("prefill_response", "[]"),
    ("chat_template_config", "[1]"),
    ("max_tokens", "0"),
    ("max_tokens", "1.5"),
    ("max_tokens", "\"many\""),
    ("seed", "-1"),
    ("seed", "18446744073709551616"),
    ("stop", "\"\""),
    ("stop", "[\"a\", \"\"]"),
    ("stop", "7"),
    ("ignore_eos", "1"),
    ("adapter", "true"),
    ("adapter", "\"no/such/folder\""),
    ("priority", "1.5"),
    ("priority", "3000000000"),
    ("queue_deadline", "-1"),
    ("stall_deadline", "\"soon\""),
    ("num_draft_tokens", "-1"),
    ("num_draft_tokens", "65"),
    ("filter_tempered", "\"yes\""),
    ("json_schema", "{\"type\": \"nothing\"}"),
    ("regex", "\"(\""),
    ("grammar", "\"start\""),
    ("temperature", "-0.5"),
    ("temperature", "\"hot\""),
    ("temperature", "1e999"),
    ("top_p", "1.01"),
    ("min_p", "-0.01"),
    ("min_tokens_to_keep", "0"),
    ("top_k", "-1"),
    ("xtc_probability", "1.5"),
    ("xtc_threshold", "0.51"),
    ("logit_bias", "{\"a\": 1}"),
    ("logit_bias", "{\"99999\": 1}"),
    ("logit_bias", "{\"1\": 1e39}"),
    ("repetition_penalty", "-1"),
    ("repetition_penalty", "true"),
    ("repetition_context_size", "-1"),
    ("presence_penalty", "1e39"),
    ("presence_context_size", "0.5"),
    ("frequency_penalty", "-1e39"),
    ("frequency_context_size", "\"all\""),
    ("top_logprobs", "1"),
    ("n", "2"),
];

#[test]
fn every_option_of_a_line_is_checked_and_its_error_names_it() {
    let model = Model::script(&[b"Hi", b"!"], Then::End);
    let file = model.file("requests.jsonl");
    let good = r#"{"prompt": "a"}"#.to_owned();
    let bad = WRONG.map(|(field, value)| {
        let source =
            if ["prompt", "messages", "token_ids"].contains(&field) { "" } else { r#""prompt": "a", "# };
        format!(r#"{{{source}"{field}": {value}}}"#)
    });
    let lines: Vec<String> = bad.into_iter().flat_map(|line| [good.clone(), line]).collect();
    write_requests(&file, &lines);
    let outcome = generate(&model, &file, &["--verbose", "false", "--ngram-spec"]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let replies = replies(&outcome.stdout);
    assert_eq!(replies.len(), lines.len());
    for (pair, (field, value)) in replies.chunks_exact(2).zip(WRONG) {
        assert_eq!(pair[0]["text"], "Hi!", "beside {field} {value}");
        let error = pair[1]["error"].as_str().unwrap_or_else(|| panic!("{field} {value}: {}", pair[1]));
        assert!(error.contains(field), "{field} {value}: {error}");
    }
}

#[test]
fn priorities_go_first_and_replies_stay_in_order() {
    let model = Model::random();
    let file = model.file("requests.jsonl");
    let line = |priority: i32| {
        json!({"prompt": "a", "priority": priority, "max_tokens": 30, "ignore_eos": true}).to_string()
    };
    write_requests(&file, &[-1, 0, 5, 0].map(line));
    let alone = ["--decode-concurrency", "1"];
    let replies = replies(generate(&model, &file, &alone).assert_ok());
    assert!(replies.iter().enumerate().all(|(index, reply)| reply["index"] == index));
    let mut order: Vec<usize> = (0..4).collect();
    order.sort_by(|&a, &b| {
        let time = |index: usize| replies[index]["ttft_ms"].as_f64().unwrap();
        time(a).total_cmp(&time(b))
    });
    assert_eq!(order, [2, 1, 3, 0]);
    // The second waits for the first, which takes its time.
    let waits = json!({"prompt": "a", "queue_deadline": 0.000001, "stall_deadline": 600}).to_string();
    write_requests(&file, &[line(0), waits]);
    let outcome = generate(&model, &file, &alone);
    let last = outcome.stdout.lines().last().unwrap();
    assert!(last.contains("queue_deadline: the request was not admitted within 0.000001 s"), "{outcome:?}");
}

#[test]
fn preempted_requests_are_counted_and_get_the_same_replies() {
    let model = Model::random();
    let file = model.file("requests.jsonl");
    let line = |seed: u64| {
        json!({"prompt": "word", "seed": seed, "temperature": 1, "max_tokens": 300, "ignore_eos": true})
            .to_string()
    };
    write_requests(&file, &[1, 2, 3, 4].map(line));
    let roomy = generate(&model, &file, &["--prompt-concurrency", "1"]);
    assert!(!roomy.stderr.contains("Preemptions"), "{roomy:?}");
    // Room for about 400 positions.
    let tight = generate(&model, &file, &["--kv-memory", "200KB"]);
    assert!(tight.stderr.contains("Preemptions: "), "{tight:?}");
    let (roomy, tight) = (replies(roomy.assert_ok()), replies(tight.assert_ok()));
    let preemptions = |replies: &[Value]| -> u64 {
        replies.iter().map(|reply| reply["preemptions"].as_u64().unwrap()).sum()
    };
    assert_eq!(preemptions(&roomy), 0);
    assert!(preemptions(&tight) > 0, "{tight:?}");
    assert!(roomy.iter().map(essence).eq(tight.iter().map(essence)));
}

#[test]
fn concurrency_is_for_files_of_prompts() {
    for flag in ["--prompt-concurrency", "--decode-concurrency"] {
        run(&["generate", "--model", "m", "--prompt", "a", flag, "2"])
            .assert_error(2, &[flag, "--prompts-file"]);
        run(&["generate", "--model", "m", "--prompts-file", "f", flag, "0"]).assert_error(2, &[flag, "0"]);
    }
}

#[test]
fn each_line_says_how_much_is_guessed_and_what_filters_see() {
    let model = Model::script(&[b"tick", b" tock "], Then::Loop);
    let file = model.file("requests.jsonl");
    let of = |more: Value| {
        let mut line = json!({"prompt": "go", "max_tokens": 40, "seed": 1});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line.to_string()
    };
    let lines = [
        json!({}),
        json!({"num_draft_tokens": 0}),
        json!({"num_draft_tokens": 1}),
        json!({"num_draft_tokens": 99}),
    ];
    write_requests(&file, &lines.map(of));
    for (source, always) in [(&["--ngram-spec"][..], true), (&["--draft-model", model.path()][..], false)] {
        let outcome = generate(&model, &file, &[source, &["--num-draft-tokens", "8"]].concat());
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        let replies = replies(&outcome.stdout);
        assert!(replies[1..3].iter().all(|reply| reply["token_ids"] == replies[0]["token_ids"]));
        let drafted = |index: usize| replies[index]["drafted_tokens"].as_u64().unwrap();
        assert_eq!(drafted(1), 0, "{replies:?}");
        // Whether a draft model pays is a matter of time.
        assert!(!always || drafted(0) > 0 && drafted(2) > 0 && outcome.stderr.contains("Drafts: "));
        assert!(replies[3]["error"].as_str().unwrap().contains("draft_tokens"), "{replies:?}");
    }
    let error = replies(&generate(&model, &file, &[]).stdout)[2]["error"].clone();
    assert!(
        error.as_str().unwrap().contains("num_draft_tokens needs --ngram-spec or --draft-model"),
        "{error}"
    );

    // At a high temperature few tokens are this likely before it, and all after it.
    let model = Model::random();
    let line = |tempered: Value| of(json!({"temperature": 3.0, "min_p": 0.9, "filter_tempered": tempered}));
    write_requests(&file, &[json!(false), json!(true), json!(null)].map(line));
    let texts = |words: &[&str]| -> Vec<Value> {
        let outcome = generate(&model, &file, words);
        replies(outcome.assert_ok()).into_iter().map(|mut reply| reply["token_ids"].take()).collect()
    };
    let (own, flag) = (texts(&[]), texts(&["--filter-tempered"]));
    assert!(own[0] != own[1] && own[2] == own[0] && flag[..2] == own[..2] && flag[2] == own[1]);
}

/// A finished run with its requests and its output.
fn finished() -> (Model, PathBuf, PathBuf, String) {
    let model = Model::random();
    let (file, output) = (model.file("requests.jsonl"), model.file("replies.jsonl"));
    write_requests(&file, &requests());
    generate(&model, &file, &["--output", output.to_str().unwrap()]).assert_ok();
    let text = std::fs::read_to_string(&output).unwrap();
    (model, file, output, text)
}

#[test]
fn a_run_that_was_stopped_goes_on_where_it_was() {
    let (model, file, output, whole) = finished();
    let want: Vec<Value> = replies(&whole).iter().map(essence).collect();
    let again = |model: &Model| generate(model, &file, &["--output", output.to_str().unwrap()]);
    // Cut anywhere: between lines, within one, before the first.
    for cut in [0, 1, whole.len() / 3, whole.find('\n').unwrap(), whole.find('\n').unwrap() + 1, whole.len()]
    {
        std::fs::write(&output, &whole[..cut]).unwrap();
        again(&model).assert_ok();
        let text = std::fs::read_to_string(&output).unwrap();
        assert_eq!(replies(&text).iter().map(essence).collect::<Vec<_>>(), want, "cut at {cut}");
        let kept = whole[..cut].rfind('\n').map_or(0, |at| at + 1);
        assert_eq!(text[..kept], whole[..kept], "what was there stays");
    }
}

#[test]
fn an_output_of_other_prompts_is_refused_and_left_as_it_is() {
    let (model, file, output, whole) = finished();
    let other = [r#"{"index": 0, "id": "somebody"}"#, "a diary\n", "{}\n"];
    for text in other.map(|text| format!("{}\n", text.trim_end())).iter().chain([&format!("{whole}{{}}\n")]) {
        std::fs::write(&output, text).unwrap();
        let words = ["--output", output.to_str().unwrap()];
        generate(&model, &file, &words).assert_error(1, &[]);
        assert_eq!(&std::fs::read_to_string(&output).unwrap(), text);
    }
    let words = ["--output", file.to_str().unwrap()];
    generate(&model, &file, &words).assert_error(2, &["--output", "--prompts-file"]);
    generate(&model, &file, &["--prompt", "a"]).assert_error(2, &["--prompt"]);
    generate(&model, Path::new("no-such-file"), &[]).assert_error(1, &["no-such-file"]);
    run(&["generate", "--model", model.path(), "--output", "x"]).assert_error(2, &["--prompts-file"]);
}

#[test]
fn a_killed_run_loses_nothing_and_repeats_nothing() {
    let model = Model::script(&[b"tick", b" tock "], Then::Loop);
    let (file, output) = (model.file("requests.jsonl"), model.file("replies.jsonl"));
    let lines: Vec<String> =
        (0..200).map(|i| json!({"prompt": "go", "id": i, "max_tokens": 60}).to_string()).collect();
    write_requests(&file, &lines);
    let words = ["generate", "--model", model.path(), "--prompts-file", file.to_str().unwrap()];
    let words = [&words[..], &["--output", output.to_str().unwrap(), "--decode-concurrency", "4"]].concat();
    let mut child = lmx(&words).spawn().unwrap();
    let (started, mut lines_seen) = (Instant::now(), 0);
    while lines_seen < 8 && started.elapsed() < Duration::from_secs(60) {
        lines_seen = std::fs::read_to_string(&output).unwrap_or_default().lines().count();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = std::fs::read_to_string(&output).unwrap();
    assert!(before.lines().count() < 200, "it was too fast to be killed");
    run(&words).assert_ok();
    let replies = replies(&std::fs::read_to_string(&output).unwrap());
    let ids: Vec<u64> = replies.iter().map(|reply| reply["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, (0..200).collect::<Vec<u64>>());
}
