//! Synthetic prompts: random tokens, the same for the same seed.

use lmx::engine::Engine;
use lmx::sample::fold_seed;

/// Draws prompts from a model's vocabulary.
#[derive(Debug)]
pub(crate) struct Prompts {
    /// What is drawn from: tokens that stand for text.
    ids: Vec<u32>,
    seed: u64,
    drawn: u64,
}

impl Prompts {
    /// Prompts for the engine's model. Control tokens and ids without a token are left out: they could mean something to
    /// the model, or to a server.
    pub(crate) fn new(engine: &Engine, seed: u64) -> Self {
        let (tokenizer, vocab) = (engine.tokenizer(), engine.model().vocab());
        let stands_for_text = |&id: &u32| tokenizer.token(id).is_some() && !tokenizer.is_control(id);
        let known: Vec<u32> = (0..u32::try_from(vocab).unwrap_or(u32::MAX)).filter(stands_for_text).collect();
        Self { ids: if known.is_empty() { vec![0] } else { known }, seed, drawn: 0 }
    }

    /// The next `count` prompts of `tokens` tokens each.
    pub(crate) fn draw(&mut self, count: usize, tokens: usize) -> Vec<Vec<u32>> {
        (0..count).map(|_| (0..tokens).map(|_| self.id()).collect()).collect()
    }

    fn id(&mut self) -> u32 {
        // Number 0 would be the seed itself.
        self.drawn += 1;
        let random = fold_seed(self.seed, self.drawn) as usize;
        self.ids[random % self.ids.len()]
    }
}
