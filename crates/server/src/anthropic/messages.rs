//! `/v1/messages` and `/v1/messages/count_tokens`

use super::convert;
use crate::app::App;
use crate::blocks::{Block, Blocks, Change, Kind};
use crate::body::{self, in_range};
use crate::conversation::{Conversation, Thoughts};
use crate::error::{ApiError, ApiResult};
use crate::fields::{self, Sampling};
use crate::model::Model;
use crate::openai::{messages, new_id};
use crate::reply::{Parts, Shape, Tooling};
use crate::running::Running;
use crate::schemas::{
    AnthropicMessage, AnthropicThinking, AnthropicTool, AnthropicToolChoice, SystemText, TextFormat,
};
use crate::sse::{Events, Gone};
use crate::stream::Protocol;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lmx::engine::{Event, FinishReason, Request, Stats, Update};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// The body of both endpoints.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Body {
    model: Option<String>,
    #[schema(value_type = Vec<AnthropicMessage>)]
    messages: Vec<Value>,
    /// A text, or blocks of type text.
    #[schema(value_type = Option<SystemText>)]
    system: Option<Value>,
    max_tokens: Option<i64>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<usize>,
    stop_sequences: Option<Vec<String>>,
    #[schema(value_type = Option<Vec<AnthropicTool>>)]
    tools: Option<Vec<Value>>,
    #[schema(value_type = Option<AnthropicToolChoice>)]
    tool_choice: Option<Value>,
    /// `{"type": "enabled", "budget_tokens": 1024}`, `adaptive` or `disabled`.
    #[schema(value_type = Option<AnthropicThinking>)]
    thinking: Option<Value>,
    output_config: Option<OutputConfig>,
    /// Accepted without effect: what begins alike is found without it.
    #[serde(rename = "cache_control")]
    #[schema(value_type = Option<Value>)]
    _cache_control: Option<Value>,
    /// Accepted without effect on the reply.
    #[serde(rename = "metadata")]
    #[schema(value_type = Option<Value>)]
    _metadata: Option<Value>,
    /// Accepted without effect on the reply.
    #[serde(rename = "service_tier")]
    _service_tier: Option<String>,
}

/// `output_config`
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct OutputConfig {
    /// For models that think: `low`, `medium`, `high`, `xhigh` or `max`.
    effort: Option<String>,
    /// `{"type": "json_schema", "schema": …}`
    #[schema(value_type = Option<TextFormat>)]
    format: Option<Value>,
}

/// What is asked for, checked.
struct Ask {
    model: Arc<Model>,
    shape: Shape,
    prompt_tokens: usize,
}

/// Answers a request.
pub(crate) async fn answer(State(app): State<Arc<App>>, bytes: Bytes) -> Response {
    match try_answer(&app, &bytes).await {
        Ok(response) => response,
        Err(error) => error.into_anthropic(),
    }
}

/// Counts the tokens of a prompt.
pub(crate) async fn count(State(app): State<Arc<App>>, bytes: Bytes) -> Response {
    let count = async {
        let body: Body = body::parse(&bytes)?;
        let model = app.models.get(body.model.as_deref()).await?;
        let (ask, _) = app.work(&bytes, || prepare(&app, model, body)).await?;
        Ok::<_, ApiError>(Json(json!({"input_tokens": ask.prompt_tokens})))
    };
    match count.await {
        Ok(counted) => counted.into_response(),
        Err(error) => error.into_anthropic(),
    }
}

async fn try_answer(app: &Arc<App>, bytes: &[u8]) -> ApiResult<Response> {
    let body: Body = body::parse(bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    if body.max_tokens.is_none() {
        return Err(ApiError::field("max_tokens", "max_tokens is required"));
    }
    let stream = body.stream.unwrap_or(false);
    let (ask, request) = app.work(bytes, || prepare(app, model, body)).await?;
    let mut running = app.begin(&ask.model, vec![vec![request]])?;
    if stream {
        let events = Written { id: new_id("msg_"), blocks: Blocks::new(&ask.shape), ask };
        return crate::stream::respond(app, running, events).await;
    }
    Ok(Json(collect(&ask, &mut running).await?).into_response())
}

/// The budget of `thinking`, and the word for templates.
fn thinking(thinking: Option<&Value>) -> ApiResult<(Option<usize>, Option<&'static str>)> {
    let Some(thinking) = thinking else { return Ok((None, None)) };
    match thinking["type"].as_str() {
        Some("disabled") => Ok((None, Some("none"))),
        Some("adaptive") => Ok((None, None)),
        Some("enabled") => {
            let budget = thinking["budget_tokens"].as_u64().and_then(|n| usize::try_from(n).ok());
            let field = "thinking.budget_tokens";
            let missing = || ApiError::field(field, format!("{field} must be a whole number"));
            Ok((Some(in_range(field, budget.ok_or_else(missing)?, 1, 1 << 40)?), Some("high")))
        }
        _ => Err(ApiError::field("thinking.type", "thinking.type must be enabled, adaptive or disabled")),
    }
}

/// The field that says how much to think.
const EFFORT: &str = "output_config.effort";

/// Refuses a word for it that the protocol does not have.
fn known(word: String) -> ApiResult<String> {
    const WORDS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];
    if WORDS.contains(&word.as_str()) {
        return Ok(word);
    }
    Err(ApiError::field(EFFORT, format!("{EFFORT} must be one of {}, not {word:?}", WORDS.join(", "))))
}

fn prepare(app: &App, model: Arc<Model>, body: Body) -> ApiResult<(Ask, Request)> {
    let tools = convert::tools(&body.tools.unwrap_or_default())?;
    crate::openai::tools::check(&tools)?;
    let (choice, parallel) = convert::choice(body.tool_choice.as_ref(), &tools)?;
    let (budget, effort) = thinking(body.thinking.as_ref())?;
    let OutputConfig { effort: word, format } = body.output_config.unwrap_or_default();
    let effort = match (effort, word) {
        (Some(word @ "none"), _) | (Some(word), None) => Some(("thinking", word.to_owned())),
        (_, Some(word)) => Some((EFFORT, known(word)?)),
        (None, None) => None,
    };
    // Clients ask for thoughts of whatever model there is; one that has none just answers.
    let thinks = model.tokenizer.thinking_markers().is_some();
    let reads_effort = Thoughts { model: &model, with_tools: !tools.is_empty() }.reads_effort();
    let effort = effort.filter(|(_, word)| thinks || (word != "none" && reads_effort));
    let converted = convert::messages(body.system.as_ref(), &body.messages)?;
    let begun = |last: &Value| last["role"] == "assistant" && last["tool_calls"].is_null();
    let conversation = Conversation {
        continues: converted.last().is_some_and(begun),
        messages: messages::normalize(converted, app.options.limits.messages)?,
        tooling: Tooling { tools, choice, parallel },
        form: crate::openai::tools::form("output_config.format", format.as_ref(), true)?,
        budget: budget.filter(|_| thinks),
        effort,
        variables: Map::new(),
    };
    let (prompt, shape) = conversation.render(app, &model)?;
    let stops = body.stop_sequences.unwrap_or_default();
    let sampling = Sampling::of_anthropic(&model, body.temperature, body.top_p, body.top_k);
    let prompt_tokens = prompt.len();
    let max_tokens = fields::max_tokens(&[("max_tokens", body.max_tokens)], app.options.defaults.max_tokens)?;
    let mut request = sampling.request(prompt, max_tokens, &model, &app.options)?;
    lmx::text::check_stops(&stops)
        .map_err(|error| ApiError::field("stop_sequences", format!("stop_sequences: {error}")))?;
    request.stop = stops;
    shape.constrain(shape.grammar(&model, &sampling)?, &mut request);
    Ok((Ask { model, shape, prompt_tokens }, request))
}

/// Why a reply ended, in Anthropic's words.
fn stop_reason(parts: &Parts, stopped_by_text: bool) -> &'static str {
    match parts.finish() {
        Some("tool_calls") => "tool_use",
        Some("length") => "max_tokens",
        _ if stopped_by_text => "stop_sequence",
        _ => "end_turn",
    }
}

fn usage(stats: &Stats) -> Value {
    let cached = stats.cached_tokens.min(stats.prompt_tokens);
    json!({
        "input_tokens": stats.prompt_tokens - cached,
        "output_tokens": stats.generation_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    })
}

async fn collect(ask: &Ask, running: &mut Running) -> ApiResult<Value> {
    let mut blocks = Blocks::new(&ask.shape);
    let mut last = (Stats::default(), None);
    while let Some(next) = running.next().await {
        let (_, Update::Token(event)) = next? else { continue };
        blocks.push(&event);
        last = (event.stats.clone(), event.stopped_by.clone());
    }
    let (stats, stopped_by) = last;
    let content: Vec<Value> = blocks.list().iter().map(whole).collect();
    let reason = stop_reason(blocks.parts(), stopped_by.is_some());
    Ok(json!({
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": ask.model.name,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stopped_by.filter(|_| reason == "stop_sequence"),
        "usage": usage(&stats),
    }))
}

/// A block that is complete.
fn whole(block: &Block) -> Value {
    let mut content = begun(block);
    match block.kind {
        Kind::Text => content["text"] = block.text.as_str().into(),
        Kind::Thoughts => content["thinking"] = block.text.as_str().into(),
        Kind::Call { .. } => {
            content["input"] = serde_json::from_str(&block.text).unwrap_or_else(|_| Map::new().into());
        }
    }
    content
}

/// A block that has no text yet.
fn begun(block: &Block) -> Value {
    match &block.kind {
        Kind::Text => json!({"type": "text", "text": ""}),
        Kind::Thoughts => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Kind::Call { id, name } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
    }
}

/// A streamed reply.
struct Written {
    id: String,
    ask: Ask,
    blocks: Blocks,
}

impl Written {
    async fn change(&self, events: &Events, index: usize, change: Change) -> Result<(), Gone> {
        let Some(block) = self.blocks.list().get(index) else { return Ok(()) };
        let (name, key, value) = match change {
            Change::Open => ("content_block_start", "content_block", begun(block)),
            Change::More(text) => {
                let delta = match block.kind {
                    Kind::Text => json!({"type": "text_delta", "text": text}),
                    Kind::Thoughts => json!({"type": "thinking_delta", "thinking": text}),
                    Kind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                };
                ("content_block_delta", "delta", delta)
            }
            Change::Close => {
                let stop = json!({"type": "content_block_stop", "index": index});
                return events.event("content_block_stop", &stop).await;
            }
        };
        events.event(name, &json!({"type": name, "index": index, key: value})).await
    }
}

impl Protocol for Written {
    async fn begin(&mut self, events: &Events) -> Result<(), Gone> {
        let message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.ask.model.name,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {"input_tokens": self.ask.prompt_tokens, "output_tokens": 0},
        });
        events.event("message_start", &json!({"type": "message_start", "message": message})).await
    }

    async fn event(&mut self, events: &Events, _index: usize, event: Event) -> Result<(), Gone> {
        for (index, change) in self.blocks.push(&event) {
            self.change(events, index, change).await?;
        }
        let Some(finish) = event.finish else { return Ok(()) };
        let stopped_by = event.stopped_by.filter(|_| finish == FinishReason::Stop);
        let reason = stop_reason(self.blocks.parts(), stopped_by.is_some());
        let delta =
            json!({"stop_reason": reason, "stop_sequence": stopped_by.filter(|_| reason == "stop_sequence")});
        let delta = json!({"type": "message_delta", "delta": delta, "usage": usage(&event.stats)});
        events.event("message_delta", &delta).await
    }

    async fn end(&mut self, events: &Events) -> Result<(), Gone> {
        events.event("message_stop", &json!({"type": "message_stop"})).await
    }

    async fn error(&mut self, events: &Events, error: ApiError) -> Result<(), Gone> {
        events.event("error", &error.anthropic()).await
    }
}
