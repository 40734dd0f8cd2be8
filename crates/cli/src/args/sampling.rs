//! Flags that say how the next token is chosen, and when to stop.

use super::values::{count, number};
use crate::end::End;
use clap::Args;
use lmx::sample::{ParamError, ProcessorParams, SamplingParams, parse_logit_bias};
use lmx::text::check_stops;
use std::collections::BTreeMap;

/// Temperature and filters; mlx-lm's names and defaults.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Temperature; at 0 the most likely token is taken and the filters below have no effect
    #[arg(long, value_name = "T", default_value = "0", value_parser = number, allow_negative_numbers = true)]
    pub(crate) temp: f64,
    /// Let the filters see the tempered probabilities, as in other programs, not the model's own
    #[arg(long)]
    pub(crate) filter_tempered: bool,
    /// Keep the most likely tokens that together have this probability (0 or 1: all)
    #[arg(long, value_name = "P", default_value = "1", value_parser = number, allow_negative_numbers = true)]
    pub(crate) top_p: f64,
    /// Keep tokens at least this likely relative to the most likely one (0: all)
    #[arg(long, value_name = "P", default_value = "0", value_parser = number, allow_negative_numbers = true)]
    pub(crate) min_p: f64,
    /// Tokens that --min-p keeps in any case
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, allow_negative_numbers = true)]
    pub(crate) min_tokens_to_keep: usize,
    /// Keep this many of the most likely tokens (0: all)
    #[arg(long, value_name = "K", default_value = "0", value_parser = count, allow_negative_numbers = true)]
    pub(crate) top_k: usize,
    /// How likely it is at each token that the most likely ones are struck out (XTC)
    #[arg(long, value_name = "P", default_value = "0", value_parser = number, allow_negative_numbers = true)]
    pub(crate) xtc_probability: f64,
    /// Probability above which XTC strikes out all tokens but one
    #[arg(long, value_name = "P", default_value = "0.1", value_parser = number, allow_negative_numbers = true)]
    pub(crate) xtc_threshold: f64,
    #[command(flatten)]
    pub(crate) penalties: PenaltyArgs,
}

/// Changes to the logits before sampling; they act at temperature 0 too.
#[derive(Clone, Debug, Args)]
pub(crate) struct PenaltyArgs {
    /// Divide the positive logits of recent tokens by this, multiply the negative ones
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f64>,
    /// Tokens that count as recent for --repetition-penalty (0: all) [default: 20]
    #[arg(long, value_name = "N", requires = "repetition_penalty", value_parser = count)]
    pub(crate) repetition_context_size: Option<usize>,
    /// Subtract this from the logits of recent tokens
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f64>,
    /// Tokens that count as recent for --presence-penalty (0: all) [default: 20]
    #[arg(long, value_name = "N", requires = "presence_penalty", value_parser = count)]
    pub(crate) presence_context_size: Option<usize>,
    /// Subtract this from the logits of recent tokens, once for each time they occur
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f64>,
    /// Tokens that count as recent for --frequency-penalty (0: all) [default: 20]
    #[arg(long, value_name = "N", requires = "frequency_penalty", value_parser = count)]
    pub(crate) frequency_context_size: Option<usize>,
    /// Add to the logits of tokens, as a JSON object of ids and numbers like '{"13": -100}'
    #[arg(long, value_name = "JSON", value_parser = logit_bias)]
    pub(crate) logit_bias: Option<BTreeMap<u32, f64>>,
}

/// When the text ends.
#[derive(Clone, Debug, Args)]
pub(crate) struct StopArgs {
    /// End the text before this string; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
}

impl StopArgs {
    /// The stop strings.
    ///
    /// # Errors
    /// Too many, or one that is too long.
    pub(crate) fn strings(&self) -> Result<Vec<String>, End> {
        check_stops(&self.stop).map_err(|error| End::Usage(format!("--stop: {error}")))?;
        Ok(self.stop.clone())
    }
}

impl SamplingArgs {
    /// The library's parameters, in range but for what depends on the model (its vocabulary).
    ///
    /// # Errors
    /// Names the flag whose value is out of range.
    pub(crate) fn params(&self) -> Result<(SamplingParams, ProcessorParams), End> {
        let sampling = SamplingParams {
            temperature: self.temp,
            top_p: self.top_p,
            min_p: self.min_p,
            min_tokens_to_keep: self.min_tokens_to_keep,
            top_k: self.top_k,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            temperature_first: self.filter_tempered,
            ..SamplingParams::default()
        };
        let off = ProcessorParams::default();
        let p = &self.penalties;
        let processors = ProcessorParams {
            logit_bias: p.logit_bias.clone().unwrap_or_default(),
            repetition_penalty: p.repetition_penalty.unwrap_or(off.repetition_penalty),
            repetition_context_size: p.repetition_context_size.unwrap_or(off.repetition_context_size),
            presence_penalty: p.presence_penalty.unwrap_or(off.presence_penalty),
            presence_context_size: p.presence_context_size.unwrap_or(off.presence_context_size),
            frequency_penalty: p.frequency_penalty.unwrap_or(off.frequency_penalty),
            frequency_context_size: p.frequency_context_size.unwrap_or(off.frequency_context_size),
        };
        sampling.validate(usize::MAX).map_err(|error| out_of_range(&error))?;
        processors.validate(usize::MAX).map_err(|error| out_of_range(&error))?;
        Ok((sampling, processors))
    }
}

pub(super) fn out_of_range(error: &ParamError) -> End {
    End::Usage(format!("{} must be {}, but is {}", flag_of(error.field), error.allowed, error.value))
}

fn logit_bias(text: &str) -> Result<BTreeMap<u32, f64>, String> {
    parse_logit_bias(text).map_err(|error| format!("must be {}, but is {}", error.allowed, error.value))
}

/// The flag that fills a field of [`SamplingParams`] or [`ProcessorParams`].
pub(crate) fn flag_of(field: &str) -> String {
    match field {
        "temperature" => "--temp".to_owned(),
        "temperature_first" => "--filter-tempered".to_owned(),
        _ => format!("--{}", field.replace('_', "-")),
    }
}

/// `--max-tokens`: `None` for no limit.
pub(crate) fn max_tokens(word: &str) -> Result<MaxTokens, String> {
    match word.parse::<i64>() {
        Ok(0) => Err("the maximum number of tokens must be non-zero (use -1 for no limit)".into()),
        Ok(n) => Ok(MaxTokens(usize::try_from(n).ok())),
        Err(_) => Err("expected a whole number (-1 for no limit)".into()),
    }
}

/// A limit of generated tokens; `None` means until the context is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaxTokens(pub(crate) Option<usize>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_tokens_as_in_mlx_lm() {
        assert_eq!(max_tokens("7"), Ok(MaxTokens(Some(7))));
        assert_eq!(max_tokens("-1"), Ok(MaxTokens(None)));
        assert_eq!(max_tokens("-9"), Ok(MaxTokens(None)));
        for word in ["0", "1.5", "ten", "", "99999999999999999999"] {
            assert!(max_tokens(word).is_err(), "{word}");
        }
    }
}
