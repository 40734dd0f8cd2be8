//! Agreement: of several answers to one question, and of two sets of answers.

/// Why there is no such number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AgreementError {
    /// Nothing to compare.
    #[error("there are no answers")]
    Empty,
    /// Not pairs.
    #[error("{a} answers cannot be compared with {b}: there must be as many")]
    Lengths {
        /// Answers of the first set.
        a: usize,
        /// Answers of the second set.
        b: usize,
    },
    /// Agreement by chance cannot be told from any other.
    #[error(
        "both sets hold one and the same answer throughout, so that chance alone explains their agreement"
    )]
    Constant,
}

/// The most frequent answer and its share of all, of equally frequent ones the one that came first (self-consistency, Wang
/// et al. 2022: the share is a measure of how sure a model is). `None` without answers.
#[must_use]
pub fn majority<T: PartialEq>(answers: &[T]) -> Option<(&T, f64)> {
    let count = |answer: &T| answers.iter().filter(|other| *other == answer).count();
    let mut best: Option<(&T, usize)> = None;
    for answer in answers {
        let votes = count(answer);
        if best.is_none_or(|(_, most)| votes > most) {
            best = Some((answer, votes));
        }
    }
    best.map(|(answer, votes)| (answer, votes as f64 / answers.len() as f64))
}

/// The share of questions that two sets of answers agree in.
///
/// # Errors
/// [`AgreementError`]: no answers, or not as many in both.
pub fn agreement<T: PartialEq>(a: &[T], b: &[T]) -> Result<f64, AgreementError> {
    if a.len() != b.len() {
        return Err(AgreementError::Lengths { a: a.len(), b: b.len() });
    }
    if a.is_empty() {
        return Err(AgreementError::Empty);
    }
    Ok(a.iter().zip(b).filter(|(a, b)| a == b).count() as f64 / a.len() as f64)
}

/// Cohen's kappa: how much more often two sets of answers agree than they would by chance, as a share of how much more
/// they could (Cohen 1960). 1 is agreement, 0 is chance, below 0 is less than chance.
///
/// # Errors
/// [`AgreementError`]: no answers, not as many in both, or only one answer in both.
pub fn cohen_kappa<T: PartialEq>(a: &[T], b: &[T]) -> Result<f64, AgreementError> {
    let observed = agreement(a, b)?;
    let share =
        |of: &[T], answer: &T| of.iter().filter(|other| *other == answer).count() as f64 / of.len() as f64;
    let chance = a.iter().map(|answer| share(b, answer)).sum::<f64>() / a.len() as f64;
    if chance >= 1.0 { Err(AgreementError::Constant) } else { Ok((observed - chance) / (1.0 - chance)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn by_hand() {
        assert_eq!(majority(&["a", "b", "b", "a", "c"]), Some((&"a", 0.4)));
        assert_eq!(majority(&["a", "b", "b"]), Some((&"b", 2.0 / 3.0)));
        assert_eq!(majority::<u8>(&[]), None);
        // 50 questions: both yes 20, both no 15, only the first yes 5, only the second 10.
        let pairs = [(true, true, 20), (false, false, 15), (true, false, 5), (false, true, 10)];
        let expand = |first: bool| -> Vec<bool> {
            pairs.iter().flat_map(|&(a, b, n)| vec![if first { a } else { b }; n]).collect()
        };
        let (a, b) = (expand(true), expand(false));
        assert_eq!(agreement(&a, &b), Ok(0.7));
        assert!((cohen_kappa(&a, &b).unwrap() - 0.4).abs() < 1e-12);
        assert_eq!(cohen_kappa(&[1, 2], &[1, 2]), Ok(1.0));
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        assert_eq!(agreement(&[1], &[1, 2]), Err(AgreementError::Lengths { a: 1, b: 2 }));
        assert_eq!(cohen_kappa::<u8>(&[], &[]), Err(AgreementError::Empty));
        assert_eq!(cohen_kappa(&[1, 1], &[1, 1]), Err(AgreementError::Constant));
    }
}
