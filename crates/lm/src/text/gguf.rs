//! A tokenizer from the metadata of a GGUF file, with the ids of the same model's tokenizer.json.

use super::added::{AddedToken, AddedTokens};
use super::bpe::{Bpe, Merges, UNUSABLE};
use super::decoder::Decoder;
use super::error::TokenizerError;
use super::parts;
use super::post::Surround;
use super::pre;
use super::special::SpecialTokens;
use super::template::TemplateSources;
use super::tokenizer::{Model, Parts, Tokenizer};
use super::tokenizer_json::MergesJson;
use super::vocab::Vocab;
use hashbrown::HashMap;
use lmx_tensor::files::FileError;
use lmx_tensor::files::gguf::GgufFile;
use serde_json::{Value, json};
use std::borrow::Cow;

/// What a GGUF file says about its tokenizer, under `tokenizer.ggml.`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab<'a> {
    /// The file, for messages.
    pub file: String,
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: &'a str,
    /// The name of the pre-tokenizer (gpt2 only).
    pub pre: Option<&'a str>,
    /// The token of each id.
    pub tokens: &'a [String],
    /// SentencePiece scores (llama only).
    pub scores: Vec<f32>,
    /// 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Vec<i64>,
    /// `left right` (gpt2 only).
    pub merges: &'a [String],
    /// Roles such as `bos`, `eos`, `unknown`, `eot`, with their ids.
    pub roles: Vec<(&'static str, u32)>,
    /// Whether BOS goes before a text.
    pub add_bos: Option<bool>,
    /// Whether EOS goes after a text.
    pub add_eos: Option<bool>,
    /// Whether a space goes before a text (llama only).
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.
    pub templates: Vec<(String, String)>,
}

const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Keys of roles (`tokenizer.ggml.KEY_token_id`) and what transformers calls them.
const ROLES: &[(&str, &str)] = &[
    ("bos", "bos_token"),
    ("eos", "eos_token"),
    ("unknown", "unk_token"),
    ("seperator", "sep_token"), // spelled so in the format
    ("padding", "pad_token"),
    ("cls", "cls_token"),
    ("mask", "mask_token"),
    ("eot", ""),
    ("eom", ""),
];

const TEMPLATE_KEY: &str = "tokenizer.chat_template";

impl<'a> GgufVocab<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, FileError> {
        let m = file.metadata();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let model = m.get_str("tokenizer.ggml.model")?;
        let tokens = m.get_strs("tokenizer.ggml.tokens")?;
        let mut roles = Vec::new();
        for (role, _) in ROLES {
            if let Some(id) = m.get_u32(&key(&format!("{role}_token_id")))? {
                roles.push((*role, id));
            }
        }
        let mut templates = Vec::new();
        for (name, _) in m.iter() {
            let short = match name.strip_prefix(TEMPLATE_KEY) {
                Some("") => "default",
                Some(rest) if rest.starts_with('.') => rest.trim_start_matches('.'),
                _ => continue,
            };
            templates.push((short.to_owned(), m.get_str(name)?.unwrap_or_default().to_owned()));
        }
        Ok(Self {
            file: file.path().display().to_string(),
            model: model.ok_or_else(|| m.missing_error("tokenizer.ggml.model"))?,
            pre: m.get_str("tokenizer.ggml.pre")?,
            tokens: tokens.ok_or_else(|| m.missing_error("tokenizer.ggml.tokens"))?,
            scores: m.get_f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
            token_types: m.get_ints("tokenizer.ggml.token_type")?.unwrap_or_default(),
            merges: m.get_strs("tokenizer.ggml.merges")?.unwrap_or_default(),
            add_bos: m.get_bool("tokenizer.ggml.add_bos_token")?,
            add_eos: m.get_bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: m.get_bool("tokenizer.ggml.add_space_prefix")?,
            roles,
            templates,
        })
    }

    fn invalid(&self, key: &str, value: impl ToString, why: impl ToString) -> TokenizerError {
        TokenizerError::invalid(&self.file, &format!("tokenizer.ggml.{key}"), value, why)
    }

    fn kind(&self, id: usize) -> i64 {
        self.token_types.get(id).copied().unwrap_or(NORMAL)
    }

    fn role(&self, role: &str) -> Option<u32> {
        self.roles.iter().find(|(name, _)| *name == role).map(|(_, id)| *id)
    }

    fn vocab(&self, token: impl Fn(usize, &'a str) -> Cow<'a, str>) -> Result<Vocab, TokenizerError> {
        let count = self.tokens.len();
        let lists = [("token_type", self.token_types.len()), ("scores", self.scores.len())];
        if let Some((key, length)) = lists.into_iter().find(|&(_, length)| length != 0 && length != count) {
            let why = format!("must have one entry for each of the {count} tokens");
            return Err(self.invalid(key, format!("of length {length}"), why));
        }
        if let Some((role, id)) = self.roles.iter().find(|(_, id)| *id as usize >= count) {
            let why = format!("the vocabulary has {count} tokens");
            return Err(self.invalid(&format!("{role}_token_id"), id, why));
        }
        let mut vocab = Vocab::new();
        for (id, text) in self.tokens.iter().enumerate() {
            let entered = vocab.insert(&token(id, text), id as u64);
            entered.map_err(|error| self.invalid("tokens", id, error))?;
        }
        Ok(vocab)
    }

    /// Byte-level BPE: the merges are listed, the pre-tokenizer is known by its name.
    fn byte_level(&self) -> Result<Core, TokenizerError> {
        let name = self.pre.unwrap_or_default();
        let pre = pre::find(name)
            .ok_or_else(|| TokenizerError::unknown(&self.file, "tokenizer.ggml.pre", name, pre::known()))?;
        let vocab = self.vocab(|_, token| Cow::Borrowed(token))?;
        let mut merges = MergesJson::default();
        for merge in self.merges {
            let why = "must be two tokens with a space between";
            let (left, right) =
                merge.split_once(' ').ok_or_else(|| self.invalid("merges", format!("{merge:?}"), why))?;
            merges.push(left, right);
        }
        let missing = |token| self.invalid("merges", format!("{token:?}"), "is not in the vocabulary");
        let merges = merges.resolve(&vocab).map_err(missing)?;
        let bpe = Bpe { merges, unk: None, fuse_unk: false, bytes: None, ignore_merges: pre.ignore_merges };
        let nfc = if pre.nfc { json!({"type": "NFC"}) } else { Value::Null };
        Ok(Core {
            vocab,
            bpe,
            normalizer: nfc,
            pre_tokenizer: pre.pre_tokenizer,
            decoder: Decoder::byte_level(),
            add_bos: self.add_bos.unwrap_or(pre.add_bos),
        })
    }

    /// SentencePiece BPE: the best-scored joined piece is merged first; user-defined pieces go before all
    /// others, the shortest first, which has the effect of matching them whole.
    fn sentence_piece(&self) -> Result<Core, TokenizerError> {
        if self.scores.is_empty() {
            return Err(self.invalid("scores", "", "a SentencePiece vocabulary must have scores"));
        }
        // User-defined pieces were written with plain spaces.
        let visible = |id: usize, token: &'a str| match self.kind(id) {
            USER_DEFINED => Cow::Owned(token.replace(' ', "▁")),
            _ => Cow::Borrowed(token),
        };
        let vocab = self.vocab(visible)?;
        let mut order: Vec<u32> = (0..self.tokens.len() as u32)
            .filter(|&id| matches!(self.kind(id as usize), NORMAL | USER_DEFINED))
            .collect();
        let rank = |id: u32| {
            let token = self.tokens.get(id as usize).map_or("", String::as_str);
            let score = self.scores.get(id as usize).copied().unwrap_or(0.0);
            match self.kind(id as usize) {
                USER_DEFINED => (0, token.chars().count(), 0),
                // Total order of floats, descending; ties go by id.
                _ => (1, 0, !ordered(score + 0.0)),
            }
        };
        order.sort_by_cached_key(|&id| (rank(id), id));
        let mut places = vec![UNUSABLE; self.tokens.len()];
        for (place, &id) in order.iter().enumerate() {
            if let Some(slot) = places.get_mut(id as usize) {
                *slot = place as u32;
            }
        }
        let bpe = Bpe {
            merges: Merges::Scored(places),
            unk: self.role("unknown"),
            fuse_unk: true,
            bytes: Some(Bpe::byte_tokens(&vocab)),
            ignore_merges: false,
        };
        let prefix = self.add_space_prefix.unwrap_or(true);
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let normalizer = json!({"type": "Sequence", "normalizers": [prepend, spaces]});
        Ok(Core {
            vocab,
            bpe,
            normalizer: if prefix { normalizer } else { spaces },
            pre_tokenizer: Value::Null,
            decoder: Decoder::sentence_piece(prefix),
            add_bos: self.add_bos.unwrap_or(true),
        })
    }

    fn added(&self, vocab: &Vocab) -> HashMap<u32, AddedToken> {
        let marked = |id: &usize| matches!(self.kind(*id), UNKNOWN | CONTROL | USER_DEFINED);
        let token = |id: usize| {
            let content = vocab.token(id as u32)?.to_owned();
            let special = self.kind(id) != USER_DEFINED;
            (!content.is_empty())
                .then(|| (id as u32, AddedToken { content, special, ..AddedToken::default() }))
        };
        (0..self.tokens.len()).filter(marked).filter_map(token).collect()
    }
}

/// The bits of a float such that integer order is float order.
fn ordered(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// What differs between the kinds of vocabulary.
struct Core {
    vocab: Vocab,
    bpe: Bpe,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Decoder,
    add_bos: bool,
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes.
    ///
    /// # Errors
    /// If keys are missing or of the wrong type, or the model or pre-tokenizer is not known.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, TokenizerError> {
        let vocab = GgufVocab::read(file).map_err(|error| TokenizerError::Parse {
            file: file.path().display().to_string(),
            why: error.problem.to_string(),
        })?;
        Self::from_gguf_vocab(&vocab)
    }

    /// As [`from_gguf`](Self::from_gguf), from the values themselves.
    ///
    /// # Errors
    /// See [`from_gguf`](Self::from_gguf).
    pub fn from_gguf_vocab(file: &GgufVocab<'_>) -> Result<Self, TokenizerError> {
        let core = match file.model {
            "gpt2" => file.byte_level()?,
            "llama" => file.sentence_piece()?,
            other => {
                let field = "tokenizer.ggml.model";
                return Err(TokenizerError::unknown(&file.file, field, other, "gpt2, llama"));
            }
        };
        let mut special = SpecialTokens::default();
        let mut extra_eos = Vec::new();
        for &(role, id) in &file.roles {
            let name = ROLES.iter().find(|(key, _)| *key == role).map_or("", |(_, name)| *name);
            match core.vocab.token(id) {
                _ if name.is_empty() => extra_eos.push(id),
                Some(token) => special.set(name, token),
                None => {}
            }
        }
        let with = |wanted: bool, role| wanted.then(|| file.role(role)).flatten().into_iter().collect();
        let surround =
            Surround { before: with(core.add_bos, "bos"), after: with(file.add_eos.unwrap_or(false), "eos") };
        let tokens = file.added(&core.vocab);
        let control = tokens.iter().filter(|(_, t)| t.special).map(|(&id, _)| id).collect();
        let added = AddedTokens::new(tokens, |_| None);
        Ok(Self::new(Parts {
            added: added.map_err(|error| file.invalid("tokens", "", error))?,
            model: Model::Bpe(core.bpe),
            normalizer: parts::normalizer(&file.file, &core.normalizer)?,
            pre_tokenizer: parts::pre_tokenizer(&file.file, &core.pre_tokenizer)?,
            decoder: core.decoder,
            vocab: core.vocab,
            templates: TemplateSources {
                named: file.templates.clone(),
                origin: TEMPLATE_KEY.to_owned(),
                by_code: None,
            },
            tool_format: None,
            special,
            surround,
            control,
            extra_eos,
        }))
    }
}
