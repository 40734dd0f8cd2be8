//! Values to places between 0 and 1, and the round values in between.

/// What an axis shows, from its lowest value to its highest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    /// As far as the values reach that can be shown.
    pub(super) fn of(values: impl IntoIterator<Item = f64>, log: bool) -> Self {
        let shown = values.into_iter().filter(|value| value.is_finite() && (!log || *value > 0.0));
        let (low, high) = shown
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        match () {
            () if low < high => Self { low, high, log },
            // One value is in the middle, none leaves the axis empty.
            () if low == high && log => Self { low: low / 2.0, high: high * 2.0, log },
            () if low == high => Self { low: low - 0.5, high: high + 0.5, log },
            () => Self { low: if log { 0.1 } else { 0.0 }, high: 1.0, log },
        }
    }

    /// As far as the next round values.
    pub(super) fn rounded(self) -> Self {
        let step = self.step();
        Self { low: (self.low / step).floor() * step, high: (self.high / step).ceil() * step, ..self }
    }

    /// Where a value is, if it can be shown.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let Self { low, high, log } = *self;
        let place = if log { (value / low).ln() / (high / low).ln() } else { (value - low) / (high - low) };
        // A bit outside is rounding.
        (-1e-9..=1.0 + 1e-9).contains(&place).then(|| place.clamp(0.0, 1.0))
    }

    /// The value at a place.
    pub(super) fn value(&self, place: f64) -> f64 {
        let Self { low, high, log } = *self;
        if log { low * (high / low).powf(place) } else { low + (high - low) * place }
    }

    /// A round step that makes about five.
    fn step(&self) -> f64 {
        let rough = (self.high - self.low) / 5.0;
        let decade = 10_f64.powf(rough.log10().floor());
        let times = [1.0, 2.0, 5.0].into_iter().find(|times| times * decade >= rough * 0.999);
        times.unwrap_or(10.0) * decade
    }

    /// Round values, ascending.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let inside = |value: &f64| self.place(*value).is_some();
        if !self.log {
            let step = self.step();
            let first = (self.low / step).ceil() as i64;
            let all = (first..first.saturating_add(12)).map(|i| i as f64 * step);
            return all.filter(inside).collect();
        }
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        // A short axis shows more than its decades, a long one not all of them.
        let every = usize::try_from((last - first) / 8 + 1).unwrap_or(1);
        let factors: &[f64] = if self.high / self.low < 2000.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let decades = (first..=last).step_by(every).map(|exponent| 10_f64.powi(exponent));
        let ticks: Vec<f64> =
            decades.flat_map(|decade| factors.iter().map(move |f| f * decade)).filter(inside).collect();
        // Less than a factor of two shows none of them.
        if ticks.len() < 2 { vec![self.low, self.high] } else { ticks }
    }
}

/// A value in few characters.
pub(super) fn label(value: f64) -> String {
    let size = value.abs();
    let short = |value: f64| {
        let text = format!("{value:.3}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        text.to_owned()
    };
    match () {
        () if size < 1e-12 => "0".to_owned(),
        () if size >= 1e9 => format!("{}G", short(value / 1e9)),
        () if size >= 1e6 => format!("{}M", short(value / 1e6)),
        () if size >= 1e4 => format!("{}k", short(value / 1e3)),
        () if size < 1e-2 => format!("{value:.0e}"),
        () => short(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_on_the_axis() {
        let ticks = |low, high, log| Scale::of([low, high], log).ticks();
        assert_eq!(ticks(0.0, 10.0, false), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.5, 200.0, true), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
        assert_eq!(ticks(1.1, 1.4, true), [1.1, 1.4]);
        let wide = ticks(1e-30, 1e30, true);
        assert!((4..12).contains(&wide.len()), "{wide:?}");
        assert_eq!(Scale::of([1.3, 8.7], false).rounded().ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert!(!Scale::of([], false).ticks().is_empty() && !Scale::of([5.0], true).ticks().is_empty());
    }

    #[test]
    fn labels_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (1000.0, "1000"),
            (20_000.0, "20k"),
            (3e6, "3M"),
            (1e-3, "1e-3"),
            (0.05, "0.05"),
        ] {
            assert_eq!(label(value), text);
        }
    }
}
