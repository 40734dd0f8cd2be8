//! What a trial measured, and the figures that follow from it. Times are in seconds.

/// What one sequence of a trial did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    pub(crate) prompt_tokens: usize,
    /// Those of them that were not run, because a prefix cache held them.
    pub(crate) cached_tokens: usize,
    /// Tokens generated.
    pub(crate) tokens: usize,
    /// When each piece of the reply came, counted from the request. A piece is a token; a server may send several tokens
    /// in one.
    pub(crate) arrivals: Vec<f64>,
}

/// What a trial was: as many sequences as its batch size.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trial {
    pub(crate) sequences: Vec<Sequence>,
    /// From the first request to the end of the last reply.
    pub(crate) seconds: f64,
    /// The most memory that the process held meanwhile, in bytes; `None` for a server, which does not tell.
    pub(crate) peak_memory: Option<u64>,
    /// How often a sequence gave its keys and values up to others.
    pub(crate) preemptions: usize,
}

impl Trial {
    /// When each sequence got its first token.
    pub(crate) fn first_tokens(&self) -> impl Iterator<Item = f64> {
        self.sequences.iter().filter_map(|sequence| sequence.arrivals.first().copied())
    }

    /// The times between a sequence's pieces, of all sequences.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = f64> {
        self.sequences.iter().flat_map(|s| s.arrivals.windows(2).map(|pair| pair[1] - pair[0]))
    }

    /// Prompt tokens run per second until the last sequence had its first token; for one sequence what `lmx generate`
    /// reports.
    pub(crate) fn prompt_tps(&self) -> f64 {
        let run = |s: &Sequence| s.prompt_tokens - s.cached_tokens.min(s.prompt_tokens);
        let tokens: usize = self.sequences.iter().map(run).sum();
        tokens as f64 / self.all_begun().max(f64::MIN_POSITIVE)
    }

    /// Tokens generated per second once all sequences had their first token; for one sequence what `lmx generate`
    /// reports. `None` if none was generated after that.
    pub(crate) fn generation_tps(&self) -> Option<f64> {
        let begun = self.all_begun();
        let end = self.sequences.iter().filter_map(|s| s.arrivals.last().copied()).fold(begun, f64::max);
        let tokens: f64 = self.sequences.iter().map(|s| s.tokens_after(begun)).sum();
        (tokens > 0.0 && end > begun).then(|| tokens / (end - begun))
    }

    fn all_begun(&self) -> f64 {
        self.first_tokens().fold(0.0, f64::max)
    }
}

impl Sequence {
    /// Tokens that came after `time`: each piece but the first stands for the same part of them.
    fn tokens_after(&self, time: f64) -> f64 {
        let pieces = self.arrivals.len().saturating_sub(1);
        let after = self.arrivals.iter().skip(1).filter(|&&arrival| arrival > time).count();
        let tokens = self.tokens.saturating_sub(1);
        if pieces == 0 { 0.0 } else { tokens as f64 * after as f64 / pieces as f64 }
    }
}

/// The values of a figure in order: quantiles interpolate between neighbours, as most programs do (Hyndman and Fan's
/// type 7).
#[derive(Clone, Debug)]
pub(crate) struct Sample(Vec<f64>);

impl Sample {
    /// `None` without values.
    pub(crate) fn new(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        (!values.is_empty()).then_some(Self(values))
    }

    /// The value below which `part` (0 to 1) of the values lie.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let place = part * (self.0.len() - 1) as f64;
        let low = self.0[place.floor() as usize];
        let high = self.0[place.ceil() as usize];
        low + (high - low) * place.fract()
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(prompt_tokens: usize, tokens: usize, arrivals: &[f64]) -> Sequence {
        Sequence { prompt_tokens, tokens, arrivals: arrivals.to_vec(), cached_tokens: 0 }
    }

    fn trial(sequences: Vec<Sequence>) -> Trial {
        Trial { sequences, ..Trial::default() }
    }

    #[test]
    fn one_sequence_is_counted_from_its_first_token() {
        let one = trial(vec![sequence(100, 3, &[2.0, 2.5, 4.0])]);
        assert_eq!((one.prompt_tps(), one.generation_tps()), (50.0, Some(1.0)));
        assert_eq!(one.gaps().collect::<Vec<_>>(), [0.5, 1.5]);
    }

    #[test]
    fn a_batch_is_counted_from_the_last_first_token() {
        // Of the first sequence one token comes before the second has begun.
        let two = trial(vec![sequence(10, 4, &[1.0, 2.0, 3.0, 4.0]), sequence(30, 3, &[2.0, 3.0, 5.0])]);
        assert_eq!((two.prompt_tps(), two.generation_tps()), (20.0, Some(4.0 / 3.0)));
    }

    #[test]
    fn pieces_of_several_tokens_count_as_what_they_hold() {
        let server = trial(vec![sequence(8, 9, &[1.0, 2.0, 3.0])]);
        assert_eq!(server.generation_tps(), Some(4.0));
    }

    #[test]
    fn a_reply_of_one_token_has_no_speed() {
        assert_eq!(trial(vec![sequence(8, 1, &[1.0])]).generation_tps(), None);
    }

    #[test]
    fn quantiles_interpolate() {
        let sample = Sample::new([4.0, 1.0, 3.0, 2.0]);
        let quantiles = sample.map(|s| [s.quantile(0.0), s.quantile(0.25), s.median(), s.quantile(1.0)]);
        assert_eq!(quantiles, Some([1.0, 1.75, 2.5, 4.0]));
        assert!(Sample::new([]).is_none());
    }
}
