//! Calibration: whether what a model is sure of is as often right as it is sure.

/// Why there is no such number.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// Nothing to measure.
    #[error("there are no predictions")]
    Empty,
    /// Not a probability.
    #[error("the confidence of prediction {index} is {value}; allowed is 0 to 1")]
    Confidence {
        /// Which prediction.
        index: usize,
        /// Its confidence.
        value: f64,
    },
    /// No bin to count in.
    #[error("bins is 0: it must be at least 1")]
    Bins,
}

/// The mean difference of confidence and accuracy over `bins` intervals of confidence of equal width, each as heavy as it
/// has predictions (Guo et al., "On calibration of modern neural networks", 2017): 0 is calibrated, 1 is the worst.
///
/// A prediction is the probability that it was given, and whether it was right.
///
/// # Errors
/// [`CalibrationError`]: no predictions, no bins, or a confidence that is no probability.
pub fn expected_calibration_error(predictions: &[(f64, bool)], bins: usize) -> Result<f64, CalibrationError> {
    check(predictions)?;
    if bins == 0 {
        return Err(CalibrationError::Bins);
    }
    // Of each bin the sum of confidences minus the number of right ones: its difference times its weight.
    let mut gaps = vec![0.0; bins];
    for &(confidence, right) in predictions {
        // Bins hold their upper ends: 1 belongs to the last one, and so does nothing to a bin behind it.
        let bin = ((confidence * bins as f64).ceil() as usize).clamp(1, bins) - 1;
        if let Some(gap) = gaps.get_mut(bin) {
            *gap += confidence - f64::from(u8::from(right));
        }
    }
    Ok(gaps.iter().map(|gap: &f64| gap.abs()).sum::<f64>() / predictions.len() as f64)
}

/// The mean squared difference of confidence and outcome (Brier, 1950): 0 is the best, 1 the worst.
///
/// # Errors
/// [`CalibrationError`]: no predictions, or a confidence that is no probability.
pub fn brier_score(predictions: &[(f64, bool)]) -> Result<f64, CalibrationError> {
    check(predictions)?;
    let squared = |&(confidence, right): &(f64, bool)| (confidence - f64::from(u8::from(right))).powi(2);
    Ok(predictions.iter().map(squared).sum::<f64>() / predictions.len() as f64)
}

fn check(predictions: &[(f64, bool)]) -> Result<(), CalibrationError> {
    if predictions.is_empty() {
        return Err(CalibrationError::Empty);
    }
    match predictions.iter().position(|(confidence, _)| !(0.0..=1.0).contains(confidence)) {
        Some(index) => Err(CalibrationError::Confidence { index, value: predictions[index].0 }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn by_hand() {
        let told = [(0.9, true), (0.9, true), (0.8, false), (0.3, false), (0.2, true), (1.0, true)];
        // Of five bins: (0.8, 1] has 2.8 and three right, (0.6, 0.8] has 0.8 and none, (0.2, 0.4] has 0.3 and none,
        // [0, 0.2] has 0.2 and one right.
        let expected = (0.2 + 0.8 + 0.3 + 0.8) / 6.0;
        assert!((expected_calibration_error(&told, 5).unwrap() - expected).abs() < 1e-12);
        // One bin: 4.1 of confidence, four right.
        assert!((expected_calibration_error(&told, 1).unwrap() - 0.1 / 6.0).abs() < 1e-12);
        let squares = 0.01 + 0.01 + 0.64 + 0.09 + 0.64;
        assert!((brier_score(&told).unwrap() - squares / 6.0).abs() < 1e-12);
        assert_eq!(expected_calibration_error(&[(1.0, true), (0.0, false)], 10), Ok(0.0));
    }

    #[test]
    fn what_is_no_probability_is_named() {
        assert_eq!(brier_score(&[]), Err(CalibrationError::Empty));
        assert_eq!(expected_calibration_error(&[(0.5, true)], 0), Err(CalibrationError::Bins));
        for value in [1.5, -0.1, f64::NAN, f64::INFINITY] {
            let error = brier_score(&[(0.5, true), (value, true)]).unwrap_err();
            assert!(matches!(error, CalibrationError::Confidence { index: 1, .. }), "{error}");
            assert!(expected_calibration_error(&[(value, true)], 3).is_err());
        }
    }
}
