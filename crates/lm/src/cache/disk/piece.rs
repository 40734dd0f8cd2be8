//! A file of the folder: one piece of what is stored of a text.
//!
//! A file is named after the digest of everything that decides its values: what the store keeps of which model, and
//! all tokens up to its end (a partial block's: up to its beginning). So a text is found by its tokens alone, texts
//! that begin alike share files, and no file ever changes what it says.

use crate::cache::BLOCK;

/// How a file begins.
const MAGIC: &[u8; 8] = b"lmxpiece";
/// The form of the files; part of their names.
pub(super) const VERSION: u32 = 1;
/// How the names of files end.
const SUFFIX: &str = ".lmxkv";
/// Bytes of a digest.
const DIGEST: usize = 32;
/// Bytes before the tokens: magic, version, part, owner, chain, number of tokens, bytes of data.
const HEAD: usize = 8 + 4 + 8 + 2 * DIGEST + 4 + 8;

/// What all files of a store have in common: stands for the model and for all that the store keeps of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner([u8; DIGEST]);

impl Owner {
    /// Of texts, each of which counts.
    pub(super) fn of(parts: &[&str]) -> Self {
        let mut hash = blake3::Hasher::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        Self(*hash.finalize().as_bytes())
    }
}

/// Stands for an owner, a root and tokens from the first one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain([u8; DIGEST]);

impl Chain {
    /// No tokens.
    pub(super) fn new(owner: Owner, root: u64) -> Self {
        Self(digest(&[&owner.0, &root.to_le_bytes()]))
    }

    /// One more block.
    pub(super) fn then(self, block: &[u32]) -> Self {
        Self(digest(&[&self.0, &token_bytes(block)]))
    }

    /// The chains of `tokens`: none of them, the first whole block, the first two, …
    pub(super) fn all(owner: Owner, root: u64, tokens: &[u32]) -> Vec<Self> {
        let (blocks, _) = tokens.as_chunks::<BLOCK>();
        let mut chains = vec![Self::new(owner, root)];
        let mut last = chains[0];
        for block in blocks {
            last = last.then(block);
            chains.push(last);
        }
        chains
    }
}

fn digest(parts: &[&[u8]]) -> [u8; DIGEST] {
    let mut hash = blake3::Hasher::new();
    for part in parts {
        hash.update(part);
    }
    *hash.finalize().as_bytes()
}

fn token_bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The last block of its chain in a layer group.
    Block(usize),
    /// A partial block after its chain in a layer group. There is one for a chain: the newest.
    Tail(usize),
    /// The recurrent state after its chain.
    State,
}

impl Part {
    fn code(self) -> (u32, u32) {
        match self {
            Self::Block(group) => (0, group as u32),
            Self::Tail(group) => (1, group as u32),
            Self::State => (2, 0),
        }
    }

    /// Whether so many tokens may stand in its file.
    fn holds(self, tokens: usize) -> bool {
        if matches!(self, Self::Tail(_)) { (1..BLOCK).contains(&tokens) } else { tokens == BLOCK }
    }
}

/// Names a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) owner: Owner,
    pub(super) chain: Chain,
    pub(super) part: Part,
}

impl Piece {
    /// The file's name.
    pub(super) fn name(&self) -> String {
        let (kind, group) = self.part.code();
        format!("{}-{kind}.{group}{SUFFIX}", blake3::Hash::from_bytes(self.chain.0).to_hex())
    }

    /// All of the file but its data and the digest at its end.
    fn head(&self, tokens: &[u32], data_len: usize) -> Vec<u8> {
        let (kind, group) = self.part.code();
        let mut head = Vec::with_capacity(HEAD + 4 * tokens.len());
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&kind.to_le_bytes());
        head.extend_from_slice(&group.to_le_bytes());
        head.extend_from_slice(&self.owner.0);
        head.extend_from_slice(&self.chain.0);
        head.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
        head.extend_from_slice(&(data_len as u64).to_le_bytes());
        head.extend_from_slice(&token_bytes(tokens));
        head
    }

    /// The file's bytes: what stands before the data, and after it.
    pub(super) fn around(&self, tokens: &[u32], data: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let head = self.head(tokens, data.len());
        let end = digest(&[&head, data]).to_vec();
        (head, end)
    }

    /// Whether a file with `data_len` bytes of data may be so long.
    ///
    /// # Errors
    /// In words, why not.
    pub(super) fn check_len(&self, file_len: u64, data_len: usize) -> Result<(), String> {
        let bytes = |tokens: usize| file_bytes(tokens, data_len);
        if (1..=BLOCK).any(|tokens| self.part.holds(tokens) && bytes(tokens) == file_len) {
            return Ok(());
        }
        let (least, most) = if self.part.holds(BLOCK) { (BLOCK, BLOCK) } else { (1, BLOCK - 1) };
        let expected = match (bytes(least), bytes(most)) {
            (same, most) if same == most => most.to_string(),
            (least, most) => format!("{least} to {most}"),
        };
        Err(format!("it is {file_len} bytes long, not {expected}"))
    }

    /// The tokens and the data of a file.
    ///
    /// # Errors
    /// In words, why it is not what its name says.
    pub(super) fn decode<'a>(
        &self,
        file: &'a [u8],
        data_len: usize,
    ) -> Result<(Vec<u32>, &'a [u8]), &'static str> {
        const SHORT: &str = "it is cut off";
        let (body, end) = file.split_last_chunk::<DIGEST>().ok_or(SHORT)?;
        if digest(&[body]) != *end {
            return Err("its checksum is wrong");
        }
        let (head, rest) = body.split_at_checked(HEAD).ok_or(SHORT)?;
        let (rest, data) =
            rest.len().checked_sub(data_len).and_then(|at| rest.split_at_checked(at)).ok_or(SHORT)?;
        let (words, odd) = rest.as_chunks::<4>();
        let tokens: Vec<u32> = words.iter().map(|&word| u32::from_le_bytes(word)).collect();
        // With the tokens, everything that the head should say is known.
        if !odd.is_empty()
            || !self.part.holds(tokens.len())
            || !self.head(&tokens, data_len).starts_with(head)
        {
            return Err("it is not what its name says");
        }
        Ok((tokens, data))
    }
}

/// Bytes of a file.
pub(super) fn file_bytes(tokens: usize, data_len: usize) -> u64 {
    (HEAD + 4 * tokens + data_len + DIGEST) as u64
}

/// Whether a file has a name that this module gives.
pub(super) fn is_name(name: &str) -> bool {
    let Some((chain, part)) = name.strip_suffix(SUFFIX).and_then(|name| name.split_once('-')) else {
        return false;
    };
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    chain.len() == 2 * DIGEST
        && chain.bytes().all(hex)
        && part.split_once('.').is_some_and(|(kind, group)| number(kind) && number(group))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(part: Part) -> Piece {
        let owner = Owner::of(&["a", "b"]);
        Piece { owner, chain: Chain::new(owner, 7).then(&[1; BLOCK]), part }
    }

    fn file(piece: &Piece, tokens: &[u32], data: &[u8]) -> Vec<u8> {
        let (head, end) = piece.around(tokens, data);
        [&head, data, &end].concat()
    }

    #[test]
    fn what_is_written_is_read_and_every_change_is_seen() {
        for (part, tokens) in
            [(Part::Block(1), vec![1; BLOCK]), (Part::Tail(0), vec![5, 6]), (Part::State, vec![1; BLOCK])]
        {
            let piece = piece(part);
            let whole = file(&piece, &tokens, &[9; 16]);
            assert_eq!(whole.len() as u64, file_bytes(tokens.len(), 16));
            assert!(piece.check_len(whole.len() as u64, 16).is_ok());
            assert_eq!(piece.decode(&whole, 16), Ok((tokens.clone(), &[9; 16][..])));
            for at in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << (at % 8);
                assert!(piece.decode(&damaged, 16).is_err(), "byte {at}");
                assert!(piece.decode(&whole[..at], 16).is_err(), "cut at {at}");
                if !matches!(part, Part::Tail(_)) {
                    assert!(piece.check_len(at as u64, 16).is_err(), "cut at {at}");
                }
            }
        }
    }

    #[test]
    fn another_file_under_this_name_is_none() {
        let own = piece(Part::Block(0));
        let others = [
            piece(Part::Block(1)),
            Piece { owner: Owner::of(&["ab"]), ..own },
            Piece { chain: Chain::new(own.owner, 7), ..own },
        ];
        for other in others {
            assert!(own.decode(&file(&other, &[1; BLOCK], &[9; 16]), 16).is_err());
        }
        let elsewhere = Owner::of(&["ab"]);
        let names = [
            own.name(),
            piece(Part::Block(1)).name(),
            Piece { chain: Chain::new(own.owner, 7), ..own }.name(),
            Piece { chain: Chain::new(elsewhere, 7).then(&[1; BLOCK]), ..own }.name(),
        ];
        assert!((1..names.len()).all(|i| !names[..i].contains(&names[i])), "{names:?}");
        assert!(own.decode(&file(&own, &[1; 3], &[9; 16]), 16).is_err(), "too few tokens");
        assert!(own.decode(&file(&own, &[1; BLOCK], &[9; 16]), 12).is_err(), "other data");
    }

    #[test]
    fn names_are_told_from_others() {
        assert!(is_name(&piece(Part::Tail(12)).name()));
        let name = piece(Part::State).name();
        for other in
            ["x.lmxkv", ".lmxkv", "notes.txt", "", &name.replace('-', "_"), &name[1..], &format!("{name}~")]
        {
            assert!(!is_name(other), "{other}");
        }
    }
}
