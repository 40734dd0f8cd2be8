//! Measuring models: how likely they find a text, and what is made of such numbers.
//!
//! * [`Scorer`] gives [log-likelihoods](Scorer::log_likelihood) of continuations and of
//!   [whole texts](Scorer::rolling_log_likelihood), many at once, with the same bits for any batch.
//! * [`Scorer::loss`] scores a [`Plan`]: texts cut into windows by a [`Protocol`]. [`perplexity`], [`bits_per_byte`] and their
//!   errors follow from it; [`compare`] does it with two models and says how far their distributions are apart.
//! * [`pass_at_k`], [`expected_calibration_error`], [`brier_score`], [`cohen_kappa`] and their like take results that were
//!   gathered elsewhere.
//!
//! ```no_run
//! # fn run(mut engine: lmx::engine::Engine) -> Result<(), Box<dyn std::error::Error>> {
//! use lmx::eval::Scorer;
//! use std::ops::ControlFlow;
//!
//! let mut scorer = Scorer::new(&mut engine);
//! let answers = [("The capital of France is", " Paris"), ("The capital of France is", " Rome")];
//! for answer in scorer.log_likelihood(&answers, &mut |_| ControlFlow::Continue(())) {
//!     let answer = answer?;
//!     println!("{} {}", answer.sum, answer.greedy);
//! }
//! # Ok(())
//! # }
//! ```

mod agreement;
mod calibration;
mod compare;
mod likelihood;
mod pass_at_k;
mod permutation;
mod perplexity;
mod protocol;
mod score;

pub use agreement::{AgreementError, agreement, cohen_kappa, majority};
pub use calibration::{CalibrationError, brier_score, expected_calibration_error};
pub use compare::{CompareError, Comparison, compare};
pub use likelihood::{LogLikelihood, RollingLogLikelihood};
pub use pass_at_k::{PassAtK, PassAtKError, evaluate_pass_at_k, pass_at_k};
pub use permutation::numpy_permutation;
pub use perplexity::{Estimate, Loss, Plan, TextLoss, bits_per_byte, perplexity};
pub use protocol::{Protocol, Window};
pub use score::{ScoreError, Scorer, Span};
