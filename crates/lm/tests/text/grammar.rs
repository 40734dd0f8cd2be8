//! Replies of a given form, on models whose logits are noise: only the grammar can be why they are right.

use crate::common::running::together;
use lmx::cache::{KvStore, LayerKv};
use lmx::engine::{
    DraftModel, DraftSpeculation, Engine, EngineOptions, Event, FinishReason, Request, RequestError, Update,
};
use lmx::grammar::{Form, Grammar, GrammarError, Grammars};
use lmx::models::{ForwardError, LinearVisitor, Model, StepInputs};
use lmx::sample::SamplingParams;
use lmx::text::{EosSet, EosSource, Tokenizer};
use lmx::{Device, Isa, KvType};
use lmx_tensor::{RowAdapters, Tensor};
use serde_json::{Value, json};
use std::sync::Arc;

/// Logits that depend on nothing but the last token and its position.
struct Noise {
    vocab: usize,
    /// Changes the logits at every third position.
    salt: u64,
    device: Device,
}

impl Model for Noise {
    fn hidden(&self, step: &StepInputs, _: &mut KvStore) -> Result<Tensor, ForwardError> {
        let rows = step.tokens.iter().zip(&step.positions);
        let data: Vec<f32> = rows.flat_map(|(&token, &position)| [token as f32, position as f32]).collect();
        Ok(Tensor::from_slice(&self.device, step.tokens.len(), 2, &data)?)
    }

    fn final_norm(&self, hidden: &Tensor, _: &[usize]) -> Result<Tensor, ForwardError> {
        Ok(Tensor::from_slice(&self.device, hidden.rows(), hidden.cols(), hidden.data())?)
    }

    fn head(&self, hidden: &Tensor, rows: &[usize], _: &RowAdapters) -> Result<Tensor, ForwardError> {
        let logit = |row: &[f32], id: usize| {
            let salt = if (row[1] as u64).is_multiple_of(3) { self.salt } else { 0 };
            let seed = ((row[0] as u64) << 40 | (row[1] as u64) << 20 | id as u64) ^ salt;
            let mixed = (seed ^ seed >> 17).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31);
            (mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f32 / 2e6
        };
        let row = |&row: &usize| (0..self.vocab).map(move |id| logit(hidden.row(row).unwrap(), id));
        let logits: Vec<f32> = rows.iter().flat_map(row).collect();
        Ok(Tensor::from_slice(&self.device, rows.len(), self.vocab, &logits)?)
    }

    fn layer_kv(&self) -> Vec<LayerKv> {
        Vec::new()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn visit_linears<'a>(&'a self, _: &mut LinearVisitor<'_, 'a>) {}

    fn context_length(&self) -> usize {
        2000
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn width(&self) -> usize {
        2
    }

    fn original_context(&self) -> Option<usize> {
        None
    }
}

struct World {
    tokenizer: Arc<Tokenizer>,
    eos: EosSet,
    vocab: usize,
    grammars: Grammars,
}

/// A small tokenizer; the model has three logits more than there are tokens.
fn world(kind: &str) -> World {
    let tokenizer = Arc::new(crate::common::text_data::small(kind));
    let vocab = tokenizer.vocab_size() + 3;
    let mut eos = EosSet::default();
    let ends = ["<|im_end|>", "<|endoftext|>", "</s>", "<end_of_turn>"];
    for id in ends.into_iter().filter_map(|end| tokenizer.id(end)) {
        eos.insert(id, EosSource::Config);
    }
    let grammars = Grammars::new(&tokenizer, &eos, vocab).unwrap();
    World { tokenizer, eos, vocab, grammars }
}

impl World {
    fn noise(&self, salt: u64) -> Box<Noise> {
        Box::new(Noise { vocab: self.vocab, salt, device: Device::cpu(Isa::best(), 1) })
    }

    /// With a draft model that is often wrong.
    fn drafted(&self, max_running: usize) -> Engine {
        let (model, tokenizer) = (self.noise(0x5eed << 44), Arc::clone(&self.tokenizer));
        let draft = DraftModel { model, tokenizer, kv_type: KvType::F32, kv_memory: usize::MAX };
        self.engine(max_running).with_draft(draft).unwrap()
    }

    fn engine(&self, max_running: usize) -> Engine {
        let model = self.noise(0);
        let options = EngineOptions { max_running, ..EngineOptions::default() };
        Engine::new(model, Arc::clone(&self.tokenizer), self.eos.clone(), options).unwrap()
    }

    fn form(&self, form: Form) -> Grammar {
        self.grammars.compile(&form).unwrap()
    }

    fn run(&self, form: &Form, seed: u64, max_tokens: usize) -> (String, Option<FinishReason>) {
        replies(&mut self.engine(1), vec![request(self.form(form.clone()), seed, max_tokens)]).remove(0)
    }
}

fn request(grammar: Grammar, seed: u64, max_tokens: usize) -> Request {
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let prompt = vec![seed as u32 % 50 + 1];
    Request { sampling, seed: Some(seed), grammar: Some(grammar), ..Request::new(prompt, max_tokens) }
}

fn drafting(request: Request) -> Request {
    let speculation = DraftSpeculation { draft_tokens: 4, adaptive: false };
    Request { speculation: Some(speculation.into()), ..request }
}

/// What each request got, in order.
fn replies(engine: &mut Engine, requests: Vec<Request>) -> Vec<(String, Option<FinishReason>)> {
    let reply = |events: Vec<Event>| {
        assert!(events.iter().all(|event| event.token.is_none() || event.logprob > f32::NEG_INFINITY));
        (events.iter().map(|event| &*event.text).collect(), events.last().unwrap().finish)
    };
    together(engine, requests).into_iter().map(reply).collect()
}

fn schema() -> Form {
    Form::JsonSchema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "a \"b\" é"]}, "maxItems": 3},
            "count": {"type": "integer", "minimum": -5, "maximum": 120},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["name", "tags", "count", "share"],
        "additionalProperties": false,
    }))
}

fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
    assert!((1..=8).contains(&value["name"].as_str().unwrap().chars().count()), "{text}");
    let tags = value["tags"].as_array().unwrap();
    assert!(tags.len() <= 3, "{text}");
    assert!(tags.iter().all(|tag| ["red", "green", "a \"b\" é"].contains(&tag.as_str().unwrap())), "{text}");
    // Minus zero is an integer of JSON, though serde_json reads it as a float.
    let count = value["count"].as_f64().unwrap();
    assert!((-5.0..=120.0).contains(&count) && count.fract() == 0.0, "{text}");
    assert!((0.0..=1.0).contains(&value["share"].as_f64().unwrap()), "{text}");
}

#[test]
fn a_hundred_of_a_hundred_are_valid_alone_and_in_a_batch() {
    let world = world("byte_level");
    let requests = (0..100).map(|seed| request(world.form(schema()), seed, 1500)).collect();
    let batched = replies(&mut world.engine(8), requests);
    for (seed, (text, finish)) in batched.iter().enumerate() {
        // Only a number's digits have no bound in the schema.
        if *finish == Some(FinishReason::Stop) {
            assert_valid(text);
        }
        if seed % 10 == 0 {
            assert_eq!(world.run(&schema(), seed as u64, 1500), (text.clone(), *finish));
        }
    }
    let complete = batched.iter().filter(|(_, finish)| *finish == Some(FinishReason::Stop)).count();
    assert_eq!(complete, 100);
    let requests = (0..100).map(|seed| drafting(request(world.form(schema()), seed, 1500))).collect();
    assert_eq!(replies(&mut world.drafted(8), requests), batched);
}

#[test]
fn a_cut_reply_says_length() {
    let world = world("byte_level");
    let (text, finish) = world.run(&schema(), 1, 4);
    let guessed =
        replies(&mut world.drafted(1), vec![drafting(request(world.form(schema()), 1, 4))]).remove(0);
    assert_eq!(guessed, (text.clone(), finish));
    assert_eq!(finish, Some(FinishReason::Length));
    assert!(text.starts_with('{') && serde_json::from_str::<Value>(&text).is_err(), "{text}");
}

#[test]
fn a_reply_ends_where_nothing_may_follow_or_where_the_model_ends_it() {
    for kind in ["byte_level", "llama", "gemma"] {
        let world = world(kind);
        let (text, finish) = world.run(&Form::Regex("(yes|no|é+b)!".to_owned()), 3, 300);
        assert_eq!(finish, Some(FinishReason::Stop), "{kind}: {text}");
        let ok = matches!(&*text, "yes!" | "no!") || text.trim_matches('é') == "b!";
        assert!(ok, "{kind}: {text:?}");
        // Where both are possible the model decides: with noise it soon does.
        let (text, finish) = world.run(&Form::Regex("a[ab]*".to_owned()), 5, 300);
        let ended = if world.eos.iter().next().is_some() { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(finish, Some(ended), "{kind}: {text}");
        assert!(text.starts_with('a') && text.chars().all(|c| "ab".contains(c)), "{kind}: {text:?}");
    }
    let world = world("byte_level");
    let lark = "start: \"<\" word (\" \" word)~2 \">\"\nword: /[a-z]{1,4}/";
    let (text, finish) = world.run(&Form::Lark(lark.to_owned()), 7, 300);
    assert_eq!(finish, Some(FinishReason::Stop));
    let words: Vec<&str> = text.strip_prefix('<').unwrap().strip_suffix('>').unwrap().split(' ').collect();
    assert_eq!(words.len(), 3, "{text}");
}

#[test]
fn a_vocabulary_without_the_words_fails_that_request_only() {
    let world = world("metaspace");
    let mut engine = world.engine(2);
    let hopeless = engine.submit(request(world.form(Form::Regex("a!".to_owned())), 1, 50)).unwrap();
    let fine = engine.submit(request(world.form(Form::Regex("[a-z]{9}".to_owned())), 1, 50)).unwrap();
    let (mut failures, mut text) = (Vec::new(), String::new());
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            match update {
                Update::Failed(error) => failures.push((id, error.to_string())),
                Update::Token(event) if id == fine => text.push_str(&event.text),
                _ => {}
            }
        }
    }
    let why = "the grammar cannot go on: the vocabulary has no token that may follow".to_owned();
    assert_eq!(failures, [(hopeless, why)]);
    assert_eq!(text.trim().len(), 9, "{text}");
}

#[test]
fn any_json_is_json() {
    let world = world("byte_level");
    let complete = (0..30).filter(|&seed| {
        let (text, finish) = world.run(&Form::Json, seed, 60);
        let stopped = finish == Some(FinishReason::Stop);
        let right = match serde_json::from_str::<Value>(&text) {
            Ok(_) => true,
            // JSON bounds no number, serde_json does.
            Err(error) => error.to_string().contains("out of range"),
        };
        assert!(!stopped || right, "{text}");
        stopped
    });
    assert!(complete.count() >= 3);
}

#[test]
fn what_is_taken_back_is_as_if_it_had_never_come() {
    let world = world("byte_level");
    let mut grammar = world.form(schema());
    let allowed = |grammar: &mut Grammar| {
        let mut logits = vec![0.0; world.vocab];
        grammar.apply(&mut logits).unwrap();
        (0..world.vocab as u32).filter(|&id| logits[id as usize] == 0.0).collect::<Vec<u32>>()
    };
    let mut masks = Vec::new();
    for step in 0..40 {
        let mask = allowed(&mut grammar);
        grammar.accept(mask[step * 7 % mask.len()]).unwrap();
        masks.push(mask);
        if grammar.is_complete() {
            break;
        }
    }
    let mut fork = grammar.clone();
    for back in [1, 3, 2] {
        masks.truncate(masks.len() - back + 1);
        grammar.rollback(back).unwrap();
        assert_eq!(Some(allowed(&mut grammar)), masks.pop());
    }
    fork.rollback(1).unwrap();
    assert!(grammar.rollback(1000).is_err());
}

#[test]
fn what_cannot_be_enforced_is_refused() {
    let world = world("byte_level");
    let error = |form: Form| world.grammars.compile(&form).unwrap_err();
    let invalid = [
        Form::JsonSchema(json!({"type": "strin"})),
        Form::JsonSchema(json!({"type": "object", "propertyNames": {"pattern": "^x"}, "minProperties": 3})),
        Form::JsonSchema(json!({"type": "string", "format": "no-such-format"})),
        Form::JsonSchema(json!({"$ref": "https://example.com/schema.json"})),
        Form::JsonSchema(json!([1])),
        Form::Regex("(a".to_owned()),
        Form::Lark("start: missing".to_owned()),
        Form::Lark(String::new()),
    ];
    for form in invalid {
        let told = world.grammars.compile(&form).err().unwrap_or_else(|| panic!("{form:?} compiles"));
        assert_eq!(form.check().as_ref(), Err(&told), "without a model");
        assert!(matches!(&told, GrammarError::Invalid { why, .. } if !why.is_empty()), "{form:?}: {told}");
    }
    assert_eq!(error(Form::Regex(String::new())), GrammarError::Empty { kind: "regular expression" });
    let long = error(Form::Regex("a".repeat(2 << 20)));
    assert_eq!(long, GrammarError::TooLong { kind: "regular expression", bytes: 2 << 20 });

    assert_eq!(schema().check(), Ok(()));

    let other = Grammars::new(&world.tokenizer, &world.eos, world.vocab + 1).unwrap();
    let grammar = other.compile(&Form::Json).unwrap();
    let refused = world.engine(1).submit(request(grammar, 0, 5)).unwrap_err();
    assert!(matches!(refused, RequestError::GrammarVocabulary { .. }), "{refused}");
}

#[test]
fn forms_that_are_much_work_are_refused_by_their_size() {
    let integer = json!({"type": "integer"});
    let object = |field: &str, count: usize| {
        let members: serde_json::Map<String, Value> =
            (0..count).map(|n| (format!("^k{n}$"), integer.clone())).collect();
        json!({"type": "object", field: members})
    };
    let multiple = |of: Value| json!({"type": "number", "multipleOf": of});
    let nested = |count: usize| json!({"prefixItems": vec![integer.clone(); count]});
    let too_large = |form: Form| matches!(form.check(), Err(GrammarError::TooLarge { .. }));
    for (fine, refused) in [
        (object("properties", 500), object("properties", 501)),
        (
            json!({"anyOf": vec![object("properties", 500); 2]}),
            json!({"anyOf": vec![object("properties", 500); 7]}),
        ),
        (object("patternProperties", 20), object("patternProperties", 21)),
        (json!({"type": "object", "required": ["a"]}), json!({"type": "object", "required": vec!["a"; 501]})),
        (multiple(json!(9973)), multiple(json!(10_007))),
        (multiple(json!(0.25)), multiple(json!(123.456))),
        (
            json!({"allOf": [multiple(json!(100)), multiple(json!(15))]}),
            json!({"allOf": [multiple(json!(101)), multiple(json!(103))]}),
        ),
        (nested(100), nested(10_001)),
    ] {
        let embedded = Form::Lark(format!("start: %json {refused}"));
        assert!(Form::JsonSchema(fine.clone()).check().is_ok(), "{fine}");
        assert!(too_large(Form::JsonSchema(refused)) && too_large(embedded));
    }
    let rules: String = (0..10_001).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    assert!(too_large(Form::Lark(format!("start: r0\n{rules}r10001: \"a\""))));
    assert!(too_large(Form::Lark(format!("start: {}", "a{".repeat(10_001)))));
    // As deep as is allowed.
    let rules: String = (0..9_900).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    assert!(Form::Lark(format!("start: r0\n{rules}r9900: \"a\"")).check().is_ok());
    let mut defs: serde_json::Map<String, Value> =
        (0..9000).map(|n| (format!("d{n}"), json!({"$ref": format!("#/$defs/d{}", n + 1)}))).collect();
    defs.insert("d9000".to_owned(), integer.clone());
    let chain = json!({"$ref": "#/$defs/d0", "$defs": defs});
    assert_eq!(Form::JsonSchema(chain).check(), Ok(()));
}
