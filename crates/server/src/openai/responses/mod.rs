//! `/v1/responses`
//!
//! A request's items become a conversation ([`item`]), which is continued as a chat is; the reply's blocks become items
//! again ([`reply`]), streamed or not, and are kept for requests that go on from there ([`store`], [`stored`]).

mod item;
mod reply;
mod request;
mod store;
mod stored;

pub(crate) use store::Store;

use super::new_id;
use crate::app::App;
use crate::body;
use crate::error::ApiResult;
use crate::fields::Sampling;
use crate::guard::Caller;
use crate::openapi::Route;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use lmx::engine::Update;
use reply::Written;
use request::Body;
use serde_json::{Value, json};
use std::sync::Arc;

/// The paths.
pub(crate) fn routes() -> [Route; 5] {
    const FIELDS: [&str; 6] = ["id", "object", "created_at", "status", "model", "output"];
    let stored = "/v1/responses/{id}";
    [
        Route::post("/v1/responses", answer, "Items that continue a conversation")
            .body::<Body>()
            .body::<Sampling>()
            .answers(&FIELDS)
            .streams(),
        Route::post("/v1/responses/input_tokens", count, "How long its prompt is")
            .body::<Body>()
            .body::<Sampling>()
            .answers(&["object", "input_tokens"]),
        Route::get(stored, stored::get, "A stored response").answers(&FIELDS),
        Route::delete(stored, stored::delete, "Forgets it").answers(&["id", "object", "deleted"]),
        Route::get("/v1/responses/{id}/input_items", stored::input_items, "What it answers")
            .queries(&[("after", "string"), ("limit", "integer"), ("order", "string")])
            .answers(&["object", "data", "has_more"]),
    ]
}

/// Answers a request.
pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(Caller(owner)): Extension<Caller>,
    bytes: Bytes,
) -> ApiResult<Response> {
    let (body, mut sampling): (Body, Sampling) = body::parse_both(&bytes)?;
    let stream = body.stream()?;
    let model = app.models.get(body.model()).await?;
    sampling.load(&app, &model).await?;
    let (ask, request) = app.work(&bytes, || body.prepare(&app, model, owner, &sampling)).await?;
    let mut running = app.begin(&ask.model, vec![vec![request]])?;
    let mut written = Written::new(Arc::clone(&app), ask);
    if stream {
        return crate::stream::respond(&app, running, written).await;
    }
    while let Some(next) = running.next().await {
        let (_, Update::Token(event)) = next? else { continue };
        written.take(&event);
    }
    Ok(Json(written.end()).into_response())
}

/// Counts the tokens of a prompt.
pub(crate) async fn count(
    State(app): State<Arc<App>>,
    Extension(Caller(owner)): Extension<Caller>,
    bytes: Bytes,
) -> ApiResult<Json<Value>> {
    let (body, mut sampling): (Body, Sampling) = body::parse_both(&bytes)?;
    let model = app.models.get(body.model()).await?;
    sampling.load(&app, &model).await?;
    let (_, request) = app.work(&bytes, || body.prepare(&app, model, owner, &sampling)).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": request.tokens.len()})))
}

/// The ids of a response and of its items, which tell where an item is found.
#[derive(Clone, Debug)]
struct Ids(String);

impl Ids {
    /// Letters of the part that all of them share.
    const LETTERS: usize = 32;

    fn new() -> Self {
        Self(new_id(""))
    }

    /// Those of the response to which an item belongs.
    fn of_item(id: &str) -> Option<Self> {
        let (_, rest) = id.split_once('_')?;
        rest.get(..Self::LETTERS).map(|own| Self(own.to_owned()))
    }

    fn response(&self) -> String {
        format!("resp_{}", self.0)
    }

    fn item(&self, prefix: &str, number: usize) -> String {
        format!("{prefix}{}{number:04x}", self.0)
    }
}
