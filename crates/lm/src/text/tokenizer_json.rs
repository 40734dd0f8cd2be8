//! Reads a tokenizer.json: the vocabulary and merges without intermediate trees (a quarter of a million
//! entries), the small rest as JSON values.

use super::bpe::{Bpe, Merges};
use super::vocab::Vocab;
use hashbrown::HashMap;
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;

/// A tokenizer.json as it stands in the file.
#[derive(Deserialize)]
pub(crate) struct TokenizerJson {
    #[serde(default)]
    pub(crate) added_tokens: Vec<AddedEntry>,
    #[serde(default)]
    pub(crate) normalizer: Value,
    #[serde(default)]
    pub(crate) pre_tokenizer: Value,
    #[serde(default)]
    pub(crate) post_processor: Value,
    #[serde(default)]
    pub(crate) decoder: Value,
    pub(crate) model: ModelJson,
}

/// One of `added_tokens`, or of `added_tokens_decoder` in a tokenizer_config.json.
#[derive(Clone, Deserialize)]
pub(crate) struct AddedEntry {
    #[serde(default)]
    pub(crate) id: Option<u64>,
    pub(crate) content: String,
    #[serde(default)]
    pub(crate) single_word: bool,
    #[serde(default)]
    pub(crate) lstrip: bool,
    #[serde(default)]
    pub(crate) rstrip: bool,
    #[serde(default)]
    pub(crate) normalized: Option<bool>,
    #[serde(default)]
    pub(crate) special: bool,
}

/// The `model` of a tokenizer.json.
#[derive(Deserialize)]
pub(crate) struct ModelJson {
    /// Absent in old files, which are BPE if they have merges.
    #[serde(rename = "type", default)]
    pub(crate) kind: Option<String>,
    pub(crate) vocab: VocabJson,
    #[serde(default)]
    pub(crate) merges: Option<MergesJson>,
    #[serde(default)]
    pub(crate) dropout: Option<f64>,
    #[serde(default)]
    pub(crate) unk_token: Option<String>,
    #[serde(default)]
    pub(crate) unk_id: Option<usize>,
    #[serde(default)]
    pub(crate) continuing_subword_prefix: Option<String>,
    #[serde(default)]
    pub(crate) end_of_word_suffix: Option<String>,
    #[serde(default)]
    pub(crate) fuse_unk: bool,
    #[serde(default)]
    pub(crate) byte_fallback: bool,
    #[serde(default)]
    pub(crate) ignore_merges: bool,
}

/// Token texts with ids (BPE, WordLevel) or in order with scores (Unigram).
pub(crate) enum VocabJson {
    Ids(Vocab),
    Scores(Vec<(String, f64)>),
}

/// A pair of ids (see [`Merges::key`]) with its rank and the joined id.
type Ranked = (u64, (u32, u32));

/// The two halves of every merge, in one arena: (end of the left, end of the right).
#[derive(Default)]
pub(crate) struct MergesJson {
    text: String,
    ends: Vec<(usize, usize)>,
}

impl<'de> Deserialize<'de> for VocabJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = VocabJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tokens to ids or a list of [token, score]")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VocabJson, A::Error> {
                let mut vocab = Vocab::new();
                while let Some(token) = map.next_key_seed(Text)? {
                    vocab.insert(&token, map.next_value()?).map_err(de::Error::custom)?;
                }
                Ok(VocabJson::Ids(vocab))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<VocabJson, A::Error> {
                let mut pieces = Vec::new();
                while let Some(piece) = seq.next_element()? {
                    pieces.push(piece);
                }
                Ok(VocabJson::Scores(pieces))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for MergesJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = MergesJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MergesJson, A::Error> {
                let mut merges = MergesJson::default();
                while seq.next_element_seed(MergeInto(&mut merges))?.is_some() {}
                Ok(merges)
            }
        }
        deserializer.deserialize_seq(Reader)
    }
}

/// A text that is borrowed from the file where it has no escapes.
struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// One merge, `"a b"` or `["a", "b"]`.
struct MergeInto<'m>(&'m mut MergesJson);

impl<'de> DeserializeSeed<'de> for MergeInto<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MergeInto<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge, as \"a b\" or [\"a\", \"b\"]")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        match text.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => {
                self.0.push(left, right);
                Ok(())
            }
            _ => Err(E::custom(format!("merge {text:?} is not two tokens with a space between"))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let left = seq.next_element_seed(Text)?;
        let right = seq.next_element_seed(Text)?;
        let (Some(left), Some(right), None) = (left, right, seq.next_element::<de::IgnoredAny>()?) else {
            return Err(de::Error::custom("a merge is not two tokens"));
        };
        self.0.push(&left, &right);
        Ok(())
    }
}

impl MergesJson {
    pub(crate) fn push(&mut self, left: &str, right: &str) {
        self.text.push_str(left);
        let middle = self.text.len();
        self.text.push_str(right);
        self.ends.push((middle, self.text.len()));
    }

    /// Ranks by pairs of ids; the error names the token that is missing.
    pub(crate) fn resolve(&self, vocab: &Vocab) -> Result<Merges, String> {
        // Half a million merges are three times as many look-ups, most of them cache misses: half of the
        // time that a large tokenizer takes to load.
        const SHARE_MIN: usize = 1 << 16;
        if self.ends.len() <= SHARE_MIN {
            return Ok(Merges::Listed(self.find(vocab, 0, SHARE_MIN)?.into_iter().collect()));
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
        let share = self.ends.len().div_ceil(threads).max(SHARE_MIN);
        let mut map = HashMap::with_capacity(self.ends.len());
        std::thread::scope(|scope| {
            let shares = (0..self.ends.len()).step_by(share);
            let find = |first| move || self.find(vocab, first, share);
            let threads: Vec<_> = shares.map(|first| scope.spawn(find(first))).collect();
            for thread in threads {
                let found = thread.join().map_err(|_| "a thread that looks up merges died".to_owned())?;
                map.extend(found?);
            }
            Ok(Merges::Listed(map))
        })
    }

    /// The ids of `count` merges from `first` on.
    fn find(&self, vocab: &Vocab, first: usize, count: usize) -> Result<Vec<Ranked>, String> {
        let id = |token: &str| vocab.id(token).ok_or_else(|| token.to_owned());
        let before = first.checked_sub(1).and_then(|i| self.ends.get(i));
        let mut start = before.map_or(0, |&(_, end)| end);
        let mut found = Vec::with_capacity(count.min(self.ends.len()));
        for (rank, &(middle, end)) in self.ends.iter().enumerate().skip(first).take(count) {
            let part = |from, to| self.text.get(from..to).unwrap_or_default();
            let (left, right) = (id(part(start, middle))?, id(part(middle, end))?);
            found.push((Merges::key(left, right), (rank as u32, id(part(start, end))?)));
            start = end;
        }
        Ok(found)
    }
}

impl ModelJson {
    /// What the model is, by its `type` or its fields.
    pub(crate) fn kind(&self) -> &str {
        match (&self.kind, &self.vocab, &self.merges) {
            (Some(kind), _, _) => kind,
            (None, VocabJson::Scores(_), _) => "Unigram",
            (None, _, Some(_)) => "BPE",
            (None, _, None) => "WordLevel",
        }
    }

    /// The BPE model; `added` finds added tokens. The error is (field, value, why).
    pub(crate) fn bpe(
        &self,
        vocab: &Vocab,
        added: impl Fn(&str) -> Option<u32>,
    ) -> Result<Bpe, (&'static str, String, String)> {
        let affixes = [
            ("model.continuing_subword_prefix", &self.continuing_subword_prefix),
            ("model.end_of_word_suffix", &self.end_of_word_suffix),
        ];
        for (field, value) in affixes {
            if let Some(text) = value.as_ref().filter(|text| !text.is_empty()) {
                return Err((field, format!("{text:?}"), "only empty is supported".to_owned()));
            }
        }
        if let Some(p) = self.dropout.filter(|&p| p != 0.0) {
            let why = "tokenization with dropout is random; only 0 is supported".to_owned();
            return Err(("model.dropout", p.to_string(), why));
        }
        let unk = match &self.unk_token {
            None => None,
            Some(unk) => Some(vocab.id(unk).or_else(|| added(unk)).ok_or_else(|| {
                ("model.unk_token", format!("{unk:?}"), "not in the vocabulary".to_owned())
            })?),
        };
        let merges =
            self.merges.as_ref().map_or_else(|| Ok(Merges::Listed(HashMap::new())), |m| m.resolve(vocab));
        let merges = merges.map_err(|token| {
            (
                "model.merges",
                format!("{token:?}"),
                "a merge uses a token that is not in the vocabulary".to_owned(),
            )
        })?;
        Ok(Bpe {
            merges,
            unk,
            fuse_unk: self.fuse_unk,
            bytes: self.byte_fallback.then(|| Bpe::byte_tokens(vocab)),
            ignore_merges: self.ignore_merges,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test may stop at the first surprise
    use super::*;

    #[test]
    fn reads_both_spellings_of_merges_and_escapes() {
        for merges in [r#"["a b","ab \u00e9"]"#, r#"[["a","b"],["ab","é"]]"#] {
            let text = format!(
                r#"{{"model":{{"type":"BPE","vocab":{{"a":0,"b":1,"ab":2,"\u00e9":3,"abé":4}},"merges":{merges}}}}}"#
            );
            let file: TokenizerJson = serde_json::from_str(&text).unwrap();
            let VocabJson::Ids(vocab) = &file.model.vocab else { panic!("not a map") };
            let Merges::Listed(map) = file.model.bpe(vocab, |_| None).unwrap().merges else {
                panic!("not listed")
            };
            assert_eq!(map.get(&Merges::key(2, 3)), Some(&(1, 4)));
        }
    }

    #[test]
    fn refuses_what_it_would_get_wrong() {
        let bpe = |fields: &str| {
            let text = format!(r#"{{"vocab":{{"a":0,"b":1}},{fields}}}"#);
            let model: ModelJson = serde_json::from_str(&text).unwrap();
            let VocabJson::Ids(vocab) = &model.vocab else { panic!("not a map") };
            model.bpe(vocab, |_| None).err().map(|e| (e.0, e.1))
        };
        assert_eq!(bpe(r#""merges":["a b"]"#), Some(("model.merges", "\"ab\"".to_owned())));
        assert_eq!(bpe(r#""merges":["a zz"]"#), Some(("model.merges", "\"zz\"".to_owned())));
        assert_eq!(bpe(r#""unk_token":"u""#), Some(("model.unk_token", "\"u\"".to_owned())));
        assert_eq!(bpe(r#""dropout":0.1"#), Some(("model.dropout", "0.1".to_owned())));
        assert_eq!(bpe(r#""end_of_word_suffix":"</w>""#).unwrap().0, "model.end_of_word_suffix");
        assert_eq!(bpe(r#""dropout":null,"merges":[]"#), None);
        for merges in [r#"["ab"]"#, r#"["a b c"]"#, r#"[["a"]]"#, r#"[["a","b","c"]]"#] {
            let text = format!(r#"{{"vocab":{{}},"merges":{merges}}}"#);
            assert!(serde_json::from_str::<ModelJson>(&text).is_err(), "{merges}");
        }
    }
}
