//! A reply is the same, bit for bit, with and without guesses.

use crate::common::running::{essence, together};
use crate::common::tiny;
use lmx::cache::{KvQuantization, KvWindow, PrefixCacheOptions};
use lmx::engine::{Engine, EngineOptions, Event, NgramSpeculation, Request, RequestError, Stats};
use lmx::grammar::Form;
use lmx::sample::{ProcessorParams, SamplingParams};
use lmx::text::{EosSet, EosSource};

fn engine(case: &str, options: EngineOptions) -> Engine {
    let mut eos = EosSet::default();
    eos.insert(33, EosSource::Config);
    tiny::engine_ending_at(case, 1, eos, options)
}

/// Requests of many kinds; some end by a token, some by their length.
fn request(index: u64, speculation: Option<NgramSpeculation>) -> Request {
    let temperature = [0.0, 1.0, 0.3][index as usize % 3];
    let sampling =
        SamplingParams { temperature, top_k: 5 * (index as usize % 2), ..SamplingParams::default() };
    let mut processors = ProcessorParams::default();
    if index % 4 == 1 {
        processors.repetition_penalty = 1.1;
        processors.frequency_penalty = 0.05;
    }
    // Texts that repeat themselves, so that there is something to guess from.
    let tokens = (0..20 + index * 7 % 30).map(|i| (i % (3 + index % 5)) as u32 + 1).collect();
    Request {
        sampling,
        processors,
        seed: Some(index),
        ignore_eos: !index.is_multiple_of(5),
        top_logprobs: 2,
        speculation: speculation.map(Into::into),
        ..Request::new(tokens, 60 + index as usize % 9)
    }
}

fn stats(events: &[Event]) -> &Stats {
    &events.last().unwrap().stats
}

/// Compares; returns how many tokens were guessed, and rightly.
fn compare(
    case: &str,
    options: EngineOptions,
    make: &dyn Fn(Option<NgramSpeculation>) -> Vec<Request>,
) -> [usize; 2] {
    let plain = together(&mut engine(case, options), make(None));
    let mut sums = [0, 0];
    for (ngram, draft_tokens) in [(1, 1), (2, 3), (3, 8), (2, 64)] {
        let speculation = NgramSpeculation { ngram, draft_tokens };
        let mut engine = engine(case, options);
        let guessed = together(&mut engine, make(Some(speculation)));
        for (index, (events, plain)) in guessed.iter().zip(&plain).enumerate() {
            assert_eq!(essence(events), essence(plain), "{case} {speculation:?}, request {index}");
            let Stats { drafted_tokens, accepted_tokens, generation_tokens, .. } = *stats(events);
            assert_eq!(events.iter().filter(|event| event.from_draft).count(), accepted_tokens);
            assert!(accepted_tokens <= drafted_tokens && accepted_tokens < generation_tokens.max(1));
            sums = [sums[0] + drafted_tokens, sums[1] + accepted_tokens];
        }
        assert_eq!(engine.kv().budget().used(), engine.prefix_stats().bytes(), "nothing is left behind");
    }
    sums
}

#[test]
fn replies_are_the_same_alone_and_in_batches_under_every_policy() {
    let window = |size, keep| Some(KvWindow::new(size, keep).unwrap());
    let quantized = Some(KvQuantization::new(8, 32, 45).unwrap());
    let kinds = [
        ("llama-f32", None, None),
        ("gemma3-f32", None, quantized),
        ("llama-q4", window(40, 4), None),
        ("llama4-f32", None, None),
    ];
    for (case, kv_window, kv_quantization) in kinds {
        for max_running in [1, 8] {
            let prefix_cache = (max_running == 8).then(PrefixCacheOptions::default);
            let options = EngineOptions {
                kv_window,
                kv_quantization,
                max_running,
                prefix_cache,
                ..EngineOptions::default()
            };
            let make = |speculation| (1..=20).map(|index| request(index, speculation)).collect();
            let [drafted, accepted] = compare(case, options, &make);
            assert!(accepted > 100 && accepted < drafted, "{case}: {accepted} of {drafted}");
        }
    }
}

#[test]
fn grammars_see_only_what_was_drawn() {
    let options = EngineOptions::default();
    let grammars = engine("llama-f32", options).grammars().unwrap();
    // The tiny model has few tokens: signs, digits and capitals.
    let grammar = grammars.compile(&Form::Regex("(A1?B?!?){20,30}".to_owned())).unwrap();
    let make = |speculation| {
        let grammar = |index| Request { grammar: Some(grammar.clone()), ..request(index, speculation) };
        (1..=6).map(grammar).collect()
    };
    let [drafted, accepted] = compare("llama-f32", options, &make);
    assert!(accepted > 0 && drafted > accepted, "{accepted} of {drafted}");
}

#[test]
fn what_cannot_be_taken_back_is_refused() {
    let speculation = Some(NgramSpeculation::default());
    let error = engine("lfm2-f32", EngineOptions::default()).submit(request(1, speculation)).unwrap_err();
    assert!(matches!(error, RequestError::Speculation), "{error}");
    let speculation = Some(NgramSpeculation { ngram: 0, draft_tokens: 1 });
    let error = engine("llama-f32", EngineOptions::default()).submit(request(1, speculation)).unwrap_err();
    assert!(error.to_string().starts_with("ngram must be an integer from 1 to 64"), "{error}");
}

#[test]
fn guesses_give_way_where_there_is_no_room() {
    let block = engine("llama-f32", EngineOptions::default()).kv().spec().groups[0].block_bytes(None);
    let options = EngineOptions { kv_memory: 3 * block, ..EngineOptions::default() };
    let speculation = NgramSpeculation { ngram: 1, draft_tokens: 64 };
    let make = |speculation| Request { max_tokens: Some(62), ..request(6, speculation) };
    let [plain, guessed] = [None, Some(speculation)]
        .map(|speculation| together(&mut engine("llama-f32", options), vec![make(speculation)]).remove(0));
    assert_eq!(essence(&guessed), essence(&plain));
}
