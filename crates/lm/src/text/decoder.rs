//! From tokens back to text, a token at a time.
//!
//! The `decoder` of a tokenizer.json is a chain of steps over a list of tokens. Here each step is a small
//! state machine, so that text can be shown as it comes; decoding a whole list runs the same machine, which
//! is why streamed pieces always join to the full text. The result is that of the `tokenizers` crate but
//! for one case: in a run of byte tokens that is not UTF-8 as a whole, that crate loses every byte of the run;
//! here only the bytes that belong to no character become U+FFFD, as nothing that was shown can be
//! taken back.

use serde_json::Value;

/// A step that sees one token.
#[derive(Clone, Debug, PartialEq)]
enum TokenStep {
    Replace {
        from: String,
        to: String,
    },
    /// `<0xE2>` is the byte E2.
    ByteFallback,
    Strip(Strip),
    /// The replacement character is a space; in the first token it vanishes if `drop_first`.
    Metaspace {
        replacement: char,
        drop_first: bool,
    },
}

/// How tokens become one text.
#[derive(Clone, Debug, PartialEq)]
enum Join {
    /// One after the other.
    Fuse,
    /// With a space between: what a tokenizer without decoder does.
    Spaces,
    /// Each character stands for a byte (the alphabet of GPT-2).
    ByteLevel,
}

/// A step that sees the joined text.
#[derive(Clone, Debug, PartialEq)]
enum TextStep {
    Strip(Strip),
    Replace { from: char, to: String },
}

/// Takes up to `start` and `stop` times `content` from the ends.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Strip {
    content: char,
    start: usize,
    stop: usize,
}

/// What a tokenizer's tokens have to go through to become text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Decoder {
    token_steps: Vec<TokenStep>,
    join: Join,
    text_steps: Vec<TextStep>,
}

/// The names of the steps that can be read.
pub(crate) const KNOWN_DECODERS: &str = "ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip";

impl Decoder {
    /// Reads the `decoder` of a tokenizer.json; the error says which part is not known.
    pub(crate) fn from_json(value: &Value) -> Result<Self, String> {
        let mut decoder = Self { token_steps: Vec::new(), join: Join::Fuse, text_steps: Vec::new() };
        if value.is_null() {
            decoder.join = Join::Spaces;
            return Ok(decoder);
        }
        let mut joined = false;
        decoder.add(value, &mut joined)?;
        Ok(decoder)
    }

    fn add(&mut self, value: &Value, joined: &mut bool) -> Result<(), String> {
        let kind = value.get("type").and_then(Value::as_str).unwrap_or("without type");
        match (kind, *joined) {
            ("Sequence", _) => {
                let list = value.get("decoders").and_then(Value::as_array);
                return list.ok_or("Sequence without decoders")?.iter().try_for_each(|v| self.add(v, joined));
            }
            ("Fuse", _) => *joined = true,
            ("ByteLevel", false) => {
                *joined = true;
                self.join = Join::ByteLevel;
            }
            ("ByteFallback", false) => self.token_steps.push(TokenStep::ByteFallback),
            ("Metaspace", false) => self.token_steps.push(metaspace(value)?),
            ("Strip", false) => self.token_steps.push(TokenStep::Strip(strip(value)?)),
            ("Strip", true) => self.text_steps.push(TextStep::Strip(strip(value)?)),
            ("Replace", false) => {
                let (from, to) = replace(value)?;
                self.token_steps.push(TokenStep::Replace { from, to });
            }
            ("Replace", true) => {
                let (from, to) = replace(value)?;
                let mut chars = from.chars();
                let (Some(from), None) = (chars.next(), chars.next()) else {
                    return Err(format!("Replace of {from:?} after Fuse"));
                };
                self.text_steps.push(TextStep::Replace { from, to });
            }
            (kind, true) => return Err(format!("{kind} after the tokens are joined")),
            (kind, false) => return Err(kind.to_owned()),
        }
        Ok(())
    }

    /// The decoder of byte-level BPE.
    pub(crate) fn byte_level() -> Self {
        Self { token_steps: Vec::new(), join: Join::ByteLevel, text_steps: Vec::new() }
    }

    /// The decoder of SentencePiece vocabularies: `▁` is a space, and with `strip_first` one space at the
    /// start, which encoding had put there, is taken off.
    pub(crate) fn sentence_piece(strip_first: bool) -> Self {
        let spaces = TokenStep::Replace { from: "▁".to_owned(), to: " ".to_owned() };
        let strip = TextStep::Strip(Strip { content: ' ', start: 1, stop: 0 });
        Self {
            token_steps: vec![spaces, TokenStep::ByteFallback],
            join: Join::Fuse,
            text_steps: if strip_first { vec![strip] } else { Vec::new() },
        }
    }

    /// The bytes that `token` adds to a text in which it is not the first.
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        let mut token = token.to_owned();
        for step in &self.token_steps {
            token = match step {
                TokenStep::Replace { from, to } => token.replace(from.as_str(), to),
                TokenStep::Strip(strip) => strip_whole(*strip, &token),
                TokenStep::Metaspace { replacement, .. } => token.replace(*replacement, " "),
                TokenStep::ByteFallback => match byte_token(&token) {
                    Some(byte) => return vec![byte],
                    None => token,
                },
            };
        }
        for step in &self.text_steps {
            // What is stripped are the ends of the whole text.
            if let TextStep::Replace { from, to } = step {
                token = token.replace(*from, to);
            }
        }
        match self.join {
            Join::Fuse => token.into_bytes(),
            Join::Spaces => format!(" {token}").into_bytes(),
            Join::ByteLevel => {
                token.chars().map(byte_of_char).collect::<Option<_>>().unwrap_or_else(|| token.into_bytes())
            }
        }
    }

    pub(crate) fn stream(&self) -> DecodeStream {
        DecodeStream {
            token_states: self.token_steps.iter().map(|_| TokenState::default()).collect(),
            text_states: self.text_steps.iter().map(|_| TextState::default()).collect(),
            bytes: Utf8Stream::default(),
            any_token: false,
        }
    }
}

fn metaspace(value: &Value) -> Result<TokenStep, String> {
    let replacement = character(value, "replacement")?;
    // Files before the prepend scheme have `add_prefix_space`.
    let scheme = value.get("prepend_scheme").and_then(Value::as_str).unwrap_or("always");
    let prefixed = value.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true);
    Ok(TokenStep::Metaspace { replacement, drop_first: scheme != "never" && prefixed })
}

fn strip(value: &Value) -> Result<Strip, String> {
    let count = |key: &str| {
        let number = value.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        number.ok_or_else(|| format!("Strip without a number {key}"))
    };
    Ok(Strip { content: character(value, "content")?, start: count("start")?, stop: count("stop")? })
}

fn replace(value: &Value) -> Result<(String, String), String> {
    let from = value.pointer("/pattern/String").and_then(Value::as_str).unwrap_or_default();
    let to = value.get("content").and_then(Value::as_str).ok_or("Replace without content")?;
    if from.is_empty() {
        return Err("Replace whose pattern is not a plain text".to_owned());
    }
    Ok((from.to_owned(), to.to_owned()))
}

fn character(value: &Value, key: &str) -> Result<char, String> {
    let text = value.get(key).and_then(Value::as_str).unwrap_or_default();
    let mut chars = text.chars();
    match (chars.next(), chars.next()) {
        (Some(c), None) => Ok(c),
        _ => Err(format!("{key} {text:?}, which is not one character")),
    }
}

/// The state of one decoding.
#[derive(Clone, Debug)]
pub(crate) struct DecodeStream {
    token_states: Vec<TokenState>,
    text_states: Vec<TextState>,
    bytes: Utf8Stream,
    any_token: bool,
}

#[derive(Clone, Debug, Default)]
struct TokenState {
    bytes: Utf8Stream,
    seen_token: bool,
}

#[derive(Clone, Debug, Default)]
struct TextState {
    /// How many characters were taken from the start, and whether something else was seen.
    taken: usize,
    started: bool,
    /// Characters that are taken off if they turn out to be the last ones.
    held: usize,
}

impl DecodeStream {
    /// Appends to `out` what `token` makes ready to be shown.
    pub(crate) fn push(&mut self, decoder: &Decoder, token: &str, out: &mut String) {
        let mut joined = String::new();
        self.token_step(decoder, 0, token.to_owned(), &mut joined);
        self.text_step(decoder, 0, joined, out);
    }

    /// Appends what was held back.
    pub(crate) fn finish(&mut self, decoder: &Decoder, out: &mut String) {
        let mut joined = String::new();
        // A step that lets go of held bytes feeds the steps after it.
        for (i, step) in decoder.token_steps.iter().enumerate() {
            if *step == TokenStep::ByteFallback {
                let mut rest = String::new();
                if let Some(state) = self.token_states.get_mut(i) {
                    state.bytes.flush(true, &mut rest);
                }
                if !rest.is_empty() {
                    self.token_step(decoder, i + 1, rest, &mut joined);
                }
            }
        }
        self.bytes.flush(false, &mut joined);
        self.text_step(decoder, 0, joined, out);
    }

    fn token_step(&mut self, decoder: &Decoder, step: usize, token: String, joined: &mut String) {
        let Some((kind, state)) = decoder.token_steps.get(step).zip(self.token_states.get_mut(step)) else {
            return self.join(decoder, &token, joined);
        };
        let token = match kind {
            TokenStep::Replace { from, to } => token.replace(from.as_str(), to),
            TokenStep::Strip(strip) => strip_whole(*strip, &token),
            TokenStep::Metaspace { replacement, drop_first } => {
                let drop = *drop_first && !std::mem::replace(&mut state.seen_token, true);
                token.replace(*replacement, if drop { "" } else { " " })
            }
            TokenStep::ByteFallback => {
                let mut ready = String::new();
                let byte = byte_token(&token);
                match byte {
                    Some(byte) => state.bytes.push(&[byte], true, &mut ready),
                    None => state.bytes.flush(true, &mut ready),
                }
                if !ready.is_empty() {
                    self.token_step(decoder, step + 1, ready, joined);
                }
                if byte.is_some() {
                    return;
                }
                token
            }
        };
        self.token_step(decoder, step + 1, token, joined);
    }

    fn join(&mut self, decoder: &Decoder, token: &str, joined: &mut String) {
        match decoder.join {
            Join::Fuse => joined.push_str(token),
            Join::Spaces => {
                if std::mem::replace(&mut self.any_token, true) {
                    joined.push(' ');
                }
                joined.push_str(token);
            }
            Join::ByteLevel => {
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of_char).collect();
                // An added token may hold characters outside the alphabet: it is then taken as it is.
                self.bytes.push(bytes.as_deref().unwrap_or(token.as_bytes()), false, joined);
            }
        }
    }

    fn text_step(&mut self, decoder: &Decoder, step: usize, text: String, out: &mut String) {
        let Some((kind, state)) = decoder.text_steps.get(step).zip(self.text_states.get_mut(step)) else {
            return out.push_str(&text);
        };
        let text = match kind {
            TextStep::Replace { from, to } => text.replace(*from, to),
            TextStep::Strip(strip) => state.strip(*strip, &text),
        };
        self.text_step(decoder, step + 1, text, out);
    }
}

impl TextState {
    /// Characters that may be the last ones are held back; at the end of the text they stay unseen.
    fn strip(&mut self, strip: Strip, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            if c != strip.content {
                out.extend(std::iter::repeat_n(strip.content, self.held));
                self.held = 0;
                self.started = true;
                out.push(c);
            } else if !self.started && self.taken < strip.start {
                self.taken += 1;
            } else {
                self.started = true;
                self.held += 1;
                if self.held > strip.stop {
                    self.held -= 1;
                    out.push(c);
                }
            }
        }
        out
    }
}

fn strip_whole(strip: Strip, token: &str) -> String {
    TextState::default().strip(strip, token)
}

/// The byte of `<0xNN>`.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte that a character of the byte-level alphabet stands for: printable Latin-1 characters stand
/// for themselves, the other bytes follow in order from U+0100.
fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    let low = match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(low).ok()
}

/// Turns bytes into characters as soon as they are complete.
#[derive(Clone, Debug, Default)]
struct Utf8Stream {
    /// The first bytes of a character, at most three.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Invalid bytes become one U+FFFD each (`each_byte`), or one for every run that could have begun a
    /// character.
    fn push(&mut self, bytes: &[u8], each_byte: bool, out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, tail) = rest.split_at_checked(error.valid_up_to()).unwrap_or((&[], rest));
            out.push_str(std::str::from_utf8(valid).unwrap_or_default());
            rest = tail;
            let Some(bad) = error.error_len() else { break };
            out.extend(std::iter::repeat_n('\u{FFFD}', if each_byte { bad } else { 1 }));
            rest = tail.get(bad..).unwrap_or_default();
        }
        self.pending = rest.to_vec();
    }

    /// What is left becomes U+FFFD.
    fn flush(&mut self, each_byte: bool, out: &mut String) {
        let left = std::mem::take(&mut self.pending).len();
        out.extend(std::iter::repeat_n('\u{FFFD}', if each_byte { left } else { left.min(1) }));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test may stop at the first surprise
    use super::*;
    use serde_json::json;

    fn decode(decoder: &Decoder, tokens: &[&str]) -> Vec<String> {
        let mut stream = decoder.stream();
        let mut pieces = Vec::new();
        for token in tokens {
            let mut piece = String::new();
            stream.push(decoder, token, &mut piece);
            pieces.push(piece);
        }
        let mut rest = String::new();
        stream.finish(decoder, &mut rest);
        pieces.push(rest);
        pieces
    }

    #[test]
    fn byte_level_alphabet_is_whole() {
        let bytes: Vec<u8> = (0..0x180).filter_map(char::from_u32).filter_map(byte_of_char).collect();
        let mut sorted = bytes.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..=255).collect::<Vec<u8>>());
        assert_eq!(
            (byte_of_char('Ġ'), byte_of_char('Ċ'), byte_of_char('Ń')),
            (Some(32), Some(10), Some(0xAD))
        );
    }

    #[test]
    fn characters_are_shown_once_complete_and_broken_ones_once_known_to_be() {
        let byte_level = Decoder::byte_level();
        assert_eq!(decode(&byte_level, &["Ġa", "â", "Ĥ", "¬", "!"]), [" a", "", "", "€", "!", ""]);
        assert_eq!(
            decode(&byte_level, &["â", "Ĥ", "x", "â", "Ĥ"]),
            ["", "", "\u{FFFD}x", "", "", "\u{FFFD}"]
        );
        // A character outside the alphabet makes the whole token stand for itself.
        assert_eq!(decode(&byte_level, &["<a b>"]), ["<a b>", ""]);
    }

    #[test]
    fn byte_fallback_keeps_good_characters_of_a_bad_run() {
        let sp = Decoder::sentence_piece(false);
        let got = decode(&sp, &["▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "<0x82>", "b", "<0xff>"]);
        assert_eq!(got, [" a", "", "", "€", "", "", "\u{FFFD}\u{FFFD}b", "\u{FFFD}", ""]);
    }

    #[test]
    fn one_leading_space_is_stripped_from_the_text_not_from_tokens() {
        let sp = Decoder::sentence_piece(true);
        assert_eq!(decode(&sp, &["▁▁a", "▁b"]), [" a", " b", ""]);
        assert_eq!(decode(&sp, &["", "▁", "▁b"]), ["", "", " b", ""]);
        assert_eq!(decode(&sp, &["<s>", "▁b"]), ["<s>", " b", ""]);
    }

    #[test]
    fn tokens_have_bytes_of_their_own() {
        let bytes = |decoder: Decoder, token: &str| decoder.bytes(token);
        assert_eq!(bytes(Decoder::byte_level(), "Ġâ"), [b' ', 0xE2]);
        assert_eq!(bytes(Decoder::byte_level(), "<a b>"), b"<a b>");
        assert_eq!(bytes(Decoder::sentence_piece(true), "▁a▁"), b" a ");
        assert_eq!(bytes(Decoder::sentence_piece(true), "<0xE2>"), [0xE2]);
        assert_eq!(bytes(Decoder::from_json(&Value::Null).unwrap(), "a"), b" a");
    }

    #[test]
    fn reads_the_chains_of_real_files_and_names_what_it_does_not_know() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(Decoder::from_json(&llama).unwrap(), Decoder::sentence_piece(true));
        let meta = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
        let meta = Decoder::from_json(&meta).unwrap();
        assert_eq!(decode(&meta, &["▁a", "▁b"]), ["a", " b", ""]);
        let none = Decoder::from_json(&Value::Null).unwrap();
        assert_eq!(decode(&none, &["a", "b"]), ["a", " b", ""]);
        let ends = json!({"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Strip", "content": "_", "start": 0, "stop": 2}]});
        let ends = Decoder::from_json(&ends).unwrap();
        assert_eq!(decode(&ends, &["_a_", "_b", "___"]), ["_a", "__b", "_", ""]);
        assert_eq!(Decoder::from_json(&json!({"type": "CTC"})).unwrap_err(), "CTC");
    }
}
