//! Log-likelihoods of continuations and of whole texts, as lm-evaluation-harness defines them.

use super::protocol::Protocol;
use super::score::{ScoreError, Scored, Scorer, Span};
use std::ops::ControlFlow;

/// How likely a continuation is after its context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogLikelihood {
    /// The natural logarithm of its probability: the sum over its tokens.
    pub sum: f64,
    /// Whether greedy decoding would have given it: no token is likelier than its own, at any place.
    pub greedy: bool,
    /// Its tokens.
    pub tokens: usize,
    /// Tokens of the context that were left out at its beginning, because the model could not have read them.
    pub truncated: usize,
    /// Whether context and continuation are other tokens together than apart: a token may cross the border. As
    /// everywhere in the harness the context's own tokens are read then, and of the tokens of both together those are
    /// scored that follow as many.
    pub merged: bool,
}

/// How likely a whole text is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RollingLogLikelihood {
    /// The natural logarithm of its probability: the sum over all its tokens.
    pub sum: f64,
    /// Its tokens; each is scored once.
    pub tokens: usize,
    /// The pieces that it was read in: more than one if it is longer than the model's context.
    pub windows: usize,
}

/// A continuation in its tokens.
struct Continuation {
    span: Span,
    truncated: usize,
    merged: bool,
}

impl Scorer<'_> {
    /// The log-likelihood of each continuation after its context. `progress` is told how many are done, and says whether
    /// to go on; what is not scored then is [`ScoreError::Stopped`].
    ///
    /// White space at the end of a context belongs to the continuation, since that is where tokenizers have it. Both are
    /// encoded together; of an empty context the [prefix token](Scorer::prefix_token) takes the place. A context that
    /// leaves no room is cut at its beginning.
    ///
    /// # Errors
    /// Each pair has its own; the others are not touched.
    pub fn log_likelihood<C: AsRef<str>, K: AsRef<str>>(
        &mut self,
        pairs: &[(C, K)],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Vec<Result<LogLikelihood, ScoreError>> {
        let encoded = pairs.iter().map(|(context, rest)| self.continuation(context.as_ref(), rest.as_ref()));
        let (mut spans, mut parts) = (Vec::new(), Vec::new());
        for encoded in encoded.collect::<Vec<_>>() {
            parts.push(encoded.map(|Continuation { span, truncated, merged }| {
                spans.push(span);
                (truncated, merged)
            }));
        }
        let mut scored = self.score_all(spans, progress).into_iter();
        let likelihood = |part: Result<(usize, bool), ScoreError>| {
            let (truncated, merged) = part?;
            let tokens = scored.next().unwrap_or(Err(ScoreError::Stopped))?;
            let greedy = tokens.iter().all(|token| token.greedy);
            Ok(LogLikelihood { sum: sum(&tokens), greedy, tokens: tokens.len(), truncated, merged })
        };
        parts.into_iter().map(likelihood).collect()
    }

    fn continuation(&self, context: &str, rest: &str) -> Result<Continuation, ScoreError> {
        if rest.is_empty() {
            return Err(ScoreError::EmptyContinuation);
        }
        let mut tokens = self.encode(context.trim_end())?;
        let whole = self.encode(&format!("{context}{rest}"))?;
        let common = tokens.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        let merged = common < tokens.len();
        // All of it may have gone into the context's last token: that token is the least that tells of it.
        let mut from = if tokens.len() < whole.len() { tokens.len() } else { common };
        tokens.truncate(from);
        tokens.extend_from_slice(whole.get(from..).unwrap_or_default());
        if from >= tokens.len() {
            return Err(ScoreError::EmptyContinuation);
        }
        if from == 0 {
            let prefix = self.prefix_token().ok_or(ScoreError::NoPrefixToken)?;
            // A text that begins with it anyway has it once.
            if tokens.len() < 2 || tokens.first() != Some(&prefix) {
                tokens.insert(0, prefix);
            }
            from = 1;
        }
        let (scored, max_length) = (tokens.len() - from, self.max_length());
        if scored > max_length {
            return Err(ScoreError::ContinuationTooLong { tokens: scored, max_length });
        }
        let truncated = tokens.len().saturating_sub(max_length + 1);
        let span = Span { tokens: tokens.split_off(truncated), from: from - truncated };
        Ok(Continuation { span, truncated, merged })
    }

    /// The log-likelihood of each text, its first token given the [prefix token](Scorer::prefix_token). One that is longer
    /// than the model's context is read in the windows of [`Protocol::Documents`], with one token of context at least.
    ///
    /// # Errors
    /// Each text has its own; the others are not touched.
    pub fn rolling_log_likelihood<T: AsRef<str>>(
        &mut self,
        texts: &[T],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Vec<Result<RollingLogLikelihood, ScoreError>> {
        let (mut spans, mut counts) = (Vec::new(), Vec::new());
        for text in texts {
            counts.push(self.rolling(text.as_ref()).map(|windows| {
                let count = windows.len();
                spans.extend(windows);
                count
            }));
        }
        let mut scored = self.score_all(spans, progress).into_iter();
        let likelihood = |windows: Result<usize, ScoreError>| {
            let windows = windows?;
            let parts: Vec<Scored> = scored.by_ref().take(windows).collect();
            let (mut total, mut tokens) = (0.0, 0);
            for part in parts {
                let part = part?;
                total += sum(&part);
                tokens += part.len();
            }
            Ok(RollingLogLikelihood { sum: total, tokens, windows })
        };
        counts.into_iter().map(likelihood).collect()
    }

    fn rolling(&self, text: &str) -> Result<Vec<Span>, ScoreError> {
        let prefix = self.prefix_token().ok_or(ScoreError::NoPrefixToken)?;
        let mut tokens = self.encode(text)?;
        if tokens.first() != Some(&prefix) {
            tokens.insert(0, prefix);
        }
        if tokens.len() < 2 {
            return Err(ScoreError::EmptyText);
        }
        let protocol = Protocol::Documents { max_length: self.max_length(), context: 1 };
        Ok(protocol.windows(tokens.len()).iter().filter_map(|window| window.span(&tokens, None)).collect())
    }
}

fn sum(tokens: &[crate::engine::PromptToken]) -> f64 {
    tokens.iter().map(|token| f64::from(token.logprob)).sum()
}
