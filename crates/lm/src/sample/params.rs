//! What a request may ask of sampling, and what is refused.

use std::collections::BTreeMap;
use std::fmt;

/// How tokens are drawn; the fields are mlx-lm's, and so are the defaults.
///
/// Filters act in the order top-p, min-p, XTC, top-k on the model's log-probabilities as they are; temperature comes last.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the log-probabilities before the draw. 0 takes the most likely token (the lowest id on ties) and
    /// leaves everything below without effect.
    pub temperature: f64,
    /// Nucleus: keeps the most likely tokens until they hold this share of the probability; tokens as likely as
    /// the last one stay too. In [0, 1]; 0 and 1 are off.
    pub top_p: f64,
    /// Keeps tokens with at least this fraction of the top token's probability. In [0, 1]; 0 is off.
    pub min_p: f64,
    /// min-p keeps at least this many tokens. At least 1; more than there are keeps all.
    pub min_tokens_to_keep: usize,
    /// Keeps this many tokens (the lowest ids on ties). 0, and the vocabulary's size or more, are off.
    pub top_k: usize,
    /// How likely XTC acts on a token. In [0, 1]; 0 is off.
    pub xtc_probability: f64,
    /// XTC removes all but the least likely of the tokens whose probability is above this. In (0, 0.5].
    pub xtc_threshold: f64,
    /// Tokens that XTC never removes: end of sequence and newline, so that text can end.
    pub xtc_special_tokens: Vec<u32>,
    /// Temper the log-probabilities before the filters instead of after them. Not in mlx-lm.
    pub temperature_first: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 0.0,
            min_p: 0.0,
            min_tokens_to_keep: 1,
            top_k: 0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            xtc_special_tokens: Vec::new(),
            temperature_first: false,
        }
    }
}

impl SamplingParams {
    /// Checks every field, also those without effect. `vocab` is the number of logits of the model.
    ///
    /// # Errors
    /// Names the first field that is out of range, its value and what is allowed.
    pub fn validate(&self, vocab: usize) -> Result<(), ParamError> {
        at_least_zero("temperature", self.temperature)?;
        in_unit("top_p", self.top_p)?;
        in_unit("min_p", self.min_p)?;
        require(
            "min_tokens_to_keep",
            self.min_tokens_to_keep,
            self.min_tokens_to_keep >= 1,
            "an integer, 1 or more",
        )?;
        in_unit("xtc_probability", self.xtc_probability)?;
        let threshold = self.xtc_threshold;
        require("xtc_threshold", threshold, (0.0..=0.5).contains(&threshold), "a number in [0, 0.5]")?;
        require(
            "xtc_threshold",
            threshold,
            threshold > 0.0 || self.xtc_probability == 0.0,
            "above 0 where xtc_probability is (0 would leave only the least likely token)",
        )?;
        self.xtc_special_tokens.iter().try_for_each(|&id| in_vocab("xtc_special_tokens", id, vocab))
    }

    /// The fields that are set but change nothing, for a notice: everything at temperature 0, and what lacks the
    /// setting that it belongs to.
    #[must_use]
    pub fn without_effect(&self) -> Vec<&'static str> {
        let default = Self::default();
        let greedy = self.is_greedy();
        let no_min_p = greedy || self.min_p == 0.0;
        let no_xtc = greedy || self.xtc_probability == 0.0;
        [
            ("top_p", self.has_top_p() && greedy),
            ("min_p", self.min_p != 0.0 && greedy),
            ("min_tokens_to_keep", self.min_tokens_to_keep != default.min_tokens_to_keep && no_min_p),
            ("top_k", self.top_k > 0 && greedy),
            ("xtc_probability", self.xtc_probability != 0.0 && greedy),
            ("xtc_threshold", self.xtc_threshold != default.xtc_threshold && no_xtc),
            ("temperature_first", self.temperature_first && greedy),
        ]
        .into_iter()
        .filter_map(|(name, idle)| idle.then_some(name))
        .collect()
    }

    /// How often mlx splits its key for one token: once for the draw, and once before it for XTC's coin.
    #[must_use]
    pub fn splits_per_token(&self) -> usize {
        1 + usize::from(self.xtc_probability > 0.0)
    }

    /// No draw: the most likely token is taken.
    pub(super) fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// The nucleus filter acts.
    pub(super) fn has_top_p(&self) -> bool {
        self.top_p > 0.0 && self.top_p < 1.0
    }
}

/// Changes to the logits before sampling; names and defaults are mlx-lm's.
///
/// A context size is the number of tokens at the end of the history that a penalty looks at; 0 is the whole history. The
/// history is the prompt, then what was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessorParams {
    /// Added to the logits of these token ids.
    pub logit_bias: BTreeMap<u32, f64>,
    /// Divides the positive and multiplies the negative logits of tokens in the context, once however often they occur.
    /// 0 or more; 0 and 1 are off.
    pub repetition_penalty: f64,
    /// Context of the repetition penalty, in tokens.
    pub repetition_context_size: usize,
    /// Subtracted from the logits of tokens in the context, once however often they occur. Any sign; 0 is off.
    pub presence_penalty: f64,
    /// Context of the presence penalty, in tokens.
    pub presence_context_size: usize,
    /// Subtracted from a token's logit for each occurrence in the context. Any sign; 0 is off.
    pub frequency_penalty: f64,
    /// Context of the frequency penalty, in tokens.
    pub frequency_context_size: usize,
}

impl Default for ProcessorParams {
    fn default() -> Self {
        Self {
            logit_bias: BTreeMap::new(),
            repetition_penalty: 0.0,
            repetition_context_size: 20,
            presence_penalty: 0.0,
            presence_context_size: 20,
            frequency_penalty: 0.0,
            frequency_context_size: 20,
        }
    }
}

impl ProcessorParams {
    /// Checks every field. `vocab` is the number of logits of the model.
    ///
    /// # Errors
    /// Names the first field that is out of range, its value and what is allowed.
    pub fn validate(&self, vocab: usize) -> Result<(), ParamError> {
        for (&id, &bias) in &self.logit_bias {
            in_vocab("logit_bias", id, vocab)?;
            in_f32("logit_bias", bias)?;
        }
        at_least_zero("repetition_penalty", self.repetition_penalty)?;
        in_f32("repetition_penalty", self.repetition_penalty)?;
        in_f32("presence_penalty", self.presence_penalty)?;
        in_f32("frequency_penalty", self.frequency_penalty)
    }

    /// The fields that are set but change nothing, for a notice: context sizes of penalties that are off.
    #[must_use]
    pub fn without_effect(&self) -> Vec<&'static str> {
        let default = Self::default();
        let sizes = [
            (
                "repetition_context_size",
                self.has_repetition(),
                self.repetition_context_size,
                default.repetition_context_size,
            ),
            (
                "presence_context_size",
                self.presence_penalty != 0.0,
                self.presence_context_size,
                default.presence_context_size,
            ),
            (
                "frequency_context_size",
                self.frequency_penalty != 0.0,
                self.frequency_context_size,
                default.frequency_context_size,
            ),
        ];
        let idle = sizes.into_iter().filter(|&(_, on, size, default)| !on && size != default);
        idle.map(|(name, ..)| name).collect()
    }

    /// The repetition penalty acts.
    pub(super) fn has_repetition(&self) -> bool {
        self.repetition_penalty != 0.0 && self.repetition_penalty != 1.0
    }
}

/// Reads a logit bias as it stands in JSON: an object of token ids and numbers, such as `{"42": -5.0}`.
///
/// # Errors
/// Says what is wrong with other text. Whether the ids are in the vocabulary is for [`ProcessorParams::validate`] to say.
pub fn parse_logit_bias(json: &str) -> Result<BTreeMap<u32, f64>, ParamError> {
    /// Characters of wrong text that an error repeats.
    const SHOWN: usize = 80;
    serde_json::from_str(json).map_err(|error| ParamError {
        field: "logit_bias",
        value: json.chars().take(SHOWN).collect(),
        allowed: format!("a JSON object of token ids and numbers such as {{\"42\": -5.0}} ({error})"),
    })
}

/// A request's field that is out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {allowed}, but is {value}")]
pub struct ParamError {
    /// The field, as it is called here and in a request.
    pub field: &'static str,
    /// What was given.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
}

/// That a field `holds` what is `allowed`.
pub(crate) fn require(
    field: &'static str,
    value: impl fmt::Debug,
    holds: bool,
    allowed: &str,
) -> Result<(), ParamError> {
    if holds {
        Ok(())
    } else {
        Err(ParamError { field, value: format!("{value:?}"), allowed: allowed.to_owned() })
    }
}

/// Penalties and biases are computed in f32.
fn in_f32(field: &'static str, value: f64) -> Result<(), ParamError> {
    require(field, value, (value as f32).is_finite(), "a finite 32-bit number")
}

fn at_least_zero(field: &'static str, value: f64) -> Result<(), ParamError> {
    require(field, value, value.is_finite() && value >= 0.0, "a finite number, 0 or more")
}

fn in_unit(field: &'static str, value: f64) -> Result<(), ParamError> {
    require(field, value, (0.0..=1.0).contains(&value), "a number in [0, 1]")
}

fn in_vocab(field: &'static str, id: u32, vocab: usize) -> Result<(), ParamError> {
    let holds = usize::try_from(id).is_ok_and(|id| id < vocab);
    require(field, id, holds, &format!("given for token ids below the vocabulary's {vocab}"))
}
