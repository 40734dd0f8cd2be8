//! `/v1/responses/{id}`: responses that are stored.

use super::store::Stored;
use crate::app::App;
use crate::body::in_range;
use crate::error::{ApiError, ApiResult};
use crate::guard::Caller;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use std::sync::Arc;

type Parameters = Query<Vec<(String, String)>>;

fn find(app: &App, id: &str, owner: usize) -> ApiResult<Arc<Stored>> {
    app.responses.get(id, owner).ok_or_else(|| missing(id))
}

fn missing(id: &str) -> ApiError {
    let message = format!("there is no stored response {id:?}");
    ApiError { param: Some("id".to_owned()), ..ApiError::new(StatusCode::NOT_FOUND, message) }
}

/// The response.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Extension(Caller(owner)): Extension<Caller>,
    Path(id): Path<String>,
    Query(parameters): Parameters,
) -> ApiResult<Response> {
    for (name, value) in &parameters {
        let has_effect = match name.as_str() {
            "stream" | "include_obfuscation" => value != "false",
            _ => true,
        };
        if has_effect {
            let message = format!("{name} has no effect here: a stored response is told as a whole");
            return Err(ApiError::field(name, message));
        }
    }
    let stored = find(&app, &id, owner)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], stored.response.clone()).into_response())
}

/// Forgets it.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(Caller(owner)): Extension<Caller>,
    Path(id): Path<String>,
) -> ApiResult<Json<Value>> {
    if !app.responses.delete(&id, owner) {
        return Err(missing(&id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

/// Items of a list at most, and where nothing is said.
const PAGE_MAX: usize = 100;
const PAGE: usize = 20;

/// The items that it answers, with those of the responses before it.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(Caller(owner)): Extension<Caller>,
    Path(id): Path<String>,
    Query(parameters): Parameters,
) -> ApiResult<Json<Value>> {
    let stored = find(&app, &id, owner)?;
    let (mut after, mut limit, mut ascending) = (None, PAGE, false);
    for (name, value) in parameters {
        let wrong = |why: &str| Err(ApiError::field(&name, format!("{name} is {value:?}: {why}")));
        match (name.as_str(), value.as_str()) {
            ("after", _) => after = Some(value),
            ("order", "asc" | "desc") => ascending = value == "asc",
            ("order", _) => return wrong("it must be asc or desc"),
            ("limit", number) => match number.parse() {
                Ok(number) => limit = in_range("limit", number, 1, PAGE_MAX)?,
                Err(_) => return wrong("it must be a whole number"),
            },
            _ => return wrong("only after, limit and order are parameters of this list"),
        }
    }
    // The latest first: the request's own items, then the answer before it and what that one answered.
    let mut items: Vec<Value> = serde_json::from_str(&stored.input).unwrap_or_default();
    items.reverse();
    items.extend(stored.chain().skip(1).flat_map(|before| before.items().into_iter().rev()));
    if ascending {
        items.reverse();
    }
    let start = match &after {
        None => 0,
        Some(id) => match items.iter().position(|item| item["id"] == id.as_str()) {
            Some(position) => position + 1,
            None => return Err(ApiError::field("after", format!("after is {id:?}: there is no such item"))),
        },
    };
    let page: Vec<Value> = items.iter().skip(start).take(limit).cloned().collect();
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    Ok(Json(json!({
        "object": "list",
        "first_id": id(page.first()),
        "last_id": id(page.last()),
        "has_more": items.len() > start + page.len(),
        "data": page,
    })))
}
