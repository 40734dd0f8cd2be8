//! pass@k: how likely one of k samples solves a problem.

/// Why there is no pass@k.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PassAtKError {
    /// No sample is drawn.
    #[error("k is 0: it must be at least 1")]
    Zero,
    /// More samples than there are.
    #[error("k is {k}, more than the {n} samples")]
    TooFew {
        /// How many are drawn.
        k: usize,
        /// How many there are.
        n: usize,
    },
    /// More right samples than samples.
    #[error("{correct} samples are correct, more than the {n} that there are")]
    Correct {
        /// Those that are correct.
        correct: usize,
        /// All of them.
        n: usize,
    },
}

/// The probability that at least one of `k` samples is correct, drawn without replacement from `n` of which `correct`
/// are: 1 - C(n - correct, k) / C(n, k). That is an unbiased estimate of the same for fresh samples (Chen et al.,
/// "Evaluating large language models trained on code", 2021).
///
/// # Errors
/// [`PassAtKError`]: `k` is 0 or above `n`, or `correct` is above `n`.
pub fn pass_at_k(n: usize, correct: usize, k: usize) -> Result<f64, PassAtKError> {
    match () {
        () if k == 0 => Err(PassAtKError::Zero),
        () if k > n => Err(PassAtKError::TooFew { k, n }),
        () if correct > n => Err(PassAtKError::Correct { correct, n }),
        // Fewer wrong ones than are drawn.
        () if n - correct < k => Ok(1.0),
        () => Ok(1.0 - (0..k).map(|i| (n - correct - i) as f64 / (n - i) as f64).product::<f64>()),
    }
}

/// pass@k of a set of problems.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassAtK {
    /// Samples per problem that may be tried.
    pub k: usize,
    /// The mean of [`pass_at_k`] over the problems that count; `None` if none does.
    pub mean: Option<f64>,
    /// Problems that count.
    pub problems: usize,
    /// Problems that do not: they have fewer than `k` samples.
    pub excluded: usize,
}

/// Tests every sample of every problem once with `test`, which is told the problem's index and the sample, and gives
/// pass@k for each of `ks`. Running code that a model wrote is the caller's business, and a sandbox's.
///
/// # Errors
/// [`PassAtKError::Zero`].
pub fn evaluate_pass_at_k<S: AsRef<str>>(
    samples: &[Vec<S>],
    mut test: impl FnMut(usize, &str) -> bool,
    ks: &[usize],
) -> Result<Vec<PassAtK>, PassAtKError> {
    if ks.contains(&0) {
        return Err(PassAtKError::Zero);
    }
    let mut passed = |(problem, samples): (usize, &Vec<S>)| {
        (samples.len(), samples.iter().filter(|sample| test(problem, sample.as_ref())).count())
    };
    let counts: Vec<(usize, usize)> = samples.iter().enumerate().map(&mut passed).collect();
    let of = |&k: &usize| {
        let values: Vec<f64> =
            counts.iter().filter_map(|&(n, correct)| pass_at_k(n, correct, k).ok()).collect();
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        PassAtK { k, mean, problems: values.len(), excluded: counts.len() - values.len() }
    };
    Ok(ks.iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::sample::Key;

    #[test]
    fn the_closed_form() {
        let choose =
            |n: u64, k: u64| (0..k).fold(1.0, |product, i| product * (n - i) as f64 / (i + 1) as f64);
        for n in 1..=12_usize {
            for (correct, k) in (0..=n).flat_map(|correct| (1..=n).map(move |k| (correct, k))) {
                let wrong = (n - correct) as u64;
                let none =
                    if wrong < k as u64 { 0.0 } else { choose(wrong, k as u64) / choose(n as u64, k as u64) };
                assert!(
                    (pass_at_k(n, correct, k).unwrap() - (1.0 - none)).abs() < 1e-12,
                    "{n} {correct} {k}"
                );
            }
        }
        assert!((pass_at_k(10, 3, 1).unwrap() - 0.3).abs() < 1e-15);
        assert!((pass_at_k(10, 3, 5).unwrap() - 0.916_666_666_666_667).abs() < 1e-12);
        assert_eq!((pass_at_k(5, 5, 1), pass_at_k(5, 0, 1), pass_at_k(3, 1, 3)), (Ok(1.0), Ok(0.0), Ok(1.0)));
        assert!(pass_at_k(100_000, 1, 50_000).unwrap() - 0.5 < 1e-9, "no overflow");
    }

    #[test]
    fn bad_counts_are_refused() {
        assert_eq!(pass_at_k(3, 1, 0), Err(PassAtKError::Zero));
        assert_eq!(pass_at_k(3, 1, 4), Err(PassAtKError::TooFew { k: 4, n: 3 }));
        assert_eq!(pass_at_k(3, 4, 1), Err(PassAtKError::Correct { correct: 4, n: 3 }));
        assert_eq!(pass_at_k(0, 0, 1), Err(PassAtKError::TooFew { k: 1, n: 0 }));
    }

    /// Draws k of n samples many times: the share of draws with a correct one is what the formula says.
    #[test]
    fn drawing_gives_the_same() {
        let mut key = Key::from_seed(5);
        let mut below = |n: usize| {
            let (state, drawn) = key.split();
            key = state;
            ((drawn.uniform() * n as f32) as usize).min(n - 1)
        };
        for (n, correct, k) in [(10, 3, 1), (10, 3, 5), (20, 2, 4), (7, 6, 2)] {
            let draws = 20_000;
            let hits = (0..draws)
                .filter(|_| {
                    let mut samples: Vec<bool> = (0..n).map(|i| i < correct).collect();
                    (0..k).any(|_| {
                        let drawn = below(samples.len());
                        samples.swap_remove(drawn)
                    })
                })
                .count();
            let (share, p) = (hits as f64 / f64::from(draws), pass_at_k(n, correct, k).unwrap());
            let error = (p * (1.0 - p) / f64::from(draws)).sqrt();
            assert!((share - p).abs() < 5.0 * error + 1e-9, "{n} {correct} {k}: {share}, not {p}");
        }
    }

    #[test]
    fn problems_with_too_few_samples_are_counted_out() {
        let samples = vec![vec!["good", "bad"], vec!["bad", "bad", "good", "good"], vec![]];
        let told = evaluate_pass_at_k(&samples, |_, sample| sample == "good", &[1, 3, 5]).unwrap();
        let mean = |values: &[f64]| Some(values.iter().sum::<f64>() / values.len() as f64);
        assert_eq!(told[0], PassAtK { k: 1, mean: mean(&[0.5, 0.5]), problems: 2, excluded: 1 });
        assert_eq!(told[1], PassAtK { k: 3, mean: Some(1.0), problems: 1, excluded: 2 });
        assert_eq!(told[2], PassAtK { k: 5, mean: None, problems: 0, excluded: 3 });
        assert_eq!(evaluate_pass_at_k(&samples, |_, _| true, &[0]), Err(PassAtKError::Zero));
    }
}
