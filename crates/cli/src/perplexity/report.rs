//! What is said about losses: a table, a JSON object, a plot.

use super::plan::Planned;
use crate::args::perplexity::{PerplexityArgs, ProtocolOptions};
use crate::data::Data;
use crate::plot::{self, Axis, Panel, Reference, Series, Shape};
use crate::report::{gigabytes, peak_memory};
use anyhow::anyhow;
use lmx::eval::{Comparison, Estimate, Loss, perplexity};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// One model's result.
pub(crate) struct Measured {
    pub(crate) model: String,
    pub(crate) loss: Loss,
    pub(crate) perplexity: Estimate,
}

impl Measured {
    /// # Errors
    /// A token that the model thinks impossible: there is no perplexity then.
    pub(crate) fn new(model: &str, loss: Loss) -> anyhow::Result<Self> {
        let impossible = loss.tokens.iter().filter(|loss| !loss.is_finite()).count();
        let perplexity = perplexity(&loss.tokens).ok_or_else(|| {
            anyhow!("{model} gives {impossible} of {} tokens the probability 0", loss.tokens.len())
        })?;
        Ok(Self { model: model.to_owned(), loss, perplexity })
    }

    fn json(&self) -> Value {
        let text = self.loss.text;
        let mean: f64 = self.loss.tokens.iter().sum::<f64>() / self.loss.tokens.len() as f64;
        json!({
            "perplexity": self.perplexity.mean,
            "standard_error": self.perplexity.standard_error,
            "mean_loss": mean,
            "tokens_scored": self.perplexity.count,
            "text": {
                "bits_per_byte": text.bits_per_byte(),
                "byte_perplexity": text.byte_perplexity(),
                "word_perplexity": text.word_perplexity(),
                "tokens": text.tokens,
                "bytes": text.bytes,
                "words": text.words,
            },
        })
    }
}

/// All that is known of a run.
pub(crate) struct Run<'a> {
    pub(crate) args: &'a PerplexityArgs,
    pub(crate) options: ProtocolOptions,
    pub(crate) data: &'a Data,
    pub(crate) planned: &'a Planned,
    /// What the models are: fingerprints of each, and how it keeps keys and values.
    pub(crate) identities: Vec<Map<String, Value>>,
    pub(crate) first: Measured,
    pub(crate) second: Option<(Measured, Comparison)>,
    pub(crate) seconds: f64,
    pub(crate) notices: &'a [String],
}

fn pm(estimate: Option<Estimate>, digits: usize) -> String {
    match estimate {
        None => "none".to_owned(),
        Some(Estimate { mean, standard_error: None, .. }) => format!("{mean:.digits$}"),
        Some(Estimate { mean, standard_error: Some(error), .. }) => {
            format!("{mean:.digits$} ± {error:.digits$}")
        }
    }
}

impl Run<'_> {
    /// mlx-lm's lines, and what they leave out.
    pub(crate) fn table(&self) -> String {
        let plan = &self.planned.plan;
        let mut out = format!("{0}\nEVALUATION RESULTS\n{0}\n", "=".repeat(60));
        let mut line = |title: &str, text: String| {
            let _ = writeln!(out, "{title}: {text}");
        };
        line("Model", self.first.model.clone());
        lines_of(&self.first, &mut line);
        if let Some((second, comparison)) = &self.second {
            line("Against", second.model.clone());
            lines_of(second, &mut line);
            let difference = comparison.difference();
            line("Loss, second minus first", format!("{} nats per token, paired", pm(difference, 5)));
            line("Perplexity, second over first", pm(difference.map(Estimate::exp), 5));
            let (kl, infinite) = comparison.mean_kl();
            line("KL divergence", format!("{} nats per token", pm(kl, 5)));
            if infinite > 0 {
                line("KL divergence left out", format!("{infinite} tokens where it is infinite"));
            }
            line("Same likeliest token", format!("{:.2} %", comparison.agreement().unwrap_or(0.0) * 100.0));
        }
        line("Evaluation time", format!("{:.2} seconds", self.seconds));
        line("Peak memory", format!("{:.2} GB", gigabytes(peak_memory())));
        line(
            "Tokens per second",
            format!("{:.0}", self.first.perplexity.count as f64 / self.seconds.max(1e-9)),
        );
        line("\nProtocol", self.protocol());
        line("Data", format!("{} (BLAKE3 {:.16})", self.data.source, self.data.hash));
        line(
            "Records",
            format!("{} of {}, {} empty left out", self.planned.records, self.data.len(), self.planned.empty),
        );
        line("Total samples", format!("{}", plan.windows()));
        line("Total tokens", format!("{} read, {} scored", plan.tokens_read(), self.first.perplexity.count));
        out
    }

    fn protocol(&self) -> String {
        let ProtocolOptions { name, length, stride, bos, .. } = self.options;
        let stride = if name.word() == "windows" { String::new() } else { format!(", stride {stride}") };
        let seed =
            if name.word() == "strided" { String::new() } else { format!(", seed {}", self.data.seed) };
        format!("{}, {length} tokens{stride}, BOS {}{seed}", name.word(), bos.word())
    }

    /// All that is needed to repeat it.
    pub(crate) fn json(&self) -> Value {
        let ProtocolOptions { name, length, stride, bos, samples } = self.options;
        let names = std::iter::once(&self.first).chain(self.second.iter().map(|(second, _)| second));
        let models = names.zip(&self.identities).map(|(measured, identity)| {
            let mut model = Map::new();
            model.insert("name".to_owned(), json!(measured.model));
            model.extend(identity.clone());
            if let Value::Object(result) = measured.json() {
                model.extend(result);
            }
            Value::Object(model)
        });
        let mut object = json!({
            "lmx": env!("CARGO_PKG_VERSION"),
            "models": models.collect::<Vec<_>>(),
            "protocol": {
                "name": name.word(), "sequence_length": length, "stride": stride, "bos": bos.word(),
                "prefix_token": self.planned.prefix, "num_samples": samples, "seed": self.data.seed,
            },
            "data": {
                "source": self.data.source, "files": self.data.files, "blake3": self.data.hash, "records": self.data.len(),
                "records_used": self.planned.records, "records_empty": self.planned.empty,
            },
            "windows": self.planned.plan.windows(),
            "tokens_read": self.planned.plan.tokens_read(),
            "tokens_scored": self.first.perplexity.count,
            "batch_size": self.args.batch_size,
            "seconds": self.seconds,
            "peak_memory_bytes": peak_memory(),
            "notices": self.notices,
        });
        if let (Some((_, comparison)), Value::Object(object)) = (&self.second, &mut object) {
            let estimate = |of: Option<Estimate>| {
                of.map(|of| json!({"mean": of.mean, "standard_error": of.standard_error, "tokens": of.count}))
            };
            let (kl, infinite) = comparison.mean_kl();
            let sorted = sorted(&comparison.kl);
            let difference = comparison.difference();
            object.insert(
                "against".to_owned(),
                json!({
                    "loss_difference": estimate(difference),
                    "perplexity_ratio": estimate(difference.map(Estimate::exp)),
                    "kl": estimate(kl),
                    "kl_infinite": infinite,
                    "kl_median": quantile(&sorted, 0.5),
                    "kl_p95": quantile(&sorted, 0.95),
                    "kl_p99": quantile(&sorted, 0.99),
                    "kl_max": sorted.last(),
                    "same_top": comparison.agreement(),
                }),
            );
        }
        object
    }

    /// Writes how far two models are apart, token by token.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn plot(&self, path: &std::path::Path) -> Result<(), crate::end::End> {
        let Some((second, comparison)) = &self.second else { return Ok(()) };
        let kl = sorted(&comparison.kl);
        let axis = Axis::log("KL(first || second) of a token, nats");
        let (mean, infinite) = comparison.mean_kl();
        let mark = |value: Option<f64>, label: &str| {
            value.map(|x| Reference { x, label: format!("{label} {x:.2e}") })
        };
        let positive: Vec<f64> = kl.iter().copied().filter(|kl| *kl > 1e-9).collect();
        let divergences = Panel {
            title: "How far the distributions are apart".to_owned(),
            series: vec![Series::histogram("", &positive, 60, &axis)],
            references: [mark(quantile(&kl, 0.5), "median"), mark(mean.map(|m| m.mean), "mean")]
                .into_iter()
                .flatten()
                .collect(),
            x: axis,
            y: Axis::linear("tokens"),
        };
        let pairs = self.first.loss.tokens.iter().zip(&second.loss.tokens).map(|(a, b)| (*a, *b));
        let pairs: Vec<(f64, f64)> = pairs.collect();
        // More points than this say nothing more, and make the file large.
        let every = pairs.len().div_ceil(4000).max(1);
        let most = pairs.iter().fold(0.0_f64, |most, (a, b)| most.max(*a).max(*b));
        let losses = Panel {
            title: "The same tokens by both".to_owned(),
            x: Axis::linear("loss by the first, nats"),
            y: Axis::linear("loss by the second, nats"),
            series: vec![
                Series::new("token", Shape::Points(pairs.into_iter().step_by(every).collect())),
                Series::new("equal", Shape::Dashed(vec![(0.0, 0.0), (most, most)])),
            ],
            references: Vec::new(),
        };
        let same = comparison.agreement().unwrap_or(0.0) * 100.0;
        let small = comparison.kl.len() - positive.len() - infinite;
        let notes = vec![
            format!("first: {}, perplexity {}", self.first.model, pm(Some(self.first.perplexity), 3)),
            format!("second: {}, perplexity {}", second.model, pm(Some(second.perplexity), 3)),
            format!("{} tokens, {same:.2} % of them with the same likeliest token", comparison.kl.len()),
            format!(
                "not shown: {small} tokens with a KL divergence up to 1e-9, {infinite} with an infinite one"
            ),
            format!("{}; lmx {}", self.protocol(), env!("CARGO_PKG_VERSION")),
            self.data.source.clone(),
        ];
        plot::write(path, "Two models on the same tokens", &[divergences, losses], &notes)
    }
}

fn lines_of(measured: &Measured, line: &mut dyn FnMut(&str, String)) {
    let text = measured.loss.text;
    let number =
        |value: Option<f64>, digits: usize| value.map_or("none".to_owned(), |v| format!("{v:.digits$}"));
    line("Perplexity", pm(Some(measured.perplexity), 3));
    line("Word perplexity", format!("{} over {} words", number(text.word_perplexity(), 3), text.words));
    line("Byte perplexity", format!("{} over {} bytes", number(text.byte_perplexity(), 5), text.bytes));
    line("Bits per byte", number(text.bits_per_byte(), 5));
}

/// The finite values, ascending.
fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The value below which a share of the others lie (the nearest rank).
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}
