//! Limits in time, liveness, shutdown, and panics in a request's own code.

use super::{Engine, RequestError, RequestId, Update};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// One request's limits in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    submitted: Instant,
    /// When it last got on; `None` until it is admitted.
    progress: Option<Instant>,
    queue_deadline: Option<Duration>,
    stall_deadline: Option<Duration>,
}

impl Watch {
    pub(super) fn new(
        submitted: Instant,
        queue_deadline: Option<Duration>,
        stall_deadline: Option<Duration>,
    ) -> Self {
        Self { submitted, progress: None, queue_deadline, stall_deadline }
    }

    /// It was admitted, or got on.
    pub(super) fn note_progress(&mut self, now: Instant) {
        self.progress = Some(now);
    }

    /// The limit that has passed, if one has.
    fn expired(&self, now: Instant) -> Option<RequestError> {
        let passed = |since: Instant, limit: Option<Duration>| {
            limit.filter(|&l| now.saturating_duration_since(since) > l)
        };
        match self.progress {
            None => {
                passed(self.submitted, self.queue_deadline).map(|limit| RequestError::QueueDeadline { limit })
            }
            Some(last) => {
                passed(last, self.stall_deadline).map(|limit| RequestError::StallDeadline { limit })
            }
        }
    }
}

/// Whether an engine gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// Requests that wait or run.
    pub in_flight: usize,
    /// Those of them that wait: for a place among the running ones, or for memory.
    pub waiting: usize,
    /// Since the last token was delivered, or since there have been requests in flight; zero if there are none.
    pub silent: Duration,
}

impl Liveness {
    /// Whether requests are in flight and no token was delivered for longer than `limit`.
    #[must_use]
    pub fn is_stalled(&self, limit: Duration) -> bool {
        self.in_flight > 0 && self.silent > limit
    }
}

/// The engine's time.
pub(super) struct Clock {
    now: Box<dyn Fn() -> Instant + Send>,
    /// When the last token was delivered, or the engine was idle.
    pub(super) heard: Instant,
    /// When what still runs is ended; nothing is taken in while it is set.
    shutdown: Option<Instant>,
}

impl Clock {
    pub(super) fn new(now: Box<dyn Fn() -> Instant + Send>) -> Self {
        let heard = now();
        Self { now, heard, shutdown: None }
    }

    pub(super) fn now(&self) -> Instant {
        (self.now)()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.shutdown.is_some()
    }
}

impl Engine {
    /// The same engine with another clock, which all limits in time are measured by; for tests and simulations.
    /// Statistics keep real time.
    #[must_use]
    pub fn with_clock(mut self, now: impl Fn() -> Instant + Send + 'static) -> Self {
        self.clock = Clock::new(Box::new(now));
        self
    }

    /// Whether the engine gets on: a watchdog's question.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        let waiting = self.waiting.len();
        let in_flight = waiting + self.running.len();
        let silent = self.clock.now().saturating_duration_since(self.clock.heard);
        Liveness { in_flight, waiting, silent: if in_flight == 0 { Duration::ZERO } else { silent } }
    }

    /// Takes no more requests ([`RequestError::Shutdown`]). Those in flight go on as the caller goes on with
    /// [`Engine::step`]; the first step after `grace` ends the ones that are left with the same error.
    pub fn shutdown(&mut self, grace: Duration) {
        let now = self.clock.now();
        // A grace that no clock reaches is one that never ends.
        self.clock.shutdown =
            Some(now.checked_add(grace).unwrap_or(now + Duration::from_secs(u32::MAX.into())));
    }

    /// Ends the requests whose time is over.
    pub(super) fn expire(&mut self, updates: &mut Vec<(RequestId, Update)>) {
        let now = self.clock.now();
        let over = self.clock.shutdown.is_some_and(|end| now >= end);
        let all = self.running.iter().chain(&self.waiting);
        let expired = |watch: &Watch| if over { Some(RequestError::Shutdown) } else { watch.expired(now) };
        let ended: Vec<_> = all.filter_map(|active| Some((active.id, expired(&active.watch)?))).collect();
        for (id, error) in ended {
            self.cancel(id);
            updates.push((id, Update::Failed(error)));
        }
    }
}

/// Runs code that belongs to one request; should it panic, the request has an error.
pub(super) fn guarded<T>(
    part: &'static str,
    run: impl FnOnce() -> Result<T, RequestError>,
) -> Result<T, RequestError> {
    // What the code left half done belongs to the request, which ends.
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(RequestError::Panicked { part, message })
    })
}
