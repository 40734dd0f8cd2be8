//! What logits each token of a reply was drawn from.

use lmx::engine::{Engine, Request};
use lmx::sample::{LogitsProcessor, SampleError};
use std::sync::{Arc, Mutex};

/// Hashes of the logits of each step, in order.
#[derive(Clone, Default)]
pub(crate) struct LogitsLog(Arc<Mutex<Vec<u64>>>);

impl LogitsLog {
    /// A processor that only looks.
    pub(crate) fn watch(&self) -> Box<dyn LogitsProcessor> {
        let log = Arc::clone(&self.0);
        Box::new(move |_: &[u32], logits: &mut [f32]| -> Result<(), SampleError> {
            let hash = |h: u64, l: &f32| (h ^ u64::from(l.to_bits())).wrapping_mul(0x100_0000_01b3);
            log.lock().unwrap().push(logits.iter().fold(0xcbf2_9ce4_8422_2325, hash));
            Ok(())
        })
    }

    /// Those so far.
    pub(crate) fn hashes(&self) -> Vec<u64> {
        self.0.lock().unwrap().clone()
    }
}

/// A greedy reply: its tokens, and a hash of all logits that each was drawn from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reply {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<u64>,
}

/// The reply of `max_tokens` tokens, and the prompt tokens that were held.
pub(crate) fn reply(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> (Reply, usize) {
    let log = LogitsLog::default();
    let request = Request {
        ignore_eos: true,
        logits_processors: vec![log.watch()],
        ..Request::new(prompt.to_vec(), max_tokens)
    };
    let events: Vec<_> = engine.generate(request).unwrap().map(Result::unwrap).collect();
    let tokens = events.iter().filter_map(|event| event.token).collect();
    (Reply { tokens, logits: log.hashes() }, events.last().unwrap().stats.cached_tokens)
}
