//! The filters of sampling. Each sets the log-probabilities that it drops to `-inf`, renormalises nothing, and
//! leaves at least one token.

use super::logprobs::{Cut, exp, max};

/// Drops the tokens outside the nucleus: those before which, in descending order, tokens of a total probability of at
/// least `top_p` stand. Tokens as likely as the last one inside stay. `sorted` is overwritten.
///
/// As in mlx-lm, probabilities are summed in f32 from the most likely down, and `top_p` is a share of that sum. From some
/// point on they are too small to change it, so that only those above `NEGLIGIBLE` need be sorted, unless
/// the sum is small.
pub(super) fn top_p(logprobs: &mut [f32], top_p: f32, sorted: &mut Vec<f32>) {
    /// Its probability, 2.8e-8, is below half a unit in the last place of any f32 from 0.5.
    const NEGLIGIBLE: f32 = -17.4;
    for floor in [NEGLIGIBLE, f32::NEG_INFINITY] {
        sorted.clear();
        sorted.extend(logprobs.iter().copied().filter(|&l| l > floor));
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let total: f32 = sorted.iter().fold(0.0, |mass, &l| mass + exp(l));
        if total + exp(floor) > total {
            continue; // something below the floor would count
        }
        let limit = top_p * total;
        let mut mass = 0.0;
        let inside = sorted.iter().take_while(|&&l| {
            let before = mass;
            mass += exp(l);
            before < limit || before == 0.0
        });
        if let Some(&lowest) = inside.last() {
            drop_below(logprobs, lowest);
        }
        return;
    }
}

/// Drops the tokens with less than `min_p` (above 0) of the top token's probability, but keeps the `at_least` most
/// likely ones. `scratch` is overwritten.
pub(super) fn min_p(logprobs: &mut [f32], min_p: f64, at_least: usize, scratch: &mut Vec<f32>) {
    let lowest = max(logprobs) + min_p.ln() as f32;
    let kept_anyway = if at_least > 1 { Cut::keeping(logprobs, at_least, scratch) } else { None };
    match kept_anyway {
        Some(cut) if cut.lowest < lowest => drop_outside(logprobs, cut),
        _ => drop_below(logprobs, lowest),
    }
}

/// Drops all but the least likely of the tokens with a probability above `threshold`; never a `special` one. The
/// probabilities are those of the tokens that are left. `probabilities` is overwritten.
pub(super) fn xtc(logprobs: &mut [f32], threshold: f32, special: &[u32], probabilities: &mut Vec<f32>) {
    let top = max(logprobs);
    probabilities.clear();
    probabilities.extend(logprobs.iter().map(|&l| exp(l - top)));
    let total: f64 = probabilities.iter().copied().map(f64::from).sum();
    let scale = total.recip() as f32;
    probabilities.iter_mut().for_each(|p| *p *= scale);
    let above = probabilities.iter().copied().filter(|&p| p > threshold);
    let Some(least) = above.min_by(f32::total_cmp) else { return };
    for (id, (logprob, &p)) in (0_u32..).zip(logprobs.iter_mut().zip(probabilities.iter())) {
        if p > least && !special.contains(&id) {
            *logprob = f32::NEG_INFINITY;
        }
    }
}

/// Keeps the `top_k` (at least 1) most likely tokens, the lowest ids on ties. `scratch` is overwritten.
pub(super) fn top_k(logprobs: &mut [f32], top_k: usize, scratch: &mut Vec<f32>) {
    if let Some(cut) = Cut::keeping(logprobs, top_k, scratch) {
        drop_outside(logprobs, cut);
    }
}

fn drop_below(logprobs: &mut [f32], lowest: f32) {
    logprobs.iter_mut().for_each(|l| *l = if *l < lowest { f32::NEG_INFINITY } else { *l });
}

fn drop_outside(logprobs: &mut [f32], cut: Cut) {
    let mut ties = cut.ties;
    for logprob in logprobs {
        if !cut.keeps(*logprob, &mut ties) {
            *logprob = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// top_p by its definition: everything sorted and summed.
    fn nucleus(logprobs: &[f32], share: f32) -> Vec<f32> {
        let mut sorted = logprobs.to_vec();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let total: f32 = sorted.iter().fold(0.0, |mass, &l| mass + exp(l));
        let mut before = 0.0;
        let mut lowest = f32::INFINITY;
        for l in sorted {
            if before < share * total {
                lowest = l;
            }
            before += exp(l);
        }
        logprobs.iter().map(|&l| if l < lowest { f32::NEG_INFINITY } else { l }).collect()
    }

    proptest! {
        #[test]
        fn top_p_equals_its_definition(
            mut row in prop::collection::vec(prop_oneof![-40.0_f32..5.0, -21.0_f32..-15.0], 1..600),
            share in 0.01_f32..1.0,
            normalise in any::<bool>(),
        ) {
            if normalise {
                let total: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
                row.iter_mut().for_each(|l| *l -= total.ln() as f32);
            }
            let expected = nucleus(&row, share);
            top_p(&mut row, share, &mut Vec::new());
            prop_assert_eq!(row, expected);
        }
    }

    #[test]
    fn top_p_sums_small_probabilities_where_there_are_no_others() {
        for lowest in [-18.0, -17.5, -17.3] {
            let mut row: Vec<f32> = (0..300).map(|i| lowest + (i * 7 % 300) as f32 * 1e-3).collect();
            let expected = nucleus(&row, 0.5);
            assert!(expected.contains(&f32::NEG_INFINITY));
            top_p(&mut row, 0.5, &mut Vec::new());
            assert_eq!(row, expected);
        }
    }

    #[test]
    fn top_k_keeps_the_lowest_ids_on_ties() {
        let mut row = [-2.0, -1.0, -2.0, -2.0, -3.0];
        top_k(&mut row, 3, &mut Vec::new());
        assert_eq!(row.map(f32::is_finite), [true, true, true, false, false]);
    }

    #[test]
    fn equal_tokens_all_stay_in_xtc() {
        // Which of the two to remove nothing says; neither is likelier than the least likely.
        let mut row = [0.5_f32.ln(), 0.5_f32.ln()];
        xtc(&mut row, 0.4, &[], &mut Vec::new());
        assert!(row.iter().all(|l| l.is_finite()));
    }
}
