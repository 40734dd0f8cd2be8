//! `/v1/chat/completions`

use super::{Cost, Envelope, StreamOptions, messages, tools};
use crate::app::App;
use crate::body::{self, in_range};
use crate::conversation::Conversation;
use crate::error::{ApiError, ApiResult};
use crate::fields::{self, Sampling};
use crate::logprobs;
use crate::model::Model;
use crate::reply::{Parts, Shape, Tooling};
use crate::running::Running;
use crate::schemas::{ChatMessage, ChatTool, ChatToolChoice, ResponseFormat};
use crate::sse::{Events, Gone};
use crate::stream::Protocol;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lmx::engine::{Event, Request, Update};
use lmx::sample::fold_seed;
use lmx::text::reply::ReplyPart;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// The fields of this endpoint alone.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Body {
    model: Option<String>,
    #[schema(value_type = Vec<ChatMessage>)]
    messages: Vec<Value>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Tokens to generate at most.
    max_tokens: Option<i64>,
    /// The same by its newer name, which wins.
    max_completion_tokens: Option<i64>,
    /// Replies to the conversation.
    n: Option<usize>,
    /// Tell the log-probability of each token.
    logprobs: Option<bool>,
    /// And of so many likely ones, from 0 to 20.
    top_logprobs: Option<i64>,
    /// `{"type": "json_schema", "json_schema": {"schema": …}}`, `json_object`, `text`, `regex` or `grammar`.
    #[schema(value_type = Option<ResponseFormat>)]
    response_format: Option<Value>,
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or an object that names a function.
    #[schema(value_type = Option<ChatToolChoice>)]
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    /// For models that think: `none` turns thinking off, other words go to the chat template.
    reasoning_effort: Option<String>,
    /// Tokens of thoughts at most.
    max_reasoning_tokens: Option<usize>,
    /// Variables of the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Only `text`.
    modalities: Option<Vec<String>>,
    /// Accepted without effect on the reply.
    #[serde(rename = "metadata")]
    #[schema(value_type = Option<Value>)]
    _metadata: Option<Value>,
    /// Accepted without effect on the reply.
    #[serde(rename = "service_tier")]
    _service_tier: Option<String>,
    /// Accepted without effect on the reply.
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<String>,
    /// Accepted without effect: what begins alike is found without it.
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<String>,
    /// Accepted without effect.
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: Option<String>,
    /// Only false: nothing is stored.
    store: Option<bool>,
}

/// What is asked for, checked.
struct Ask {
    model: Arc<Model>,
    n: usize,
    logprobs: bool,
    shape: Shape,
}

/// Answers a request.
pub(crate) async fn answer(State(app): State<Arc<App>>, bytes: Bytes) -> ApiResult<Response> {
    let (body, mut sampling): (Body, Sampling) = body::parse_both(&bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    sampling.load(&app, &model).await?;
    let (stream, options) = (body.stream.unwrap_or(false), body.stream_options);
    if options.is_some() && !stream {
        return Err(ApiError::field("stream_options", "stream_options needs stream"));
    }
    let (ask, requests) = app.work(&bytes, || prepare(&app, model, body, &sampling)).await?;
    let running = app.begin(&ask.model, vec![requests])?;
    if stream {
        let usage = options.and_then(|options| options.include_usage).unwrap_or(false);
        return crate::stream::respond(&app, running, Chunks::new(ask, usage)).await;
    }
    Ok(Json(collect(ask, running).await?).into_response())
}

fn check(body: &Body) -> ApiResult<()> {
    if let Some(other) = body.modalities.iter().flatten().find(|kind| *kind != "text") {
        return Err(ApiError::field(
            "modalities",
            format!("modalities has {other:?}: only text is supported"),
        ));
    }
    if body.store == Some(true) {
        return Err(ApiError::field("store", "store must be false: chat completions are not stored"));
    }
    Ok(())
}

fn prepare(app: &App, model: Arc<Model>, body: Body, sampling: &Sampling) -> ApiResult<(Ask, Vec<Request>)> {
    check(&body)?;
    let n = in_range("n", body.n.unwrap_or(1), 1, app.options.limits.choices)?;
    let logprobs = body.logprobs.unwrap_or(false);
    let top = match body.top_logprobs {
        // mlx-lm's word for none.
        None | Some(-1) => 0,
        Some(_) if !logprobs => {
            return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs"));
        }
        Some(top) => in_range("top_logprobs", top, 0, 20)? as usize,
    };
    let mut tools = tools::normalize(body.tools.unwrap_or_default())?;
    let choice = tools::choose(body.tool_choice.as_ref(), &mut tools)?;
    let conversation = Conversation {
        messages: messages::normalize(body.messages, app.options.limits.messages)?,
        continues: false,
        tooling: Tooling { tools, choice, parallel: body.parallel_tool_calls.unwrap_or(true) },
        form: tools::form("response_format", body.response_format.as_ref(), false)?,
        effort: body.reasoning_effort.map(|word| ("reasoning_effort", word)),
        budget: body.max_reasoning_tokens,
        variables: body.chat_template_kwargs.unwrap_or_default(),
    };
    let (prompt, shape) = conversation.render(app, &model)?;
    let max_tokens = fields::max_tokens(
        &[("max_completion_tokens", body.max_completion_tokens), ("max_tokens", body.max_tokens)],
        app.options.defaults.max_tokens,
    )?;
    let seed = sampling.seed().unwrap_or_else(lmx::sample::random_seed);
    let grammar = shape.grammar(&model, sampling)?;
    let base = |choice: u64| -> ApiResult<Request> {
        let mut request = sampling.request(prompt.clone(), max_tokens, &model, &app.options)?;
        shape.constrain(grammar.clone(), &mut request);
        Ok(Request { seed: Some(fold_seed(seed, choice)), top_logprobs: top, ..request })
    };
    let requests = (0..n as u64).map(base).collect::<ApiResult<_>>()?;
    Ok((Ask { model, n, logprobs, shape }, requests))
}

/// A reply, while it is made.
struct Choice {
    parts: Parts,
    logprobs: Vec<Value>,
    finish: Option<&'static str>,
}

/// Whole replies.
async fn collect(ask: Ask, mut running: Running) -> ApiResult<Value> {
    let envelope = Envelope::new("chatcmpl-", &ask.model);
    let choice = |_| Choice { parts: Parts::new(&ask.shape), logprobs: Vec::new(), finish: None };
    let mut choices: Vec<Choice> = (0..ask.n).map(choice).collect();
    let mut cost = Cost::default();
    while let Some(next) = running.next().await {
        let (index, Update::Token(event)) = next? else { continue };
        let Some(choice) = choices.get_mut(index) else { continue };
        choice.parts.push(&event);
        if ask.logprobs {
            choice.logprobs.extend(logprobs::of_chat(&ask.model.tokenizer, &event));
        }
        if event.finish.is_some() {
            choice.finish = choice.parts.finish();
            cost.add(&event.stats, choice.parts.reasoning_tokens(), index > 0);
        }
    }
    let choices = choices.into_iter().enumerate().map(|(index, choice)| {
        json!({
            "index": index,
            "message": choice.parts.message(),
            "logprobs": if ask.logprobs { json!({"content": choice.logprobs}) } else { Value::Null },
            "finish_reason": choice.finish,
        })
    });
    let mut object = envelope.object("chat.completion", choices.collect());
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
    choices: Vec<Streamed>,
}

/// One of its choices.
struct Streamed {
    parts: Parts,
    /// Whether the role was told.
    begun: bool,
    /// Log-probabilities of tokens whose text is held back.
    logprobs: Vec<Value>,
}

impl Chunks {
    fn new(ask: Ask, usage: bool) -> Self {
        let envelope = Envelope::new("chatcmpl-", &ask.model);
        let choice = |_| Streamed { parts: Parts::new(&ask.shape), begun: false, logprobs: Vec::new() };
        let choices = (0..ask.n).map(choice).collect();
        Self { ask, envelope, usage, cost: Cost::default(), choices }
    }

    /// The chunks of an event.
    fn chunks(&mut self, index: usize, event: &Event) -> Vec<Value> {
        let Some(choice) = self.choices.get_mut(index) else { return Vec::new() };
        let parts = choice.parts.push(event);
        if self.ask.logprobs {
            choice.logprobs.extend(logprobs::of_chat(&self.ask.model.tokenizer, event));
        }
        let mut deltas: Vec<Map<String, Value>> =
            parts.into_iter().filter_map(|part| delta(&choice.parts, part)).collect();
        let finish = event.finish.and_then(|_| choice.parts.finish());
        if (finish.is_some() || !choice.begun) && deltas.is_empty() {
            deltas.push(Map::new());
        }
        if let (false, Some(first)) = (choice.begun, deltas.first_mut()) {
            choice.begun = true;
            first.shift_insert(0, "role".to_owned(), "assistant".into());
        }
        let last = deltas.len();
        let mut chunks = Vec::new();
        for (nth, delta) in deltas.into_iter().enumerate() {
            let logprobs = std::mem::take(&mut choice.logprobs);
            let logprobs = if logprobs.is_empty() { Value::Null } else { json!({"content": logprobs}) };
            let finish = finish.filter(|_| nth + 1 == last);
            let choice =
                json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
            chunks.push(self.envelope.chunk("chat.completion.chunk", choice, self.usage));
        }
        chunks
    }
}

/// What a part changes of a message.
fn delta(parts: &Parts, part: ReplyPart) -> Option<Map<String, Value>> {
    let object = match part {
        ReplyPart::Content(text) => json!({"content": text}),
        // By both names that clients look for.
        ReplyPart::Reasoning(text) => json!({"reasoning_content": text, "reasoning": text}),
        ReplyPart::ToolCallStart { index, name, .. } => {
            let id = parts.call_id(index);
            let function = json!({"name": name, "arguments": ""});
            json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
        }
        ReplyPart::ToolCallArguments { index, text } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        }
        ReplyPart::ToolCallEnd { .. } => return None,
    };
    match object {
        Value::Object(map) => Some(map),
        _ => None,
    }
}

impl Protocol for Chunks {
    async fn event(&mut self, events: &Events, index: usize, event: Event) -> Result<(), Gone> {
        for chunk in self.chunks(index, &event) {
            events.data(&chunk).await?;
        }
        if event.finish.is_some()
            && let Some(choice) = self.choices.get(index)
        {
            self.cost.add(&event.stats, choice.parts.reasoning_tokens(), index > 0);
        }
        Ok(())
    }

    async fn end(&mut self, events: &Events) -> Result<(), Gone> {
        if self.usage {
            let mut object = self.envelope.object("chat.completion.chunk", Vec::new());
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
