//! Log-likelihoods: those of a reply that is forced to be the text, for any batch, at every border of texts and contexts.

use crate::common::golden_cases::Case;
use lmx::cache::PrefixCacheOptions;
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{Engine, EngineOptions, Request};
use lmx::eval::{
    CompareError, LogLikelihood, Plan, Protocol, RollingLogLikelihood, ScoreError, Scorer, Span, TextLoss,
    compare, numpy_permutation, perplexity,
};
use lmx::models::Decoder;
use lmx::sample::Key;
use lmx::text::{EosSet, Tokenizer};
use lmx::{Device, Isa, KvType, LoadOptions};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TOKENS: [&str; 10] = ["Ġ", "th", "the", "Ġthe", "in", "Ġa", "<s>", "</s>", "A", "B"];
const BOS: u32 = 32;
const EOS: u32 = 33;

/// Letters and a few words, so that tokens cross the borders of texts.
fn tokenizer(bos: bool, eos: bool) -> Tokenizer {
    let letters = (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let all = letters.chain(TOKENS.map(str::to_owned)).enumerate();
    let vocab: Map<String, Value> = all.map(|(id, token)| (token, json!(id))).collect();
    let added: Vec<Value> = [(BOS, "<s>"), (EOS, "</s>")]
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .into();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let merges = ["t h", "th e", "Ġ the", "i n", "Ġ a"];
    let template = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS]}, "</s>": {"id": "</s>", "ids": [EOS]}}});
    let file = json!({"version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": byte_level,
        "post_processor": if bos { template } else { Value::Null }, "decoder": byte_level,
        "model": {"type": "BPE", "unk_token": null, "vocab": vocab, "merges": merges}});
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let mut config = Map::new();
    config.extend(bos.then(|| ("bos_token".to_owned(), json!("<s>"))));
    config.extend(eos.then(|| ("eos_token".to_owned(), json!("</s>"))));
    std::fs::write(folder.path().join("tokenizer_config.json"), Value::Object(config).to_string()).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

fn engine(tokenizer: Tokenizer, options: EngineOptions) -> Engine {
    engine_of("llama-f32", tokenizer, options)
}

fn engine_of(case: &str, tokenizer: Tokenizer, options: EngineOptions) -> Engine {
    let disk = Case::read(case).on_disk();
    let checkpoint = Checkpoint::open(&disk.path, &OpenOptions::default()).unwrap();
    let device = Device::cpu(Isa::best(), 1);
    let model = Decoder::load(&checkpoint, checkpoint.describe().unwrap(), &device, &mut |_, _| {}).unwrap();
    Engine::new(Box::new(model), Arc::new(tokenizer), EosSet::default(), options).unwrap()
}

fn plain() -> Engine {
    engine(tokenizer(true, true), EngineOptions::default())
}

/// The log-likelihood of `rest` after `context`, and whether it is greedy: of a reply that is made to be `rest`.
fn forced(engine: &mut Engine, context: &[u32], rest: &[u32]) -> (f64, bool) {
    let mut queue = VecDeque::from(rest.to_vec());
    let request = Request {
        sampler: Some(Box::new(move |_: &[f32], _: Key| queue.pop_front().unwrap())),
        top_logprobs: 1,
        ignore_eos: true,
        ..Request::new(context.to_vec(), rest.len())
    };
    engine.generate(request).unwrap().fold((0.0, true), |(sum, greedy), event| {
        let event = event.unwrap();
        (sum + f64::from(event.logprob), greedy && event.top[0].1 <= event.logprob)
    })
}

fn go_on(_: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn likelihood(engine: &mut Engine, context: &str, rest: &str) -> Result<LogLikelihood, ScoreError> {
    Scorer::new(engine).log_likelihood(&[(context, rest)], &mut go_on).remove(0)
}

/// Context, continuation, the tokens that are read before, those that are scored, and whether a token crosses the border.
type Border = (&'static str, &'static str, &'static [u32], &'static [u32], bool);

const BORDERS: [Border; 10] = [
    ("bc", "de", &[BOS, 1, 2], &[3, 4], false),
    ("bc", "d", &[BOS, 1, 2], &[3], false),
    ("b", " the", &[BOS, 1], &[29], false),
    // White space before the border is the continuation's.
    ("b ", "the", &[BOS, 1], &[29], false),
    // Nothing before it: BOS.
    ("", "the", &[BOS], &[28], false),
    ("  ", "b", &[BOS], &[26, 26, 1], false),
    ("<s>b", "c", &[BOS, 1], &[2], false),
    // "at" alone is two tokens, and so are the first two of "athen", of which the second is "the".
    ("at", "hen", &[BOS, 0, 19], &[13], true),
    // "th" alone is one token, and "the" is one: it tells of the continuation what can be told.
    ("th", "e", &[BOS], &[28], true),
    ("b t", "he", &[BOS, 1], &[29], true),
];

#[test]
fn a_continuation_is_scored_as_a_reply() {
    let mut engine = plain();
    for (context, rest, before, scored, merged) in BORDERS {
        let told = likelihood(&mut engine, context, rest).unwrap();
        let (sum, greedy) = forced(&mut engine, before, scored);
        let expected = LogLikelihood { sum, greedy, tokens: scored.len(), truncated: 0, merged };
        assert_eq!(told, expected, "{context:?} {rest:?}");
    }
}

#[test]
fn greedy_is_what_greedy_decoding_gives() {
    let mut engine = plain();
    let context = [BOS, 1, 2];
    let reply: Vec<u32> = engine
        .generate(Request::new(context.to_vec(), 5))
        .unwrap()
        .map(|e| e.unwrap().token.unwrap())
        .collect();
    let score = |engine: &mut Engine, tokens: &[u32]| {
        let (mut greedy, span) =
            (Vec::new(), Span { tokens: [&context, tokens].concat(), from: context.len() });
        Scorer::new(engine).score([span], &mut |_, scored| {
            greedy = scored.unwrap().iter().map(|token| token.greedy).collect();
            ControlFlow::Continue(())
        });
        greedy
    };
    assert_eq!(score(&mut engine, &reply), [true; 5]);
    let mut other = reply.clone();
    other[2] = (other[2] + 1) % 36;
    let greedy = score(&mut engine, &other);
    assert_eq!((greedy[..2].to_vec(), greedy[2]), (vec![true; 2], false));
}

#[test]
fn without_bos_the_end_of_sequence_stands_before_a_text() {
    let mut engine = engine(tokenizer(false, true), EngineOptions::default());
    let told = likelihood(&mut engine, "", "the").unwrap();
    assert_eq!(told.sum, forced(&mut engine, &[EOS], &[28]).0);
    assert_eq!(likelihood(&mut engine, "b", "c").unwrap().sum, forced(&mut engine, &[1], &[2]).0);
    let mut bare = self::engine(tokenizer(false, false), EngineOptions::default());
    assert!(matches!(likelihood(&mut bare, "", "the"), Err(ScoreError::NoPrefixToken)));
    assert!(likelihood(&mut bare, "b", "the").is_ok());
}

#[test]
fn a_long_context_is_cut_at_its_beginning() {
    let mut engine = plain();
    let context = "bcdfg".repeat(100);
    let told = likelihood(&mut engine, &context, "zy").unwrap();
    // The model reads 256 tokens and is asked for one more.
    let all = Scorer::new(&mut engine).max_length();
    assert_eq!((all, told.truncated, told.tokens), (256, 503 - 257, 2));
    let ids = engine.tokenizer().encode(&context, false).unwrap();
    let kept = &ids[ids.len() - 255..];
    assert_eq!(
        told.sum,
        forced(&mut engine, &[kept, &[25]].concat(), &[24]).0 + forced(&mut engine, kept, &[25]).0
    );
    let mut short = Scorer::new(&mut engine).with_max_length(4).unwrap();
    let told = short.log_likelihood(&[("bcdfg", "zy"), ("b", "bcdfg")], &mut go_on);
    assert_eq!(told[0].as_ref().unwrap().truncated, 3);
    assert!(matches!(told[1], Err(ScoreError::ContinuationTooLong { tokens: 5, max_length: 4 })));
    let expected = forced(&mut engine, &[3, 5, 6], &[25, 24]).0;
    assert_eq!(told[0].as_ref().unwrap().sum, expected);
    for asked in [0, 257] {
        let error = Scorer::new(&mut engine).with_max_length(asked).unwrap_err();
        assert!(matches!(error, ScoreError::MaxLength { context: 256, .. }), "{error}");
    }
}

#[test]
fn a_text_is_scored_from_its_first_token_to_its_last() {
    let mut engine = plain();
    let text = "bcdfg the ";
    let ids = engine.tokenizer().encode(text, false).unwrap();
    let whole = forced(&mut engine, &[BOS], &ids).0;
    let told = Scorer::new(&mut engine).rolling_log_likelihood(&[text, "b"], &mut go_on);
    assert_eq!(*told[0].as_ref().unwrap(), RollingLogLikelihood { sum: whole, tokens: 7, windows: 1 });
    assert_eq!(told[1].as_ref().unwrap().sum, forced(&mut engine, &[BOS], &[1]).0);
    // Three tokens are read at a time: the last window begins where it can read as many.
    let mut short = Scorer::new(&mut engine).with_max_length(3).unwrap();
    let told = short.rolling_log_likelihood(&[text], &mut go_on).remove(0).unwrap();
    let windows: [(&[u32], &[u32]); 3] =
        [(&[BOS], &ids[..3]), (&ids[2..3], &ids[3..6]), (&ids[3..6], &ids[6..])];
    let sum: f64 = windows.map(|(before, scored)| forced(&mut engine, before, scored).0).iter().sum();
    assert_eq!((told.tokens, told.windows), (7, 3));
    assert!((told.sum - sum).abs() < 1e-9);
}

#[test]
fn what_cannot_be_scored_is_named_and_touches_nothing_else() {
    let mut engine = plain();
    let alone = likelihood(&mut engine, "b", "c").unwrap();
    let pairs = [("b", ""), ("b", "c"), ("b", "É"), ("b", "c")];
    let told = Scorer::new(&mut engine).log_likelihood(&pairs, &mut go_on);
    assert!(matches!(told[0], Err(ScoreError::EmptyContinuation)));
    assert!([&told[1], &told[3]].iter().all(|told| told.as_ref().is_ok_and(|told| *told == alone)));
    assert!(
        matches!(told[2], Err(ScoreError::EmptyContinuation | ScoreError::Tokenizer(_))),
        "{:?}",
        told[2]
    );
    let told = Scorer::new(&mut engine).rolling_log_likelihood(&["", "b"], &mut go_on);
    assert!(matches!(told[0], Err(ScoreError::EmptyText)) && told[1].is_ok());
    let spans = [
        (vec![1, 2], 0),
        (vec![1, 2], 2),
        (vec![1], 1),
        (vec![], 1),
        (vec![1, 99, 2], 1),
        (vec![1, 2, 99], 1),
    ];
    let spans = spans.map(|(tokens, from)| Span { tokens, from });
    let mut failed = 0;
    Scorer::new(&mut engine).score(spans, &mut |_, scored| {
        failed += usize::from(scored.is_err());
        ControlFlow::Continue(())
    });
    assert_eq!(failed, 6);
    assert!(engine.is_idle());
}

#[test]
fn stopping_leaves_nothing_behind() {
    let mut engine = plain();
    let pairs = vec![("b", "c"); 100];
    let told = Scorer::new(&mut engine).log_likelihood(&pairs, &mut |done| {
        if done < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert_eq!(told.iter().filter(|told| told.is_ok()).count(), 3);
    assert!(told.iter().all(|told| matches!(told, Ok(_) | Err(ScoreError::Stopped))));
    assert!(engine.is_idle() && engine.kv().budget().used() == 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// No bit depends on the batch, the chunk, or what others left in a cache.
    #[test]
    fn the_same_for_any_batch(
        texts in prop::collection::vec(("([a-z ]{0,30}[a-z])?", "[a-z ]{1,12}"), 1..24),
        chunk in 1_usize..70,
        max_length in 12_usize..64,
    ) {
        let mut alone = None;
        for (max_running, prefixes) in [(1, false), (3, false), (16, false), (3, true)] {
            let options = EngineOptions {
                max_running,
                prompt_concurrency: max_running,
                prefill_step_size: chunk,
                prefix_cache: prefixes.then(PrefixCacheOptions::default),
                ..EngineOptions::default()
            };
            let mut engine = engine(tokenizer(true, true), options);
            let mut scorer = Scorer::new(&mut engine).with_max_length(max_length).unwrap();
            let all: Vec<String> = texts.iter().map(|(context, rest)| format!("{context}{rest}")).collect();
            let told: Vec<LogLikelihood> =
                scorer.log_likelihood(&texts, &mut go_on).into_iter().map(Result::unwrap).collect();
            let rolling: Vec<RollingLogLikelihood> =
                scorer.rolling_log_likelihood(&all, &mut go_on).into_iter().map(Result::unwrap).collect();
            let alone = alone.get_or_insert((told.clone(), rolling.clone()));
            prop_assert_eq!(&told, &alone.0);
            prop_assert_eq!(&rolling, &alone.1);
        }
    }
}

/// Pseudo-random ids of the tokenizer, some of them control tokens.
fn ids(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 7 + i * 37) % 34).collect()
}

#[test]
fn a_plan_is_scored_window_by_window() {
    let mut engine = plain();
    let texts = vec![ids(50), ids(9), vec![BOS, 3, 4], vec![5]];
    for (protocol, prefix, scored) in [
        (Protocol::Windows { length: 8 }, None, 7 * 7),
        // One of them begins with BOS anyway.
        (Protocol::Windows { length: 8 }, Some(BOS), 7 * 8 - 1),
        (Protocol::Documents { max_length: 16, context: 5 }, None, 49 + 8 + 2),
        (Protocol::Strided { length: 16, stride: 6 }, None, 49 + 8 + 2),
        (Protocol::Strided { length: 16, stride: 6 }, Some(BOS), 50 + 9 + 2 + 1),
    ] {
        let plan = Plan::new(engine.tokenizer(), texts.clone(), protocol, prefix);
        let loss = Scorer::new(&mut engine).loss(&plan, &mut go_on).unwrap();
        assert_eq!((plan.tokens_scored(), loss.tokens.len()), (scored, scored), "{protocol:?} {prefix:?}");
        let spans: Vec<Span> = plan.spans().collect();
        let forced: f64 =
            spans.iter().map(|s| forced(&mut engine, &s.tokens[..s.from], &s.tokens[s.from..]).0).sum();
        assert!((loss.tokens.iter().sum::<f64>() + forced).abs() < 1e-3, "{protocol:?}");
        // Control tokens are no text.
        let all = spans.iter().flat_map(|s| s.tokens[s.from..].iter().zip(0..)).count();
        let text = spans.iter().flat_map(|s| &s.tokens[s.from..]).filter(|&&t| t != BOS && t != EOS).count();
        assert_eq!((all, loss.text.tokens), (scored, text));
    }
}

#[test]
fn words_and_bytes_are_those_of_the_text() {
    let mut engine = plain();
    let text = "the a  thin bc the";
    let tokens = engine.tokenizer().encode(text, true).unwrap();
    assert_eq!((tokens[0], tokens[tokens.len() - 1]), (BOS, EOS));
    let plan =
        Plan::new(engine.tokenizer(), vec![tokens], Protocol::Documents { max_length: 64, context: 1 }, None);
    let TextLoss { nats, tokens, bytes, words } =
        Scorer::new(&mut engine).loss(&plan, &mut go_on).unwrap().text;
    assert_eq!((tokens, bytes, words), (engine.tokenizer().encode(text, false).unwrap().len(), 18, 5));
    let loss = TextLoss { nats, tokens, bytes, words };
    assert!((loss.bits_per_byte().unwrap() - nats / 2.0_f64.ln() / bytes as f64).abs() < 1e-12);
    assert!((loss.word_perplexity().unwrap() - (nats / 5.0).exp()).abs() < 1e-6);
    assert_eq!((TextLoss::default().bits_per_byte(), TextLoss::default().word_perplexity()), (None, None));
}

#[test]
fn equal_losses_have_a_perplexity_without_error() {
    let told = perplexity(&[64_f64.ln(); 10]).unwrap();
    assert!((told.mean - 64.0).abs() < 1e-9 && told.standard_error.unwrap() < 1e-9);
    let told = perplexity(&[1.0, 2.0, 4.0]).unwrap();
    let error = (14.0_f64 / 3.0 / 2.0 / 3.0).sqrt();
    assert!((told.standard_error.unwrap() - told.mean * error).abs() < 1e-9);
    assert_eq!(perplexity(&[1.0]).unwrap().standard_error, None);
    assert_eq!(
        (perplexity(&[]), perplexity(&[1.0, f64::INFINITY]), perplexity(&[f64::NAN])),
        (None, None, None)
    );
}

#[test]
fn two_models_are_compared_token_by_token() {
    let texts = vec![ids(50), ids(33), ids(20), ids(41)];
    let mut told = Vec::new();
    for (running, chunk) in [(1, 512), (3, 7), (16, 64)] {
        let options =
            EngineOptions { max_running: running, prefill_step_size: chunk, ..EngineOptions::default() };
        let (mut a, mut b) =
            (engine(tokenizer(true, true), options), engine_of("llama-q4", tokenizer(true, true), options));
        let plan = Plan::new(a.tokenizer(), texts.clone(), Protocol::Windows { length: 10 }, None);
        let (mut first, mut second) = (Scorer::new(&mut a), Scorer::new(&mut b));
        let alone = [first.loss(&plan, &mut go_on).unwrap(), second.loss(&plan, &mut go_on).unwrap()];
        let compared = compare(&mut first, &mut second, &plan, &mut go_on).unwrap();
        assert_eq!(compared.losses, alone);
        assert_eq!(
            (compared.kl.len(), compared.same_top.len()),
            (plan.tokens_scored(), plan.tokens_scored())
        );
        assert!(compared.kl.iter().all(|kl| *kl >= 0.0) && compared.mean_kl().0.unwrap().mean > 1e-6);
        told.push(compared);
        let mut twin = engine(tokenizer(true, true), options);
        let same = compare(&mut Scorer::new(&mut a), &mut Scorer::new(&mut twin), &plan, &mut go_on).unwrap();
        assert!(same.kl.iter().all(|kl| *kl == 0.0));
        assert_eq!((same.agreement(), same.difference().unwrap().mean), (Some(1.0), 0.0));
        assert!(a.is_idle() && b.is_idle());
    }
    assert!(told.iter().all(|other| *other == told[0]));
}

#[test]
fn models_with_other_tokens_are_not_compared() {
    let mut a = plain();
    let mut b = engine(tokenizer(true, false), EngineOptions::default());
    let plan = Plan::new(a.tokenizer(), vec![ids(20)], Protocol::Windows { length: 10 }, None);
    // BOS and EOS are the same tokens there; their roles are not asked for.
    assert!(compare(&mut Scorer::new(&mut a), &mut Scorer::new(&mut b), &plan, &mut go_on).is_ok());
    let mut stopped = |_| ControlFlow::Break(());
    let error = compare(&mut Scorer::new(&mut a), &mut Scorer::new(&mut b), &plan, &mut stopped).unwrap_err();
    assert!(matches!(error, CompareError::Stopped) && a.is_idle() && b.is_idle());
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text/byte_level");
    let mut other = engine(Tokenizer::from_folder(&other).unwrap(), EngineOptions::default());
    let error =
        compare(&mut Scorer::new(&mut a), &mut Scorer::new(&mut other), &plan, &mut go_on).unwrap_err();
    assert!(matches!(error, CompareError::Tokenizer { .. }), "{error}");
}

/// SmolLM2 with everything in f32 against mlx-lm and transformers, for several batches.
#[test]
fn smollm2_has_the_perplexities_of_mlx_lm_and_transformers() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let models = std::env::var_os("LMX_TEST_MODELS").map_or(workspace.join("models"), PathBuf::from);
    let folder = models.join("SmolLM2-135M-Instruct");
    assert!(folder.exists(), "{} is missing: run scripts/test, which fetches it", folder.display());
    let data = workspace.join("tests/golden/eval");
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(data.join("perplexity.json")).unwrap()).unwrap();
    let number = |protocol: &str, key: &str| golden[protocol][key].as_f64().unwrap();
    let count = |protocol: &str, key: &str| golden[protocol][key].as_u64().unwrap() as usize;
    let paragraphs = std::fs::read_to_string(data.join("paragraphs.jsonl")).unwrap();
    let text = |line: &str| serde_json::from_str::<Value>(line).unwrap()["text"].as_str().unwrap().to_owned();
    let texts: Vec<String> = paragraphs.lines().map(text).collect();
    let mut alone: Option<Vec<Vec<f64>>> = None;
    for batch in [1, 7] {
        let loaded =
            lmx::load(folder.to_str().unwrap(), &LoadOptions::new(Device::cpu(Isa::best(), 2))).unwrap();
        let options = EngineOptions {
            max_running: batch,
            prompt_concurrency: batch,
            kv_type: KvType::F32,
            ..EngineOptions::default()
        };
        let mut engine = Engine::new(loaded.model, loaded.tokenizer, loaded.eos, options).unwrap();
        let tokenizer = Arc::clone(engine.tokenizer());
        let encode = |text: &str| tokenizer.encode(text, false).unwrap();
        let (length, samples) = (count("windows", "length"), count("windows", "samples"));
        let order = numpy_permutation(count("windows", "seed") as u32, texts.len());
        let stream = order.iter().flat_map(|&i| encode(&texts[i]).into_iter().chain(tokenizer.eos()));
        let rows = vec![stream.take(length * samples).collect()];
        let windows = Plan::new(&tokenizer, rows, Protocol::Windows { length }, None);
        let (length, stride) = (count("strided", "length"), count("strided", "stride"));
        let mut whole = encode(&texts.join("\n\n"));
        whole.truncate(count("strided", "tokens"));
        let strided = Plan::new(&tokenizer, vec![whole], Protocol::Strided { length, stride }, None);
        let mut scorer = Scorer::new(&mut engine);
        let mut told = Vec::new();
        for (protocol, plan) in [("windows", windows), ("strided", strided)] {
            let loss = scorer.loss(&plan, &mut go_on).unwrap();
            let estimate = perplexity(&loss.tokens).unwrap();
            assert_eq!(estimate.count, count(protocol, "scored"), "{protocol}");
            let ratio = estimate.mean / number(protocol, "transformers");
            assert!((ratio - 1.0).abs() < 1e-5, "{protocol}: {ratio}");
            if protocol == "windows" {
                // mlx itself is 1.5e-4 from transformers, of which lmx is 3e-8.
                let error = estimate.standard_error.unwrap();
                let ratios =
                    [estimate.mean / number(protocol, "mlx_lm"), error / number(protocol, "mlx_lm_error")];
                assert!(ratios.iter().all(|ratio| (ratio - 1.0).abs() < 2e-4), "{ratios:?}");
            }
            told.push(loss.tokens);
            // One protocol is enough to tell batches apart.
            if let Some(alone) = &alone {
                assert_eq!(told, alone[..1], "batch {batch}");
                break;
            }
        }
        if alone.is_some() {
            continue;
        }
        let documents = golden["documents"]["documents"].as_array().unwrap();
        let mut scorer = scorer.with_max_length(count("documents", "max_length")).unwrap();
        let each = scorer.rolling_log_likelihood(&texts[..documents.len()], &mut go_on);
        let each: Vec<RollingLogLikelihood> = each.into_iter().map(Result::unwrap).collect();
        assert!(each.iter().any(|told| told.windows > 1) && each.iter().any(|told| told.windows == 1));
        for (told, expected) in each.iter().zip(documents) {
            assert!(
                (told.sum + expected.as_f64().unwrap()).abs() < 1e-3 * told.tokens as f64,
                "{told:?} {expected}"
            );
        }
        let (sum, scored) = each.iter().fold((0.0, 0), |(sum, n), told| (sum + told.sum, n + told.tokens));
        let ratio = (-sum / scored as f64).exp() / number("documents", "transformers");
        assert!(scored == count("documents", "scored") && (ratio - 1.0).abs() < 1e-5, "{ratio}");
        alone = Some(told);
    }
}
