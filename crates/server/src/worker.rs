//! The one thread that runs models: it owns every engine and lets each advance in turn.

use crate::error::{ApiError, ApiResult};
use crate::metrics::Metrics;
use lmx::engine::{Engine, Request, RequestId, Update};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Where what happens to a request goes: several requests of one caller share a way, told apart by an index.
pub(crate) type Listener = mpsc::UnboundedSender<(usize, ApiResult<Update>)>;

enum Command {
    /// Serve another model.
    Add { model: u64, engine: Box<Engine> },
    /// Look at a model's engine between steps.
    Ask { model: u64, ask: Asking },
    /// Run a request.
    Submit { model: u64, open: Open, request: Box<Request> },
    /// End it; nobody listens any more.
    Cancel { ticket: u64 },
    /// End all that run, after a while, and take no more.
    Stop { grace: Duration },
}

/// What is to be done with an engine, if it is there.
type Asking = Box<dyn FnOnce(Option<&Engine>) + Send>;

/// Sends requests to the thread. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Worker {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

/// What the thread and its callers both see.
struct Shared {
    tickets: AtomicU64,
    /// Requests that wait or run.
    in_flight: AtomicUsize,
    /// When something was last delivered, or began to be waited for.
    delivered: Mutex<Instant>,
    metrics: Arc<Metrics>,
}

/// A request that waits or runs; dropping it ends it.
pub(crate) struct Ticket {
    ticket: u64,
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // The thread may have ended; then so has the request.
        let _ = self.commands.send(Command::Cancel { ticket: self.ticket });
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// If there can be no further thread.
    pub(crate) fn start(metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let (commands, receiver) = channel();
        let shared = Arc::new(Shared {
            tickets: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            delivered: Mutex::new(Instant::now()),
            metrics,
        });
        let own = Arc::clone(&shared);
        std::thread::Builder::new().name("lmx-engines".to_owned()).spawn(move || {
            Thread { receiver, shared: own, engines: HashMap::new(), open: HashMap::new(), stop_at: None }
                .run();
        })?;
        Ok(Self { commands, shared })
    }

    fn send(&self, command: Command) -> ApiResult<()> {
        self.commands.send(command).map_err(|_| ApiError::unavailable("the server is stopping"))
    }

    /// Adds a model.
    pub(crate) fn add(&self, model: u64, engine: Engine) -> ApiResult<()> {
        self.send(Command::Add { model, engine: Box::new(engine) })
    }

    /// What `ask` finds out of a model's engine, between two steps.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        model: u64,
        ask: impl FnOnce(&Engine) -> T + Send + 'static,
    ) -> ApiResult<T> {
        let (sender, receiver) = oneshot::channel();
        let ask: Asking = Box::new(move |engine| {
            // Who asked may have gone.
            let _ = sender.send(engine.map(ask));
        });
        self.send(Command::Ask { model, ask })?;
        let answer = receiver.await.map_err(|_| ApiError::unavailable("the server is stopping"))?;
        answer.ok_or_else(ApiError::unloaded)
    }

    /// Queues a request, unless `most` wait or run already.
    pub(crate) fn submit(
        &self,
        model: u64,
        request: Request,
        (index, listener): (usize, Listener),
        most: usize,
    ) -> ApiResult<Ticket> {
        let ticket = self.shared.tickets.fetch_add(1, Ordering::Relaxed);
        let before = self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        // From here on the ticket counts down again.
        let held = Ticket { ticket, commands: self.commands.clone(), shared: Arc::clone(&self.shared) };
        if before >= most {
            self.shared.metrics.refused.inc();
            return Err(ApiError::too_many(format!("{before} requests wait or run: the queue is full"), 1));
        }
        if before == 0 {
            self.shared.touch();
        }
        let open = Open { ticket, index, listener };
        self.send(Command::Submit { model, open, request: Box::new(request) })?;
        Ok(held)
    }

    /// Requests that wait or run.
    pub(crate) fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Relaxed)
    }

    /// For how long nothing has been delivered although there are requests; `None` without requests.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        let delivered = *self.shared.delivered.lock().unwrap_or_else(PoisonError::into_inner);
        (self.in_flight() > 0).then(|| delivered.elapsed())
    }

    /// Takes no more requests, and ends those that run after `grace`.
    pub(crate) fn stop(&self, grace: Duration) {
        // If the thread has ended there is nothing to stop.
        let _ = self.commands.send(Command::Stop { grace });
    }
}

impl Shared {
    fn touch(&self) {
        *self.delivered.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

/// Somebody who waits for a request.
struct Open {
    ticket: u64,
    index: usize,
    /// What is sent is at most the reply, whose length is bounded.
    listener: Listener,
}

impl Open {
    fn tell(&self, update: ApiResult<Update>) {
        // Who has gone sends a cancel of his own.
        let _ = self.listener.send((self.index, update));
    }
}

struct Thread {
    receiver: Receiver<Command>,
    shared: Arc<Shared>,
    engines: HashMap<u64, Engine>,
    /// By model and request.
    open: HashMap<(u64, RequestId), Open>,
    /// When what still runs is ended.
    stop_at: Option<Instant>,
}

impl Thread {
    fn run(mut self) {
        loop {
            let idle = self.open.is_empty();
            if idle && self.stop_at.is_some() {
                return;
            }
            let command = if idle {
                // Nothing runs until somebody asks: no core is kept busy.
                self.receiver.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.receiver.try_recv()
            };
            match command {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => self.step(),
                Err(TryRecvError::Disconnected) => return,
            }
            if self.stop_at.is_some_and(|at| Instant::now() >= at) {
                let ended = ApiError::unavailable("the server was stopped before the reply was complete");
                self.open.drain().for_each(|(_, open)| open.tell(Err(ended.clone())));
                return;
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Add { model, engine } => {
                self.engines.insert(model, *engine);
            }
            Command::Ask { model, ask } => ask(self.engines.get(&model)),
            Command::Submit { model, open, request } => {
                let submitted = match self.engines.get_mut(&model) {
                    _ if self.stop_at.is_some() => Err(ApiError::unavailable("the server is stopping")),
                    None => Err(ApiError::unloaded()),
                    Some(engine) => engine.submit(*request).map_err(ApiError::from),
                };
                match submitted {
                    Ok(id) => {
                        self.open.insert((model, id), open);
                    }
                    Err(error) => open.tell(Err(error)),
                }
            }
            Command::Cancel { ticket } => {
                let found = self.open.iter().find(|(_, open)| open.ticket == ticket).map(|(key, _)| *key);
                if let Some((model, id)) = found {
                    self.open.remove(&(model, id));
                    if let Some(engine) = self.engines.get_mut(&model) {
                        engine.cancel(id);
                    }
                    self.shared.metrics.cancelled.inc();
                }
            }
            Command::Stop { grace } => self.stop_at = Some(Instant::now() + grace),
        }
        self.gauge();
    }

    /// Lets every engine that has something to do advance by a step.
    fn step(&mut self) {
        let Self { engines, open, shared, .. } = self;
        for (&model, engine) in engines.iter_mut().filter(|(_, engine)| !engine.is_idle()) {
            let started = Instant::now();
            let Ok(updates) = catch_unwind(AssertUnwindSafe(|| engine.step())) else {
                // Its requests end, and what they hold is freed. The model is not loaded anew.
                shared.metrics.panics.inc();
                let error = ApiError::new(
                    axum::http::StatusCode::INTERNAL_SERVER_ERROR,
                    "the engine failed in this step",
                );
                open.retain(|(of, id), open| {
                    if *of == model {
                        engine.cancel(*id);
                        open.tell(Err(error.clone()));
                    }
                    *of != model
                });
                continue;
            };
            for warning in engine.take_prefix_warnings() {
                tracing::warn!("--prompt-cache-dir: {warning}");
            }
            shared.metrics.step.observe(started.elapsed().as_secs_f64());
            if !updates.is_empty() {
                shared.touch();
            }
            for (id, update) in updates {
                let (update, ended) = match update {
                    Update::Failed(error) => (Err(ApiError::from(error)), true),
                    Update::Token(event) => {
                        shared.metrics.tokens.inc_by(u64::from(event.token.is_some()));
                        let ended = event.finish.is_some();
                        (Ok(Update::Token(event)), ended)
                    }
                    update => (Ok(update), false),
                };
                let Some(listener) = open.get(&(model, id)) else { continue };
                listener.tell(update);
                if ended {
                    open.remove(&(model, id));
                }
            }
        }
        self.gauge();
    }

    fn gauge(&self) {
        let budgets = || self.engines.values().map(|engine| engine.kv().budget());
        let metrics = &self.shared.metrics;
        metrics.running.set(self.open.len() as i64);
        metrics.kv_bytes.set(budgets().map(|budget| budget.used()).sum::<usize>() as i64);
        let limit = budgets().map(|budget| budget.limit()).fold(0, usize::saturating_add);
        metrics.kv_limit.set(i64::try_from(limit).unwrap_or(i64::MAX));
    }
}
