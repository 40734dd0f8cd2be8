//! The least that a reply may have.

use lmx::sample::{LogitsProcessor, SampleError};

/// Strikes out the tokens that would end a reply until it has so many tokens.
#[derive(Debug)]
pub(crate) struct MinTokens {
    ends: Vec<u32>,
    least: usize,
    come: usize,
}

impl MinTokens {
    /// For a reply of at least `least` tokens before one of `ends`.
    pub(crate) fn new(ends: Vec<u32>, least: usize) -> Self {
        Self { ends, least, come: 0 }
    }
}

impl LogitsProcessor for MinTokens {
    fn process(&mut self, _: &[u32], logits: &mut [f32]) -> Result<(), SampleError> {
        if self.come < self.least {
            for &end in &self.ends {
                if let Some(logit) = logits.get_mut(end as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, _: u32) {
        self.come += 1;
    }

    fn rollback(&mut self, tokens: usize) {
        self.come = self.come.saturating_sub(tokens);
    }
}
