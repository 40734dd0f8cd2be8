//! Perplexity per token, per word and per byte, each with what it was counted over.

use super::protocol::{Protocol, Window};
use super::score::{ScoreError, Scorer, Span};
use crate::engine::PromptToken;
use crate::text::Tokenizer;
use std::ops::ControlFlow;

/// A mean with its error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// The standard error of the mean, the values taken as independent; `None` for fewer than two.
    pub standard_error: Option<f64>,
    /// How many values.
    pub count: usize,
}

impl Estimate {
    /// Of some values; `None` without any, and if they are not all finite.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        // Bessel's correction, as in mlx-lm.
        let standard_error = (count > 1).then(|| (squares / (count - 1) as f64 / count as f64).sqrt());
        let finite = mean.is_finite() && standard_error.is_none_or(f64::is_finite);
        finite.then_some(Self { mean, standard_error, count })
    }

    /// Its exponential: of a mean loss the perplexity. The error is that of the mean times it (the delta method).
    #[must_use]
    pub fn exp(self) -> Self {
        let mean = self.mean.exp();
        Self { mean, standard_error: self.standard_error.map(|error| error * mean), ..self }
    }
}

/// The perplexity of tokens with these losses (negative natural log-probabilities): the exponential of their mean, with
/// the error that the delta method gives. `None` without losses, and if one is not finite.
#[must_use]
pub fn perplexity(losses: &[f64]) -> Option<Estimate> {
    Estimate::of(losses).map(Estimate::exp)
}

/// The bits that a text of `bytes` bytes takes per byte if it has this loss in all, in nats. `None` for no bytes.
#[must_use]
pub fn bits_per_byte(loss: f64, bytes: usize) -> Option<f64> {
    (bytes > 0).then(|| loss / std::f64::consts::LN_2 / bytes as f64)
}

/// What a token is of its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Size {
    bytes: usize,
    /// Words that begin in it.
    words: usize,
    /// Control tokens are no text.
    text: bool,
}

/// The sizes of a text's tokens. Words are what white space separates.
fn sizes(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<Size> {
    let mut bytes = Vec::new();
    let mut sizes: Vec<Size> = Vec::with_capacity(tokens.len());
    let mut ends = Vec::with_capacity(tokens.len());
    for &token in tokens {
        let text = !tokenizer.is_control(token);
        let own = tokenizer.token_bytes(token).filter(|_| text).unwrap_or_default();
        sizes.push(Size { bytes: own.len(), words: 0, text });
        // What is on both sides of a control token is not one word.
        bytes.extend(if text { own } else { vec![b'\n'] });
        ends.push(bytes.len());
    }
    let (mut at, mut between) = (0, true);
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if between && !c.is_whitespace() {
                let token = ends.partition_point(|&end| end <= at);
                sizes.get_mut(token).into_iter().for_each(|size| size.words += 1);
            }
            between = c.is_whitespace();
            at += c.len_utf8();
        }
        at += chunk.invalid().len();
    }
    sizes
}

/// A text in its tokens.
struct Text {
    tokens: Vec<u32>,
    sizes: Vec<Size>,
}

/// What is to be scored: texts, cut into windows.
pub struct Plan {
    texts: Vec<Text>,
    /// Each with its text's index.
    windows: Vec<(usize, Window)>,
    prefix: Option<u32>,
}

impl Plan {
    /// The windows of texts that are given in their tokens, each cut by itself. `prefix` stands before every window that
    /// does not begin with it.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer, texts: Vec<Vec<u32>>, protocol: Protocol, prefix: Option<u32>) -> Self {
        let windows = |(i, tokens): (usize, &Vec<u32>)| {
            let windows = protocol.windows(tokens.len()).into_iter();
            // A window of one token scores nothing without a prefix.
            windows.filter(|w| w.span(tokens, prefix).is_some()).map(move |w| (i, w)).collect::<Vec<_>>()
        };
        let windows = texts.iter().enumerate().flat_map(windows).collect();
        let text = |tokens: Vec<u32>| Text { sizes: sizes(tokenizer, &tokens), tokens };
        Self { texts: texts.into_iter().map(text).collect(), windows, prefix }
    }

    /// Keeps the first windows only.
    pub fn truncate(&mut self, windows: usize) {
        self.windows.truncate(windows);
    }

    /// How many windows there are.
    #[must_use]
    pub fn windows(&self) -> usize {
        self.windows.len()
    }

    /// Tokens of all windows, counted as often as they are read, without the prefixes.
    #[must_use]
    pub fn tokens_read(&self) -> usize {
        self.windows.iter().map(|(_, window)| window.read.len()).sum()
    }

    /// Tokens that will be scored.
    #[must_use]
    pub fn tokens_scored(&self) -> usize {
        self.spans().map(|span| span.tokens.len() - span.from).sum()
    }

    /// The tokens of each window.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.windows
            .iter()
            .filter_map(|(text, window)| window.span(&self.texts.get(*text)?.tokens, self.prefix))
    }

    /// The size of the token with an index in the span of a window, the `place`th.
    fn size(&self, place: usize, index: usize) -> Size {
        let of = |(text, window): &(usize, Window)| {
            let Text { tokens, sizes } = self.texts.get(*text)?;
            let first = tokens.get(window.read.start);
            let prefixed = self.prefix.is_some() && first.copied() != self.prefix;
            sizes.get(window.read.start + index - usize::from(prefixed)).copied()
        };
        self.windows.get(place).and_then(of).unwrap_or_default()
    }

    /// Sums losses up: of each window those of its scored tokens, with their indices in the span.
    pub(super) fn sum(&self, losses: &[Vec<(usize, f64)>]) -> Loss {
        let mut loss =
            Loss { tokens: losses.iter().flatten().map(|&(_, loss)| loss).collect(), ..Loss::default() };
        for (place, losses) in losses.iter().enumerate() {
            for &(index, nats) in losses {
                let size = self.size(place, index);
                if size.text {
                    loss.text.nats += nats;
                    loss.text.tokens += 1;
                    loss.text.bytes += size.bytes;
                    loss.text.words += size.words;
                }
            }
        }
        loss
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("texts", &self.texts.len())
            .field("windows", &self.windows.len())
            .finish()
    }
}

/// What was measured: the loss of each scored token, and of the text that they make.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loss {
    /// The losses of all scored tokens, in nats, in the order of the windows.
    pub tokens: Vec<f64>,
    /// Those of them that are text.
    pub text: TextLoss,
}

/// The loss of text, whatever its tokens, so that models with different tokenizers can be compared. Control tokens are
/// left out of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TextLoss {
    /// In all, in nats.
    pub nats: f64,
    /// Tokens.
    pub tokens: usize,
    /// UTF-8 bytes.
    pub bytes: usize,
    /// Words, as white space separates them.
    pub words: usize,
}

impl TextLoss {
    /// Bits per byte. `None` for no bytes.
    #[must_use]
    pub fn bits_per_byte(&self) -> Option<f64> {
        bits_per_byte(self.nats, self.bytes)
    }

    /// Perplexity per byte. `None` for no bytes.
    #[must_use]
    pub fn byte_perplexity(&self) -> Option<f64> {
        (self.bytes > 0).then(|| (self.nats / self.bytes as f64).exp())
    }

    /// Perplexity per word. `None` for no words.
    #[must_use]
    pub fn word_perplexity(&self) -> Option<f64> {
        (self.words > 0).then(|| (self.nats / self.words as f64).exp())
    }
}

impl Scorer<'_> {
    /// The losses of what is planned. `progress` is told how many windows are done, and says whether to go on.
    ///
    /// # Errors
    /// The first window's that fails; [`ScoreError::Stopped`].
    pub fn loss(
        &mut self,
        plan: &Plan,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Loss, ScoreError> {
        let scored = self.score_all(plan.spans().collect(), progress);
        let losses: Result<Vec<_>, _> = scored.into_iter().map(|window| Ok(losses(&window?))).collect();
        losses.map(|losses| plan.sum(&losses))
    }
}

/// The loss of each token, with its index.
pub(super) fn losses(tokens: &[PromptToken]) -> Vec<(usize, f64)> {
    tokens.iter().map(|token| (token.index, -f64::from(token.logprob))).collect()
}
