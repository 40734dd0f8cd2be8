//! Codes out of a bit stream, a word at a time.

/// Codes in a step of [`unpack`]: any number of bits fills whole bytes with eight of them.
const STEP: usize = 8;

/// Unpacks a little-endian bit stream: code j is bits `j·bits..(j + 1)·bits`, bit t being bit t % 8 of byte t / 8.
///
/// `codes.len()` is a multiple of 8 and `stream` has `codes.len() · bits / 8` bytes, bits 2, 3, 4, 5, 6 or 8.
pub(super) fn unpack(bits: u8, stream: &[u8], codes: &mut [u8]) {
    debug_assert!(codes.len().is_multiple_of(STEP) && stream.len() == codes.len() / STEP * usize::from(bits));
    match bits {
        2 => steps::<2>(stream, codes),
        3 => steps::<3>(stream, codes),
        // Vectorizes better than by steps.
        4 => {
            stream.iter().zip(codes.as_chunks_mut().0).for_each(|(byte, pair)| *pair = [byte & 15, byte >> 4])
        }
        5 => steps::<5>(stream, codes),
        6 => steps::<6>(stream, codes),
        _ => codes.copy_from_slice(stream),
    }
}

fn steps<const BITS: usize>(stream: &[u8], codes: &mut [u8]) {
    for (from, to) in stream.as_chunks::<BITS>().0.iter().zip(codes.as_chunks_mut::<STEP>().0) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(from);
        *to = spread::<BITS>(u64::from_le_bytes(word)).to_le_bytes();
    }
}

/// Adds bit j of `stream` to code j as its bit number `place`.
pub(super) fn add_bits(stream: &[u8], place: u32, codes: &mut [u8]) {
    for (&byte, codes) in stream.iter().zip(codes.as_chunks_mut::<STEP>().0) {
        let word = u64::from_le_bytes(*codes) | spread::<1>(u64::from(byte)) << place;
        *codes = word.to_le_bytes();
    }
}

/// Moves eight codes of `BITS` bits, side by side, to a byte each, by halves: four codes to each 32 bits, two to
/// each 16, one to each 8.
const fn spread<const BITS: usize>(word: u64) -> u64 {
    let word = part::<BITS>(word, 4, 32);
    let word = part::<BITS>(word, 2, 16);
    part::<BITS>(word, 1, 8)
}

/// Each `2·lane` bits hold `2·codes` codes at their low end: moves the upper half of them up to the upper lane.
const fn part<const BITS: usize>(word: u64, codes: usize, lane: usize) -> u64 {
    let width = codes * BITS;
    let mut low = 0;
    let mut at = 0;
    while at < 64 {
        low |= ((1 << width) - 1) << at;
        at += 2 * lane;
    }
    (word & low) | (word & (low << width)) << (lane - width)
}

#[cfg(test)]
mod tests {
    use super::unpack;

    /// The definition, bit by bit.
    fn code(bits: u8, stream: &[u8], index: usize) -> u8 {
        let first = index * usize::from(bits);
        (0..usize::from(bits)).map(|i| (stream[(first + i) / 8] >> ((first + i) % 8) & 1) << i).sum()
    }

    #[test]
    fn agrees_with_the_bit_by_bit_definition() {
        let mut state = 1u32;
        for bits in [2, 3, 4, 5, 6, 8] {
            for count in [8, 32, 160] {
                let stream: Vec<u8> = (0..count / 8 * usize::from(bits))
                    .map(|_| {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        (state >> 24) as u8
                    })
                    .collect();
                let mut codes = vec![0xff; count];
                unpack(bits, &stream, &mut codes);
                for (index, &found) in codes.iter().enumerate() {
                    assert_eq!(found, code(bits, &stream, index), "{bits} bits, code {index} of {count}");
                }
            }
        }
    }
}
