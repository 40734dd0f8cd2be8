//! Responses that can be asked for again and continued: bounded in number and in bytes; those that were not used for
//! longest go first.

use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a stored response takes beside its texts, about.
const OVERHEAD_BYTES: usize = 512;

/// A response, what it answers, and what came before.
pub(crate) struct Stored {
    previous: Option<Arc<Stored>>,
    /// Whose it is: the index of a key.
    owner: usize,
    /// The request's own items, a JSON list.
    pub(crate) input: String,
    /// The response, a JSON object.
    pub(crate) response: String,
    /// Bytes of this response and of all before it.
    bytes: usize,
    /// Bytes of all responses that are held.
    held: Arc<AtomicUsize>,
}

impl Stored {
    fn own_bytes(&self) -> usize {
        self.input.len() + self.response.len() + OVERHEAD_BYTES
    }

    /// The items of the request, then those of the response.
    pub(crate) fn items(&self) -> Vec<Value> {
        let mut items: Vec<Value> = serde_json::from_str(&self.input).unwrap_or_default();
        let mut response: Value = serde_json::from_str(&self.response).unwrap_or_default();
        if let Value::Array(output) = response["output"].take() {
            items.extend(output);
        }
        items
    }

    /// This response and those before it, the latest first.
    pub(crate) fn chain(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(Some(self), |stored| stored.previous.as_ref())
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.held.fetch_sub(self.own_bytes(), Ordering::Relaxed);
        // One after the other: as many calls within calls as a conversation has turns could be too many.
        let mut next = self.previous.take();
        while let Some(mut stored) = next.and_then(Arc::into_inner) {
            next = stored.previous.take();
        }
    }
}

/// The responses.
pub(crate) struct Store {
    most: usize,
    most_bytes: usize,
    held: Arc<AtomicUsize>,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    by_id: HashMap<String, (u64, Arc<Stored>)>,
    /// Ids by when they were last used.
    by_use: BTreeMap<u64, String>,
    clock: u64,
}

impl Entries {
    fn put(&mut self, id: String, stored: Arc<Stored>) {
        self.clock += 1;
        self.by_use.insert(self.clock, id.clone());
        self.by_id.insert(id, (self.clock, stored));
    }

    fn take(&mut self, id: &str) -> Option<Arc<Stored>> {
        let (used, stored) = self.by_id.remove(id)?;
        self.by_use.remove(&used);
        Some(stored)
    }
}

impl Store {
    /// A store of at most `most` responses of `most_bytes` bytes together; 0 stores none.
    pub(crate) fn new(most: usize, most_bytes: usize) -> Self {
        Self { most, most_bytes, held: Arc::default(), entries: Mutex::default() }
    }

    /// Whether anything can be stored.
    pub(crate) fn is_on(&self) -> bool {
        self.most > 0 && self.most_bytes > 0
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response. Returns whether it could be: with all that came before it may be too long.
    pub(crate) fn keep(
        &self,
        id: &str,
        owner: usize,
        previous: Option<Arc<Stored>>,
        (input, response): (String, String),
    ) -> bool {
        let held = Arc::clone(&self.held);
        let before = previous.as_ref().map_or(0, |stored| stored.bytes);
        let mut stored = Stored { previous, owner, input, response, bytes: 0, held };
        self.held.fetch_add(stored.own_bytes(), Ordering::Relaxed);
        stored.bytes = before + stored.own_bytes();
        if !self.is_on() || stored.bytes > self.most_bytes {
            return false;
        }
        let mut entries = self.entries();
        entries.put(id.to_owned(), Arc::new(stored));
        while entries.by_id.len() > self.most || self.held.load(Ordering::Relaxed) > self.most_bytes {
            let Some((_, id)) = entries.by_use.pop_first() else { break };
            entries.by_id.remove(&id);
        }
        true
    }

    /// A response of this owner.
    pub(crate) fn get(&self, id: &str, owner: usize) -> Option<Arc<Stored>> {
        let mut entries = self.entries();
        entries.by_id.get(id).filter(|(_, stored)| stored.owner == owner)?;
        let stored = entries.take(id)?;
        entries.put(id.to_owned(), Arc::clone(&stored));
        Some(stored)
    }

    /// Forgets a response of this owner. Those that continue it keep what they need of it. Returns whether it was there.
    pub(crate) fn delete(&self, id: &str, owner: usize) -> bool {
        let mut entries = self.entries();
        let own = entries.by_id.get(id).is_some_and(|(_, stored)| stored.owner == owner);
        own && entries.take(id).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(store: &Store, id: &str, previous: Option<&str>, bytes: usize) -> bool {
        let previous = previous.map(|id| store.get(id, 0).unwrap());
        store.keep(id, 0, previous, (String::new(), "x".repeat(bytes)))
    }

    fn held(store: &Store) -> usize {
        store.held.load(Ordering::Relaxed)
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let store = Store::new(2, 1 << 20);
        assert!(keep(&store, "a", None, 1) && keep(&store, "b", None, 1));
        assert!(store.get("a", 0).is_some());
        assert!(keep(&store, "c", None, 1));
        assert!(store.get("b", 0).is_none() && store.get("a", 0).is_some() && store.get("c", 0).is_some());
    }

    #[test]
    fn bytes_are_those_that_are_held() {
        let store = Store::new(100, 10_000);
        assert!(keep(&store, "a", None, 3000));
        assert!(keep(&store, "b", Some("a"), 3000));
        assert!(store.delete("a", 0) && !store.delete("a", 0));
        assert_eq!(held(&store), 6000 + 2 * OVERHEAD_BYTES, "what continues it holds it");
        assert_eq!(store.get("b", 0).unwrap().chain().count(), 2);
        assert!(!keep(&store, "c", Some("b"), 3000), "with what came before it is too long");
        assert!(keep(&store, "d", None, 4000), "others give way");
        assert!(store.get("b", 0).is_none());
        assert_eq!(held(&store), 4000 + OVERHEAD_BYTES);
        assert!(!keep(&store, "e", None, 20_000) && held(&store) < 10_000);
    }

    #[test]
    fn a_long_chain_ends_without_nesting() {
        let store = Store::new(usize::MAX, usize::MAX);
        let mut previous = None;
        for turn in 0..200_000 {
            store.keep(&turn.to_string(), 0, previous.take(), (String::new(), String::new()));
            previous = store.get(&turn.to_string(), 0);
        }
        drop(store);
        drop(previous);
    }

    #[test]
    fn nobody_sees_what_is_not_his() {
        let store = Store::new(9, 1 << 20);
        assert!(keep(&store, "a", None, 1));
        assert!(store.get("a", 1).is_none() && !store.delete("a", 1) && store.get("a", 0).is_some());
        assert!(!Store::new(0, 1).is_on());
    }
}
