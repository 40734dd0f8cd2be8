//! The order in which mlx-lm draws the records of a data set: numpy's legacy generator.

/// Words of the generator's state, and how far back it looks.
const WORDS: usize = 624;
const BACK: usize = 397;

/// The numbers 0 to `len` - 1 in the order that `numpy.random.seed(seed); numpy.random.permutation(len)` gives:
/// a Fisher-Yates shuffle from the end, with numbers of MT19937 (Matsumoto and Nishimura, "Mersenne Twister", 1998) that
/// are masked and drawn again where they are too large.
#[must_use]
pub fn numpy_permutation(seed: u32, len: usize) -> Vec<usize> {
    let mut random = Twister::new(seed);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, random.up_to(last));
    }
    order
}

/// MT19937.
struct Twister {
    state: Vec<u32>,
    at: usize,
}

impl Twister {
    fn new(seed: u32) -> Self {
        let mut state = vec![seed; WORDS];
        for i in 1..WORDS {
            let previous = state[i - 1];
            state[i] = (previous ^ (previous >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { state, at: WORDS }
    }

    fn next(&mut self) -> u32 {
        if self.at == WORDS {
            for i in 0..WORDS {
                let (next, back) = (self.state[(i + 1) % WORDS], self.state[(i + BACK) % WORDS]);
                let mixed = (self.state[i] & 0x8000_0000) | (next & 0x7fff_ffff);
                self.state[i] = back ^ (mixed >> 1) ^ if mixed & 1 == 1 { 0x9908_b0df } else { 0 };
            }
            self.at = 0;
        }
        let mut word = self.state[self.at];
        self.at += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// A number from 0 to `most`.
    fn up_to(&mut self, most: usize) -> usize {
        let mask = usize::MAX >> most.leading_zeros();
        loop {
            // Two words where one does not reach.
            let low = self.next();
            let drawn = if most > u32::MAX as usize {
                (low as usize) << 32 | self.next() as usize
            } else {
                low as usize
            };
            if drawn & mask <= most {
                return drawn & mask;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.random.seed(s); numpy.random.permutation(n)` of numpy 2.4.6.
    #[test]
    fn numpys_order() {
        assert_eq!(numpy_permutation(123, 10), [4, 0, 7, 5, 8, 3, 1, 6, 9, 2]);
        assert_eq!(numpy_permutation(0, 7), [6, 2, 1, 3, 0, 5, 4]);
        assert_eq!(numpy_permutation(4294967295, 12), [11, 8, 5, 9, 1, 10, 6, 0, 4, 7, 2, 3]);
        let long = numpy_permutation(123, 100_000);
        assert_eq!(long[..4], [42083, 71825, 99535, 47879]);
        assert_eq!(long[99_996..], [61404, 17730, 28030, 15725]);
        assert_eq!((numpy_permutation(1, 0), numpy_permutation(1, 1)), (vec![], vec![0]));
    }
}
