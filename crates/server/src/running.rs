//! The replies that a request asks for, while they are made.

use crate::error::{ApiError, ApiResult};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::worker::{Listener, Ticket, Worker};
use lmx::engine::{Request, Stats, Update};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Replies that are being made; dropping it ends them.
pub(crate) struct Running {
    model: Arc<Model>,
    worker: Worker,
    metrics: Arc<Metrics>,
    /// Replies that wait or run at most, those of all clients.
    most: usize,
    /// By index.
    tickets: HashMap<usize, Ticket>,
    updates: mpsc::UnboundedReceiver<(usize, ApiResult<Update>)>,
    listener: Listener,
    /// Requests for more replies to the same prompt, each with its index: they begin when the first one has run it.
    held_back: Vec<(usize, Request)>,
    /// Requests that begin when there is room for them.
    waiting: VecDeque<(usize, Request)>,
    open: usize,
}

impl Running {
    /// Begins `requests`: for each prompt the requests for its replies. Those for which there is no room beside others
    /// begin later.
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
            most,
            tickets: HashMap::new(),
            updates,
            listener,
            held_back: Vec::new(),
            waiting: VecDeque::new(),
            open: prompts.iter().map(Vec::len).sum(),
        };
        let mut index = 0;
        for requests in prompts {
            for (nth, request) in requests.into_iter().enumerate() {
                match nth {
                    0 => running.waiting.push_back((index, request)),
                    _ => running.held_back.push((index, request)),
                }
                index += 1;
            }
        }
        running.submit(most)?;
        running.fill()?;
        Ok(running)
    }

    /// Begins the next request, unless `most` wait or run.
    fn submit(&mut self, most: usize) -> ApiResult<()> {
        let Some((index, request)) = self.waiting.pop_front() else { return Ok(()) };
        let listener = (index, self.listener.clone());
        self.tickets.insert(index, self.worker.submit(&self.model.engine, request, listener, most)?);
        Ok(())
    }

    /// Begins as many requests as there is room for.
    fn fill(&mut self) -> ApiResult<()> {
        while !self.waiting.is_empty() && self.worker.in_flight() < self.most {
            self.submit(usize::MAX)?;
        }
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
            self.release(index);
            let mut begun = self.fill();
            if event.finish.is_some() {
                self.open -= 1;
                self.count(&event.stats);
                // Its place goes to the next one, however many others wait.
                self.tickets.remove(&index);
                begun = begun.and_then(|()| self.submit(usize::MAX));
            }
            if let Err(error) = begun {
                return Some(Err(self.end(error)));
            }
        }
        Some(Ok((index, update)))
    }

    fn end(&mut self, error: ApiError) -> ApiError {
        self.open = 0;
        self.tickets.clear();
        error
    }

    /// Lets the further replies to the prompt begin that reply `first` has run.
    fn release(&mut self, first: usize) {
        let mut next = first + 1;
        while let Some(at) = self.held_back.iter().position(|&(index, _)| index == next) {
            self.waiting.push_back(self.held_back.swap_remove(at));
            next += 1;
        }
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
        // Embeddings and prompts that are only scored have none.
        if stats.generation_tokens > 0 {
            metrics.first_token.get_or_create(model).observe(stats.first_token_seconds);
        }
    }
}
