//! Adapters that requests can name: the entries of a folder, each loaded for a model when it is first asked for.

use crate::error::{ApiError, ApiResult};
use crate::folder::Folder;
use crate::model::Model;
use crate::worker::Worker;
use lmx::adapter::{Adapter, AdapterFiles};
use lmx::checkpoint::OpenOptions;
use std::collections::VecDeque;
use tokio::sync::Mutex;

/// Adapters of a model that are kept for requests to come; those of running requests are kept by these.
const KEPT_MAX: usize = 16;

/// Loaded adapters of one model by their names, the one that was last used at the end.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<VecDeque<(String, Adapter)>>);

/// The adapter `name` of `folder` for `model`.
///
/// # Errors
/// 400 naming the field `adapters`: there is no such adapter, or it is not one of this model.
pub(crate) async fn load(
    folder: Option<&Folder>,
    model: &Model,
    worker: &Worker,
    name: &str,
) -> ApiResult<Adapter> {
    let refused = |why: String| ApiError::field("adapters", format!("adapters: {why}"));
    let Some(folder) = folder.cloned() else {
        return Err(refused("this server offers none (--adapters-dir)".to_owned()));
    };
    // Held while it is loaded: of requests that come together one loads it.
    let mut kept = model.adapters.0.lock().await;
    if let Some(known) = kept.iter().position(|(own, _)| own == name).and_then(|at| kept.remove(at)) {
        kept.push_back(known.clone());
        return Ok(known.1);
    }
    let own = name.to_owned();
    let opened = tokio::task::spawn_blocking(move || {
        let path = folder.find(&own)?;
        // Unicode, as its name is; only a folder above could be otherwise.
        Some(AdapterFiles::open(path.to_str()?, &OpenOptions::default()))
    });
    let opened = opened.await.map_err(ApiError::of_task)?;
    let files =
        opened.ok_or_else(|| refused(format!("there is no adapter {name:?} here; see /v1/models")))?;
    let unusable = |error: lmx::adapter::AdapterError| refused(format!("{name} cannot be used: {error}"));
    let files = files.map_err(unusable)?;
    let fitted = worker.ask(&model.engine, move |engine| files.fit(engine.model())).await?;
    let adapter = fitted.map_err(unusable)?;
    if kept.len() >= KEPT_MAX {
        kept.pop_front();
    }
    kept.push_back((name.to_owned(), adapter.clone()));
    Ok(adapter)
}
