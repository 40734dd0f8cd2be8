//! Little-endian reading of a GGUF file with every length checked.

use super::super::Problem;

/// A position in a file. Each reading method takes what it reads, for the message if the file ends before it.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Bytes of the whole file.
    pub(super) fn length(&self) -> usize {
        self.bytes.len()
    }

    /// The next `count` bytes.
    pub(super) fn bytes(&mut self, count: u64, what: impl Fn() -> String) -> Result<&'a [u8], Problem> {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        match usize::try_from(count).ok().and_then(|count| rest.get(..count)) {
            Some(bytes) => {
                self.position += bytes.len();
                Ok(bytes)
            }
            None => Err(Problem::Truncated {
                what: what(),
                needs: count,
                at: self.position as u64,
                length: self.bytes.len() as u64,
            }),
        }
    }

    pub(super) fn array<const N: usize>(&mut self, what: impl Fn() -> String) -> Result<[u8; N], Problem> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: impl Fn() -> String) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: impl Fn() -> String) -> Result<u64, Problem> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A text: its length in eight bytes, at most `max`, then UTF-8.
    pub(super) fn text(&mut self, max: u64, what: impl Fn() -> String) -> Result<&'a str, Problem> {
        let length = self.u64(&what)?;
        if length > max {
            return Err(Problem::Value {
                what: format!("the length of {}", what()),
                found: length.to_string(),
                allowed: format!("up to {max} bytes"),
            });
        }
        std::str::from_utf8(self.bytes(length, &what)?).map_err(|_| Problem::Utf8 { what: what() })
    }
}
