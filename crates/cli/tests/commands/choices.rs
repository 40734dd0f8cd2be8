//! `--n`, `--best-of` and `--vote`.

use crate::common::model::Model;
use crate::common::{Outcome, run};
use serde_json::{Value, json};

fn generate(model: &Model, words: &[&str]) -> Outcome {
    let common = ["generate", "--model", model.path(), "--prompt", "a few words", "--temp", "1", "-m", "6"];
    run(&[&common, words].concat())
}

fn json_of(model: &Model, words: &[&str]) -> Value {
    serde_json::from_str(generate(model, &[words, &["--json"]].concat()).assert_ok()).unwrap()
}

#[test]
fn the_first_choice_is_the_reply_without_choices() {
    let model = Model::random();
    let solo = json_of(&model, &["--seed", "5"]);
    let several = json_of(&model, &["--seed", "5", "--n", "4"]);
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert_eq!((&choices[0]["token_ids"], &choices[0]["seed"]), (&solo["token_ids"], &json!(5)));
    assert_eq!(several["text"], solo["text"]);
    // Each choice is the reply of its own seed.
    let seed = choices[2]["seed"].to_string();
    assert_eq!(json_of(&model, &["--seed", &seed])["token_ids"], choices[2]["token_ids"]);

    // The prompt was run for the first of them, and its time counts.
    assert_eq!(several["cached_tokens"], 0);
    let plain = generate(&model, &["--seed", "5", "--n", "2", "--regex", "[ab]{4}"]);
    let lines: Vec<&str> = plain.assert_ok().lines().collect();
    assert_eq!((lines.len(), lines[1]), (3, "---"));
    assert!(plain.stderr.contains("run once") && plain.stderr.contains("in 2 replies"), "{plain:?}");
    let cut = generate(&model, &["--seed", "5", "--n", "3", "-m", "40", "--ngram-spec", "--ngram-n", "1"]);
    for part in ["of 3 replies were cut (--max-tokens)", "Drafts: ", "Seed: 5"] {
        assert!(cut.stderr.contains(part), "{part}: {cut:?}");
    }
    let greedy = generate(&model, &["--n", "2", "--temp", "0", "--verbose", "false"]);
    assert!(greedy.stderr.contains("all replies are the same"), "{greedy:?}");
}

#[test]
fn the_best_are_printed_best_first() {
    let model = Model::random();
    let best = json_of(&model, &["--seed", "5", "--n", "2", "--best-of", "6"]);
    let choices = best["choices"].as_array().unwrap();
    let score = |choice: &Value| choice["score"].as_f64().unwrap();
    assert!(choices.len() == 2 && score(&choices[0]) >= score(&choices[1]), "{best}");
    assert_eq!(best["text"], choices[0]["text"]);
    // What it cost is that of all six, and the seed is the one from which all of it can be made again.
    let all = json_of(&model, &["--seed", "5", "--n", "6"]);
    let made: usize =
        all["choices"].as_array().unwrap().iter().map(|c| c["token_ids"].as_array().unwrap().len()).sum();
    for object in [&all, &best] {
        assert_eq!((&object["generation_tokens"], &object["seed"]), (&json!(made), &json!(5)), "{object}");
        assert_eq!((&object["prompt_tokens"], &object["cached_tokens"]), (&all["prompt_tokens"], &json!(0)));
    }
    let said = generate(&model, &["--seed", "5", "--best-of", "6"]);
    assert!(said.stderr.contains(&format!("Generation: {made} tokens in 6 replies")), "{said:?}");
    let normalized = json_of(&model, &["--seed", "5", "--best-of", "6", "--score", "length-normalized"]);
    assert!(score(&normalized["choices"][0]) > score(&choices[0]) / 2.0);
}

#[test]
fn the_most_frequent_answer_wins() {
    let model = Model::random();
    let words = ["--seed", "1", "--n", "9", "--vote", "--regex", "(yes|no), [a-z]"];
    let vote = json_of(&model, &[&words[..], &["--answer", "^(yes|no)"]].concat());
    let votes = vote["votes"].as_array().unwrap();
    let count = |index: usize| votes.get(index).map_or(0, |vote| vote["count"].as_u64().unwrap());
    assert!(count(0) >= count(1) && count(0) + count(1) == 9, "{vote}");
    let answer = votes[0]["answer"].as_str().unwrap();
    assert!(vote["text"].as_str().unwrap().starts_with(answer));
    let plain = generate(&model, &[&words[..], &["--answer", "^(yes|no)"]].concat());
    assert_eq!(plain.assert_ok(), format!("{answer}\n"));
    assert!(plain.stderr.contains(&format!("Votes: {} for {answer}", count(0))));
    assert_eq!(generate(&model, &[&words[..], &["--answer", "[0-9]"]].concat()).assert_ok(), "", "no answer");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let refused = |words: &[&str], parts: &[&str]| {
        run(&[&["generate", "--model", "no-such-model"], words].concat()).assert_error(2, parts);
    };
    refused(&["--n", "0"], &["--n"]);
    refused(&["--n", "5", "--best-of", "3"], &["--best-of is 3", "--n 5"]);
    refused(&["--n", "5000"], &["--n is 5000"]);
    refused(&["--n", "3", "--vote", "--best-of", "5"], &["--vote", "--best-of"]);
    refused(&["--vote"], &["--n"]);
    refused(&["--answer", "a"], &["--vote"]);
    refused(&["--n", "2", "--vote", "--answer", "("], &["--answer"]);
    refused(&["--score", "log-prob"], &["--best-of"]);
    refused(&["--n", "2", "--prompts-file", "x"], &["--n"]);
    refused(&["--n", "2", "--prompt-cache-file", "x"], &["--n"]);
}
