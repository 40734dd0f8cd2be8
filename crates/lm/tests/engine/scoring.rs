//! Log-likelihoods: those of a reply that is forced to be the text, for any batch, at every border of texts and contexts.

use crate::common::golden_cases::Case;
use lmx::cache::PrefixCacheOptions;
use lmx::checkpoint::{Checkpoint, OpenOptions};
use lmx::engine::{Engine, EngineOptions, Request};
use lmx::eval::{LogLikelihood, RollingLogLikelihood, ScoreError, Scorer, Span};
use lmx::models::Decoder;
use lmx::sample::Key;
use lmx::text::{EosSet, Tokenizer};
use lmx::{Device, Isa};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::ops::ControlFlow;
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
    let disk = Case::read("llama-f32").on_disk();
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
    // "at" alone is two tokens, and so are the first two of "athen".
    ("at", "hen", &[BOS, 0, 28], &[13], true),
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
