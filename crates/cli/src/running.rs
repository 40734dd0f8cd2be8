//! Running one request: the only loop of the program that waits for tokens.

use crate::end::End;
use crate::interrupt::Hold;
use crate::progress::Progress;
use anyhow::Context;
use lmx::engine::{Engine, FinishReason, Request, Stats, Update};

/// New tokens from which on reading a prompt may take so long that a bar is due.
const LONG_PROMPT: usize = 512;

/// What a request gave.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// All text, as it was shown.
    pub(crate) text: String,
    /// All tokens that were generated; the last one may be an end-of-sequence token, which has no text.
    pub(crate) token_ids: Vec<u32>,
    /// `None` if Ctrl-C stopped it.
    pub(crate) finish: Option<FinishReason>,
    /// What it cost.
    pub(crate) stats: Stats,
}

/// Runs `request` to its end or until Ctrl-C, handing each piece of text to `show`.
///
/// # Errors
/// The request's own, with what was generated so far shown already; and those of `show`.
pub(crate) fn run(
    engine: &mut Engine,
    request: Request,
    show: &mut dyn FnMut(&str) -> Result<(), End>,
) -> Result<Outcome, End> {
    let hold = Hold::new();
    let unread = request.tokens.len() - engine.cached_tokens(&request.tokens, request.adapter.as_ref());
    let total = request.tokens.len() as u64;
    let mut generation = engine.generate(request).map_err(anyhow::Error::new)?;
    let mut progress = (unread >= LONG_PROMPT).then(|| Progress::slow("reading the prompt", total));
    let (mut text, mut token_ids, mut finish) = (String::new(), Vec::new(), None);
    while !hold.is_pressed() {
        match generation.next_update() {
            None => break,
            Some(Update::Prefill { done, total }) => {
                if let Some(progress) = &mut progress {
                    progress.set(done as u64, total as u64);
                }
            }
            Some(Update::Prompt(_) | Update::Embedding(_)) => {}
            Some(Update::Token(event)) => {
                // The bar must be gone before there is text.
                progress = None;
                token_ids.extend(event.token);
                text.push_str(&event.text);
                finish = event.finish;
                show(&event.text)?;
            }
            Some(Update::Failed(error)) => {
                return Err(error).context("the reply failed").map_err(End::Failed);
            }
        }
    }
    Ok(Outcome { text, token_ids, finish, stats: generation.stats().clone() })
}
