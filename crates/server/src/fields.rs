//! The fields that say how a text is continued, the same for every endpoint of OpenAI's protocol.

use crate::app::App;
use crate::body::in_range;
use crate::error::{ApiError, ApiResult};
use crate::min_tokens::MinTokens;
use crate::model::Model;
use crate::options::ServerOptions;
use lmx::adapter::Adapter;
use lmx::engine::{DraftSpeculation, NgramSpeculation, Request, Speculation};
use lmx::sample::{ProcessorParams, SamplingParams};
use lmx::text::check_stops;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;
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
    #[schema(value_type = Option<crate::schemas::OneOrMany>)]
    pub(crate) stop: Option<OneOrMany>,
    /// Generate past end-of-sequence tokens.
    ignore_eos: Option<bool>,
    /// Tokens before which no end-of-sequence token may come.
    min_tokens: Option<usize>,
    /// The adapter to run with, by its name in `/v1/models`.
    adapters: Option<String>,
    /// It, loaded.
    #[serde(skip)]
    #[schema(ignore)]
    adapter: Option<Adapter>,
    /// Only `default_model`: guesses come from the draft model that the server was started with.
    draft_model: Option<String>,
    /// Tokens guessed at once at most; 0 for none.
    num_draft_tokens: Option<usize>,
    /// Higher ones run first and give way last; 0 where nothing is said.
    priority: Option<i32>,
    /// Seconds after which the request fails if it still waits.
    queue_deadline: Option<f64>,
    /// Seconds without progress after which it fails.
    stall_deadline: Option<f64>,
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
    pub(crate) fn of_anthropic(
        model: &Model,
        temperature: Option<f64>,
        top_p: Option<f64>,
        top_k: Option<usize>,
    ) -> Self {
        Self { temperature, top_p, top_k, adapter: model.adapter.clone(), ..Self::default() }
    }

    /// Refuses what a reply that must have a form cannot have: it ends where the form does.
    pub(crate) fn check_with_form(&self) -> ApiResult<()> {
        match self.min_tokens {
            None | Some(0) => Ok(()),
            Some(_) => {
                Err(ApiError::field("min_tokens", "min_tokens cannot be had with a form of the reply"))
            }
        }
    }

    /// The seed, if one is given. Negative ones count from the top, as in two's complement.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.seed.map(i64::cast_unsigned)
    }

    /// Loads the adapter that is asked for.
    ///
    /// # Errors
    /// 400 naming `adapters`.
    pub(crate) async fn load(&mut self, app: &App, model: &Model) -> ApiResult<()> {
        self.adapter = match &self.adapters {
            Some(name) => Some(app.adapter(model, name).await?),
            None => model.adapter.clone(),
        };
        Ok(())
    }

    /// How tokens are guessed.
    fn speculation(&self, model: &Model) -> ApiResult<Option<Speculation>> {
        if let Some(other) = self.draft_model.as_ref().filter(|name| *name != "default_model") {
            let why = "a draft model is chosen when the server is started";
            return Err(ApiError::field("draft_model", format!("draft_model is {other:?}: {why}")));
        }
        let field = "num_draft_tokens";
        let Some(count) = self.num_draft_tokens else { return Ok(model.speculation) };
        let count = in_range(field, count, 0, DraftSpeculation::MOST)?;
        match model.speculation {
            _ if count == 0 => Ok(None),
            Some(Speculation::Draft(own)) => Ok(Some(DraftSpeculation { draft_tokens: count, ..own }.into())),
            Some(Speculation::Ngram(own)) => Ok(Some(NgramSpeculation { draft_tokens: count, ..own }.into())),
            None => {
                let why = "can only be 0: this server does not guess (--draft-model, --ngram-spec)";
                Err(ApiError::field(field, format!("{field} {why}")))
            }
        }
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
        let mut request = Request {
            max_tokens: Some(max_tokens),
            sampling: self.sampling(&options.defaults.sampling, &model.xtc_special_tokens),
            processors: self.processors(),
            stop: self.stop.clone().map(OneOrMany::into_vec).unwrap_or_default(),
            seed: self.seed(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            adapter: self.adapter.clone(),
            speculation: self.speculation(model)?,
            priority: self.priority.unwrap_or_default(),
            queue_deadline: seconds("queue_deadline", self.queue_deadline)?,
            stall_deadline: seconds("stall_deadline", self.stall_deadline)?,
            tokens,
            ..Request::default()
        };
        let refused = |error: lmx::sample::ParamError| ApiError::from(lmx::engine::RequestError::from(error));
        request.sampling.validate(model.vocab).map_err(refused)?;
        request.processors.validate(model.vocab).map_err(refused)?;
        check_stops(&request.stop).map_err(|error| ApiError::field("stop", format!("stop: {error}")))?;
        check_prompt(&request.tokens, model)?;
        let least = in_range("min_tokens", self.min_tokens.unwrap_or(0), 0, max_tokens)?;
        if least > 0 {
            request.logits_processors.push(Box::new(MinTokens::new(model.ends.clone(), least)));
        }
        Ok(request)
    }
}

/// A length of time.
fn seconds(field: &str, seconds: Option<f64>) -> ApiResult<Option<Duration>> {
    /// A year.
    const MOST: f64 = 31_536_000.0;
    let valid = |seconds| in_range(field, seconds, 0.0, MOST).map(Duration::from_secs_f64);
    seconds.map(valid).transpose()
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
