//! Which function answers which path, and what every request passes first.

use crate::error::{ApiError, ApiResult};
use crate::guard;
use crate::metrics::Metrics;
use crate::model::{Loader, Model};
use crate::models::Models;
use crate::options::ServerOptions;
use crate::running::Running;
use crate::worker::Worker;
use crate::{adapters, anthropic, openai, text};
use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use lmx::adapter::Adapter;
use lmx::engine::Request;
use serde_json::json;
use std::sync::Arc;

/// What all handlers share.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) models: Models,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) guard: guard::Guard,
}

impl App {
    /// Serves the models `names`, the first of which is the default.
    ///
    /// # Errors
    /// If there can be no further thread.
    pub(crate) fn new(
        options: ServerOptions,
        names: Vec<String>,
        loader: Loader,
    ) -> std::io::Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::new());
        let worker = Worker::start(Arc::clone(&metrics))?;
        let guard = guard::Guard::new(&options);
        Ok(Arc::new(Self { models: Models::new(names, loader, worker), options, metrics, guard }))
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
    #[expect(dead_code, reason = "the field comes next")]
    pub(crate) async fn adapter(&self, model: &Model, name: &str) -> ApiResult<Adapter> {
        adapters::load(self.options.adapters.as_ref(), model, self.models.worker(), name).await
    }

    /// The paths.
    pub(crate) fn router(self: Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(openai::chat::answer))
            .route("/chat/completions", post(openai::chat::answer))
            .route("/v1/completions", post(openai::completions::answer))
            .route("/completions", post(openai::completions::answer))
            .route("/v1/embeddings", post(openai::embeddings::answer))
            .route("/v1/models", get(openai::models::list))
            .route("/v1/models/{*name}", get(openai::models::one))
            .route("/v1/messages", post(anthropic::messages::answer))
            .route("/v1/messages/count_tokens", post(anthropic::messages::count))
            .route("/tokenize", post(text::tokenize))
            .route("/detokenize", post(text::detokenize))
            .route("/apply-template", post(text::apply_template))
            .route("/", get(page))
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is no such path") })
            .method_not_allowed_fallback(|| async {
                ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
            })
            // The body is there already, and is not too long.
            .layer(DefaultBodyLimit::disable())
            .layer(middleware::from_fn_with_state(Arc::clone(&self), guard::check))
            .with_state(self)
    }
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

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.text()).into_response()
}
