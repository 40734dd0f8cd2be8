//! `lmx generate`, from words to streams, on tiny models.

use crate::common::model::{END, Model, Then};
use crate::common::{Outcome, lmx, outcome, run, run_with_input};
use serde_json::{Value, json};
use std::io::Read;
use std::process::{Child, Command};

/// Says "Hello wörld!\n" and ends.
fn hello() -> Model {
    Model::script(&[b"Hello", b" w", b"\xc3", b"\xb6", b"rld!", b"\n"], Then::End)
}

/// Says "tick tock" without end.
fn clock() -> Model {
    Model::script(&[b"tick", b" tock "], Then::Loop)
}

fn generate(model: &Model, words: &[&str]) -> Outcome {
    run(&[&["generate", "--model", model.path()], words].concat())
}

fn json_of(outcome: &Outcome) -> Value {
    serde_json::from_str(outcome.assert_ok()).unwrap()
}

#[test]
fn the_text_is_on_stdout_and_the_rest_on_stderr() {
    let outcome = generate(&hello(), &["--prompt", "hi"]);
    assert_eq!(outcome.assert_ok(), "Hello wörld!\n\n");
    // <|user|> h i <|end|> \n <|assistant|>, and the reply with its end.
    for part in
        ["Prompt: 6 tokens", "Generation: 7 tokens", "Peak memory: ", "first token: ", "Seed: ", "template"]
    {
        assert!(outcome.stderr.contains(part), "{part:?} is not in {outcome:?}");
    }
    let brief = generate(&hello(), &["--verbose", "false"]);
    assert_eq!((brief.assert_ok(), brief.stderr.as_str()), ("Hello wörld!\n\n", ""));
}

#[test]
fn the_json_object_has_exactly_its_keys() {
    let model = hello();
    let outcome = generate(&model, &["--json", "--seed", "7", "-p", "hi"]);
    assert_eq!(outcome.stderr, "");
    let object = json_of(&outcome);
    let mut keys: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        [
            "accepted_tokens",
            "cached_tokens",
            "draft_seconds",
            "draft_stop",
            "drafted_tokens",
            "finish_reason",
            "generation_tokens",
            "generation_tps",
            "kv_format",
            "kv_quantized_from",
            "model",
            "notices",
            "peak_memory_bytes",
            "preemptions",
            "prompt_tokens",
            "prompt_tps",
            "seed",
            "text",
            "token_ids",
            "ttft_ms",
        ]
    );
    assert_eq!(object["text"], "Hello wörld!\n");
    assert_eq!(object["finish_reason"], "stop");
    assert_eq!(object["token_ids"].as_array().unwrap().len(), 7);
    assert_eq!((&object["prompt_tokens"], &object["cached_tokens"]), (&json!(6), &json!(0)));
    assert_eq!((&object["seed"], &object["model"]), (&json!(7), &json!(model.path())));
    assert!(object["peak_memory_bytes"].as_u64().unwrap() > 1 << 20);
    assert!(object["ttft_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn an_empty_reply_is_an_empty_string() {
    let model = Model::script(&[], Then::End);
    let outcome = generate(&model, &[]);
    assert_eq!(outcome.assert_ok(), "");
    assert!(outcome.stderr.contains("No text generated"));
    let object = json_of(&generate(&model, &["--json"]));
    assert_eq!((&object["text"], &object["finish_reason"]), (&json!(""), &json!("stop")));
    assert_eq!(object["generation_tokens"], 1);
}

#[test]
fn a_cut_reply_is_marked() {
    let outcome = generate(&clock(), &["-m", "3", "--verbose", "false"]);
    assert_eq!(outcome.assert_ok(), "tick tock tick\n");
    assert_eq!(outcome.stderr, "note: the reply was cut after 3 tokens (--max-tokens)\n");
    let object = json_of(&generate(&clock(), &["-m", "3", "--json"]));
    assert_eq!(object["finish_reason"], "length");
    assert!(object["notices"].to_string().contains("cut after 3 tokens"));
}

#[test]
fn quantized_keys_and_values_are_reported() {
    let bits = ["--kv-bits", "4", "--kv-group-size", "32"];
    let with = |words: &[&str]| generate(&clock(), &[&bits, words].concat());
    let object = json_of(&with(&["--quantized-kv-start", "8", "-p", "hi", "-m", "5", "--json"]));
    assert_eq!(object["kv_format"], "f32, 4 bits in groups of 32 from 8 on");
    assert_eq!((&object["prompt_tokens"], &object["kv_quantized_from"]), (&json!(6), &json!(8)));
    assert_eq!(object["text"], "tick tock tick tock tick");
    let notices = object["notices"].to_string();
    assert!(notices.contains("positions from 8 on") && !notices.contains("no effect"), "{notices}");
    // The first of two tokens is run at position 6, the second not at all.
    let object = json_of(&with(&["--quantized-kv-start", "7", "-p", "hi", "-m", "2", "--json"]));
    assert_eq!(object["kv_quantized_from"], Value::Null);
    assert!(
        object["notices"].to_string().contains("--kv-bits has no effect: it acts from position 7"),
        "{object}"
    );
    let object = json_of(&with(&["--quantized-kv-start", "6", "-p", "hi", "-m", "2", "--json"]));
    assert_eq!(object["kv_quantized_from"], 6);
    assert!(!object["notices"].to_string().contains("no effect"), "{object}");
    let outcome = with(&["-m", "3", "--verbose", "false"]);
    assert!(outcome.stderr.contains("--kv-bits has no effect"), "{outcome:?}");
    let object = json_of(&generate(&clock(), &["-m", "3", "--json"]));
    assert_eq!((&object["kv_format"], &object["kv_quantized_from"]), (&json!("f32"), &Value::Null));
    // Refused before the weights are read: a file without any would be an error of its own.
    let model = clock();
    model.edit("config.json", |config| config["tie_word_embeddings"] = json!(true));
    std::fs::write(model.file("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let says = ["--kv-group-size 64", "layer 0", "heads of 32 dimensions", "groups of 32"];
    generate(&model, &["--kv-bits", "8"]).assert_error(2, &says);
}

#[test]
fn no_limit_means_the_context() {
    let model = clock();
    model.edit("config.json", |config| config["max_position_embeddings"] = json!(32));
    let outcome = generate(&model, &["-m", "-1", "--json"]);
    let object = json_of(&outcome);
    assert_eq!(object["finish_reason"], "length");
    assert!(object["notices"].to_string().contains("context is full"), "{object}");
    let long = "x".repeat(40);
    generate(&model, &["-p", &long]).assert_error(1, &["44", "32"]);
}

#[test]
fn stop_strings_match_text_across_tokens() {
    let outcome = generate(&hello(), &["--stop", "nothing", "--stop", "lo wö", "--json"]);
    let object = json_of(&outcome);
    assert_eq!((&object["text"], &object["finish_reason"]), (&json!("Hel"), &json!("stop")));
    let held = generate(&hello(), &["--stop", "!\n?"]);
    assert_eq!(held.assert_ok(), "Hello wörld!\n\n");
}

#[test]
fn extra_end_tokens_by_text_and_id() {
    let by_text = generate(&hello(), &["--extra-eos-token", "Ġw", "--verbose", "F"]);
    assert_eq!(by_text.assert_ok(), "Hello\n");
    let by_id = generate(&hello(), &["--extra-eos-token", "zzz-not-a-token"]);
    by_id.assert_error(1, &["zzz-not-a-token"]);
    // The longer pieces of the script follow the 256 bytes.
    let by_id = generate(&hello(), &["--extra-eos-token", "257", "258"]);
    assert_eq!(by_id.assert_ok(), "Hello\n");
}

#[test]
fn prompts_from_stdin() {
    let model = hello();
    let count = |words: &[&str], input: &[u8]| {
        let words = [&["generate", "--model", model.path(), "--json"], words].concat();
        let object = json_of(&run_with_input(&words, input));
        object["prompt_tokens"].as_u64().unwrap()
    };
    // The frame has four tokens; every byte is one.
    assert_eq!(count(&["--prompt", "-"], b"a\r\nb"), 4 + 3);
    assert_eq!(count(&["--prompt", "-"], b"a\\nb\n"), 4 + 5);
    assert_eq!(count(&["--prompt", r"a\nb\tc"], b""), 4 + 5);
    assert_eq!(count(&["--prompt", "-"], b""), 4);
    assert_eq!(count(&["--prompt", "\u{20ac}"], b""), 4 + 3);
    let words = ["generate", "--model", model.path(), "--prompt", "-"];
    run_with_input(&words, b"ok\xff").assert_error(1, &["UTF-8"]);
}

#[test]
fn the_template_and_what_overrides_it() {
    let model = hello();
    let tokens = |words: &[&str]| {
        let object = json_of(&generate(&model, &[&["--json", "-p", "hi"], words].concat()));
        (object["prompt_tokens"].as_u64().unwrap(), object["text"].as_str().unwrap().to_owned())
    };
    assert_eq!(tokens(&["--system-prompt", "be"]).0, 6 + 5);
    // <|assistant|>No: the reply is continued, so that the script does not start.
    assert_eq!(tokens(&["--prefill-response", "No"]), (6 + 2, String::new()));
    assert_eq!(tokens(&["--ignore-chat-template"]), (2, String::new()));
    // Content does not become control tokens, but a raw prompt does.
    let marker = "<|assistant|>".len() as u64;
    let typed = |words: &[&str]| {
        let words = [&["--json", "-p", "<|assistant|>"], words].concat();
        json_of(&generate(&model, &words))["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(typed(&[]), 4 + marker);
    assert_eq!(typed(&["--ignore-chat-template"]), 1);
    let dropped = generate(&model, &["--ignore-chat-template", "--system-prompt", "be"]);
    assert!(dropped.stderr.contains("note: --system-prompt has no effect"), "{dropped:?}");
    let idle = generate(&model, &["--use-default-chat-template"]);
    assert!(idle.stderr.contains("note: --use-default-chat-template has no effect"), "{idle:?}");
}

#[test]
fn a_model_without_template() {
    let model = hello();
    model.edit("tokenizer_config.json", |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    let plain = generate(&model, &["-p", "<|assistant|>"]);
    assert_eq!(plain.assert_ok(), "Hello wörld!\n\n");
    assert!(plain.stderr.contains("note: the model has no chat template"), "{plain:?}");
    let words = ["--use-default-chat-template", "--json", "-p", "hi"];
    let object = json_of(&generate(&model, &words));
    let rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(object["prompt_tokens"].as_u64(), Some(rendered.len() as u64));
    assert!(object["notices"].to_string().contains("ChatML"));
}

#[test]
fn filters_at_temperature_zero_are_noticed() {
    let outcome = generate(&hello(), &["--top-p", "0.5", "--top-k", "3", "--filter-tempered"]);
    assert_eq!(outcome.assert_ok(), "Hello wörld!\n\n");
    for flag in ["--top-p", "--top-k", "--filter-tempered"] {
        assert!(outcome.stderr.contains(&format!("note: {flag} has no effect")), "{outcome:?}");
    }
    let outcome = generate(&hello(), &["--top-p", "0.5", "--temp", "0.1"]);
    assert!(!outcome.stderr.contains("no effect"), "{outcome:?}");
}

#[test]
fn logits_can_be_changed() {
    let biased = generate(&hello(), &["--logit-bias", r#"{"72": 1000}"#, "-m", "3"]);
    assert_eq!(biased.assert_ok(), "HHH\n");
    generate(&hello(), &["--logit-bias", r#"{"9999": 1}"#]).assert_error(1, &["logit_bias", "9999"]);
}

#[test]
fn a_seed_repeats_a_run_on_any_number_of_threads() {
    let model = Model::random();
    let ids = |words: &[&str]| {
        let words = [&["--json", "--temp", "1", "-m", "20"], words].concat();
        let object = json_of(&generate(&model, &words));
        (object["token_ids"].clone(), object["seed"].as_u64().unwrap())
    };
    let (first, seed) = ids(&[]);
    let seed = seed.to_string();
    assert_eq!(ids(&["--seed", &seed, "--threads", "1"]).0, first);
    assert_eq!(ids(&["--seed", &seed, "--threads", "3", "--prefill-step-size", "1"]).0, first);
    assert_ne!(ids(&["--seed", "1"]).0, ids(&["--seed", "2"]).0);
}

#[test]
fn instruction_sets_agree_and_absent_ones_are_refused() {
    let model = Model::random();
    let words = ["generate", "--model", model.path(), "--json", "-m", "8"];
    let ids = |isa: &str| json_of(&outcome(lmx(&words).env("LMX_ISA", isa), b""))["token_ids"].clone();
    assert_eq!(ids("scalar"), json_of(&run(&words))["token_ids"]);
    outcome(lmx(&words).env("LMX_ISA", "mmx"), b"").assert_error(2, &["LMX_ISA", "mmx", "scalar"]);
}

#[test]
fn code_in_a_folder_is_not_run() {
    let model = hello();
    let trusting = generate(&model, &["--trust-remote-code"]);
    trusting.assert_ok();
    assert!(trusting.stderr.contains("note: --trust-remote-code has no effect"), "{trusting:?}");
    model.edit("config.json", |config| {
        config["model_type"] = json!("unheard_of");
        config["auto_map"] = json!({"AutoModelForCausalLM": "modeling.Model"});
    });
    generate(&model, &[]).assert_error(1, &["auto_map", "never runs code"]);
    let trusting = generate(&model, &["--trust-remote-code"]);
    assert_eq!((trusting.code, trusting.stdout.as_str()), (Some(1), ""));
    assert!(trusting.stderr.contains("never runs code from a model folder"), "{trusting:?}");
}

#[test]
fn damaged_weights_are_named() {
    let model = hello();
    let path = model.file("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
    generate(&model, &[]).assert_error(1, &["model.safetensors"]);
    std::fs::write(&path, &bytes[..5]).unwrap();
    generate(&model, &[]).assert_error(1, &["model.safetensors"]);
    std::fs::remove_file(&path).unwrap();
    generate(&model, &[]).assert_error(1, &["model.safetensors"]);
}

#[test]
fn a_missing_shard_is_named() {
    let model = hello();
    let bytes = std::fs::read(model.file("model.safetensors")).unwrap();
    std::fs::rename(model.file("model.safetensors"), model.file("model-00001-of-00002.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let header: Value = serde_json::from_slice(&bytes[8..8 + usize::try_from(length).unwrap()]).unwrap();
    let mut map: serde_json::Map<String, Value> = serde_json::Map::new();
    for name in header.as_object().unwrap().keys() {
        map.insert(name.clone(), json!("model-00001-of-00002.safetensors"));
    }
    map.insert("lm_head.weight".into(), json!("model-00002-of-00002.safetensors"));
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    std::fs::write(model.file("model.safetensors.index.json"), index).unwrap();
    generate(&model, &[]).assert_error(1, &["model-00002-of-00002.safetensors"]);
}

fn spawn(command: &mut Command) -> Child {
    command.spawn().unwrap()
}

#[test]
fn a_closed_pipe_ends_it_quietly() {
    let model = clock();
    let mut child = spawn(&mut lmx(&["generate", "--model", model.path(), "-m", "-1"]));
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    // The pipe is closed here.
    let output = child.wait_with_output().unwrap();
    assert_eq!((&first, output.status.code()), (b"t", Some(0)));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn ctrl_c_ends_it_with_130() {
    let model = clock();
    let mut child = spawn(&mut lmx(&["generate", "--model", model.path(), "-m", "-1"]));
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 4];
    stdout.read_exact(&mut first).unwrap();
    crate::common::interrupt(&child);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(rest.ends_with('\n'), "the line is ended: {rest:?}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn nobody_reads_stderr() {
    let model = hello();
    let mut child = spawn(&mut lmx(&["generate", "--model", model.path(), "--top-k", "3"]));
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), "Hello wörld!\n\n".as_bytes()));
}

#[test]
fn the_end_token_is_the_template_s() {
    // 256 bytes, three longer pieces, four special tokens.
    let vocabulary = 256 + 3 + 4;
    let object = json_of(&generate(&hello(), &["--json"]));
    assert_eq!(object["token_ids"].as_array().unwrap().last().unwrap(), vocabulary - 4, "{END}");
}

#[test]
fn a_hub_id_in_the_local_cache() {
    let model = hello();
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--org--name");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    std::fs::create_dir_all(repository.join("snapshots")).unwrap();
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::write(repository.join("refs/main"), commit).unwrap();
    std::os::unix::fs::symlink(model.dir(), repository.join("snapshots").join(commit)).unwrap();
    let generate = |words: &[&str]| {
        let words = [&["generate", "--model", "org/name"], words].concat();
        outcome(lmx(&words).env("HF_HUB_CACHE", cache.path()), b"")
    };
    assert_eq!(generate(&[]).assert_ok(), "Hello wörld!\n\n");
    assert_eq!(generate(&["--revision", commit]).assert_ok(), "Hello wörld!\n\n");
    generate(&["--revision", "v9"]).assert_error(1, &["v9", "main"]);
}

#[test]
fn guesses_change_nothing_but_the_speed() {
    let model = clock();
    let words = ["--json", "--seed", "1", "-m", "60"];
    let plain = json_of(&generate(&model, &words));
    let guessed = json_of(&generate(&model, &[&words[..], &["--ngram-spec", "--ngram-n", "2"]].concat()));
    assert_eq!((&guessed["text"], &guessed["token_ids"]), (&plain["text"], &plain["token_ids"]));
    assert_eq!((&plain["drafted_tokens"], &plain["accepted_tokens"]), (&json!(0), &json!(0)));
    assert!(guessed["accepted_tokens"].as_u64() > Some(40), "{guessed}");
    let said = generate(&model, &["-m", "60", "--ngram-spec"]);
    assert!(said.stderr.contains("Drafts: ") && said.stderr.contains("tokens accepted"), "{said:?}");

    generate(&model, &["--num-draft-tokens", "3"]).assert_error(2, &["--num-draft-tokens", "--ngram-spec"]);
    generate(&model, &["--ngram-n", "3"]).assert_error(2, &["--ngram-spec"]);
    generate(&model, &["--ngram-spec", "--num-draft-tokens", "99"]).assert_error(2, &["from 1 to 64", "99"]);
}

#[test]
fn a_draft_model_changes_nothing_but_the_speed() {
    let model = clock();
    let words = ["--json", "--seed", "1", "-m", "60"];
    let plain = json_of(&generate(&model, &words));
    let draft = ["--draft-model", model.path(), "--num-draft-tokens", "4"];
    let guessed = json_of(&generate(&model, &[&words[..], &draft].concat()));
    assert_eq!((&guessed["text"], &guessed["token_ids"]), (&plain["text"], &plain["token_ids"]));
    assert_eq!(guessed["accepted_tokens"], guessed["drafted_tokens"], "{guessed}");
    // Whether guesses pay is a matter of time.
    let took = guessed["draft_seconds"].as_f64().unwrap() > 0.0;
    assert!(took || guessed["drafted_tokens"] == 0, "{guessed}");
    assert_eq!(plain["draft_seconds"], 0.0);

    let other = hello();
    let mismatched = generate(&model, &["--draft-model", other.path()]);
    mismatched.assert_error(1, &["--draft-model", "the draft model's tokenizer differs"]);
    generate(&model, &["--draft-model", "/nonexistent/model"]).assert_error(1, &["/nonexistent/model"]);
    generate(&model, &["--draft-model", "x", "--ngram-spec"])
        .assert_error(2, &["--draft-model", "--ngram-spec"]);
    let many = ["--draft-model", "x", "--num-draft-tokens", "99"];
    generate(&model, &many).assert_error(2, &["from 1 to 64", "99"]);
}

#[test]
fn guesses_that_cannot_be_taken_back_are_refused_when_the_model_is_loaded() {
    let model = Model::recurrent();
    let file = model.file("prompts.jsonl");
    std::fs::write(&file, "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n").unwrap();
    let file = file.to_str().unwrap();
    for command in
        [&["generate"][..], &["generate", "--n", "2"], &["generate", "--prompts-file", file], &["chat"]]
    {
        let words = [command, &["--model", model.path()]].concat();
        run(&[&words[..], &["--ngram-spec"]].concat()).assert_error(1, &["recurrent state"]);
        let draft = Model::random();
        run(&[&words[..], &["--draft-model", draft.path()]].concat()).assert_error(1, &["recurrent state"]);
    }
    let plain = run(&["generate", "--model", model.path(), "-m", "3", "--verbose", "F"]);
    assert_eq!(plain.code, Some(0), "{plain:?}");
}
