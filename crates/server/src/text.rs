//! Between text and tokens, over HTTP.

use crate::app::App;
use crate::body;
use crate::error::{ApiError, ApiResult};
use crate::openai::{messages, tools};
use crate::schemas::{ChatMessage, ChatTool};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use lmx::text::RenderOptions;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// The body of `/tokenize`.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Tokenize {
    model: Option<String>,
    /// The text.
    content: String,
    /// Put the tokens before it that the model wants before texts (default true).
    add_special: Option<bool>,
    /// Give each token's text too.
    with_pieces: Option<bool>,
}

/// `/tokenize`
pub(crate) async fn tokenize(State(app): State<Arc<App>>, bytes: Bytes) -> ApiResult<Json<Value>> {
    let body: Tokenize = body::parse(&bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    let encode = || model.tokenizer.encode(&body.content, body.add_special.unwrap_or(true));
    let encoded = app.work(&bytes, encode).await;
    let ids = encoded.map_err(|error| ApiError::field("content", format!("content: {error}")))?;
    let piece = |id: u32| {
        let bytes = model.tokenizer.token_bytes(id).unwrap_or_default();
        json!({"id": id, "piece": String::from_utf8_lossy(&bytes), "bytes": bytes})
    };
    let tokens: Value = match body.with_pieces {
        Some(true) => ids.iter().map(|&id| piece(id)).collect(),
        _ => ids.iter().copied().collect(),
    };
    Ok(Json(json!({"tokens": tokens, "count": ids.len(), "max_model_len": model.context_length})))
}

/// The body of `/detokenize`.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Detokenize {
    model: Option<String>,
    /// The ids.
    tokens: Vec<u32>,
}

/// `/detokenize`
pub(crate) async fn detokenize(State(app): State<Arc<App>>, bytes: Bytes) -> ApiResult<Json<Value>> {
    let body: Detokenize = body::parse(&bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    if let Some(index) = body.tokens.iter().position(|&id| id as usize >= model.vocab) {
        let message = format!("tokens[{index}] is outside the vocabulary of {}", model.vocab);
        return Err(ApiError::field("tokens", message));
    }
    let content = app.work(&bytes, || model.tokenizer.decode(&body.tokens)).await;
    Ok(Json(json!({"content": content})))
}

/// The body of `/apply-template`: messages and tools are those of a chat.
#[derive(Deserialize, ToSchema)]
pub(crate) struct ApplyTemplate {
    model: Option<String>,
    #[schema(value_type = Vec<ChatMessage>)]
    messages: Vec<Value>,
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Vec<Value>>,
    /// End with the beginning of a reply (default true).
    add_generation_prompt: Option<bool>,
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// `/apply-template`
pub(crate) async fn apply_template(State(app): State<Arc<App>>, bytes: Bytes) -> ApiResult<Json<Value>> {
    let body: ApplyTemplate = body::parse(&bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    let tools = tools::normalize(body.tools.unwrap_or_default())?;
    let own = body.chat_template_kwargs.unwrap_or_default();
    model.check_variables(&own, !tools.is_empty())?;
    let mut variables = app.options.defaults.template.clone();
    variables.extend(own);
    let options = RenderOptions {
        add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
        tools: Some(tools).filter(|tools| !tools.is_empty()),
        variables,
        ..RenderOptions::default()
    };
    let messages = messages::normalize(body.messages, app.options.limits.messages)?;
    let prompt = app.work(&bytes, || model.render(&messages, &options)).await?;
    Ok(Json(json!({"prompt": prompt.text, "tokens": prompt.ids, "count": prompt.ids.len()})))
}
