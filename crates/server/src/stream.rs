//! Replies as streams of events: what all protocols have in common.

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::running::Running;
use crate::sse::{Events, Gone};
use axum::response::Response;
use lmx::engine::{Event, PromptToken, Update};
use std::time::Duration;

/// How a protocol writes a reply's events.
pub(crate) trait Protocol: Send + 'static {
    /// Before anything else.
    fn begin(&mut self, _events: &Events) -> impl Future<Output = Result<(), Gone>> + Send {
        async { Ok(()) }
    }

    /// Log-probabilities of tokens of the prompt of reply `index`.
    fn prompt(
        &mut self,
        _events: &Events,
        _index: usize,
        _tokens: Vec<PromptToken>,
    ) -> impl Future<Output = Result<(), Gone>> + Send {
        async { Ok(()) }
    }

    /// A token of reply `index`.
    fn event(
        &mut self,
        events: &Events,
        index: usize,
        event: Event,
    ) -> impl Future<Output = Result<(), Gone>> + Send;

    /// All replies have ended.
    fn end(&mut self, events: &Events) -> impl Future<Output = Result<(), Gone>> + Send;

    /// A reply failed; nothing follows.
    fn error(&mut self, events: &Events, error: ApiError) -> impl Future<Output = Result<(), Gone>> + Send;
}

/// Answers with a stream. What fails before anything happened, within the time after which a silent stream would send a
/// comment, is an answer of its own.
pub(crate) async fn respond<P: Protocol>(
    app: &App,
    mut running: Running,
    mut protocol: P,
) -> ApiResult<Response> {
    let patience = app.options.limits.keep_alive;
    let first = match tokio::time::timeout(patience, running.next()).await {
        Ok(Some(Err(error))) => return Err(error),
        Ok(first) => first,
        Err(_) => None,
    };
    let (events, response) = Events::new();
    tokio::spawn(async move {
        let all = async {
            protocol.begin(&events).await?;
            write(&events, &mut running, &mut protocol, first, patience).await
        };
        // When the client has gone, what runs for it ends with `running`.
        tokio::select! {
            _ = all => {}
            () = events.gone() => {}
        }
    });
    Ok(response)
}

/// Ends a stream that has begun; its code was sent, so the log alone can tell that it was not the last word.
async fn fail<P: Protocol>(events: &Events, protocol: &mut P, error: ApiError) -> Result<(), Gone> {
    tracing::warn!(status = error.status.as_u16(), "a stream failed: {}", error.message);
    protocol.error(events, error).await
}

async fn write<P: Protocol>(
    events: &Events,
    running: &mut Running,
    protocol: &mut P,
    first: Option<ApiResult<(usize, Update)>>,
    patience: Duration,
) -> Result<(), Gone> {
    let mut next = first;
    loop {
        match next.take() {
            Some(Ok((index, Update::Token(event)))) => protocol.event(events, index, event).await?,
            Some(Ok((_, Update::Prefill { done, total }))) => {
                events.comment(&format!("keepalive {done}/{total}")).await?;
            }
            Some(Ok((index, Update::Prompt(tokens)))) => protocol.prompt(events, index, tokens).await?,
            // Only embeddings ask for it.
            Some(Ok((_, Update::Embedding(_)))) => {}
            Some(Ok((_, Update::Failed(error)))) => return fail(events, protocol, error.into()).await,
            Some(Err(error)) => return fail(events, protocol, error).await,
            None => {}
        }
        next = loop {
            match tokio::time::timeout(patience, running.next()).await {
                Ok(None) => return protocol.end(events).await,
                Ok(next) => break next,
                Err(_) => events.comment("keepalive").await?,
            }
        };
    }
}
