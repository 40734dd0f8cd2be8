//! Requests that run together, and what of their events must not depend on that.

use lmx::engine::{Engine, Event, FinishReason, Request, RequestId, Update};
use std::collections::BTreeMap;

/// What must not depend on the company: tokens, the bits of their log-probabilities and of the likely ones', texts, ends.
pub type Essence = Vec<(Option<u32>, u32, Vec<(u32, u32)>, String, Option<FinishReason>)>;

pub fn essence(events: &[Event]) -> Essence {
    let top = |e: &Event| e.top.iter().map(|&(id, p)| (id, p.to_bits())).collect();
    events.iter().map(|e| (e.token, e.logprob.to_bits(), top(e), e.text.clone(), e.finish)).collect()
}

/// The events of one request that runs alone.
pub fn alone(engine: &mut Engine, request: Request) -> Vec<Event> {
    engine.generate(request).unwrap().map(Result::unwrap).collect()
}

/// Gives the events of a step to those that they are of.
pub fn collect(updates: Vec<(RequestId, Update)>, events: &mut BTreeMap<RequestId, Vec<Event>>) {
    for (id, update) in updates {
        match update {
            Update::Token(event) => events.entry(id).or_default().push(event),
            Update::Failed(error) => panic!("{id:?}: {error}"),
            Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
        }
    }
}

/// The events of requests that run together, in their order.
pub fn together(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<Event>> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut events = BTreeMap::new();
    while !engine.is_idle() {
        collect(engine.step(), &mut events);
    }
    ids.iter().map(|id| events.remove(id).unwrap_or_default()).collect()
}
