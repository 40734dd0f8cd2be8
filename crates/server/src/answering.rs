//! What is told of every answer: a line in the log, and a count.

use crate::metrics::{Answered, Metrics};
use axum::body::Body;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use futures_util::{StreamExt, stream};
use std::sync::Arc;
use std::time::Instant;

/// The code of requests whose client did not wait for the answer; it is never sent.
const CLIENT_LEFT: u16 = 499;

/// A request that is being answered. When dropped it tells how that ended; whoever is not done by then was left.
pub(crate) struct Answering {
    metrics: Arc<Metrics>,
    id: HeaderValue,
    method: Method,
    path: String,
    started: Instant,
    status: u16,
}

impl Answering {
    pub(crate) fn new(metrics: &Arc<Metrics>, id: HeaderValue, method: Method, path: String) -> Self {
        Self { metrics: Arc::clone(metrics), id, method, path, started: Instant::now(), status: CLIENT_LEFT }
    }

    /// The same response; it counts as given now, or when its last event is, if it has events.
    pub(crate) fn with(mut self, response: Response) -> Response {
        let status = response.status();
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        if !kind.is_some_and(|kind| kind.starts_with("text/event-stream")) {
            self.done(status);
            return response;
        }
        response.map(|body| {
            let events =
                stream::unfold((body.into_data_stream(), self), move |(mut body, mut own)| async move {
                    match body.next().await {
                        Some(event) => Some((event, (body, own))),
                        None => {
                            own.done(status);
                            None
                        }
                    }
                });
            Body::from_stream(events)
        })
    }

    fn done(&mut self, status: StatusCode) {
        self.status = status.as_u16();
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let Self { metrics, id, method, path, started, status } = self;
        metrics.answered.get_or_create(&Answered { path: path.clone(), status: *status }).inc();
        tracing::info!(
            id = id.to_str().unwrap_or_default(),
            %method,
            path = path.as_str(),
            status = *status,
            ms = started.elapsed().as_millis() as u64,
            "{}",
            if *status == CLIENT_LEFT { "the client left" } else { "answered" }
        );
    }
}
