//! Server-sent events.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use tokio::sync::mpsc;

/// Events that the network has not taken yet, at most; then the stream waits for it.
const AHEAD: usize = 64;

/// The writing end of a stream of events.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    sender: mpsc::Sender<Bytes>,
}

/// The client has gone.
#[derive(Debug)]
pub(crate) struct Gone;

impl Events {
    /// A stream, and the response that carries it.
    pub(crate) fn new() -> (Self, Response) {
        let (sender, receiver) = mpsc::channel(AHEAD);
        let body = stream::unfold(receiver, |mut receiver| async {
            let bytes = receiver.recv().await?;
            Some((Ok::<_, std::convert::Infallible>(bytes), receiver))
        });
        let mut response = Body::from_stream(body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Proxies that collect answers must not collect this one.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        (Self { sender }, response)
    }

    async fn send(&self, text: String) -> Result<(), Gone> {
        self.sender.send(Bytes::from(text)).await.map_err(|_| Gone)
    }

    /// An event without a name.
    pub(crate) async fn data(&self, data: &Value) -> Result<(), Gone> {
        self.send(format!("data: {data}\n\n")).await
    }

    /// An event with a name.
    pub(crate) async fn event(&self, name: &str, data: &Value) -> Result<(), Gone> {
        self.send(format!("event: {name}\ndata: {data}\n\n")).await
    }

    /// OpenAI's last event.
    pub(crate) async fn done(&self) -> Result<(), Gone> {
        self.send("data: [DONE]\n\n".to_owned()).await
    }

    /// What readers skip.
    pub(crate) async fn comment(&self, text: &str) -> Result<(), Gone> {
        self.send(format!(": {text}\n\n")).await
    }

    /// Waits until the client has gone.
    pub(crate) async fn gone(&self) {
        self.sender.closed().await;
    }
}
