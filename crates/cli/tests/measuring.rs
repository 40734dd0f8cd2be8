//! `lmx benchmark` and `lmx evaluate`: what they measure and what they refuse.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::model::{Model, Then};
use common::server::Server;
use common::{Outcome, lmx, outcome, run};
use lmx::engine::{Engine, EngineOptions, PromptLogprobs, Request, Update};
use lmx::{Device, Isa, KvType, LoadOptions};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use tempfile::TempDir;

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
    let plot = model.file("plot.svg");
    let words = ["-p", "5,9", "-b", "1,3", "-g", "4", "-n", "2", "--json", "--plot", plot.to_str().unwrap()];
    let report = object(&benchmark(model.path(), &words));
    let picture = std::fs::read_to_string(plot).unwrap();
    for text in
        ["<svg", "Throughput against batch size", "roofline, prompt 9", "lmx, batch 3", "medians of 2 trials"]
    {
        assert!(picture.contains(text), "{text}");
    }
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
    // Null where the trials were too short to tell.
    let others = &report["others_share"];
    assert!(
        others.is_null() || others.as_f64().is_some_and(|share| (0.0..=1.0).contains(&share)),
        "{report}"
    );
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
    let unwritable = ["--plot", "/nonexistent/plot.svg"];
    benchmark("/nonexistent/model", &unwritable).assert_error(1, &["--plot", "/nonexistent/plot.svg"]);
    let model = Model::random();
    let words = ["-p", "131072", "-g", "1"];
    benchmark(model.path(), &words)
        .assert_error(2, &["--prompt-tokens 131072", "131073", "the model's is 131072"]);
    // Nobody listens on port 9 of a test machine.
    let words = ["-p", "4", "-g", "2", "--against", "http://127.0.0.1:9"];
    benchmark(model.path(), &words).assert_error(1, &["--against", "127.0.0.1:9"]);
}

/// Runs the evaluation of `requests` with the harness's stand-in, and `words`.
fn evaluate(model: &str, requests: &Value, words: &[&str]) -> Outcome {
    let dir = TempDir::new().unwrap();
    let (file, results) = (dir.path().join("requests.json"), dir.path().join("results"));
    std::fs::write(&file, requests.to_string()).unwrap();
    let output = ["--output-dir", results.to_str().unwrap(), "--python", "python3"];
    let mut command = lmx(&[&["evaluate", "--model", model, "--threads", "2"], &output[..], words].concat());
    let stand_in = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness");
    command.env("PYTHONPATH", stand_in).env("PYTHONDONTWRITEBYTECODE", "1").env("LMX_TEST_REQUESTS", &file);
    let outcome = outcome(&mut command, b"");
    if outcome.code == Some(0) {
        let written = std::fs::read_dir(results.join("model")).unwrap().count();
        assert_eq!(written, 2, "the harness's files");
    }
    outcome
}

/// The stand-in's answers.
#[track_caller]
fn answers(model: &str, requests: &Value, words: &[&str]) -> Value {
    let words = [&["--tasks", "requests", "--json"], words].concat();
    object(&evaluate(model, requests, &words))["results"]["requests"].clone()
}

/// The log-likelihood of the bytes of `text` from the index `from` on, and whether greedy decoding would give them, by
/// the engine alone: a byte is a token, before which `prefix` stands.
fn reference(model: &Model, prefix: Option<u32>, text: &str, from: usize) -> (f64, bool) {
    let loaded = lmx::load(model.path(), &LoadOptions::new(Device::cpu(Isa::best(), 1))).unwrap();
    let encoded = loaded.tokenizer.encode(text, false).unwrap();
    let options = EngineOptions { kv_type: KvType::F32, ..EngineOptions::default() };
    let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options).unwrap();
    let from = from + usize::from(prefix.is_some());
    let request = Request {
        prompt_logprobs: Some(PromptLogprobs { from, top: 0 }),
        ..Request::new(prefix.into_iter().chain(encoded).collect(), 0)
    };
    let (mut sum, mut greedy) = (0.0, true);
    let mut generation = engine.generate(request).unwrap();
    while let Some(update) = generation.next_update() {
        let Update::Prompt(tokens) = update else { continue };
        sum += tokens.iter().map(|token| f64::from(token.logprob)).sum::<f64>();
        greedy &= tokens.iter().all(|token| token.greedy);
    }
    (sum, greedy)
}

#[track_caller]
fn assert_scored(answer: &Value, (sum, greedy): (f64, bool)) {
    assert_eq!(answer[0].as_f64(), Some(sum), "{answer}");
    assert_eq!(answer[1].as_bool(), Some(greedy), "{answer}");
}

#[test]
fn log_likelihoods_are_those_of_the_engine() {
    let model = Model::random();
    let pairs =
        json!([["hello", " world"], ["hello", "!"], ["", "ab"], ["one ", "two"], ["hello", " there"]]);
    let requests = json!({"loglikelihood": pairs, "loglikelihood_rolling": [["a text"], ["b"]]});
    let plain = ["--no-apply-chat-template"];
    let got = answers(model.path(), &requests, &plain);
    // The model has no BOS, so that its EOS stands before what would begin with nothing.
    let end = Some(256);
    let scored = &got["loglikelihood"];
    assert_scored(&scored[0], reference(&model, None, "hello world", 5));
    assert_scored(&scored[1], reference(&model, None, "hello!", 5));
    assert_scored(&scored[2], reference(&model, end, "ab", 0));
    // White space at the end of a context is scored.
    assert_scored(&scored[3], reference(&model, None, "one two", 3));
    let rolling = &got["loglikelihood_rolling"];
    assert_eq!(rolling[0].as_f64(), Some(reference(&model, end, "a text", 0).0));
    assert_eq!(rolling[1].as_f64(), Some(reference(&model, end, "b", 0).0));
    let alone = answers(model.path(), &requests, &[&plain[..], &["--batch-size", "1"]].concat());
    assert_eq!(alone["loglikelihood"], *scored, "a batch changes nothing");
    assert_eq!(got["apply_chat_template"], false);
}

#[test]
fn what_is_longer_than_the_model_is_given() {
    let model = Model::random();
    let requests = json!({
        "loglikelihood": [["0123456789", "abc"]],
        "loglikelihood_rolling": [["0123456789"]],
        "generate_until": [["0123456789", {"until": [], "max_gen_toks": 3}]],
    });
    let words = ["--no-apply-chat-template", "--max-length", "8"];
    let got = answers(model.path(), &requests, &words);
    // The last token is scored, but not read: eight are.
    assert_scored(&got["loglikelihood"][0], reference(&model, None, "456789abc", 6));
    let described = &got["described"];
    let counts = ["truncated_contexts", "windowed_texts", "truncated_prompts", "max_length"];
    assert_eq!(counts.map(|count| described[count].as_u64().unwrap()), [1, 1, 1, 8], "{described}");
    let short = answers(model.path(), &json!({"generate_until": [["56789", {"max_gen_toks": 3}]]}), &words);
    assert_eq!(got["generate_until"], short["generate_until"]);
    let said = evaluate(model.path(), &requests, &[&["--tasks", "requests"], &words[..]].concat());
    assert!(said.stderr.contains("1 of 1 contexts were longer"), "{said:?}");
}

#[test]
fn the_table_is_all_of_standard_output() {
    let model = Model::random();
    let requests = json!({"loglikelihood": [["a", "b"]]});
    let words = ["--tasks", "req*,requests", "--num-shots", "2", "--limit", "0.5", "--seed", "7"];
    let said = evaluate(model.path(), &requests, &words);
    assert_eq!(said.assert_ok(), "|table of requests|");
    assert!(said.stderr.contains("written: "), "{said:?}");
    assert!(said.stderr.contains("noise"), "what the harness prints goes to standard error: {said:?}");
    let settings = &answers(model.path(), &requests, &words[2..])["settings"];
    assert_eq!((&settings["num_fewshot"], &settings["limit"]), (&json!(2), &json!(0.5)));
    assert_eq!((&settings["numpy_random_seed"], &settings["batch_size"]), (&json!(7), &json!(8)));
}

#[test]
fn texts_end_where_the_task_says() {
    let model = Model::script(&[b"ab", b"c\n", b"d"], Then::Loop);
    let user = json!([{"role": "user", "content": "say it"}]);
    let prompt = format!("<|user|>say it{}\n{}", common::model::END, common::model::ASSISTANT);
    let words = |words: Value| json!([prompt, words]);
    let requests = json!({
        "chats": [user],
        "generate_until": [
            words(json!({"until": ["d"], "max_gen_toks": 9})),
            words(json!({"until": "bc"})),
            words(json!({"max_gen_toks": 2, "num_beams": 4})),
        ],
    });
    let got = answers(model.path(), &requests, &[]);
    assert_eq!(got["chats"], json!([prompt]));
    assert_eq!(got["generate_until"], json!(["abc\n", "a", "abc\n", "abc"]));
    assert_eq!(
        (&got["apply_chat_template"], &got["chat_template"]),
        (&json!(true), &json!(common::model::TEMPLATE))
    );
    let cut = answers(model.path(), &requests, &["--max-tokens", "1", "--batch-size", "2"]);
    assert_eq!(cut["generate_until"], json!(["ab", "ab", "ab", "ab"]), "the user's limit wins");
    let said = evaluate(model.path(), &requests, &["--tasks", "requests"]);
    assert!(said.stderr.contains("num_beams has no effect"), "{said:?}");
}

#[test]
fn thoughts_are_no_part_of_an_answer() {
    let model = Model::script(&[b"<think>", b"one\n", b"</think>", b"two", b"\n"], Then::Loop);
    let prompt = common::model::ASSISTANT;
    let requests = json!({"generate_until": [
        [prompt, {"until": ["\n"], "max_gen_toks": 9}],
        [prompt, {"until": ["\n"], "max_gen_toks": 2}],
    ]});
    let got = answers(model.path(), &requests, &[]);
    // What ends an answer does not end the thoughts before it; thoughts alone are no answer.
    assert_eq!(got["generate_until"], json!(["two", ""]));
}

#[test]
fn sampling_is_the_tasks_or_the_users() {
    let model = Model::random();
    let draw = |n: usize| json!(["ab", {"do_sample": true, "temperature": 1.5, "max_gen_toks": 6 + n}]);
    let greedy = json!(["ab", {"max_gen_toks": 6}]);
    let requests = json!({"generate_until": [draw(0), draw(0), greedy, greedy]});
    let plain = ["--no-apply-chat-template"];
    let texts = |words: &[&str]| answers(model.path(), &requests, words)["generate_until"].clone();
    let got = texts(&plain);
    assert_ne!(got[0], got[1], "each request has draws of its own");
    assert_eq!(got[2], got[3]);
    assert_eq!(texts(&plain), got, "the same seed gives the same texts");
    let cold = texts(&[&plain[..], &["--temp", "0"]].concat());
    assert_eq!((&cold[0], &cold[1]), (&got[2], &got[2]), "the user's temperature wins");
}

#[test]
fn what_an_evaluation_refuses() {
    let nothing = json!({});
    let refused = |words: &[&str], code, says: &[&str]| {
        evaluate("/nonexistent/model", &nothing, words).assert_error(code, says);
    };
    refused(&["--tasks", "requests,included,other"], 1, &["--tasks", "included, other", "--include-path"]);
    refused(&["--tasks", "included", "--include-path", "/nonexistent"], 2, &["--include-path /nonexistent"]);
    // The task is known with the folder: now the model is missing.
    refused(&["--tasks", "included", "--include-path", "/"], 1, &["/nonexistent/model"]);
    refused(&[], 2, &["--tasks"]);
    refused(&["--tasks", "requests", "--limit", "0"], 2, &["--limit"]);
    refused(&["--tasks", "requests", "--temp", "-1"], 2, &["--temp must be"]);
    refused(&["--tasks", "requests", "--top-k", "3"], 2, &["--temp"]);
    refused(
        &["--tasks", "requests", "--python", "/nonexistent/python"],
        1,
        &["/nonexistent/python", "--python"],
    );
    run(&["evaluate", "--tasks", "requests"]).assert_error(2, &["--model"]);
    let missing = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness/missing");
    let mut command =
        lmx(&["evaluate", "--model", "/nonexistent/model", "--tasks", "x", "--python", "python3"]);
    command.current_dir(std::env::temp_dir()).env("PYTHONPATH", missing).env("PYTHONDONTWRITEBYTECODE", "1");
    outcome(&mut command, b"").assert_error(1, &["pip install lm-eval", "--python"]);
}

#[test]
fn what_has_no_likelihood_is_counted_not_hidden() {
    let model = Model::random();
    let words = ["--tasks", "requests", "--no-apply-chat-template", "--max-length", "4"];
    let requests = json!({"loglikelihood": [["a", "b"], ["a", ""], ["a", "bcdefg"]]});
    let said = evaluate(model.path(), &requests, &words);
    assert_eq!((said.code, said.stdout.as_str()), (Some(1), ""), "{said:?}");
    let error = said.stderr.lines().last().unwrap_or_default();
    assert!(error.contains("2 of 3 pairs") && error.contains("number 1"), "{error}");
    let words = [&words[..3], &["--apply-chat-template"]].concat();
    model.edit("tokenizer_config.json", |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    let said = evaluate(model.path(), &requests, &words);
    assert!(said.stderr.contains("--apply-chat-template"), "{said:?}");
}
