//! Sampling against mlx-lm's results (tests/gen/sample_golden.py), and the properties that hold for all input.

use lmx::sample::{
    BuiltinSampler, Key, KeyStream, LogitsProcessor, ProcessorChain, ProcessorParams, SampleError, Sampler,
    SamplingParams, log_softmax, parse_logit_bias,
};
use lmx_tensor::kernels::{Exec, Isa};
use proptest::prelude::*;
use serde_json::Value;

fn cases(json: &str) -> Vec<Value> {
    serde_json::from_str(json).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|x| u32::try_from(x.as_u64().unwrap()).unwrap()).collect()
}

fn size(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

/// mlx-lm's arguments of `make_sampler`.
fn sampling_params(json: &Value) -> SamplingParams {
    let mut params = drawing();
    for (name, value) in json.as_object().unwrap() {
        match name.as_str() {
            "temp" => params.temperature = value.as_f64().unwrap(),
            "top_p" => params.top_p = value.as_f64().unwrap(),
            "min_p" => params.min_p = value.as_f64().unwrap(),
            "min_tokens_to_keep" => params.min_tokens_to_keep = size(value),
            "top_k" => params.top_k = size(value),
            "xtc_probability" => params.xtc_probability = value.as_f64().unwrap(),
            "xtc_threshold" => params.xtc_threshold = value.as_f64().unwrap(),
            "xtc_special_tokens" => params.xtc_special_tokens = ids(value),
            other => panic!("unknown parameter {other}"),
        }
    }
    params
}

/// mlx-lm's arguments of `make_logits_processors`.
fn processor_params(json: &Value) -> ProcessorParams {
    let mut params = ProcessorParams::default();
    for (name, value) in json.as_object().unwrap() {
        match name.as_str() {
            "logit_bias" => params.logit_bias = parse_logit_bias(&value.to_string()).unwrap(),
            "repetition_penalty" => params.repetition_penalty = value.as_f64().unwrap(),
            "repetition_context_size" => params.repetition_context_size = size(value),
            "presence_penalty" => params.presence_penalty = value.as_f64().unwrap(),
            "presence_context_size" => params.presence_context_size = size(value),
            "frequency_penalty" => params.frequency_penalty = value.as_f64().unwrap(),
            "frequency_context_size" => params.frequency_context_size = size(value),
            other => panic!("unknown parameter {other}"),
        }
    }
    params
}

/// Temperature 1 and no filter.
fn drawing() -> SamplingParams {
    SamplingParams { temperature: 1.0, ..SamplingParams::default() }
}

/// The generator's logits: the same f32 operations in the same order.
fn formula_logits(shape: &str, vocab: usize, salt: u64) -> Vec<f32> {
    let unit = |i: u64| ((i + salt).wrapping_mul(2_654_435_761) as u32 >> 8) as f32 / 16_777_216.0;
    let stretch = vocab as f32 / 8.0;
    let logit = |u: f32| if shape == "peaked" { 12.0 / (u * stretch + 1.0) } else { u * u * u * 30.0 };
    (0..vocab as u64).map(|i| logit(unit(i))).collect()
}

fn formula_logprobs(shape: &str, vocab: usize, salt: u64) -> Vec<f32> {
    normalised(&formula_logits(shape, vocab, salt)).unwrap()
}

fn normalised(logits: &[f32]) -> Result<Vec<f32>, SampleError> {
    let mut out = vec![0.0; logits.len()];
    log_softmax(&Exec::new(Isa::best(), 1), logits, &mut out).map(|()| out)
}

fn logs(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

fn kept(row: &[f32]) -> Vec<u32> {
    (0..).zip(row).filter(|(_, l)| **l > f32::NEG_INFINITY).map(|(i, _)| i).collect()
}

/// What the filters leave, with the key of seed 0.
fn filtered(params: SamplingParams, row: &[f32]) -> Vec<u32> {
    kept(BuiltinSampler::new(params).filter(row, Key::from_seed(0)))
}

/// FNV-1a over 32-bit words, as in the generator.
fn digest(ids: &[u32]) -> String {
    let hash = ids
        .iter()
        .fold(0xCBF2_9CE4_8422_2325_u64, |h, &id| (h ^ u64::from(id)).wrapping_mul(0x0100_0000_01B3));
    format!("{hash:016x}")
}

#[test]
fn draws_equal_mlx_lm_token_for_token() {
    let mut tokens_compared = 0;
    for case in cases(include_str!("../../../../tests/golden/sample/draws.json")) {
        let (shape, vocab) = (case["shape"].as_str().unwrap(), size(&case["vocab"]));
        let params = sampling_params(&case["params"]);
        params.validate(vocab).unwrap();
        let seed = case["seed"].as_str().unwrap().parse().unwrap();
        let mut keys = KeyStream::new(seed, params.splits_per_token());
        let mut sampler = BuiltinSampler::new(params);
        let drawn: Vec<u32> = (0..10)
            .map(|step| sampler.sample(&formula_logprobs(shape, vocab, 100 + step as u64), keys.key(step)))
            .collect();
        assert_eq!(drawn, ids(&case["tokens"]), "{case}");
        tokens_compared += drawn.len();
    }
    assert!(tokens_compared >= 1760, "the golden file has shrunk to {tokens_compared} draws");
}

#[test]
fn filters_keep_the_tokens_that_mlx_lm_keeps() {
    for case in cases(include_str!("../../../../tests/golden/sample/survivors.json")) {
        let row = match case["shape"].as_str() {
            Some(shape) => formula_logprobs(shape, size(&case["vocab"]), case["salt"].as_u64().unwrap()),
            None => logs(&floats(&case["probabilities"])),
        };
        let left = filtered(sampling_params(&case["params"]), &row);
        match case.get("kept") {
            Some(expected) => assert_eq!(left, ids(expected), "{case}"),
            None => {
                assert_eq!(left.len(), size(&case["count"]), "{case}");
                assert_eq!(digest(&left), case["digest"].as_str().unwrap(), "{case}");
            }
        }
    }
}

#[test]
fn processors_change_logits_as_mlx_lm_does() {
    for case in cases(include_str!("../../../../tests/golden/sample/processors.json")) {
        let mut logits = floats(&case["logits"]);
        let mut chain = ProcessorChain::new(&processor_params(&case["params"]));
        chain.process(&ids(&case["history"]), &mut logits).unwrap();
        for (got, expected) in logits.iter().zip(floats(&case["out"])) {
            // mlx subtracts a frequency penalty once per occurrence, which rounds each time.
            assert!(
                (got - expected).abs() <= 2e-6 * expected.abs().max(1.0),
                "{got} for {expected} in {case}"
            );
        }
    }
}

#[test]
fn greedy_takes_the_lowest_id_on_ties_whatever_the_filters_and_the_key() {
    let params = SamplingParams { top_k: 1, xtc_probability: 1.0, min_p: 1.0, ..SamplingParams::default() };
    let mut sampler = BuiltinSampler::new(params);
    for seed in 0..20 {
        assert_eq!(sampler.sample(&[-3.0, -1.0, -2.0, -1.0], Key::from_seed(seed)), 1);
    }
}

/// Draws `n` tokens from fixed probabilities and counts them.
fn frequencies(probabilities: &[f32], params: SamplingParams, n: usize) -> Vec<usize> {
    let row = logs(probabilities);
    let mut keys = KeyStream::new(2024, params.splits_per_token());
    let mut sampler = BuiltinSampler::new(params);
    let mut counts = vec![0; row.len()];
    for position in 0..n {
        counts[sampler.sample(&row, keys.key(position)) as usize] += 1;
    }
    counts
}

#[test]
fn frequencies_pass_a_chi_squared_test() {
    let probabilities = [0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005];
    for temperature in [1.0, 0.5, 2.0] {
        let weights = probabilities.map(|p| f64::from(p).powf(1.0 / temperature));
        let total: f64 = weights.iter().sum();
        let n = 40_000;
        let counts = frequencies(&probabilities, SamplingParams { temperature, ..drawing() }, n);
        let chi_squared: f64 = counts
            .iter()
            .zip(weights)
            .map(|(&count, weight)| {
                let expected = n as f64 * weight / total;
                (count as f64 - expected).powi(2) / expected
            })
            .sum();
        // The 99.9 % quantile with 9 degrees of freedom.
        assert!(chi_squared < 27.88, "temperature {temperature}: chi squared is {chi_squared}");
    }
}

#[test]
fn top_k_draws_only_its_tokens_in_proportion() {
    let n = 10_000.0;
    let counts = frequencies(&[0.1, 0.4, 0.05, 0.2, 0.25], SamplingParams { top_k: 3, ..drawing() }, 10_000);
    for (count, share) in counts.iter().zip([0.0, 0.4 / 0.85, 0.0, 0.2 / 0.85, 0.25 / 0.85]) {
        let sigma = f64::sqrt(n * share * (1.0 - share));
        assert!((*count as f64 - n * share).abs() <= 3.0 * sigma, "{counts:?}");
    }
}

#[test]
fn top_k_of_none_or_of_the_vocabulary_and_more_is_off() {
    let row = logs(&[0.4, 0.3, 0.2, 0.1]);
    for top_k in [0, 4, 5, usize::MAX] {
        assert_eq!(filtered(SamplingParams { top_k, ..drawing() }, &row), [0, 1, 2, 3]);
    }
}

#[test]
fn temperature_first_filters_what_is_drawn_from() {
    // The nucleus of 0.7 holds two tokens, and at temperature 2 three.
    let row = logs(&[0.4, 0.3, 0.15, 0.1, 0.05]);
    let mut params = SamplingParams { temperature: 2.0, top_p: 0.69, ..SamplingParams::default() };
    assert_eq!(filtered(params.clone(), &row), [0, 1]);
    params.temperature_first = true;
    assert_eq!(filtered(params.clone(), &row), [0, 1, 2]);
    // The draw is then not tempered again.
    params.top_p = 0.0;
    let share = frequencies(&[0.8, 0.2], params, 10_000)[0] as f64 / 10_000.0;
    assert!((share - 2.0 / 3.0).abs() < 0.015, "sqrt(0.8) : sqrt(0.2) is 2 : 1, but got {share}");
}

#[test]
fn xtc_tosses_its_coin_for_each_token() {
    let row = logs(&[0.5, 0.3, 0.2]);
    let mut keys = KeyStream::new(5, 2);
    let mut sampler = BuiltinSampler::new(SamplingParams { xtc_probability: 0.25, ..drawing() });
    let mut acted = 0;
    for position in 0..4000 {
        match kept(sampler.filter(&row, keys.key(position)))[..] {
            [2] => acted += 1,
            [0, 1, 2] => {}
            ref left => panic!("XTC leaves only the least likely, not {left:?}"),
        }
    }
    assert!((900..1100).contains(&acted), "a quarter of 4000, but it acted {acted} times");
}

#[test]
fn bad_parameters_are_refused_by_name_value_and_range() {
    let refused = |change: &dyn Fn(&mut SamplingParams), message: &str| {
        for temperature in [1.0, 0.0] {
            let mut params = SamplingParams { temperature, ..SamplingParams::default() };
            change(&mut params);
            assert_eq!(params.validate(10).unwrap_err().to_string(), message);
        }
    };
    for (value, shown) in [(-1.0, "-1.0"), (f64::NAN, "NaN"), (f64::INFINITY, "inf"), (-1e300, "-1e300")] {
        let message = format!("temperature must be a finite number, 0 or more, but is {shown}");
        refused(&|p| p.temperature = value, &message);
    }
    for (value, shown) in [(-1.0, "-1.0"), (f64::NAN, "NaN"), (1.5, "1.5")] {
        refused(&|p| p.top_p = value, &format!("top_p must be a number in [0, 1], but is {shown}"));
        refused(&|p| p.min_p = value, &format!("min_p must be a number in [0, 1], but is {shown}"));
        let message = format!("xtc_probability must be a number in [0, 1], but is {shown}");
        refused(&|p| p.xtc_probability = value, &message);
        let message = format!("xtc_threshold must be a number in [0, 0.5], but is {shown}");
        refused(&|p| p.xtc_threshold = value, &message);
    }
    refused(&|p| p.min_tokens_to_keep = 0, "min_tokens_to_keep must be an integer, 1 or more, but is 0");
    refused(
        &|p| (p.xtc_threshold, p.xtc_probability) = (0.0, 0.5),
        "xtc_threshold must be above 0 where xtc_probability is (0 would leave only the least likely token), but is 0.0",
    );
    refused(
        &|p| p.xtc_special_tokens = vec![2, 10],
        "xtc_special_tokens must be given for token ids below the vocabulary's 10, but is 10",
    );
}

#[test]
fn parameters_at_the_edges_are_accepted() {
    for good in [
        SamplingParams::default(),
        SamplingParams { top_p: 1.0, min_p: 1.0, xtc_probability: 1.0, xtc_threshold: 0.5, ..drawing() },
        SamplingParams { top_k: usize::MAX, min_tokens_to_keep: usize::MAX, xtc_threshold: 0.0, ..drawing() },
        SamplingParams { temperature: 1e9, ..drawing() },
        SamplingParams { temperature: 5e-324, ..drawing() },
    ] {
        assert_eq!(good.validate(10), Ok(()));
        assert!(!filtered(good, &logs(&[0.1; 10])).is_empty());
    }
}

#[test]
fn bad_processor_parameters_are_refused_by_name_value_and_range() {
    let ok = ProcessorParams::default();
    let bias = |id, value| ProcessorParams { logit_bias: [(id, value)].into(), ..ok.clone() };
    for (params, message) in [
        (bias(10, 1.0), "logit_bias must be given for token ids below the vocabulary's 10, but is 10"),
        (bias(1, f64::NAN), "logit_bias must be a finite 32-bit number, but is NaN"),
        (bias(1, 1e39), "logit_bias must be a finite 32-bit number, but is 1e39"),
        (
            ProcessorParams { repetition_penalty: -0.5, ..ok.clone() },
            "repetition_penalty must be a finite number, 0 or more, but is -0.5",
        ),
        (
            ProcessorParams { presence_penalty: f64::INFINITY, ..ok.clone() },
            "presence_penalty must be a finite 32-bit number, but is inf",
        ),
        (
            ProcessorParams { frequency_penalty: f64::NAN, ..ok.clone() },
            "frequency_penalty must be a finite 32-bit number, but is NaN",
        ),
    ] {
        assert_eq!(params.validate(10).unwrap_err().to_string(), message);
    }
    let negative = ProcessorParams { presence_penalty: -2.0, frequency_penalty: -2.0, ..bias(9, -100.0) };
    assert_eq!(negative.validate(10), Ok(()));
}

#[test]
fn penalties_of_zero_and_a_repetition_penalty_of_one_are_off() {
    assert!(ProcessorChain::new(&ProcessorParams::default()).is_empty());
    let one = ProcessorParams { repetition_penalty: 1.0, ..ProcessorParams::default() };
    assert!(ProcessorChain::new(&one).is_empty());
    let some = ProcessorParams { repetition_penalty: 1.1, ..ProcessorParams::default() };
    assert!(!ProcessorChain::new(&some).is_empty());
}

#[test]
fn a_logit_bias_is_read_from_json() {
    assert_eq!(parse_logit_bias(r#"{"3": 1.5, "0": -100}"#).unwrap(), [(0, -100.0), (3, 1.5)].into());
    for text in
        ["", "[1]", "{\"a\": 1}", "{\"-1\": 1}", "{\"1\": \"x\"}", "{\"1\": null}", "{\"4294967296\": 1}"]
    {
        let error = parse_logit_bias(text).unwrap_err().to_string();
        assert!(error.starts_with("logit_bias must be a JSON object of token ids and numbers"), "{error}");
    }
    let long = parse_logit_bias(&"x".repeat(1 << 20)).unwrap_err().to_string();
    assert!(long.len() < 300, "an error does not repeat a megabyte");
}

#[test]
fn settings_without_effect_are_listed() {
    let filters = SamplingParams {
        top_p: 0.9,
        min_p: 0.1,
        min_tokens_to_keep: 2,
        top_k: 5,
        xtc_probability: 0.5,
        xtc_threshold: 0.2,
        ..SamplingParams::default()
    };
    let all = ["top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold"];
    assert_eq!(filters.without_effect(), all);
    assert!(SamplingParams { temperature: 0.1, ..filters }.without_effect().is_empty());
    let off = SamplingParams { top_p: 1.0, ..SamplingParams::default() };
    assert!(off.without_effect().is_empty(), "off is not set");
    let idle = SamplingParams { min_tokens_to_keep: 2, xtc_threshold: 0.2, ..drawing() };
    assert_eq!(idle.without_effect(), ["min_tokens_to_keep", "xtc_threshold"]);
    let sizes = ProcessorParams {
        repetition_context_size: 0,
        presence_context_size: 64,
        presence_penalty: 1.0,
        ..ProcessorParams::default()
    };
    assert_eq!(sizes.without_effect(), ["repetition_context_size"]);
}

#[test]
fn closures_are_samplers_and_processors() {
    let mut last = |logprobs: &[f32], _: Key| logprobs.len() as u32 - 1;
    assert_eq!(Sampler::sample(&mut last, &[0.0; 5], Key::from_seed(0)), 4);

    let bias = ProcessorParams { logit_bias: [(0, 1.0)].into(), ..ProcessorParams::default() };
    let mut chain = ProcessorChain::new(&bias);
    chain.push(Box::new(|_: &[u32], logits: &mut [f32]| {
        logits[0] *= 10.0; // sees the biased logit
        Ok(())
    }));
    chain.push(Box::new(|_: &[u32], _: &mut [f32]| Err(SampleError::Processor("no luck".into()))));
    let mut logits = [1.0, 2.0];
    let error = chain.process(&[], &mut logits).unwrap_err();
    assert_eq!((logits[0], error.to_string().as_str()), (20.0, "logits processor: no luck"));
}

#[test]
fn tokens_accepted_before_the_first_step_are_not_counted_twice() {
    let params =
        ProcessorParams { frequency_penalty: 1.0, frequency_context_size: 0, ..ProcessorParams::default() };
    let mut chain = ProcessorChain::new(&params);
    chain.accept(1);
    chain.rollback(1);
    chain.accept(2);
    let mut logits = [0.0; 3];
    chain.process(&[1, 1, 2], &mut logits).unwrap();
    assert_eq!(logits, [0.0, -2.0, -1.0]);
}

#[test]
fn history_beyond_the_logits_is_harmless() {
    let params = ProcessorParams { presence_penalty: 1.0, ..ProcessorParams::default() };
    let mut logits = [0.0; 2];
    ProcessorChain::new(&params).process(&[7, 1], &mut logits).unwrap();
    assert_eq!(logits, [0.0, -1.0]);
}

prop_compose! {
    fn any_sampling()(
        temperature in prop_oneof![Just(0.0), Just(1e-300), 0.01..5.0, Just(1e30)],
        [top_p, min_p, xtc_probability] in prop::array::uniform3(prop_oneof![Just(0.0), Just(1.0), 0.0..1.0]),
        min_tokens_to_keep in 1_usize..20,
        top_k in 0_usize..60,
        xtc_threshold in 0.001..0.5,
        xtc_special_tokens in prop::collection::vec(0_u32..40, 0..3),
        temperature_first in any::<bool>(),
    ) -> SamplingParams {
        SamplingParams {
            temperature,
            top_p,
            min_p,
            min_tokens_to_keep,
            top_k,
            xtc_probability,
            xtc_threshold,
            xtc_special_tokens,
            temperature_first,
        }
    }
}

fn any_row() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![8 => -20.0_f32..20.0, 1 => Just(3.0), 1 => Just(f32::NEG_INFINITY)];
    prop::collection::vec(logit, 40..50).prop_filter_map("a possible token", |row| normalised(&row).ok())
}

proptest! {
    #[test]
    fn something_always_survives_and_only_survivors_are_drawn(
        params in any_sampling(),
        row in any_row(),
        seed in any::<u64>(),
    ) {
        prop_assert_eq!(params.validate(row.len()), Ok(()));
        let mut sampler = BuiltinSampler::new(params);
        let key = Key::from_seed(seed);
        let left = sampler.filter(&row, key).to_vec();
        prop_assert!(!kept(&left).is_empty());
        prop_assert!(left[sampler.sample(&row, key) as usize].is_finite());
    }

    #[test]
    fn the_filters_run_one_after_the_other(params in any_sampling(), row in any_row(), seed in any::<u64>()) {
        let params = SamplingParams { temperature: 1.0, temperature_first: false, ..params };
        let (top_p, min_p, top_k) = (params.top_p, params.min_p, params.top_k);
        let steps = [
            SamplingParams { top_p, ..drawing() },
            SamplingParams { min_p, min_tokens_to_keep: params.min_tokens_to_keep, ..drawing() },
            SamplingParams { top_k: 0, top_p: 0.0, min_p: 0.0, ..params.clone() },
            SamplingParams { top_k, ..drawing() },
        ];
        let key = Key::from_seed(seed);
        let filter = |row: Vec<f32>, step| BuiltinSampler::new(step).filter(&row, key).to_vec();
        prop_assert_eq!(filter(row.clone(), params), steps.into_iter().fold(row, filter));
    }

    #[test]
    fn rollback_restores_what_was_before(
        prompt in prop::collection::vec(0_u32..8, 0..30),
        steps in prop::collection::vec((prop::collection::vec(0_u32..8, 0..9), 0_usize..9), 1..8),
        contexts in prop::array::uniform3(prop_oneof![Just(0_usize), 1_usize..12, Just(usize::MAX)]),
    ) {
        let params = ProcessorParams {
            repetition_penalty: 1.7,
            repetition_context_size: contexts[0],
            presence_penalty: 0.3,
            presence_context_size: contexts[1],
            frequency_penalty: 0.9,
            frequency_context_size: contexts[2],
            ..ProcessorParams::default()
        };
        let logits = [1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 0.0, 3.0];
        let mut history = prompt;
        let mut chain = ProcessorChain::new(&params);
        for (drafted, taken_back) in steps {
            // The definition: a new chain that sees the whole history at once.
            let (mut got, mut expected) = (logits, logits);
            chain.process(&history, &mut got).unwrap();
            ProcessorChain::new(&params).process(&history, &mut expected).unwrap();
            prop_assert_eq!(got, expected);
            for &token in &drafted {
                history.push(token);
                chain.accept(token);
            }
            let taken_back = taken_back.min(drafted.len());
            chain.rollback(taken_back);
            history.truncate(history.len() - taken_back);
        }
    }
}
