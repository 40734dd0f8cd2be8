//! Replies of a given form: a JSON schema, a regular expression, a Lark grammar.
//!
//! A [`Grammars`] belongs to a vocabulary and compiles what is asked for into a [`Grammar`], which goes into a request. At
//! each position the grammar says which tokens may follow; the others' logits become `-inf` before anything is drawn. A
//! reply ends when its form is complete and nothing may follow; where it may both end and go on, the end-of-sequence
//! tokens are allowed and the model decides. A reply that `max_tokens` cuts is a beginning of the form.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::text::{EosSet, Tokenizer};
use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};

/// Bytes of a form's text at most.
pub const MAX_SOURCE: usize = 1 << 20;
/// Rules and groups of a grammar, and objects of a schema, at most: the compiler may go down a level with each.
pub const MAX_PARTS: usize = 10_000;
/// Properties of an object of a schema at most: the compiler's work grows with their square.
pub const MAX_PROPERTIES: usize = 500;
/// Properties of all objects of a form at most.
pub const MAX_ALL_PROPERTIES: usize = 3000;
/// Patterns of an object's properties at most: each is compared with each.
pub const MAX_PATTERNS: usize = 20;
/// What numbers must be multiples of at most, all such numbers of a schema multiplied, without their points: remainders are
/// states.
pub const MAX_MULTIPLE: usize = 10_000;

/// Bytes of the stack on which forms are compiled: room for [`MAX_PARTS`] levels.
const STACK: usize = 256 << 20;

/// Marks the name of a control token among the bytes of tokens.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// The form of a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Any JSON value.
    Json,
    /// A JSON value that a schema describes. Keywords that cannot be enforced are refused.
    JsonSchema(Value),
    /// Text that a regular expression (syntax of Rust's `regex`, without anchors) matches as a whole.
    Regex(String),
    /// Text of a grammar in llguidance's variant of Lark's notation; it begins with the rule `start`.
    Lark(String),
}

/// Why a form cannot be used, or not any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The form does not compile.
    #[error("the {kind} cannot be used: {why}")]
    Invalid {
        /// What it was given as.
        kind: &'static str,
        /// The compiler's words.
        why: String,
    },
    /// The form is too long.
    #[error("the {kind} has {bytes} bytes: at most {MAX_SOURCE} are allowed")]
    TooLong {
        /// What it was given as.
        kind: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// The form has more of something than is allowed.
    #[error("the {kind} has {count} {what}: at most {most} are allowed")]
    TooLarge {
        /// What it was given as.
        kind: &'static str,
        /// What it has too many of.
        what: &'static str,
        /// How many it has.
        count: usize,
        /// How many are allowed.
        most: usize,
    },
    /// Only the empty text has the form.
    #[error("the {kind} allows no text but the empty one")]
    Empty {
        /// What it was given as.
        kind: &'static str,
    },
    /// The vocabulary cannot be used.
    #[error("no grammar can be used with this tokenizer: {why}")]
    Vocabulary {
        /// What is wrong with it.
        why: String,
    },
    /// The form needs more work for one token than is allowed, or the token does not fit.
    #[error("the grammar cannot go on: {why}")]
    Stuck {
        /// The parser's words.
        why: String,
    },
}

impl Form {
    /// Whether the form can be used at all, to be asked before there is a model.
    ///
    /// # Errors
    /// [`GrammarError`] with the compiler's words.
    pub fn check(&self) -> Result<(), GrammarError> {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        Grammars::of_words(bytes, Vec::new())?.compile(self).map(drop)
    }

    fn kind(&self) -> &'static str {
        match self {
            Form::Json | Form::JsonSchema(_) => "JSON schema",
            Form::Regex(_) => "regular expression",
            Form::Lark(_) => "grammar",
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Form::Json => 0,
            Form::JsonSchema(schema) => schema.to_string().len(),
            Form::Regex(text) | Form::Lark(text) => text.len(),
        }
    }

    /// Refuses what would take long to compile, without compiling it.
    pub(crate) fn check_size(&self) -> Result<(), GrammarError> {
        let (kind, bytes) = (self.kind(), self.bytes());
        if bytes > MAX_SOURCE {
            return Err(GrammarError::TooLong { kind, bytes });
        }
        let size = Size::of(self);
        for (what, count, most) in [
            ("properties in one object", size.widest, MAX_PROPERTIES),
            ("properties", size.properties, MAX_ALL_PROPERTIES),
            ("patterns of properties", size.patterns, MAX_PATTERNS),
            (
                "remainders of multipleOf",
                size.multiples.iter().fold(1, |all, &one| one.saturating_mul(all)),
                MAX_MULTIPLE,
            ),
            ("rules, groups and objects", size.parts, MAX_PARTS),
        ] {
            if count > most {
                return Err(GrammarError::TooLarge { kind, what, count, most });
            }
        }
        Ok(())
    }

    fn compile(&self) -> TopLevelGrammar {
        match self {
            Form::Json => TopLevelGrammar::from_json_schema(spaced(&json!({}))),
            Form::JsonSchema(schema) => TopLevelGrammar::from_json_schema(spaced(schema)),
            Form::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Form::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        }
    }
}

/// How much there is of what makes compiling a form much work.
#[derive(Default)]
struct Size {
    /// Rules and groups of a grammar, objects of schemas.
    parts: usize,
    /// Properties of the object that has the most.
    widest: usize,
    /// Those of all objects.
    properties: usize,
    /// Patterns of the one that has the most.
    patterns: usize,
    /// What numbers must be multiples of, without points.
    multiples: BTreeSet<usize>,
}

impl Size {
    fn of(form: &Form) -> Self {
        let mut size = Self::default();
        match form {
            Form::Json | Form::Regex(_) => {}
            Form::JsonSchema(schema) => size.add_schema(schema),
            Form::Lark(text) => size.add_grammar(text),
        }
        size
    }

    fn add_schema(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                let members = |key: &str| map.get(key).and_then(Value::as_object).map_or(0, |map| map.len());
                let required = map.get("required").and_then(Value::as_array).map_or(0, Vec::len);
                let properties = members("properties").max(required);
                self.widest = self.widest.max(properties);
                self.properties += properties;
                self.patterns = self.patterns.max(members("patternProperties"));
                self.multiples.extend(map.get("multipleOf").filter(|value| value.is_number()).map(digits));
                self.parts += 1;
                map.values().for_each(|value| self.add_schema(value));
            }
            Value::Array(list) => list.iter().for_each(|value| self.add_schema(value)),
            _ => {}
        }
    }

    /// Each rule has a line. Brackets of texts and regular expressions are counted too.
    fn add_grammar(&mut self, text: &str) {
        let mut parts = text.split("%json");
        let opens =
            |text: &str| text.bytes().filter(|byte| matches!(byte, b'\n' | b'(' | b'[' | b'{')).count();
        self.parts += parts.next().map_or(0, opens);
        for rest in parts {
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            let schema = values.next().and_then(Result::ok);
            let behind = if schema.is_some() { values.byte_offset() } else { 0 };
            schema.iter().for_each(|schema| self.add_schema(schema));
            self.parts += rest.get(behind..).map_or(0, opens);
        }
    }
}

/// A number without its point and its exponent, as far as it can be told.
fn digits(number: &Value) -> usize {
    let text = number.to_string();
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, "0"));
    let digits = digits.replace(['.', '-'], "").parse::<usize>().unwrap_or(usize::MAX);
    let zeros = exponent.parse::<u32>().unwrap_or(0);
    10_usize.checked_pow(zeros).map_or(usize::MAX, |scale| digits.saturating_mul(scale))
}

/// A schema whose texts have a bounded amount of white space between their parts: room for indentation, but not for a
/// model that finds nothing else to say.
fn spaced(schema: &Value) -> Value {
    const OPTIONS: &str = "x-guidance";
    let mut schema = schema.clone();
    if schema == true {
        schema = json!({});
    }
    if let Some(map) = schema.as_object_mut().filter(|map| !map.contains_key(OPTIONS)) {
        map.insert(OPTIONS.to_owned(), json!({"whitespace_pattern": r"[ ]{1,24}|\n[ ]{0,24}"}));
    }
    schema
}

/// Compiles forms for one vocabulary. Cheap to clone; to be shared between threads.
#[derive(Clone)]
pub struct Grammars {
    factory: Arc<ParserFactory>,
    vocab: usize,
}

impl Grammars {
    /// For a model with `vocab` logits. Takes tens of milliseconds for a large vocabulary.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`].
    pub fn new(tokenizer: &Tokenizer, eos: &EosSet, vocab: usize) -> Result<Self, GrammarError> {
        let words = (0..vocab as u32).map(|id| word(tokenizer, id)).collect();
        let ends = eos.iter().map(|(id, _)| id).filter(|&id| (id as usize) < vocab).collect();
        Self::of_words(words, ends)
    }

    /// For a vocabulary of these `words`; `ends` are those that end a reply.
    fn of_words(mut words: Vec<Vec<u8>>, mut ends: Vec<u32>) -> Result<Self, GrammarError> {
        let vocab = words.len();
        if let Some(id) = words.iter().position(|word| word.len() > MAX_TOKEN) {
            return Err(GrammarError::Vocabulary {
                why: format!("token {id} has more than {MAX_TOKEN} bytes"),
            });
        }
        if ends.is_empty() {
            // The trie wants a token that ends replies: one that has no logit.
            ends.push(vocab as u32);
            words.push(Vec::new());
        }
        let info = TokRxInfo::new(words.len() as u32, ends.first().copied().unwrap_or_default());
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Vocabulary { why: error.to_string() })?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory: Arc::new(factory), vocab })
    }

    /// Compiles a form.
    ///
    /// # Errors
    /// [`GrammarError`] with the compiler's words.
    pub fn compile(&self, form: &Form) -> Result<Grammar, GrammarError> {
        form.check_size()?;
        let failed = |why: String| GrammarError::Invalid { kind: form.kind(), why };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || self.compile_here(form));
            let thread = thread.map_err(|error| failed(format!("no thread for its compiler: {error}")))?;
            thread.join().map_err(|_| failed("its compiler failed".to_owned()))?
        })
    }

    fn compile_here(&self, form: &Form) -> Result<Grammar, GrammarError> {
        let kind = form.kind();
        let mut matcher = Matcher::new(self.factory.create_parser(form.compile()));
        if let Some(why) = matcher.get_error() {
            return Err(GrammarError::Invalid { kind, why });
        }
        // What the compiler would only warn of would be ignored.
        if let Some(why) = matcher.grammar_warnings().into_iter().next() {
            return Err(GrammarError::Invalid { kind, why });
        }
        let mut grammar = Grammar { matcher, mask: None, vocab: self.vocab };
        grammar.prepare()?;
        let ends = self.factory.tok_env().tok_trie().eos_token_set();
        let goes_on = grammar.mask.as_ref().is_some_and(|mask| mask.iter().any(|id| !ends.is_allowed(id)));
        if goes_on { Ok(grammar) } else { Err(GrammarError::Empty { kind }) }
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

/// Bytes of a token at most: what the trie of the vocabulary can hold.
const MAX_TOKEN: usize = 1000;

/// The bytes of a token as the trie wants them; empty for what no text contains.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let mut bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if tokenizer.is_control(id) {
        bytes.insert(0, CONTROL);
    }
    bytes
}

/// A form and how much of it a reply has so far.
pub struct Grammar {
    matcher: Matcher,
    /// The tokens that may come next, once computed.
    mask: Option<SimpleVob>,
    vocab: usize,
}

impl Grammar {
    /// Logits of the models that it is for.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Whether the form is complete and no token may follow.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }

    /// Computes which tokens may come next, unless it is known. Needs no logits, so it can be done while a model runs.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`].
    pub fn prepare(&mut self) -> Result<(), GrammarError> {
        if self.mask.is_none() {
            let mask = self.matcher.compute_mask_or_eos().map_err(|error| Self::stuck(&error))?;
            self.mask = Some(mask);
        }
        Ok(())
    }

    /// Makes the logits of all tokens that may not come next `-inf`.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`].
    pub fn apply(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        self.prepare()?;
        let words = self.mask.as_ref().map_or(&[][..], SimpleVob::as_slice);
        for (index, logits) in logits.chunks_mut(32).enumerate() {
            let word = words.get(index).copied().unwrap_or(0);
            if word != u32::MAX {
                let logits = logits.iter_mut().enumerate();
                logits
                    .filter(|(bit, _)| word >> bit & 1 == 0)
                    .for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
        }
        Ok(())
    }

    /// `token`, one of those that were allowed, came.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`] if it was not.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.mask = None;
        self.matcher.consume_token(token).map_err(|error| Self::stuck(&error))
    }

    /// Takes the last `tokens` accepted tokens back.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`] if there are fewer.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), GrammarError> {
        self.mask = None;
        self.matcher.rollback(tokens).map_err(|error| Self::stuck(&error))
    }

    /// The matcher has no state left but its words, which begin with the name of the reason.
    fn stuck(error: &impl std::fmt::Display) -> GrammarError {
        let words = error.to_string().replace("<non-verbose/>", "");
        let reasons = [
            (StopReason::NoExtensionBias, "the vocabulary has no token that may follow"),
            (StopReason::LexerTooComplex, "it takes too much work to find out what may follow"),
            (StopReason::ParserTooComplex, "it takes too much work to find out what may follow"),
        ];
        let known = reasons.iter().find(|(reason, _)| words.starts_with(&format!("{reason:?}")));
        let why = known.map_or_else(|| words.trim().to_owned(), |&(_, why)| why.to_owned());
        GrammarError::Stuck { why }
    }
}

impl Clone for Grammar {
    /// Goes its own way from here.
    fn clone(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), mask: self.mask.clone(), vocab: self.vocab }
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}
