//! One request's events as an iterator.

use super::{Engine, Event, RequestError, RequestId, Stats, Update};
use std::collections::VecDeque;

/// The events of one request, in order; ends after the event whose `finish` is set, or after an error.
/// Dropping it cancels the request.
#[derive(Debug)]
pub struct Generation<'a> {
    engine: &'a mut Engine,
    id: RequestId,
    pending: VecDeque<Update>,
    stats: Stats,
    ended: bool,
}

impl<'a> Generation<'a> {
    pub(super) fn new(engine: &'a mut Engine, id: RequestId) -> Self {
        let stats = engine.stats(id).unwrap_or_default();
        Self { engine, id, pending: VecDeque::new(), stats, ended: false }
    }

    /// What the request cost so far.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The next update, prompt progress included; `None` at the end.
    pub fn next_update(&mut self) -> Option<Update> {
        if self.ended {
            return None;
        }
        while self.pending.is_empty() {
            if self.engine.is_idle() {
                self.ended = true;
                return None;
            }
            let mine = self.engine.step().into_iter().filter(|(id, _)| *id == self.id);
            self.pending.extend(mine.map(|(_, update)| update));
        }
        let update = self.pending.pop_front();
        if let Some(Update::Token(event)) = &update {
            self.stats.clone_from(&event.stats);
        }
        self.ended = match &update {
            Some(Update::Token(event)) => event.finish.is_some(),
            Some(Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_)) => false,
            Some(Update::Failed(_)) | None => true,
        };
        update
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Event, RequestError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_update()? {
                Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
                Update::Token(event) => return Some(Ok(event)),
                Update::Failed(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        self.engine.cancel(self.id);
    }
}
