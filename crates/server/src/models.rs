//! Models that requests can name.

use crate::error::{ApiError, ApiResult};
use crate::model::{Loader, Model};
use crate::openai::now;
use crate::worker::Worker;
use std::sync::{Arc, Mutex, PoisonError};

/// A name that requests may give.
struct Slot {
    name: String,
    created: u64,
    /// Held while the model is loaded: who asks for it meanwhile waits.
    loading: Arc<tokio::sync::Mutex<()>>,
    model: Mutex<Option<Arc<Model>>>,
}

impl Slot {
    fn new(name: String) -> Self {
        Self { name, created: now(), loading: Arc::default(), model: Mutex::default() }
    }

    /// The model, if its engine is there.
    fn loaded(&self) -> Option<Arc<Model>> {
        let model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        model.clone().filter(|model| !model.engine.is_lost())
    }

    fn put(&self, model: Arc<Model>) {
        *self.model.lock().unwrap_or_else(PoisonError::into_inner) = Some(model);
    }
}

/// All models that are served, each loaded when it is first asked for, and again when its engine was lost.
pub(crate) struct Models {
    slots: Vec<Arc<Slot>>,
    loader: Loader,
    worker: Worker,
}

/// What `/v1/models` says of one.
pub(crate) struct Listed<'a> {
    pub(crate) name: &'a str,
    pub(crate) created: u64,
    pub(crate) model: Option<Arc<Model>>,
}

impl Models {
    /// The first of `names` is the default.
    pub(crate) fn new(names: Vec<String>, loader: Loader, worker: Worker) -> Self {
        Self { slots: names.into_iter().map(|name| Arc::new(Slot::new(name))).collect(), loader, worker }
    }

    /// The model of that name; absent and `default_model` are the first one.
    pub(crate) async fn get(&self, name: Option<&str>) -> ApiResult<Arc<Model>> {
        let found = match name {
            None | Some("default_model") => self.slots.first(),
            Some(name) => self.slots.iter().find(|slot| slot.name == name),
        };
        let Some(slot) = found else { return Err(ApiError::no_model(name.unwrap_or_default())) };
        if let Some(model) = slot.loaded() {
            return Ok(model);
        }
        let turn = Arc::clone(&slot.loading).lock_owned().await;
        if let Some(model) = slot.loaded() {
            return Ok(model);
        }
        let (slot, loader, worker) = (Arc::clone(slot), Arc::clone(&self.loader), self.worker.clone());
        // A task of its own: should this client leave, the others that wait do not begin again.
        let loading = tokio::spawn(async move {
            let _turn = turn;
            load(&slot, loader, &worker).await
        });
        loading.await.unwrap_or_else(|error| Err(ApiError::unavailable(error.to_string())))
    }

    pub(crate) fn list(&self) -> impl Iterator<Item = Listed<'_>> {
        self.slots.iter().map(|slot| Listed { name: &slot.name, created: slot.created, model: slot.loaded() })
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }
}

async fn load(slot: &Slot, loader: Loader, worker: &Worker) -> ApiResult<Arc<Model>> {
    let name = slot.name.clone();
    let loaded = tokio::task::spawn_blocking(move || loader(&name)).await;
    let failed =
        |why: String| ApiError::unavailable(format!("the model {} cannot be loaded: {why}", slot.name));
    let loaded = loaded.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
    let model = Arc::new(Model::new(slot.name.clone(), loaded, worker)?);
    slot.put(Arc::clone(&model));
    Ok(model)
}
