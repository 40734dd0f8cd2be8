//! The replies that a request asks for, while they are made.

use crate::error::{ApiError, ApiResult};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::worker::{Listener, Ticket, Worker};
use lmx::engine::{Request, Stats, Update};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Replies that are being made; dropping it ends them.
pub(crate) struct Running {
    model: Arc<Model>,
    worker: Worker,
    metrics: Arc<Metrics>,
    tickets: Vec<Ticket>,
    updates: mpsc::UnboundedReceiver<(usize, ApiResult<Update>)>,
    listener: Listener,
    /// Requests for more replies to the same prompt, each with its index: they begin when the first one has run it.
    held_back: Vec<(usize, Request)>,
    open: usize,
}

impl Running {
    /// Begins `requests`: for each prompt the requests for its replies.
    ///
    /// # Errors
    /// 429 if `most` wait or run already, 503 if the server is stopping.
    pub(crate) fn begin(
        model: Arc<Model>,
        worker: &Worker,
        metrics: &Arc<Metrics>,
        prompts: Vec<Vec<Request>>,
        most: usize,
    ) -> ApiResult<Self> {
        let (listener, updates) = mpsc::unbounded_channel();
        let mut running = Self {
            model,
            worker: worker.clone(),
            metrics: Arc::clone(metrics),
            tickets: Vec::new(),
            updates,
            listener,
            held_back: Vec::new(),
            open: prompts.iter().map(Vec::len).sum(),
        };
        let mut index = 0;
        for requests in prompts {
            for (nth, request) in requests.into_iter().enumerate() {
                if nth == 0 {
                    running.submit(index, request, most)?;
                } else {
                    running.held_back.push((index, request));
                }
                index += 1;
            }
        }
        Ok(running)
    }

    fn submit(&mut self, index: usize, request: Request, most: usize) -> ApiResult<()> {
        let listener = (index, self.listener.clone());
        self.tickets.push(self.worker.submit(&self.model.engine, request, listener, most)?);
        Ok(())
    }

    /// What happens next, and to which reply; `None` when all have ended. After an error nothing follows.
    pub(crate) async fn next(&mut self) -> Option<ApiResult<(usize, Update)>> {
        if self.open == 0 {
            return None;
        }
        let (index, update) = match self.updates.recv().await {
            Some((index, Ok(update))) => (index, update),
            Some((_, Err(error))) => return Some(Err(self.end(error))),
            // Cannot be: this holds a sender of its own.
            None => return Some(Err(self.end(ApiError::unavailable("the server is stopping")))),
        };
        if let Update::Token(event) = &update {
            if let Err(error) = self.release(index) {
                return Some(Err(self.end(error)));
            }
            if event.finish.is_some() {
                self.open -= 1;
                self.count(&event.stats);
            }
        }
        Some(Ok((index, update)))
    }

    fn end(&mut self, error: ApiError) -> ApiError {
        self.open = 0;
        self.tickets.clear();
        error
    }

    /// Begins the further replies to the prompt that reply `first` has run.
    fn release(&mut self, first: usize) -> ApiResult<()> {
        let mut next = first + 1;
        while let Some(at) = self.held_back.iter().position(|&(index, _)| index == next) {
            let (index, request) = self.held_back.swap_remove(at);
            self.submit(index, request, usize::MAX)?;
            next += 1;
        }
        Ok(())
    }

    fn count(&self, stats: &Stats) {
        let (metrics, model) = (&self.metrics, self.model.engine.model());
        for (counter, tokens) in [
            (&metrics.prompt_tokens, stats.prompt_tokens),
            (&metrics.cached_tokens, stats.cached_tokens),
            (&metrics.drafted_tokens, stats.drafted_tokens),
            (&metrics.accepted_tokens, stats.accepted_tokens),
        ] {
            counter.get_or_create(model).inc_by(tokens as u64);
        }
        metrics.first_token.get_or_create(model).observe(stats.first_token_seconds);
        if stats.generation_tokens > 1 {
            let seconds = 1.0 / stats.generation_tps().max(f64::MIN_POSITIVE);
            metrics.between_tokens.get_or_create(model).observe(seconds);
        }
    }
}
