//! [`Tokenizer`]: text to ids and back.

use super::added::{AddedTokens, Piece};
use super::bpe::{Bpe, Scratch};
use super::decoder::{DecodeStream, Decoder};
use super::error::TokenizerError;
use super::post::Surround;
use super::reply::ToolFormat;
use super::special::SpecialTokens;
use super::template::TemplateSources;
use super::vocab::Vocab;
use hashbrown::HashSet;
use std::sync::Arc;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::tokenizer::normalizer::Range;
use tokenizers::{
    Model as _, NormalizedString, Normalizer as _, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer as _, Token,
};

/// Text to token ids and back. Cheap to clone; safe to share between threads.
#[derive(Clone)]
pub struct Tokenizer {
    pub(crate) inner: Arc<Parts>,
}

/// What a tokenizer is made of.
pub(crate) struct Parts {
    pub(crate) vocab: Vocab,
    pub(crate) model: Model,
    pub(crate) added: AddedTokens,
    pub(crate) normalizer: Option<NormalizerWrapper>,
    pub(crate) pre_tokenizer: Option<PreTokenizerWrapper>,
    pub(crate) surround: Surround,
    pub(crate) decoder: Decoder,
    pub(crate) special: SpecialTokens,
    /// Ids of added tokens that mark structure.
    pub(crate) control: HashSet<u32>,
    pub(crate) templates: TemplateSources,
    /// `tool_parser_type` of tokenizer_config.json.
    pub(crate) tool_format: Option<ToolFormat>,
    /// End-of-sequence ids besides `eos_token` (GGUF: end of turn, end of message).
    pub(crate) extra_eos: Vec<u32>,
}

/// How a word becomes ids.
pub(crate) enum Model {
    Bpe(Bpe),
    /// The most probable split into pieces (SentencePiece's other model).
    Unigram(Box<Unigram>),
    /// A word is a token or unknown.
    WordLevel {
        unk: Option<u32>,
    },
}

/// Places of a text at which no control token may begin or lie: they came from outside.
pub(crate) struct Hidden<'a> {
    /// Byte positions, ascending.
    pub(crate) positions: &'a [usize],
    /// The tokens that are read as plain text there.
    pub(crate) control: &'a HashSet<u32>,
}

impl Hidden<'_> {
    fn hides(&self, id: u32, start: usize, end: usize) -> bool {
        let first = self.positions.partition_point(|&p| p < start);
        self.control.contains(&id) && self.positions.get(first).is_some_and(|&p| p < end)
    }
}

impl Tokenizer {
    pub(crate) fn new(parts: Parts) -> Self {
        Self { inner: Arc::new(parts) }
    }

    /// The ids of `text`. With `add_special` the tokenizer's own frame is put around it (BOS before, for
    /// some EOS after), but nothing that the text already starts with, so there is never a second BOS.
    /// The texts of added tokens (`<|im_end|>`) become those tokens.
    ///
    /// # Errors
    /// If the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_into(text, None, &mut ids)?;
        if add_special {
            let Surround { before, after } = &self.inner.surround;
            if !ids.starts_with(before) {
                ids.splice(0..0, before.iter().copied());
            }
            ids.extend(after);
        }
        Ok(ids)
    }

    /// Appends the ids of `text`; control tokens at `hidden` places are read as plain text.
    pub(crate) fn encode_into(
        &self,
        text: &str,
        hidden: Option<&Hidden<'_>>,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let failed = |error: tokenizers::Error| TokenizerError::Encode { why: error.to_string() };
        let parts = &*self.inner;
        let hides = |id, start, end| hidden.is_some_and(|h| h.hides(id, start, end));
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, piece| Ok(cut(&piece, parts.added.split(piece.get(), &hides)))).map_err(failed)?;
        pieces
            .split(|_, mut piece| {
                if let Some(normalizer) = &parts.normalizer {
                    normalizer.normalize(&mut piece)?;
                }
                let shift = piece.offsets_original().0;
                let hides = |id, start, end| {
                    let original = piece.convert_offsets(Range::Normalized(start..end));
                    original.is_some_and(|r| hides(id, shift + r.start, shift + r.end))
                };
                Ok(cut(&piece, parts.added.split_normalized(piece.get(), &hides)))
            })
            .map_err(failed)?;
        if let Some(pre_tokenizer) = &parts.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        let mut scratch = Scratch::default();
        let forbidden = hidden.map(|h| h.control);
        for (word, _, tokens) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            match tokens {
                Some(tokens) => out.extend(tokens.iter().map(|t| t.id)),
                None => self.encode_word(word, forbidden, &mut scratch, out).map_err(failed)?,
            }
        }
        Ok(())
    }

    fn encode_word(
        &self,
        word: &str,
        forbidden: Option<&HashSet<u32>>,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) -> Result<(), tokenizers::Error> {
        let vocab = &self.inner.vocab;
        let allowed = |id: u32| forbidden.is_none_or(|set| !set.contains(&id));
        match &self.inner.model {
            Model::Bpe(bpe) => bpe.encode(vocab, word, forbidden, scratch, out),
            Model::Unigram(unigram) => {
                for token in unigram.tokenize(word)? {
                    if allowed(token.id) {
                        out.push(token.id);
                        continue;
                    }
                    // A piece that is a control token is spelled out.
                    for c in token.value.chars() {
                        let spelled = unigram.tokenize(c.encode_utf8(&mut [0; 4]))?;
                        out.extend(spelled.iter().map(|t| t.id).filter(|&id| allowed(id)));
                    }
                }
            }
            Model::WordLevel { unk } => {
                let id = vocab.id(word).filter(|&id| allowed(id)).or(*unk);
                out.push(id.ok_or_else(|| format!("{word:?} is no token and there is no unknown token"))?);
            }
        }
        Ok(())
    }

    /// The text of `ids`, special tokens included. Ids without a token are left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut detokenizer = self.detokenizer();
        let mut text = String::new();
        for &id in ids {
            detokenizer.add_to(id, &mut text);
        }
        text.push_str(&detokenizer.finish());
        text
    }

    /// A decoder for tokens that come one at a time.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer { tokenizer: self.clone(), stream: self.inner.decoder.stream() }
    }

    /// The token of an id, as it stands in the vocabulary (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn token(&self, id: u32) -> Option<&str> {
        let added = self.inner.added.get(id).map(|token| token.content.as_str());
        added.or_else(|| self.inner.vocab.token(id))
    }

    /// The bytes that a token adds to a text in which it is not the first, for a control token those of its name
    /// (`<|im_end|>`). They need not be whole characters. `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let Parts { added, vocab, decoder, .. } = &*self.inner;
        added.piece(id).or_else(|| vocab.token(id)).map(|token| decoder.bytes(token))
    }

    /// The id of a token, spelled as in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.added.id(token).or_else(|| self.inner.vocab.id(token))
    }

    /// One more than the largest id. A model may have more rows (padding) than that.
    pub fn vocab_size(&self) -> usize {
        let added = self.inner.added.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
        self.inner.vocab.id_end().max(added) as usize
    }

    /// The id of a token that the user names: an integer is an id, anything else must be a token.
    ///
    /// # Errors
    /// If the integer is out of range or the word is not a token.
    pub fn lookup(&self, word: &str) -> Result<u32, TokenizerError> {
        let last = u32::try_from(self.vocab_size()).unwrap_or(u32::MAX).saturating_sub(1);
        let digits = word.strip_prefix(['-', '+']).unwrap_or(word);
        if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
            let id = word.parse().ok().filter(|&id: &u32| id <= last);
            return id.ok_or_else(|| TokenizerError::IdOutOfRange { id: word.to_owned(), last });
        }
        self.id(word).ok_or_else(|| TokenizerError::NotAToken { word: word.to_owned() })
    }

    /// The begin-of-sequence token's id.
    pub fn bos(&self) -> Option<u32> {
        self.role("bos_token")
    }

    /// The end-of-sequence token's id, as the tokenizer knows it; generation stops at an
    /// [`EosSet`](super::EosSet).
    pub fn eos(&self) -> Option<u32> {
        self.role("eos_token")
    }

    /// All ids that end a reply as the tokenizer knows it: [`eos`](Self::eos), and those that a GGUF file
    /// names besides (end of turn, end of message).
    pub fn eos_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self.eos().into_iter().collect();
        for &id in &self.inner.extra_eos {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }

    /// The id of the token for what has no token.
    pub fn unk(&self) -> Option<u32> {
        self.role("unk_token")
    }

    /// The padding token's id.
    pub fn pad(&self) -> Option<u32> {
        self.role("pad_token")
    }

    fn role(&self, role: &str) -> Option<u32> {
        self.id(self.inner.special.get(role)?)
    }

    /// Whether [`encode`](Self::encode) puts BOS before a text.
    pub fn adds_bos(&self) -> bool {
        self.bos().is_some_and(|bos| self.inner.surround.before.first() == Some(&bos))
    }

    /// Whether an id marks structure (BOS, end of turn) rather than text.
    pub fn is_control(&self, id: u32) -> bool {
        self.inner.control.contains(&id)
    }

    /// The first id that both tokenizers have and that means different tokens in them, with what it is in each, in words.
    pub(crate) fn difference(&self, other: &Self) -> Option<(u32, [String; 2])> {
        let meaning = |of: &Self, id| (of.token_bytes(id), of.is_control(id));
        let words = |of: &Self, id| match meaning(of, id) {
            (None, _) => "no token".to_owned(),
            (Some(bytes), true) => format!("the control token {:?}", String::from_utf8_lossy(&bytes)),
            (Some(bytes), false) => format!("{:?}", String::from_utf8_lossy(&bytes)),
        };
        let mut ids = 0..self.vocab_size().min(other.vocab_size()) as u32;
        let id = ids.find(|&id| meaning(self, id) != meaning(other, id))?;
        Some((id, [words(self, id), words(other, id)]))
    }

    /// The named special tokens (`bos_token` to its text, and so on), which chat templates may use.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.inner.special
    }
}

/// The parts of a piece as the crate wants them: text, or text with its token.
fn cut(piece: &NormalizedString, parts: Vec<Piece>) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let with_token = |part: Piece| {
        let slice = piece.slice(Range::Normalized(part.start..part.end))?;
        let token = part.id.map(|id| vec![Token::new(id, String::new(), (0, 0))]);
        Some((slice, token))
    };
    parts.into_iter().filter_map(with_token).collect()
}

/// Turns tokens into text as they come.
///
/// What it returns joins to [`Tokenizer::decode`] of all ids, byte for byte, and never ends inside a
/// character: the bytes of an unfinished one are held until it is complete or known to be broken.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    stream: DecodeStream,
}

impl Detokenizer {
    /// Adds a token; returns the text that is ready to be shown.
    pub fn add(&mut self, id: u32) -> String {
        let mut text = String::new();
        self.add_to(id, &mut text);
        text
    }

    fn add_to(&mut self, id: u32, text: &mut String) {
        let parts = &*self.tokenizer.inner;
        if let Some(token) = parts.added.piece(id).or_else(|| parts.vocab.token(id)) {
            self.stream.push(&parts.decoder, token, text);
        }
    }

    /// Returns what was held back and starts anew.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        let decoder = &self.tokenizer.inner.decoder;
        self.stream.finish(decoder, &mut text);
        self.stream = decoder.stream();
        text
    }
}
