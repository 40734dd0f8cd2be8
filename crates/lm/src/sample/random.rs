//! MLX's random numbers: Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) over
//! counters, and keys that split.

use std::hash::{BuildHasher, Hasher, RandomState};

/// The randomness of one position. Splitting gives independent keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u32, u32);

impl Key {
    /// The key of a seed: its high and its low half.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        Self((seed >> 32) as u32, seed as u32)
    }

    /// Two keys, as `mx.random.split` gives them: the state to go on with, and a key to draw with.
    #[must_use]
    pub fn split(self) -> (Self, Self) {
        // Four words of counters 0 to 3; counter i shares a block with i + 2.
        let ((a, c), (b, d)) = (self.threefry(0, 2), self.threefry(1, 3));
        (Self(a, b), Self(c, d))
    }

    /// A number in [0, 1), as `mx.random.uniform` draws a single one.
    #[must_use]
    pub fn uniform(self) -> f32 {
        const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;
        let (word, _) = self.threefry(0, 0);
        (word as f32 / u32::MAX as f32).min(BELOW_ONE)
    }

    /// Threefry-2x32 with 20 rounds: two random words for two counters.
    fn threefry(self, mut x0: u32, mut x1: u32) -> (u32, u32) {
        const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
        let schedule = [self.0, self.1, 0x1BD1_1BDA ^ self.0 ^ self.1];
        x0 = x0.wrapping_add(schedule[0]);
        x1 = x1.wrapping_add(schedule[1]);
        for group in 0..5 {
            for rotation in ROTATIONS[group % 2] {
                x0 = x0.wrapping_add(x1);
                x1 = x1.rotate_left(rotation) ^ x0;
            }
            x0 = x0.wrapping_add(schedule[(group + 1) % 3]);
            x1 = x1.wrapping_add(schedule[(group + 2) % 3]).wrapping_add(group as u32 + 1);
        }
        (x0, x1)
    }
}

/// The seed of the `index`th of several replies to one prompt: `seed` itself for the first, else a 32-bit number that
/// is random in both.
#[must_use]
pub fn fold_seed(seed: u64, index: u64) -> u64 {
    let fold = || Key::from_seed(seed).threefry((index >> 32) as u32, index as u32).0;
    if index == 0 { seed } else { fold().into() }
}

/// The keys of a request's positions, a function of its seed.
///
/// mlx-lm draws from one chain: each token replaces the state by the first half of its split, once or (with XTC) twice.
/// Here the state before the n-th generated token is that token's key, whenever it is asked for.
#[derive(Clone, Debug)]
pub struct KeyStream {
    seed: Key,
    splits_per_token: usize,
    /// The states so far, first token first. Kept (8 bytes a token) so that speculation can step back.
    states: Vec<Key>,
}

impl KeyStream {
    /// The keys of a request with this seed; [`splits_per_token`](super::SamplingParams::splits_per_token) is 1 for a
    /// sampler of your own.
    #[must_use]
    pub fn new(seed: u64, splits_per_token: usize) -> Self {
        Self { seed: Key::from_seed(seed), splits_per_token, states: Vec::new() }
    }

    /// The key of the n-th generated token, counted from 0.
    pub fn key(&mut self, n: usize) -> Key {
        while self.states.len() <= n {
            let next = match self.states.last() {
                None => self.seed,
                Some(&last) => (0..self.splits_per_token).fold(last, |state, _| state.split().0),
            };
            self.states.push(next);
        }
        self.states[n]
    }
}

/// A seed that nobody chose, from the operating system's randomness.
#[must_use]
pub fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)] // a golden file that does not parse fails the test

    use super::*;
    use serde_json::Value;

    fn words(value: &Value) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|w| u32::try_from(w.as_u64().unwrap()).unwrap()).collect()
    }

    #[test]
    fn chains_equal_mlx() {
        let golden = include_str!("../../../../tests/golden/sample/random.json");
        for case in serde_json::from_str::<Vec<Value>>(golden).unwrap() {
            let seed = case["seed"].as_str().unwrap().parse().unwrap();
            let (mut stream, mut double) = (KeyStream::new(seed, 1), KeyStream::new(seed, 2));
            for (n, state) in case["states"].as_array().unwrap().iter().enumerate() {
                let [a, b] = words(state)[..] else { panic!("a key has two words") };
                assert_eq!(stream.key(n), Key(a, b), "state {n} of seed {seed}");
                if n % 2 == 0 {
                    assert_eq!(double.key(n / 2), Key(a, b), "with XTC a token takes two splits");
                }
            }
            for (n, bits) in words(&case["uniform_bits"]).into_iter().enumerate() {
                assert_eq!(stream.key(n).split().1.uniform().to_bits(), bits, "uniform {n}");
            }
        }
    }

    #[test]
    fn a_key_is_the_same_whenever_it_is_asked_for() {
        let mut forward = KeyStream::new(9, 2);
        let keys: Vec<Key> = (0..20).map(|n| forward.key(n)).collect();
        let mut jumping = KeyStream::new(9, 2);
        for n in [19, 3, 0, 7, 19] {
            assert_eq!(jumping.key(n), keys[n]);
        }
    }
}
