//! A benchmark in pictures: throughput against batch size, latency against context.

use super::report::{Cell, Program, Report, Row};
use crate::plot::{Axis, Panel, Series, Shape};
use std::collections::BTreeMap;

/// What a point of a chart tells of a row, if the row has it.
type Value = fn(&Row<'_>) -> Option<f64>;

/// The panels: what there is only one value of is not drawn against anything.
pub(crate) fn panels(report: &Report<'_>) -> Vec<Panel> {
    let rows: Vec<Row<'_>> = report.rows().collect();
    let by_batch = |cell: Cell| (cell.prompt_tokens, cell.batch_size as f64);
    let by_context = |cell: Cell| (cell.batch_size, cell.prompt_tokens as f64);
    let generation: Value = |row| row.figures.generation_tps.as_ref().map(|sample| sample.median());
    let prompt: Value = |row| Some(row.figures.prompt_tps.median());
    let first: Value = |row| Some(row.figures.first_token.median() * 1e3);
    let between: Value = |row| row.figures.gaps.as_ref().map(|sample| sample.median() * 1e3);
    let throughput = |title: &str, x: Axis, x_of: &dyn Fn(Cell) -> (usize, f64), of: &str| {
        let mut series = lines(&rows, x_of, generation, of);
        series.extend(rooflines(&rows, x_of, of, |row| row.limit));
        Panel {
            title: title.to_owned(),
            x,
            y: Axis::linear("generated tokens/s"),
            series,
            references: Vec::new(),
        }
    };
    let batch = || Axis::log("batch size");
    let context = || Axis::log("prompt tokens");
    let latency = |title: &str, y: &str, value: Value| Panel {
        title: title.to_owned(),
        x: context(),
        y: Axis::linear(y),
        series: lines(&rows, &by_context, value, "batch"),
        references: Vec::new(),
    };
    let mut tokens = latency("Time between tokens against context", "ms, median", between);
    tokens.series.extend(rooflines(&rows, &by_context, "batch", |row| {
        row.limit.map(|limit| 1e3 * row.cell.batch_size as f64 / limit)
    }));
    vec![
        throughput("Throughput against batch size", batch(), &by_batch, "prompt"),
        latency("Time to the first token against context", "ms, median", first),
        tokens,
        Panel {
            title: "Prompt throughput against context".to_owned(),
            x: context(),
            y: Axis::linear("prompt tokens/s"),
            series: lines(&rows, &by_context, prompt, "batch"),
            references: Vec::new(),
        },
    ]
}

/// What must be known beside the pictures.
pub(crate) fn notes(report: &Report<'_>) -> Vec<String> {
    let machine = &report.machine;
    let trials = report.measured.first().and_then(|measured| measured.trials.first()).map_or(0, Vec::len);
    let mut notes = vec![
        format!(
            "lmx {}, {} threads, {}; keys and values as {}; {} generated tokens; medians of {trials} trials",
            env!("CARGO_PKG_VERSION"),
            machine.threads,
            machine.isa,
            report.kv_format,
            report.generation_tokens
        ),
        format!("{}, {} CPUs", machine.processor, machine.cpus),
    ];
    if let Some(others) = report.others {
        notes.push(format!("Other programs took {:.0} % of all CPU time meanwhile", 100.0 * others));
    }
    if report.roofline.weights_bytes.is_some() {
        notes.push(format!(
            "Roofline: the weights once a step and each sequence's keys and values, at the measured {:.1} GB/s",
            report.roofline.bandwidth / 1e9
        ));
    }
    if let Some((url, model)) = report.server {
        notes.push(format!("server: {url}, model {model}"));
    }
    notes
}

/// A line for each program and each value of what is not on the axis.
fn lines(rows: &[Row<'_>], x_of: &dyn Fn(Cell) -> (usize, f64), value: Value, of: &str) -> Vec<Series> {
    let mut lines: BTreeMap<(Program, usize), Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        let ((of, x), y) = (x_of(row.cell), value(row));
        lines.entry((row.program, of)).or_default().extend(y.map(|y| (x, y)));
    }
    let name = |program| match program {
        Program::Lmx => "lmx",
        Program::Server => "server",
    };
    lines
        .into_iter()
        .map(|((program, n), places)| {
            Series::new(format!("{}, {of} {n}", name(program)), Shape::Line(sorted(places)))
        })
        .collect()
}

/// The limits that memory sets, dashed.
fn rooflines(
    rows: &[Row<'_>],
    x_of: &dyn Fn(Cell) -> (usize, f64),
    of: &str,
    limit: impl Fn(&Row<'_>) -> Option<f64>,
) -> Vec<Series> {
    let mut lines: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        let (of, x) = x_of(row.cell);
        if let Some(y) = limit(row) {
            lines.entry(of).or_default().push((x, y));
        }
    }
    let line = |(n, places): (usize, Vec<(f64, f64)>)| {
        Series::new(format!("roofline, {of} {n}"), Shape::Dashed(sorted(places)))
    };
    lines.into_iter().map(line).collect()
}

fn sorted(mut places: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    places.sort_by(|a, b| a.0.total_cmp(&b.0));
    places
}
