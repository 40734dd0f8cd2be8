//! `lmx benchmark` and `lmx evaluate`: what they measure and what they refuse.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::model::{Model, Then};
use common::server::Server;
use common::{Outcome, run};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;

#[track_caller]
fn benchmark(model: &str, words: &[&str]) -> Outcome {
    run(&[&["benchmark", "--model", model, "--threads", "2"], words].concat())
}

#[track_caller]
fn object(outcome: &Outcome) -> Value {
    serde_json::from_str(outcome.assert_ok()).unwrap()
}

/// The script ends at once, so that every reply would stop early if end-of-sequence tokens counted.
fn ends_at_once() -> Model {
    Model::script(&[b"a"], Then::End)
}

#[test]
fn a_benchmark_runs_every_cell_in_full() {
    let model = ends_at_once();
    let words = ["-p", "5,9", "-b", "1,3", "-g", "4", "-n", "2", "--json"];
    let report = object(&benchmark(model.path(), &words));
    let results = report["results"].as_array().unwrap();
    let cells: Vec<[u64; 2]> = results
        .iter()
        .map(|row| ["prompt_tokens", "batch_size"].map(|key| row[key].as_u64().unwrap()))
        .collect();
    assert_eq!(cells, [[5, 1], [5, 3], [9, 1], [9, 3]]);
    for (row, [prompt_tokens, batch_size]) in results.iter().zip(cells) {
        let trials = row["trials"].as_array().unwrap();
        assert_eq!(trials.len(), 2, "{row}");
        for trial in trials {
            assert_eq!(trial["prompt_tokens"], prompt_tokens * batch_size, "{trial}");
            assert_eq!(trial["generation_tokens"], 4 * batch_size, "{trial}");
            assert_eq!(trial["first_token_seconds"].as_array().unwrap().len() as u64, batch_size, "{trial}");
        }
        for figure in
            ["prompt_tps", "generation_tps", "seconds", "first_token_seconds", "between_tokens_seconds"]
        {
            let at = |quantile: &str| row[figure][quantile].as_f64().unwrap();
            assert!(
                at("min") > 0.0 && at("min") <= at("median") && at("median") <= at("max"),
                "{figure}: {row}"
            );
        }
        assert!(row["roofline_tps"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["peak_memory_bytes"].as_u64().unwrap() > 1_000_000, "{row}");
    }
    assert_eq!(report["machine"]["threads"], 2);
    assert!(report["bandwidth_bytes_per_second"].as_f64().unwrap() > 1e8, "{report}");
}

#[test]
fn the_report_has_mlx_lms_lines() {
    let model = Model::random();
    let report = benchmark(model.path(), &["-p", "6", "-g", "3", "-n", "2", "--delay", "0"]);
    let lines: Vec<&str> = report.assert_ok().lines().collect();
    assert_eq!(lines[0], "Timing with prompt_tokens=6, generation_tokens=3, batch_size=1.");
    for (line, begin) in lines[1..].iter().zip([
        "Trial 1:  prompt_tps=",
        "Trial 2:  prompt_tps=",
        "Averages: prompt_tps=",
        "Medians: prompt_tps=",
        "Time to first token: median ",
        "Between tokens: median ",
        "Roofline: generation_tps=",
    ]) {
        assert!(line.starts_with(begin), "{line}");
    }
    let names =
        |line: &str| line.split(['=', ' ']).filter(|word| word.contains('_')).map(str::to_owned).collect();
    let trial: Vec<String> = names(lines[1]);
    assert_eq!(trial, ["prompt_tps", "generation_tps", "peak_memory", "total_time"]);
}

#[test]
fn a_reply_of_one_token_has_no_speed() {
    let model = Model::random();
    let report = object(&benchmark(model.path(), &["-p", "6", "-g", "1", "-n", "1", "--json"]));
    let row = &report["results"][0];
    assert_eq!((&row["generation_tps"], &row["between_tokens_seconds"]), (&Value::Null, &Value::Null));
}

#[test]
fn a_server_is_measured_with_the_same_prompts() {
    let model = ends_at_once();
    let server = Server::start(model.path(), &[]);
    let url = format!("http://127.0.0.1:{}", server.port);
    let report = object(&benchmark(
        model.path(),
        &["-p", "40", "-b", "2", "-g", "5", "-n", "2", "--json", "--against", &url],
    ));
    let results = report["results"].as_array().unwrap();
    let programs: Vec<&str> = results.iter().map(|row| row["program"].as_str().unwrap()).collect();
    assert_eq!(programs, ["lmx", "server"]);
    for trial in results.iter().flat_map(|row| row["trials"].as_array().unwrap()) {
        assert_eq!(
            (&trial["prompt_tokens"], &trial["generation_tokens"]),
            (&json!(80), &json!(10)),
            "{trial}"
        );
    }
    assert_eq!(report["against"]["model"], model.path());
    // Each trial's prompts are new ones: nothing was cached.
    assert!(!report["notices"].to_string().contains("cache;"), "{report}");
}

/// Answers requests until the test ends: token ids are refused, a text gets two pieces.
fn server_of_texts() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {
                let line = head.lines().last().unwrap_or_default().to_lowercase();
                if let Some(bytes) = line.strip_prefix("content-length:") {
                    length = bytes.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            let (status, text) = if body["prompt"].is_string() {
                let pieces =
                    "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\n";
                let usage = r#"{"prompt_tokens":7,"completion_tokens":3}"#;
                ("200 OK", format!("{pieces}data: {{\"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n"))
            } else {
                ("400 Bad Request", r#"{"error":{"message":"a prompt is a text"}}"#.to_owned())
            };
            let head =
                format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", text.len());
            let _ = stream.write_all(format!("{head}{text}").as_bytes());
        }
    });
    format!("http://{address}/v1")
}

#[test]
fn a_server_that_takes_no_ids_gets_texts() {
    let (model, url) = (Model::random(), server_of_texts());
    let words = ["-p", "6", "-g", "5", "-n", "1", "--json", "--against", &url, "--against-model", "m"];
    let report = object(&benchmark(model.path(), &words));
    let notices = report["notices"].to_string();
    assert!(notices.contains("does not take token ids"), "{notices}");
    assert!(notices.contains("ended 1 replies before"), "{notices}");
    let trial = &report["results"][1]["trials"][0];
    assert_eq!((&trial["prompt_tokens"], &trial["generation_tokens"]), (&json!(7), &json!(3)));
}

#[test]
fn what_a_benchmark_refuses() {
    for (words, says) in [
        (&["-p", "0"][..], "--prompt-tokens"),
        (&["-b", "1,0"], "--batch-size"),
        (&["-n", "0"], "--num-trials"),
        (&["-g", "0"], "--generation-tokens"),
        (&["--delay", "-1"], "--delay"),
        (&["--pipeline"], "--pipeline is not supported"),
        (&["-qa"], "--quantize-activations"),
        (&["--against", "localhost:80"], "--against localhost:80"),
        (&["--against-model", "m"], "--against"),
    ] {
        benchmark("/nonexistent/model", words).assert_error(2, &[says]);
    }
    let model = Model::random();
    let words = ["-p", "131072", "-g", "1"];
    benchmark(model.path(), &words)
        .assert_error(2, &["--prompt-tokens 131072", "131073", "the model's is 131072"]);
    // Nobody listens on port 9 of a test machine.
    let words = ["-p", "4", "-g", "2", "--against", "http://127.0.0.1:9"];
    benchmark(model.path(), &words).assert_error(1, &["--against", "127.0.0.1:9"]);
}
