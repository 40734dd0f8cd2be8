//! Log-probabilities: normalising a row of logits, and finding the likely tokens in it.

use lmx_tensor::kernels::{Exec, vector};

use super::SampleError;

/// Partial results that run side by side, so that the compiler uses SIMD.
const LANES: usize = 16;

/// The natural log-probabilities of a row of logits: `x - ln(sum(e^x))`.
///
/// # Errors
/// NaN and `inf`, which name the first such token; a row that is empty or all `-inf`.
///
/// # Panics
/// If the lengths differ.
pub fn log_softmax(exec: &Exec, logits: &[f32], logprobs: &mut [f32]) -> Result<(), SampleError> {
    vector::log_softmax(exec, logits, logprobs);
    if logprobs.first().is_some_and(|l| !l.is_nan()) {
        return Ok(());
    }
    let wrong = logits.iter().enumerate().find(|(_, x)| x.is_nan() || **x == f32::INFINITY);
    Err(match wrong {
        Some((token, &value)) => SampleError::NotANumber { token, value },
        None => SampleError::NoCandidate { vocab: logits.len() },
    })
}

/// The `n` most likely tokens with their log-probabilities, most likely first, the lower id first on ties. Tokens
/// of probability 0 are left out.
#[must_use]
pub fn top_logprobs(logprobs: &[f32], n: usize) -> Vec<(u32, f32)> {
    let Some(cut) = Cut::keeping(logprobs, n, &mut Vec::new()) else { return Vec::new() };
    let mut ties = cut.ties;
    let mut top: Vec<(u32, f32)> =
        (0..).zip(logprobs.iter().copied()).filter(|&(_, l)| cut.keeps(l, &mut ties)).collect();
    top.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: ids stay in order on ties
    top
}

/// Where the `n` largest finite log-probabilities end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// The smallest log-probability kept.
    pub(super) lowest: f32,
    /// How many of the tokens at `lowest` are kept: the first ones.
    pub(super) ties: usize,
}

impl Cut {
    /// `None` where nothing is to be kept. `scratch` is overwritten.
    pub(super) fn keeping(logprobs: &[f32], n: usize, scratch: &mut Vec<f32>) -> Option<Self> {
        // The n-th largest of the chunks' maxima has n values at or above it: nothing below it need be looked at.
        scratch.clear();
        scratch.extend(logprobs.chunks(LANES).map(max));
        let floor = if n < scratch.len() { nth_largest(scratch, n)? } else { f32::NEG_INFINITY };
        scratch.clear();
        scratch.extend(logprobs.iter().copied().filter(|&l| l >= floor && l > f32::NEG_INFINITY));
        let kept = n.min(scratch.len());
        let lowest = nth_largest(scratch, kept)?;
        let larger = scratch.iter().filter(|&&l| l > lowest).count();
        Some(Self { lowest, ties: kept - larger })
    }

    /// Whether a token stays, asked in ascending order of ids; `ties` counts down.
    pub(super) fn keeps(&self, logprob: f32, ties: &mut usize) -> bool {
        if logprob == self.lowest && *ties > 0 {
            *ties -= 1;
            return true;
        }
        logprob > self.lowest
    }
}

/// The n-th largest of at least n values, counted from 1; `None` for n = 0. Reorders the values.
fn nth_largest(values: &mut [f32], n: usize) -> Option<f32> {
    let (_, &mut nth, _) = values.select_nth_unstable_by(n.checked_sub(1)?, |a, b| b.total_cmp(a));
    Some(nth)
}

/// The index of the largest value, the lowest on ties; 0 if there is none.
pub(crate) fn argmax(values: &[f32]) -> usize {
    let top = max(values);
    values.iter().position(|&x| x == top).unwrap_or(0)
}

/// The largest value, `-inf` if there is none; NaN is passed over.
pub(super) fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// `e^x` for x up to 88, within 2 units in the last place; 0 below -87, where f32 loses digits; NaN for NaN.
///
/// e^x = 2^n · e^r with n the integer nearest to x / ln 2, and the power series for |r| <= ln 2 / 2. Plain multiplications
/// and additions: the same bits on every CPU, and SIMD without a choice of instruction set (unlike the kernel of this name,
/// which wants a fused multiply-add).
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5 · 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has so few bits that n times it is exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let series = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let power = series.into_iter().fold(1.0 / 5040.0, |sum, term| sum * r + term);
    let two_to_n = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x < -87.0 { 0.0 } else { power * two_to_n }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // rows that must have a softmax

    use super::*;
    use lmx_tensor::kernels::Isa;

    fn normalised(logits: &[f32]) -> Result<Vec<f32>, SampleError> {
        let mut out = vec![0.0; logits.len()];
        log_softmax(&Exec::new(Isa::best(), 1), logits, &mut out).map(|()| out)
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn log_softmax_is_the_logarithm_of_the_softmax() {
        for n in [1, 2, 15, 16, 17, 1000] {
            let logits: Vec<f32> = (0..n).map(|i| ((i * 37) % 101) as f32 * 0.3 - 9.0).collect();
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            for (&x, l) in logits.iter().zip(normalised(&logits).unwrap()) {
                assert!((f64::from(l) - (f64::from(x) - sum.ln())).abs() < 4e-6, "{n}: {x} became {l}");
            }
        }
    }

    #[test]
    fn huge_logits_do_not_overflow() {
        let row = normalised(&[3e38, 3e38, -3e38, f32::NEG_INFINITY]).unwrap();
        assert_eq!(row[3], f32::NEG_INFINITY);
        assert_eq!(row[0], row[1]);
    }

    #[test]
    fn garbage_is_an_error_that_names_the_token() {
        for at in [0, 5, 16, 39] {
            for value in [f32::NAN, f32::INFINITY] {
                let mut row = vec![0.5; 40];
                row[at] = value;
                let error = normalised(&row).unwrap_err();
                assert!(matches!(error, SampleError::NotANumber { token, .. } if token == at), "{error}");
            }
        }
        let all_nan = normalised(&[f32::NAN; 3]).unwrap_err();
        assert!(matches!(all_nan, SampleError::NotANumber { token: 0, .. }));
        for vocab in [0, 1, 40] {
            let error = normalised(&vec![f32::NEG_INFINITY; vocab]).unwrap_err();
            assert!(matches!(error, SampleError::NoCandidate { .. }), "{error}");
        }
    }

    #[test]
    fn argmax_takes_the_lowest_index_on_ties() {
        let mut row = vec![-2.0; 50];
        row[17] = -1.0;
        row[40] = -1.0;
        assert_eq!(argmax(&row), 17);
    }

    #[test]
    fn top_logprobs_are_sorted_with_lower_ids_first() {
        let row = [-3.0, -1.0, -2.0, -1.0, f32::NEG_INFINITY, -2.0];
        assert_eq!(top_logprobs(&row, 3), [(1, -1.0), (3, -1.0), (2, -2.0)]);
        assert_eq!(top_logprobs(&row, 0), []);
        assert_eq!(top_logprobs(&row, 99).len(), 5, "impossible tokens are left out");
    }
}
