//! The built-in sampler: mlx-lm's filters and mlx's draw.

use super::{Key, Sampler, SamplingParams, filters, logprobs};

/// Samples as mlx-lm's `make_sampler` does: with the same log-probabilities and seed it draws the same tokens.
///
/// Make one per request and keep it: it owns the buffers, which grow to two floats per token of the vocabulary.
#[derive(Clone, Debug)]
pub struct BuiltinSampler {
    params: SamplingParams,
    /// Log-probabilities of the tokens that are left, `-inf` for the others.
    left: Vec<f32>,
    scratch: Vec<f32>,
}

impl BuiltinSampler {
    /// A sampler for parameters that [`SamplingParams::validate`] accepts.
    #[must_use]
    pub fn new(params: SamplingParams) -> Self {
        Self { params, left: Vec::new(), scratch: Vec::new() }
    }

    /// The log-probabilities with `-inf` where a filter drops the token; at temperature 0 as they are. They are not
    /// normalised again; with `temperature_first` they are relative to the top token's.
    pub fn filter(&mut self, logprobs: &[f32], key: Key) -> &[f32] {
        self.run_filters(logprobs, key);
        &self.left
    }

    /// Fills `left`. Returns the key of the draw.
    fn run_filters(&mut self, logprobs: &[f32], mut key: Key) -> Key {
        let Self { params, left, scratch } = self;
        left.clear();
        left.extend_from_slice(logprobs);
        if params.is_greedy() {
            return key;
        }
        if params.temperature_first {
            // Relative to the top token, so that the filters' exponentials stay in range. They need no normalised rows.
            let (top, factor) = (logprobs::max(left), inverse(params.temperature));
            left.iter_mut().for_each(|l| *l = (*l - top) * factor);
        }
        if params.has_top_p() {
            filters::top_p(left, params.top_p as f32, scratch);
        }
        if params.min_p != 0.0 {
            filters::min_p(left, params.min_p, params.min_tokens_to_keep, scratch);
        }
        if params.xtc_probability > 0.0 {
            let (next, coin) = key.split();
            key = next;
            if coin.uniform() <= params.xtc_probability as f32 {
                filters::xtc(left, params.xtc_threshold as f32, &params.xtc_special_tokens, scratch);
            }
        }
        if params.top_k > 0 && params.top_k < logprobs.len() {
            filters::top_k(left, params.top_k, scratch);
        }
        key.split().1
    }
}

impl Sampler for BuiltinSampler {
    fn sample(&mut self, logprobs: &[f32], key: Key) -> u32 {
        if self.params.is_greedy() {
            return logprobs::argmax(logprobs) as u32;
        }
        let key = self.run_filters(logprobs, key);
        let factor = if self.params.temperature_first { 1.0 } else { inverse(self.params.temperature) };
        categorical(&self.left, factor, key.uniform(), &mut self.scratch) as u32
    }
}

/// 1 / temperature as mlx-lm computes it, kept in the range in which f32 can multiply by it.
fn inverse(temperature: f64) -> f32 {
    ((1.0 / temperature) as f32).clamp(f32::MIN_POSITIVE, f32::MAX)
}

/// Draws token i with a probability in proportion to `e^(factor · logprobs[i])`: the one at which the cumulative sum of
/// these weights passes the share `uniform` of their total.
///
/// This is what `mx.random.categorical` of mlx 0.32.4 computes for one row (docs/decisions/0004-categorical-draw.md), hence
/// f32 sums in the order of token ids. Weights are relative to the largest; one below 2^-24 of the sum so far is never
/// drawn. `weights` is overwritten.
fn categorical(logprobs: &[f32], factor: f32, uniform: f32, weights: &mut Vec<f32>) -> usize {
    let top = logprobs::max(logprobs) * factor;
    weights.clear();
    weights.extend(logprobs.iter().map(|&l| logprobs::exp(l * factor - top)));
    let total: f32 = weights.iter().fold(0.0, |sum, w| sum + w);
    let passed = uniform * total; // below the total, since `uniform` is at most 1 - 2^-24
    let mut sum = 0.0;
    let drawn = weights.iter().position(|w| {
        sum += w;
        sum > passed
    });
    // Nothing passes where a tiny temperature drives even the top score out of f32's range.
    drawn.unwrap_or_else(|| logprobs::argmax(logprobs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_token_is_drawn_whatever_the_uniform_number() {
        let mut row = vec![f32::NEG_INFINITY; 33];
        row[20] = -5.0;
        for uniform in [0.0, f32::MIN_POSITIVE, 0.3, 1.0 - f32::EPSILON / 2.0] {
            assert_eq!(categorical(&row, 1.0, uniform, &mut Vec::new()), 20);
        }
    }

    #[test]
    fn the_ends_of_the_unit_interval_draw_the_first_and_the_last_possible_token() {
        let never = f32::NEG_INFINITY;
        let row = [never, -1.2, -0.9, never, -1.5, never, never];
        assert_eq!(categorical(&row, 1.0, 0.0, &mut Vec::new()), 1);
        assert_eq!(categorical(&row, 1.0, 1.0 - f32::EPSILON / 2.0, &mut Vec::new()), 4);
    }

    #[test]
    fn extreme_temperatures_stay_in_range() {
        let row = [-2.0, -1.0, -1.5, f32::NEG_INFINITY];
        let draw = |row: &[f32], temperature, uniform| {
            categorical(row, inverse(temperature), uniform, &mut Vec::new())
        };
        for temperature in [5e-324, 1e-300, 1e-45, 1e-20] {
            assert_eq!(draw(&row, temperature, 0.1), 1, "{temperature}");
            assert_eq!(draw(&row.map(|l| l - 40.0), temperature, 0.1), 1, "{temperature}");
        }
        for (uniform, token) in [(0.1, 0), (0.5, 1), (0.9, 2)] {
            assert_eq!(draw(&row, 1e308, uniform), token, "hot: the possible tokens are equally likely");
        }
    }
}
