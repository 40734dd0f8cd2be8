//! `/v1/completions`: plain text, without a chat template.

use super::{Cost, Envelope, StreamOptions};
use crate::app::App;
use crate::body::{self, in_range};
use crate::error::{ApiError, ApiResult};
use crate::fields::{self, Sampling};
use crate::infill;
use crate::logprobs::TextLogprobs;
use crate::model::Model;
use crate::running::Running;
use crate::schemas::{LogprobsCount, Prompts};
use crate::sse::{Events, Gone};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lmx::engine::{Event, FinishReason, PromptLogprobs, PromptToken, Request, Update};
use lmx::sample::fold_seed;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// The fields of this endpoint alone.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Body {
    model: Option<String>,
    /// A text, a list of texts, token ids, or a list of lists of ids.
    #[schema(value_type = Prompts)]
    prompt: Prompt,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Tokens to generate at most; 0 with `echo` tells of the prompt alone.
    max_tokens: Option<i64>,
    /// The same by its newer name, which wins.
    max_completion_tokens: Option<i64>,
    /// Replies to each prompt.
    n: Option<usize>,
    /// Replies that are made of each prompt, of which the `n` likeliest by token are returned.
    best_of: Option<usize>,
    /// The number of likely tokens to tell of each position, from 0 to 20; `true` tells of tokens as chats do.
    #[schema(value_type = Option<LogprobsCount>)]
    logprobs: Option<Told>,
    /// With `logprobs: true`: the number of likely tokens, from 0 to 20.
    top_logprobs: Option<i64>,
    /// What stands behind the gap that the reply fills; for models that have tokens for it.
    suffix: Option<String>,
    /// Begin each reply with its prompt.
    echo: Option<bool>,
}

/// What is to be continued.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text, a list of texts, token ids, or a list of lists of token ids")]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

/// `logprobs`: OpenAI's number, or mlx-lm's word.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "expected a whole number from 0 to 20, true or false")]
enum Told {
    Top(usize),
    AsChat(bool),
}

impl Prompt {
    fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::Lists(lists) => lists.len(),
        }
    }
}

impl Body {
    /// How many likely tokens are asked for, and whether in the shape of chats; `None` for no log-probabilities.
    fn logprobs(&self) -> ApiResult<Option<(usize, bool)>> {
        let as_chat = matches!(self.logprobs, Some(Told::AsChat(true)));
        let top = match self.top_logprobs {
            // mlx-lm's word for none.
            None | Some(-1) => 0,
            Some(_) if !as_chat => {
                return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true"));
            }
            Some(top) => in_range("top_logprobs", top, 0, TOP_MAX as i64)? as usize,
        };
        match self.logprobs {
            None | Some(Told::AsChat(false)) => Ok(None),
            Some(Told::AsChat(true)) => Ok(Some((top, true))),
            Some(Told::Top(top)) => in_range("logprobs", top, 0, TOP_MAX).map(|top| Some((top, false))),
        }
    }
}

/// Likely tokens that can be asked for at most.
pub(crate) const TOP_MAX: usize = 20;
/// Prompts of one request at most.
const PROMPTS_MAX: usize = 2048;
/// Replies of one request at most.
const REPLIES_MAX: usize = 4096;

/// What is asked for, checked.
struct Ask {
    model: Arc<Model>,
    /// What each prompt's replies begin with.
    echoes: Vec<String>,
    /// And the log-probabilities of that.
    scored: Vec<TextLogprobs>,
    n: usize,
    best_of: usize,
    logprobs: bool,
    /// In the shape of chats.
    as_chat: bool,
}

impl Ask {
    /// Takes log-probabilities of the prompt of reply `index`.
    fn score(&mut self, index: usize, tokens: &[PromptToken]) {
        let Some(scored) = self.scored.get_mut(index / self.best_of) else { return };
        for token in tokens {
            scored.push(&self.model.tokenizer, token.token, Some(token.logprob), &token.top);
        }
    }

    /// The lists with which those of reply `index`, whose text begins with `text`, begin.
    fn begin(&self, index: usize, text: &str) -> TextLogprobs {
        let scored = self.scored.get(index / self.best_of).filter(|scored| !scored.is_empty());
        scored.cloned().unwrap_or_else(|| TextLogprobs::new(text.chars().count(), self.as_chat))
    }
}

/// Answers a request.
pub(crate) async fn answer(State(app): State<Arc<App>>, bytes: Bytes) -> ApiResult<Response> {
    let (body, mut sampling): (Body, Sampling) = body::parse_both(&bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    sampling.load(&app, &model).await?;
    let (stream, usage) = (body.stream.unwrap_or(false), body.stream_options.and_then(|o| o.include_usage));
    if body.stream_options.is_some() && !stream {
        return Err(ApiError::field("stream_options", "stream_options needs stream"));
    }
    let (ask, requests) = app.work(&bytes, || prepare(&app, model, body, sampling, stream)).await?;
    let running = app.begin(&ask.model, requests)?;
    if stream {
        let usage = usage.unwrap_or(false);
        return crate::stream::respond(&app, running, Chunks::new(ask, usage)).await;
    }
    Ok(Json(collect(ask, running).await?).into_response())
}

fn prepare(
    app: &App,
    model: Arc<Model>,
    body: Body,
    sampling: Sampling,
    stream: bool,
) -> ApiResult<(Ask, Vec<Vec<Request>>)> {
    let most = app.options.limits.choices;
    let n = in_range("n", body.n.unwrap_or(1), 1, most)?;
    let best_of = in_range("best_of", body.best_of.unwrap_or(n), n, most)?;
    if stream && best_of > n {
        return Err(ApiError::field(
            "best_of",
            "best_of needs whole replies: it cannot be above n with stream",
        ));
    }
    let told = body.logprobs()?;
    let (top, as_chat) = (told.map(|(top, _)| top), told.is_some_and(|(_, as_chat)| as_chat));
    let echo = body.echo.unwrap_or(false);
    let count = body.prompt.count();
    body::not_too_many("prompt", count, PROMPTS_MAX)?;
    if count * best_of > REPLIES_MAX {
        let message =
            format!("{count} prompts with {best_of} replies each are more than {REPLIES_MAX} replies");
        return Err(ApiError::field(if best_of > n { "best_of" } else { "n" }, message));
    }
    let mut prompts = match body.prompt {
        Prompt::Text(text) => vec![model.encode(&text)?],
        Prompt::Texts(texts) => texts.iter().map(|text| model.encode(text)).collect::<ApiResult<_>>()?,
        Prompt::Tokens(tokens) => vec![tokens],
        Prompt::Lists(lists) => lists,
    };
    if let Some(suffix) = &body.suffix {
        if echo {
            return Err(ApiError::field("suffix", "suffix and echo exclude each other"));
        }
        for prompt in &mut prompts {
            *prompt = infill::prompt(&model, prompt, suffix)?;
        }
    }
    let echoes =
        prompts.iter().map(|tokens| if echo { model.tokenizer.decode(tokens) } else { String::new() });
    let echoes = echoes.collect();
    let seed = sampling.seed().unwrap_or_else(lmx::sample::random_seed);
    // With echo the prompt alone is an answer.
    let no_reply = echo && body.max_tokens == Some(0) && body.max_completion_tokens.is_none();
    let asked = [
        ("max_completion_tokens", body.max_completion_tokens),
        ("max_tokens", body.max_tokens.filter(|_| !no_reply)),
    ];
    let max_tokens = fields::max_tokens(&asked, app.options.defaults.max_tokens)?;
    let mut requests = Vec::new();
    for tokens in &prompts {
        let request = |choice: u64| -> ApiResult<Request> {
            let request = sampling.request(tokens.clone(), max_tokens, &model, &app.options);
            let request = request.map_err(|error| error.renamed("messages", "prompt"))?;
            let seed = Some(fold_seed(seed, choice));
            let max_tokens = if no_reply { Some(0) } else { request.max_tokens };
            // The further replies have the same prompt.
            let scored = top.filter(|_| echo && choice == 0).map(|top| PromptLogprobs { from: 1, top });
            Ok(Request {
                seed,
                max_tokens,
                top_logprobs: top.unwrap_or(0),
                prompt_logprobs: scored,
                ..request
            })
        };
        requests.push((0..best_of as u64).map(request).collect::<ApiResult<_>>()?);
    }
    let scored = prompts.iter().map(|tokens| {
        let mut logprobs = TextLogprobs::new(0, as_chat);
        if let Some(&first) = tokens.first().filter(|_| echo && top.is_some()) {
            logprobs.push(&model.tokenizer, first, None, &[]);
        }
        logprobs
    });
    let scored = scored.collect();
    Ok((Ask { model, echoes, scored, n, best_of, logprobs: top.is_some(), as_chat }, requests))
}

/// A reply, while it is made.
struct Choice {
    text: String,
    /// Begun with the first token.
    logprobs: Option<TextLogprobs>,
    sum: f64,
    tokens: usize,
    finish: Option<FinishReason>,
}

/// Whole replies.
async fn collect(mut ask: Ask, mut running: Running) -> ApiResult<Value> {
    let envelope = Envelope::new("cmpl-", &ask.model);
    let choice = |index: usize| {
        let text = ask.echoes.get(index / ask.best_of).cloned().unwrap_or_default();
        Choice { text, logprobs: None, sum: 0.0, tokens: 0, finish: None }
    };
    let mut choices: Vec<Choice> = (0..ask.echoes.len() * ask.best_of).map(choice).collect();
    let mut cost = Cost::default();
    while let Some(next) = running.next().await {
        let (index, event) = match next? {
            (index, Update::Token(event)) => (index, event),
            (index, Update::Prompt(tokens)) => {
                ask.score(index, &tokens);
                continue;
            }
            _ => continue,
        };
        let Some(choice) = choices.get_mut(index) else { continue };
        let logprobs = choice.logprobs.get_or_insert_with(|| ask.begin(index, &choice.text));
        choice.text.push_str(&event.text);
        if let Some(id) = event.token {
            choice.sum += f64::from(event.logprob);
            choice.tokens += 1;
            if ask.logprobs {
                logprobs.push(&ask.model.tokenizer, id, Some(event.logprob), &event.top);
            }
        }
        if event.finish.is_some() {
            choice.finish = event.finish;
            cost.add(&event.stats, 0, !index.is_multiple_of(ask.best_of));
        }
    }
    let mut kept = Vec::new();
    for of_prompt in choices.chunks_mut(ask.best_of) {
        if ask.best_of > ask.n {
            let score = |choice: &Choice| choice.sum / choice.tokens.max(1) as f64;
            of_prompt.sort_by(|a, b| score(b).total_cmp(&score(a)));
        }
        for choice in of_prompt.iter().take(ask.n) {
            kept.push(json!({
                "index": kept.len(),
                "text": choice.text,
                "logprobs": choice.logprobs.as_ref().filter(|_| ask.logprobs).map(TextLogprobs::json),
                "finish_reason": choice.finish.map(FinishReason::as_str),
            }));
        }
    }
    let mut object = envelope.object("text_completion", kept);
    object.insert("usage".to_owned(), cost.usage());
    object.insert("timings".to_owned(), cost.timings());
    Ok(Value::Object(object))
}

/// A streamed reply.
struct Chunks {
    ask: Ask,
    envelope: Envelope,
    usage: bool,
    cost: Cost,
    /// For each choice, characters up to here.
    offsets: Vec<Option<usize>>,
}

impl Chunks {
    fn new(ask: Ask, usage: bool) -> Self {
        let envelope = Envelope::new("cmpl-", &ask.model);
        let offsets = vec![None; ask.echoes.len() * ask.best_of];
        Self { ask, envelope, usage, cost: Cost::default(), offsets }
    }

    fn chunk(&mut self, index: usize, event: &Event) -> Option<Value> {
        let offset = self.offsets.get_mut(index)?;
        let first = offset.is_none();
        let echo = self.ask.echoes.get(index / self.ask.best_of).filter(|_| first);
        let mut text = echo.cloned().unwrap_or_default();
        let mut logprobs = match *offset {
            Some(offset) => TextLogprobs::new(offset, self.ask.as_chat),
            None => self.ask.begin(index, &text),
        };
        text.push_str(&event.text);
        if let (Some(id), true) = (event.token, self.ask.logprobs) {
            logprobs.push(&self.ask.model.tokenizer, id, Some(event.logprob), &event.top);
        }
        *offset = Some(logprobs.offset());
        if text.is_empty() && logprobs.is_empty() && event.finish.is_none() {
            return None;
        }
        let choice = json!({
            "index": index,
            "text": text,
            "logprobs": if logprobs.is_empty() { Value::Null } else { logprobs.json() },
            "finish_reason": event.finish.map(FinishReason::as_str),
        });
        Some(self.envelope.chunk("text_completion", choice, self.usage))
    }
}

impl crate::stream::Protocol for Chunks {
    async fn prompt(&mut self, _: &Events, index: usize, tokens: Vec<PromptToken>) -> Result<(), Gone> {
        self.ask.score(index, &tokens);
        Ok(())
    }

    async fn event(&mut self, events: &Events, index: usize, event: Event) -> Result<(), Gone> {
        if event.finish.is_some() {
            self.cost.add(&event.stats, 0, !index.is_multiple_of(self.ask.best_of));
        }
        match self.chunk(index, &event) {
            Some(chunk) => events.data(&chunk).await,
            None => Ok(()),
        }
    }

    async fn end(&mut self, events: &Events) -> Result<(), Gone> {
        if self.usage {
            let mut object = self.envelope.object("text_completion", Vec::new());
            object.insert("usage".to_owned(), self.cost.usage());
            object.insert("timings".to_owned(), self.cost.timings());
            events.data(&Value::Object(object)).await?;
        }
        events.done().await
    }

    async fn error(&mut self, events: &Events, error: ApiError) -> Result<(), Gone> {
        events.data(&error.openai()).await
    }
}
