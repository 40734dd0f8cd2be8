//! `/v1/models`

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::folder::Folder;
use crate::models::Listed;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

fn describe(listed: &Listed<'_>, adapters: &[String]) -> Value {
    let context = listed.model.as_ref().map(|model| model.context_length);
    json!({
        "id": listed.name,
        "object": "model",
        "created": listed.created,
        "owned_by": "lmx",
        "loaded": listed.model.is_some(),
        "context_length": context,
        "max_model_len": context,
        "adapters": adapters,
    })
}

/// The names of the adapters that requests may ask for, whether they fit a model or not.
fn adapters(app: &App) -> Vec<String> {
    let list = app.options.adapters.iter().flat_map(Folder::list);
    list.map(|(name, _)| name).collect()
}

/// All of them.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let adapters = adapters(&app);
    let data: Vec<Value> = app.models.list().map(|listed| describe(&listed, &adapters)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// One of them.
pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> ApiResult<Json<Value>> {
    let found = app.models.list().find(|listed| listed.name == name);
    found.map(|listed| Json(describe(&listed, &adapters(&app)))).ok_or_else(|| ApiError::no_model(&name))
}
