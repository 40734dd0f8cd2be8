//! Models that requests can name: which there are, and which of them are loaded.

use crate::error::{ApiError, ApiResult};
use crate::folder::Folder;
use crate::metrics::Metrics;
use crate::model::{LoadProgress, Loader, Model, Source};
use crate::openai::now;
use crate::options::ServerOptions;
use crate::worker::Worker;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// How long a request waits for loaded models to become idle, where its own does not fit beside them.
const ROOM_WAIT: Duration = Duration::from_secs(60);
/// How often it looks.
const ROOM_POLL: Duration = Duration::from_millis(20);

/// A name that requests may give.
struct Slot {
    name: String,
    source: Source,
    created: u64,
    state: Mutex<State>,
    loading: AtomicBool,
    progress: LoadProgress,
}

struct State {
    model: Option<Arc<Model>>,
    /// When a request last asked for it.
    asked: Instant,
}

impl Slot {
    fn new(name: String, source: Source) -> Arc<Self> {
        let state = Mutex::new(State { model: None, asked: Instant::now() });
        let (loading, progress) = (AtomicBool::new(false), LoadProgress::default());
        Arc::new(Self { name, source, created: now(), state, loading, progress })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model, if its engine is there.
    fn loaded(&self) -> Option<Arc<Model>> {
        self.state().model.clone().filter(|model| !model.engine.is_lost())
    }

    /// The same for a request, which then keeps it from being unloaded.
    fn ask(&self) -> Option<Arc<Model>> {
        self.state().asked = Instant::now();
        self.loaded()
    }

    /// Bytes that its model holds.
    fn held(&self) -> usize {
        self.loaded().map_or(0, |model| model.held())
    }

    /// When it was last asked for, if nobody uses it now.
    fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        let idle = state.model.as_ref().is_some_and(|model| Arc::strong_count(model) == 1);
        idle.then_some(state.asked)
    }

    /// Takes the model out, unless somebody has come to use it: whoever asks later has it loaded again.
    fn take(&self) -> Option<Arc<Model>> {
        let mut state = self.state();
        state.model.take_if(|model| Arc::strong_count(model) == 1)
    }
}

/// All models that are served: some have been named, others are found in a folder. Each is loaded when it is first asked
/// for, and again when its engine was lost or it had to make room.
pub(crate) struct Models {
    named: Vec<Arc<Slot>>,
    folder: Option<Folder>,
    /// What was last found in the folder.
    found: Mutex<BTreeMap<String, Arc<Slot>>>,
    /// Held while a model is loaded: who needs one to be loaded meanwhile waits, and those who wait for the same find it.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Bytes that loaded models may hold together.
    bytes_max: usize,
    /// Requests that may wait or run, those that wait for a model among them.
    queue_max: usize,
    loader: Arc<dyn Loader>,
    worker: Worker,
    metrics: Arc<Metrics>,
}

/// What `/v1/models` says of one.
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) created: u64,
    pub(crate) model: Option<Arc<Model>>,
    /// How much of it is loaded, from 0 to 1, while it is.
    pub(crate) progress: Option<f64>,
}

impl Models {
    /// The first of `names` is the default.
    pub(crate) fn new(
        names: Vec<(String, String)>,
        options: &ServerOptions,
        loader: Arc<dyn Loader>,
        worker: Worker,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            named: names.into_iter().map(|(name, model)| Slot::new(name, Source::Named(model))).collect(),
            folder: options.models.clone(),
            found: Mutex::default(),
            turn: Arc::default(),
            bytes_max: options.limits.models_bytes,
            queue_max: options.limits.queue,
            loader,
            worker,
            metrics,
        }
    }

    fn found(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Slot>>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks into the folder again. What has gone from it is served for as long as it is loaded.
    async fn refresh(&self) -> ApiResult<()> {
        let Some(folder) = self.folder.clone() else { return Ok(()) };
        let list = spawn_blocking(move || folder.list()).await.map_err(ApiError::of_task)?;
        let mut found = self.found();
        found.retain(|name, slot| slot.held() > 0 || list.iter().any(|(entry, _)| entry == name));
        for (name, path) in list {
            found.entry(name).or_insert_with_key(|name| Slot::new(name.clone(), Source::Entry(path)));
        }
        Ok(())
    }

    fn slot(&self, name: Option<&str>) -> ApiResult<Option<Arc<Slot>>> {
        let Some(name) = name.filter(|&name| name != "default_model") else {
            let none = "model: this server has no default model; see /v1/models";
            return self.named.first().cloned().map(Some).ok_or_else(|| ApiError::field("model", none));
        };
        let named = self.named.iter().find(|slot| slot.name == name).cloned();
        Ok(named.or_else(|| self.found().get(name).cloned()))
    }

    /// The model of that name; absent and `default_model` are the first one that was named.
    pub(crate) async fn get(&self, name: Option<&str>) -> ApiResult<Arc<Model>> {
        if let Some(model) = self.slot(name)?.and_then(|slot| slot.ask()) {
            return Ok(model);
        }
        self.refresh().await?;
        let slot = self.slot(name)?.ok_or_else(|| ApiError::no_model(name.unwrap_or_default()))?;
        let _place = self.worker.await_model(self.queue_max)?;
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if let Some(model) = slot.ask() {
            return Ok(model);
        }
        let bytes = self.make_room(&slot).await?;
        let (loader, worker, metrics) =
            (Arc::clone(&self.loader), self.worker.clone(), Arc::clone(&self.metrics));
        // A task of its own: should this client leave, the others that wait do not begin again.
        let loading = tokio::spawn(async move {
            let _turn = turn;
            load(&slot, bytes, loader, &worker, &metrics).await
        });
        loading.await.map_err(ApiError::of_task)?
    }

    /// Unloads models until that of `slot` fits beside the others: those that nobody uses, the one first that was last
    /// asked for the longest time ago. Returns the bytes of its weights.
    async fn make_room(&self, slot: &Slot) -> ApiResult<usize> {
        let (loader, source) = (Arc::clone(&self.loader), slot.source.clone());
        let needed = spawn_blocking(move || loader.bytes(&source)).await.map_err(ApiError::of_task)?;
        let needed = needed.map_err(|why| cannot_load(slot, &why))?;
        if needed > self.bytes_max {
            let most = self.bytes_max;
            let message = format!(
                "model: {} has {needed} bytes of weights, and models may hold {most} (--models-memory)",
                slot.name
            );
            return Err(ApiError::field("model", message));
        }
        let begun = Instant::now();
        loop {
            let slots: Vec<Arc<Slot>> = self.named.iter().chain(self.found().values()).cloned().collect();
            let held = slots.iter().map(|slot| slot.held()).sum::<usize>();
            if held.saturating_add(needed) <= self.bytes_max {
                return Ok(needed);
            }
            let idle = slots.iter().filter_map(|slot| Some((slot.idle_since()?, slot)));
            if let Some(model) = idle.min_by_key(|(since, _)| *since).and_then(|(_, slot)| slot.take()) {
                self.unload(&model).await?;
            } else if begun.elapsed() < ROOM_WAIT {
                tokio::time::sleep(ROOM_POLL).await;
            } else {
                let why =
                    "the loaded models are all in use, and it does not fit beside them (--models-memory)";
                return Err(cannot_load(slot, why));
            }
        }
    }

    async fn unload(&self, model: &Model) -> ApiResult<()> {
        tracing::info!(model = model.name, "unloaded");
        self.metrics.unloads.get_or_create(model.engine.model()).inc();
        // Giving its memory back takes a while; only then is there room.
        match self.worker.remove(&model.engine).await {
            Some(engine) => spawn_blocking(move || drop(engine)).await.map_err(ApiError::of_task),
            None => Ok(()),
        }
    }

    /// All of them: those that were named, and those in the folder by their names.
    pub(crate) async fn list(&self) -> ApiResult<Vec<Listed>> {
        self.refresh().await?;
        let listed = |slot: &Arc<Slot>| Listed {
            name: slot.name.clone(),
            created: slot.created,
            model: slot.loaded(),
            progress: slot.loading.load(Ordering::Relaxed).then(|| slot.progress.fraction()),
        };
        let found = self.found();
        let more = found.values().filter(|slot| self.named.iter().all(|named| named.name != slot.name));
        Ok(self.named.iter().chain(more).map(listed).collect())
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }
}

fn cannot_load(slot: &Slot, why: &str) -> ApiError {
    ApiError::unavailable(format!("the model {} cannot be loaded: {why}", slot.name))
}

async fn load(
    slot: &Arc<Slot>,
    bytes: usize,
    loader: Arc<dyn Loader>,
    worker: &Worker,
    metrics: &Metrics,
) -> ApiResult<Arc<Model>> {
    slot.progress.set(0, 0);
    slot.loading.store(true, Ordering::Relaxed);
    let own = Arc::clone(slot);
    let loaded = spawn_blocking(move || loader.load(&own.source, &own.progress)).await;
    slot.loading.store(false, Ordering::Relaxed);
    let loaded = loaded.unwrap_or_else(|error| Err(error.to_string()));
    let loaded = loaded.map_err(|why| cannot_load(slot, &why))?;
    let model = Arc::new(Model::new(slot.name.clone(), bytes, loaded, worker)?);
    metrics.loads.get_or_create(model.engine.model()).inc();
    slot.state().model = Some(Arc::clone(&model));
    Ok(model)
}

/// Bytes of the weights of a model at `path`: of a `.gguf` file, or of the `.safetensors` files in a folder.
///
/// # Errors
/// If it is neither there nor readable.
pub fn weight_bytes(path: &Path) -> std::io::Result<usize> {
    let size = |path: &Path| Ok(usize::try_from(std::fs::metadata(path)?.len()).unwrap_or(usize::MAX));
    if !path.is_dir() {
        return size(path);
    }
    let mut bytes = 0_usize;
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            bytes = bytes.saturating_add(size(&path)?);
        }
    }
    Ok(bytes)
}
