//! The fields that say how a text is continued, the same for every endpoint of OpenAI's protocol.

use crate::body::in_range;
use crate::error::{ApiError, ApiResult};
use crate::model::Model;
use crate::options::ServerOptions;
use lmx::engine::Request;
use lmx::sample::{ProcessorParams, SamplingParams};
use lmx::text::check_stops;
use serde::Deserialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// How a text is continued. Null means absent.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Sampling {
    /// 0 takes the most likely token; at most 100.
    temperature: Option<f64>,
    /// Nucleus, from 0 to 1.
    top_p: Option<f64>,
    /// Keeps so many tokens; 0 keeps all.
    top_k: Option<usize>,
    /// Keeps tokens with this fraction of the top token's probability, from 0 to 1.
    min_p: Option<f64>,
    /// How likely XTC acts on a token, from 0 to 1.
    xtc_probability: Option<f64>,
    /// The probability above which XTC removes tokens, up to 0.5.
    xtc_threshold: Option<f64>,
    /// Lessens the logits of tokens in the context; 0 and 1 are off.
    repetition_penalty: Option<f64>,
    /// Tokens of that context.
    repetition_context_size: Option<usize>,
    /// Subtracted from the logits of tokens in the context.
    presence_penalty: Option<f64>,
    /// Tokens of that context.
    presence_context_size: Option<usize>,
    /// Subtracted from a token's logit for each occurrence in the context.
    frequency_penalty: Option<f64>,
    /// Tokens of that context.
    frequency_context_size: Option<usize>,
    /// Added to the logits of token ids.
    logit_bias: Option<BTreeMap<u32, f64>>,
    /// The same seed gives the same reply.
    seed: Option<i64>,
    /// Texts that end the reply and are not part of it: one or several.
    #[schema(value_type = Option<serde_json::Value>)]
    pub(crate) stop: Option<OneOrMany>,
    /// Generate past end-of-sequence tokens.
    ignore_eos: Option<bool>,
    /// Who asks; has no effect on the reply.
    #[serde(rename = "user")]
    _user: Option<String>,
}

/// One text or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// The widest temperature and penalty that make sense.
const TEMPERATURE_MAX: f64 = 100.0;
const PENALTY_MAX: f64 = 100.0;

impl Sampling {
    /// What Anthropic's protocol has of it.
    pub(crate) fn of_anthropic(temperature: Option<f64>, top_p: Option<f64>, top_k: Option<usize>) -> Self {
        Self { temperature, top_p, top_k, ..Self::default() }
    }

    /// The seed, if one is given. Negative ones count from the top, as in two's complement.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.seed.map(i64::cast_unsigned)
    }

    fn sampling(&self, base: &SamplingParams, xtc_special: &[u32]) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            top_k: self.top_k.unwrap_or(base.top_k),
            xtc_probability: self.xtc_probability.unwrap_or(base.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(base.xtc_threshold),
            xtc_special_tokens: xtc_special.to_vec(),
            ..base.clone()
        }
    }

    fn processors(&self) -> ProcessorParams {
        let base = ProcessorParams::default();
        // Of a context size, 0 means everything, as in mlx-lm.
        let size = |size: Option<usize>, base: usize| match size {
            Some(0) => usize::MAX,
            size => size.unwrap_or(base),
        };
        ProcessorParams {
            logit_bias: self.logit_bias.clone().unwrap_or_default(),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            repetition_context_size: size(self.repetition_context_size, base.repetition_context_size),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            presence_context_size: size(self.presence_context_size, base.presence_context_size),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            frequency_context_size: size(self.frequency_context_size, base.frequency_context_size),
        }
    }

    /// A request for `tokens` to be continued so by at most `max_tokens`, checked against the model.
    ///
    /// # Errors
    /// Names the first field that is out of range.
    pub(crate) fn request(
        &self,
        tokens: Vec<u32>,
        max_tokens: usize,
        model: &Model,
        options: &ServerOptions,
    ) -> ApiResult<Request> {
        if let Some(temperature) = self.temperature {
            in_range("temperature", temperature, 0.0, TEMPERATURE_MAX)?;
        }
        for (field, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            value.map(|value| in_range(field, value, -PENALTY_MAX, PENALTY_MAX)).transpose()?;
        }
        let request = Request {
            max_tokens: Some(max_tokens),
            sampling: self.sampling(&options.defaults.sampling, &model.xtc_special_tokens),
            processors: self.processors(),
            stop: self.stop.clone().map(OneOrMany::into_vec).unwrap_or_default(),
            seed: self.seed(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            adapter: model.adapter.clone(),
            speculation: model.speculation,
            tokens,
            ..Request::default()
        };
        let refused = |error: lmx::sample::ParamError| ApiError::from(lmx::engine::RequestError::from(error));
        request.sampling.validate(model.vocab).map_err(refused)?;
        request.processors.validate(model.vocab).map_err(refused)?;
        check_stops(&request.stop).map_err(|error| ApiError::field("stop", format!("stop: {error}")))?;
        check_prompt(&request.tokens, model)?;
        Ok(request)
    }
}

/// The most tokens of a reply: the first of the fields `asked` that is given.
pub(crate) fn max_tokens(asked: &[(&str, Option<i64>)], default: usize) -> ApiResult<usize> {
    let given = asked.iter().find_map(|&(field, value)| Some((field, value?)));
    let Some((field, value)) = given else { return Ok(default) };
    usize::try_from(in_range(field, value, 1, 1 << 40)?)
        .map_err(|_| ApiError::field(field, format!("{field} is {value}: it is too large")))
}

/// Checks what the engine would refuse, so that the answer does not wait for it.
pub(crate) fn check_prompt(tokens: &[u32], model: &Model) -> ApiResult<()> {
    if tokens.is_empty() {
        return Err(lmx::engine::RequestError::EmptyPrompt.into());
    }
    if tokens.len() > model.context_length {
        let (prompt, context) = (tokens.len(), model.context_length);
        return Err(lmx::engine::RequestError::ContextExceeded { prompt, context }.into());
    }
    match tokens.iter().position(|&token| token as usize >= model.vocab) {
        Some(position) => {
            let token = tokens.get(position).copied().unwrap_or_default();
            Err(lmx::engine::RequestError::Token { position, token, vocab: model.vocab }.into())
        }
        None => Ok(()),
    }
}
