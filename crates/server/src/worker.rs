//! The one thread that runs models: it owns every engine and lets each advance in turn.

use crate::error::{ApiError, ApiResult};
use crate::metrics::{EngineMetrics, Metrics, OfModel};
use lmx::cache::BlockBudget;
use lmx::engine::{Engine, Request, RequestId, Update};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Where what happens to a request goes: several requests of one caller share a way, told apart by an index.
pub(crate) type Listener = mpsc::UnboundedSender<(usize, ApiResult<Update>)>;

enum Command {
    /// Run a further engine.
    Add(Box<Served>),
    /// Run it no more; what runs on it ends.
    Remove { engine: u64, to: oneshot::Sender<Engine> },
    /// Look at an engine between steps.
    Ask { engine: u64, ask: Asking },
    /// Run a request.
    Submit { engine: u64, open: Open, request: Box<Request> },
    /// End it; nobody listens any more.
    Cancel { ticket: u64 },
    /// End all that run, after a while, and take no more.
    Stop { grace: Duration },
}

/// What is to be done with an engine.
type Asking = Box<dyn FnOnce(&Engine) + Send>;

/// Names an engine of the thread's.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    id: u64,
    model: OfModel,
    lost: Arc<AtomicBool>,
    kv: Arc<BlockBudget>,
}

impl EngineHandle {
    /// The label of its model's metrics.
    pub(crate) fn model(&self) -> &OfModel {
        &self.model
    }

    /// Bytes of the keys and values that it holds now.
    pub(crate) fn kv_bytes(&self) -> usize {
        self.kv.used()
    }

    /// Whether it panicked: then it has been dropped, and its requests have ended.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

/// Sends requests to the thread. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Worker {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

/// What the thread and its callers both see.
struct Shared {
    engines: AtomicU64,
    tickets: AtomicU64,
    /// Requests that wait or run.
    in_flight: AtomicUsize,
    /// Requests whose model is being loaded.
    await_model: AtomicUsize,
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

/// A request whose model is being loaded.
pub(crate) struct AwaitModel(Arc<Shared>);

impl Drop for AwaitModel {
    fn drop(&mut self) {
        self.0.await_model.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.await_model.dec();
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
            engines: AtomicU64::new(0),
            tickets: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            await_model: AtomicUsize::new(0),
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

    /// Adds the engine of the model of that name.
    pub(crate) fn add(&self, name: &str, engine: Engine) -> ApiResult<EngineHandle> {
        let id = self.shared.engines.fetch_add(1, Ordering::Relaxed);
        let (model, kv) = (OfModel { model: name.to_owned() }, Arc::clone(engine.kv().budget()));
        let handle = EngineHandle { id, model, lost: Arc::default(), kv };
        // Here and not in the thread, so that the model's metrics are there as soon as the model is.
        let metrics = self.shared.metrics.of_engine(handle.model());
        metrics.show(&engine);
        self.send(Command::Add(Box::new(Served { engine, handle: handle.clone(), metrics })))?;
        Ok(handle)
    }

    /// Takes an engine out, if it is still there.
    pub(crate) async fn remove(&self, engine: &EngineHandle) -> Option<Engine> {
        let (to, removed) = oneshot::channel();
        self.send(Command::Remove { engine: engine.id, to }).ok()?;
        removed.await.ok()
    }

    /// What `ask` finds out of an engine, between two steps.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        engine: &EngineHandle,
        ask: impl FnOnce(&Engine) -> T + Send + 'static,
    ) -> ApiResult<T> {
        let (sender, receiver) = oneshot::channel();
        let ask: Asking = Box::new(move |engine| {
            // Who asked may have gone.
            let _ = sender.send(ask(engine));
        });
        self.send(Command::Ask { engine: engine.id, ask })?;
        // The engine has gone, and perhaps the thread.
        receiver.await.map_err(|_| ApiError::unloaded())
    }

    /// Queues a request, unless `most` wait or run already.
    pub(crate) fn submit(
        &self,
        engine: &EngineHandle,
        request: Request,
        (index, listener): (usize, Listener),
        most: usize,
    ) -> ApiResult<Ticket> {
        let ticket = self.shared.tickets.fetch_add(1, Ordering::Relaxed);
        let before = self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        // From here on the ticket counts down again.
        let held = Ticket { ticket, commands: self.commands.clone(), shared: Arc::clone(&self.shared) };
        self.shared.check_queue(before + self.shared.await_model.load(Ordering::Relaxed), most)?;
        if before == 0 {
            self.shared.touch();
        }
        let open = Open { ticket, index, listener, told: None };
        self.send(Command::Submit { engine: engine.id, open, request: Box::new(request) })?;
        Ok(held)
    }

    /// Takes a place in the queue for a request whose model must be loaded first, unless `most` wait or run already.
    pub(crate) fn await_model(&self, most: usize) -> ApiResult<AwaitModel> {
        let before = self.shared.await_model.fetch_add(1, Ordering::Relaxed);
        self.shared.metrics.await_model.inc();
        // From here on it counts down again.
        let place = AwaitModel(Arc::clone(&self.shared));
        self.shared.check_queue(before + self.in_flight(), most)?;
        Ok(place)
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
    /// Refuses a request if as many as `most` wait or run before it.
    fn check_queue(&self, before: usize, most: usize) -> ApiResult<()> {
        if before < most {
            return Ok(());
        }
        self.metrics.refused.inc();
        Err(ApiError::too_many(format!("{before} requests wait or run: the queue is full (--max-queue)"), 1))
    }

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
    /// When it was last told of a token.
    told: Option<Instant>,
}

impl Open {
    fn tell(&self, update: ApiResult<Update>) {
        // Who has gone sends a cancel of his own.
        let _ = self.listener.send((self.index, update));
    }
}

/// An engine that runs.
struct Served {
    engine: Engine,
    handle: EngineHandle,
    metrics: EngineMetrics,
}

struct Thread {
    receiver: Receiver<Command>,
    shared: Arc<Shared>,
    engines: HashMap<u64, Served>,
    /// By engine and request.
    open: HashMap<(u64, RequestId), Open>,
    /// When what still runs is ended.
    stop_at: Option<Instant>,
}

impl Drop for Thread {
    /// Nobody waits for a thread that has ended, however it did.
    fn drop(&mut self) {
        let ended = ApiError::unavailable("the server was stopped before the reply was complete");
        self.open.drain().for_each(|(_, open)| open.tell(Err(ended.clone())));
    }
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
                return;
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Add(served) => drop(self.engines.insert(served.handle.id, *served)),
            Command::Remove { engine, to } => {
                if let Some(served) = self.engines.remove(&engine) {
                    served.metrics.clear();
                    // Who does not wait for it has it dropped here.
                    let _ = to.send(served.engine);
                    self.end(engine, &ApiError::unloaded());
                }
            }
            Command::Ask { engine, ask } => drop(self.with(engine, |engine| ask(engine))),
            Command::Submit { engine: id, open, request } => {
                let submitted = if self.stop_at.is_some() {
                    Err(ApiError::unavailable("the server is stopping"))
                } else {
                    self.with(id, |engine| engine.submit(*request).map_err(ApiError::from)).flatten()
                };
                match submitted {
                    Ok(request) => self.begin((id, request), open),
                    Err(error) => open.tell(Err(error)),
                }
            }
            Command::Cancel { ticket } => {
                let found = self.open.iter().find(|(_, open)| open.ticket == ticket).map(|(key, _)| *key);
                if let Some((id, request)) = found {
                    self.close((id, request));
                    // If there is no engine, nothing of the request is left.
                    let _ = self.with(id, |engine| engine.cancel(request));
                    self.shared.metrics.cancelled.inc();
                }
            }
            Command::Stop { grace } => self.stop_at = Some(Instant::now() + grace),
        }
    }

    fn begin(&mut self, key: (u64, RequestId), open: Open) {
        self.open.insert(key, open);
        if let Some(served) = self.engines.get(&key.0) {
            served.metrics.in_flight.inc();
        }
    }

    fn close(&mut self, key: (u64, RequestId)) {
        self.open.remove(&key);
        if let Some(served) = self.engines.get(&key.0) {
            served.metrics.in_flight.dec();
        }
    }

    /// Ends the requests of an engine that is not there any more.
    fn end(&mut self, engine: u64, error: &ApiError) {
        for (_, open) in self.open.extract_if(|(of, _), _| *of == engine) {
            open.tell(Err(error.clone()));
        }
    }

    /// Lets an engine do something. If it panics it is lost: what it holds is dropped, its requests end, and nobody
    /// else's.
    fn with<T>(&mut self, id: u64, run: impl FnOnce(&mut Engine) -> T) -> ApiResult<T> {
        let Some(served) = self.engines.get_mut(&id) else { return Err(ApiError::unloaded()) };
        // Nothing of the engine is used after a panic.
        let done = catch_unwind(AssertUnwindSafe(|| run(&mut served.engine)));
        if done.is_ok() {
            served.metrics.show(&served.engine);
        }
        done.map_err(|_| self.lose(id))
    }

    /// Drops an engine that panicked and ends its requests; returns what they are told.
    fn lose(&mut self, id: u64) -> ApiError {
        let error = ApiError::internal("the engine failed; its model is loaded again for the next request");
        self.shared.metrics.panics.inc();
        if let Some(served) = self.engines.remove(&id) {
            served.metrics.clear();
            served.handle.lost.store(true, Ordering::Release);
            // What it left half done may have it panic again.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(served.engine)));
        }
        self.end(id, &error);
        error
    }

    /// Lets every engine that has something to do advance by a step.
    fn step(&mut self) {
        let busy: Vec<u64> =
            self.engines.iter().filter(|(_, served)| !served.engine.is_idle()).map(|(&id, _)| id).collect();
        for id in busy {
            let started = Instant::now();
            let Ok((updates, warnings)) =
                self.with(id, |engine| (engine.step(), engine.take_prefix_warnings()))
            else {
                continue;
            };
            for warning in warnings {
                tracing::warn!("--prompt-cache-dir: {warning}");
            }
            self.shared.metrics.step.observe(started.elapsed().as_secs_f64());
            if !updates.is_empty() {
                self.shared.touch();
            }
            for (request, update) in updates {
                self.deliver((id, request), update);
            }
        }
    }

    /// Tells who waits for a request what happened to it.
    fn deliver(&mut self, key: (u64, RequestId), update: Update) {
        let Some(open) = self.open.get_mut(&key) else { return };
        let ended = match &update {
            Update::Failed(_) => true,
            Update::Token(event) => {
                if let (Some(served), Some(_)) = (self.engines.get(&key.0), event.token) {
                    served.metrics.tokens.inc();
                    let now = Instant::now();
                    if let Some(before) = open.told.replace(now) {
                        served.metrics.between_tokens.observe((now - before).as_secs_f64());
                    }
                }
                event.finish.is_some()
            }
            _ => false,
        };
        open.tell(match update {
            Update::Failed(error) => Err(ApiError::from(error)),
            update => Ok(update),
        });
        if ended {
            self.close(key);
        }
    }
}
