//! Which function answers which path, and what every request passes first.

use crate::error::{ApiError, ApiResult};
use crate::fields::Sampling;
use crate::guard;
use crate::metrics::Metrics;
use crate::model::{Loader, Model};
use crate::models::Models;
use crate::openai::responses::Store;
use crate::openapi::{self, Route};
use crate::options::ServerOptions;
use crate::running::Running;
use crate::worker::Worker;
use crate::{adapters, anthropic, openai, text};
use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, Uri, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use lmx::adapter::Adapter;
use lmx::engine::Request;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;
use tokio::task::block_in_place;

/// What all handlers share.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) models: Models,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) guard: guard::Guard,
    pub(crate) responses: Store,
    /// Whose turn it is to have a long body worked on.
    long: Semaphore,
}

/// Bytes of a body that is long: what is made of it may take seconds.
const LONG: usize = 64 << 10;

impl App {
    /// Serves the models `names`, each with what the loader knows it by; the first is the default.
    ///
    /// # Errors
    /// If there can be no further thread.
    pub(crate) fn new(
        options: ServerOptions,
        names: Vec<(String, String)>,
        loader: Arc<dyn Loader>,
    ) -> std::io::Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::new());
        let worker = Worker::start(Arc::clone(&metrics))?;
        let guard = guard::Guard::new(&options);
        let responses = Store::new(options.limits.stored_responses, options.limits.stored_bytes);
        let models = Models::new(names, &options, loader, worker, Arc::clone(&metrics));
        let long = Semaphore::new(1);
        Ok(Arc::new(Self { models, options, metrics, guard, responses, long }))
    }

    /// Makes something of a body. Long ones come one after the other, beside the threads that answer everybody else.
    pub(crate) async fn work<T>(&self, body: &[u8], work: impl FnOnce() -> T) -> T {
        if body.len() < LONG {
            return work();
        }
        // Never closed.
        let _turn = self.long.acquire().await;
        aside(work)
    }

    /// Begins replies: for each prompt the requests for its replies.
    pub(crate) fn begin(&self, model: &Arc<Model>, mut prompts: Vec<Vec<Request>>) -> ApiResult<Running> {
        if let Some(hook) = &self.options.hook {
            prompts.iter_mut().flatten().for_each(|request| hook.0(request));
        }
        let most = self.options.limits.queue;
        Running::begin(Arc::clone(model), self.models.worker(), &self.metrics, prompts, most)
    }

    /// The adapter that a request asks for by its field `adapters`.
    ///
    /// # Errors
    /// 400: there is no such adapter, or it is not one of this model.
    pub(crate) async fn adapter(&self, model: &Model, name: &str) -> ApiResult<Adapter> {
        adapters::load(self.options.adapters.as_ref(), model, self.models.worker(), name).await
    }

    /// The paths.
    pub(crate) fn router(self: Arc<Self>) -> Router {
        openapi::router(&routes())
            .fallback(|uri: Uri| async move {
                ApiError::new(StatusCode::NOT_FOUND, "there is no such path").at(&uri)
            })
            .method_not_allowed_fallback(|uri: Uri| async move {
                ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method").at(&uri)
            })
            // The body is there already, and is not too long.
            .layer(DefaultBodyLimit::disable())
            .layer(middleware::from_fn_with_state(Arc::clone(&self), guard::check))
            .with_state(self)
    }
}

/// Does what takes long so that this thread's other work goes on elsewhere.
pub(crate) fn aside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => block_in_place(work),
        // It has no other thread.
        _ => work(),
    }
}

/// All paths and methods.
fn routes() -> Vec<Route> {
    const CHAT: [&str; 6] = ["id", "object", "created", "model", "choices", "usage"];
    let chat = |path| {
        Route::post(
            path,
            openai::chat::answer,
            "A message that continues a conversation, as OpenAI's chat has it",
        )
        .body::<openai::chat::Body>()
        .body::<Sampling>()
        .answers(&CHAT)
        .streams()
    };
    let text = |path| {
        Route::post(path, openai::completions::answer, "Plain text that continues a text")
            .body::<openai::completions::Body>()
            .body::<Sampling>()
            .answers(&CHAT)
            .streams()
    };
    let mut routes = vec![
        chat("/v1/chat/completions"),
        chat("/chat/completions"),
        text("/v1/completions"),
        text("/completions"),
    ];
    routes.extend(openai::responses::routes());
    routes.extend([
        Route::post("/v1/embeddings", openai::embeddings::answer, "A vector for each text")
            .body::<openai::embeddings::Body>()
            .answers(&["object", "data", "model", "usage"]),
        Route::get("/v1/models", openai::models::list, "The models that can be named")
            .answers(&["object", "data"]),
        Route::get("/v1/models/{*name}", openai::models::one, "One of them")
            .answers(&["id", "object", "created"]),
        Route::post("/v1/messages", anthropic::messages::answer, "A message, as Anthropic has it")
            .body::<anthropic::messages::Body>()
            .answers(&["id", "type", "role", "content", "stop_reason", "usage"])
            .streams(),
        Route::post("/v1/messages/count_tokens", anthropic::messages::count, "How long its prompt is")
            .body::<anthropic::messages::Body>()
            .answers(&["input_tokens"]),
        Route::post("/tokenize", text::tokenize, "The tokens of a text")
            .body::<text::Tokenize>()
            .answers(&["tokens", "count"]),
        Route::post("/detokenize", text::detokenize, "The text of tokens")
            .body::<text::Detokenize>()
            .answers(&["content"]),
        Route::post("/apply-template", text::apply_template, "A conversation as the model sees it")
            .body::<text::ApplyTemplate>()
            .answers(&["prompt", "tokens", "count"]),
        Route::get("/", page, "The chat page").of_kind("text/html; charset=utf-8").open(),
        Route::get("/health", health, "Whether tokens are being delivered").answers(&["status"]).open(),
        Route::get("/metrics", metrics, "Counters for Prometheus").of_kind(METRICS),
        Route::get("/openapi.json", document, "This document").answers(&["openapi", "paths"]).open(),
    ]);
    routes
}

/// The document that describes them.
async fn document() -> axum::Json<Value> {
    axum::Json(openapi::document(&routes()))
}

/// Whether tokens are being delivered.
async fn health(State(app): State<Arc<App>>) -> Response {
    let worker = app.models.worker();
    let silent = worker.silent_for().filter(|&silent| silent > app.options.limits.stall);
    match silent {
        None => axum::Json(json!({"status": "ok"})).into_response(),
        Some(silent) => {
            let body = json!({
                "status": "unavailable",
                "reason": format!(
                    "{} requests are in flight, but nothing was delivered for {} s",
                    worker.in_flight(),
                    silent.as_secs()
                ),
            });
            (StatusCode::SERVICE_UNAVAILABLE, axum::Json(body)).into_response()
        }
    }
}

/// The chat page: all of it in one file, which asks nobody else for anything.
async fn page() -> Response {
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
        base-uri 'none'; form-action 'self'; frame-ancestors 'none'";
    let headers =
        [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, policy)];
    (headers, include_str!("page/index.html")).into_response()
}

/// The content type of the metrics.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, METRICS)], app.metrics.text()).into_response()
}
