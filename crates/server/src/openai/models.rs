//! `/v1/models`

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::folder::Folder;
use crate::models::Listed;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::task::spawn_blocking;

fn describe(listed: &Listed, adapters: &[String]) -> Value {
    let context = listed.model.as_ref().map(|model| model.context_length);
    let status = match (&listed.model, listed.progress) {
        (Some(_), _) => "loaded",
        (None, Some(_)) => "loading",
        (None, None) => "unloaded",
    };
    json!({
        "id": listed.name,
        "object": "model",
        "created": listed.created,
        "owned_by": "lmx",
        "loaded": listed.model.is_some(),
        "status": status,
        "progress": listed.progress,
        "context_length": context,
        "max_model_len": context,
        "adapters": adapters,
    })
}

/// The names of the adapters that requests may ask for, whether they fit a model or not.
async fn adapters(app: &App) -> ApiResult<Vec<String>> {
    let folder = app.options.adapters.clone();
    let list = spawn_blocking(move || folder.iter().flat_map(Folder::list).map(|(name, _)| name).collect());
    list.await.map_err(ApiError::of_task)
}

/// All of them.
pub(crate) async fn list(State(app): State<Arc<App>>) -> ApiResult<Json<Value>> {
    let (models, adapters) = (app.models.list().await?, adapters(&app).await?);
    let data: Vec<Value> = models.iter().map(|listed| describe(listed, &adapters)).collect();
    Ok(Json(json!({"object": "list", "data": data})))
}

/// One of them.
pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> ApiResult<Json<Value>> {
    let (models, adapters) = (app.models.list().await?, adapters(&app).await?);
    let found = models.iter().find(|listed| listed.name == name);
    found.map(|listed| Json(describe(listed, &adapters))).ok_or_else(|| ApiError::no_model(&name))
}
