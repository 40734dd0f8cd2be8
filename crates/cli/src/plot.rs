//! Charts as SVG: panels of lines, points and bars with axes and legends, readable on light and on dark paper.

mod scale;

use crate::end::End;
use anyhow::Context;
use scale::Scale;
use std::fmt::Write;
use std::path::Path;

const WIDTH: f64 = 720.0;
/// Of a panel, with what is written around it.
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 62.0;
const BOTTOM: f64 = 52.0;
/// About what a character of a legend takes.
const CHARACTER: f64 = 6.6;

/// Colours that people with any colour vision tell apart, on white and on black.
const STYLE: &str = "\
    svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#222}.grid{stroke:#ddd}.axis{stroke:#555}\
    .note{fill:#666}.ref{stroke:#555;stroke-dasharray:2 3}.line{fill:none;stroke-width:2}.dashed{stroke-dasharray:7 4}\
    .bar{fill-opacity:.55}.point{fill-opacity:.55}\
    .s0{stroke:#0072b2;color:#0072b2}.s1{stroke:#d55e00;color:#d55e00}.s2{stroke:#009e73;color:#009e73}\
    .s3{stroke:#aa4499;color:#aa4499}.s4{stroke:#997700;color:#997700}.s5{stroke:#777;color:#777}\
    .fill{fill:currentColor;stroke:none!important}\
    @media(prefers-color-scheme:dark){svg{background:#16181c}text{fill:#ddd}.grid{stroke:#33363c}.axis{stroke:#999}\
    .note{fill:#999}.ref{stroke:#aaa}.s0{stroke:#56b4e9;color:#56b4e9}.s1{stroke:#ff9f45;color:#ff9f45}\
    .s2{stroke:#3fd0a4;color:#3fd0a4}.s3{stroke:#e08cd0;color:#e08cd0}.s4{stroke:#e6c84a;color:#e6c84a}\
    .s5{stroke:#aaa;color:#aaa}}";
const COLOURS: usize = 6;

/// An axis, which reaches as far as what is shown.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    /// What it measures, with the unit.
    pub(crate) label: String,
    /// Whether equal steps are equal ratios. What is not above 0 is not shown then.
    pub(crate) log: bool,
}

impl Axis {
    /// Equal steps are equal differences.
    pub(crate) fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), log: false }
    }

    /// Equal steps are equal ratios.
    pub(crate) fn log(label: impl Into<String>) -> Self {
        Self { label: label.into(), log: true }
    }
}

/// What is drawn of a series: places (x, y).
#[derive(Clone, Debug)]
pub(crate) enum Shape {
    /// Points joined by a line.
    Line(Vec<(f64, f64)>),
    /// A dashed line without points, for what is computed rather than measured.
    Dashed(Vec<(f64, f64)>),
    /// Points.
    Points(Vec<(f64, f64)>),
    /// Bars from x to x, and how high.
    Bars(Vec<(f64, f64, f64)>),
}

/// Numbers with a name.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) shape: Shape,
}

impl Series {
    pub(crate) fn new(name: impl Into<String>, shape: Shape) -> Self {
        Self { name: name.into(), shape }
    }

    /// How many values lie in each of `bins` intervals, of equal width or ratio as on `axis`.
    pub(crate) fn histogram(name: impl Into<String>, values: &[f64], bins: usize, axis: &Axis) -> Self {
        let scale = Scale::of(values.iter().copied(), axis.log);
        let edge = |i: usize| scale.value(i as f64 / bins as f64);
        let mut bars: Vec<(f64, f64, f64)> = (0..bins).map(|i| (edge(i), edge(i + 1), 0.0)).collect();
        for place in values.iter().filter_map(|&value| scale.place(value)) {
            let bin = ((place * bins as f64) as usize).min(bins.saturating_sub(1));
            if let Some((_, _, count)) = bars.get_mut(bin) {
                *count += 1.0;
            }
        }
        Self::new(name, Shape::Bars(bars))
    }

    /// All its places.
    fn places(&self) -> Vec<(f64, f64)> {
        match &self.shape {
            Shape::Line(places) | Shape::Dashed(places) | Shape::Points(places) => places.clone(),
            Shape::Bars(bars) => bars.iter().flat_map(|&(from, to, y)| [(from, y), (to, y)]).collect(),
        }
    }
}

/// A line across a panel, at a value of its x axis.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) x: f64,
    pub(crate) label: String,
}

/// One chart.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
    pub(crate) references: Vec<Reference>,
}

/// Panels below each other under a title, and below them what a reader must know of the numbers, a line each.
pub(crate) fn svg(title: &str, panels: &[Panel], notes: &[String]) -> String {
    let height = 44.0 + HEIGHT * panels.len() as f64 + 18.0 * notes.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n",
        escaped(title)
    );
    text(&mut out, (LEFT, 28.0), "font-size=\"16\" font-weight=\"600\"", title);
    for (i, panel) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", 36.0 + HEIGHT * i as f64);
        panel.draw(&mut out);
        out.push_str("</g>\n");
    }
    for (i, note) in notes.iter().enumerate() {
        let y = 46.0 + HEIGHT * panels.len() as f64 + 18.0 * i as f64;
        text(&mut out, (LEFT, y), "class=\"note\"", note);
    }
    out.push_str("</svg>\n");
    out
}

/// [`svg`] into a file.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write(path: &Path, title: &str, panels: &[Panel], notes: &[String]) -> Result<(), End> {
    let written = std::fs::write(path, svg(title, panels, notes));
    Ok(written.with_context(|| format!("cannot write {}", path.display()))?)
}

/// Values to places on paper.
struct Frame {
    x: Scale,
    y: Scale,
}

impl Frame {
    fn x(&self, value: f64) -> Option<f64> {
        Some(LEFT + self.x.place(value)? * (WIDTH - LEFT - RIGHT))
    }

    fn y(&self, value: f64) -> Option<f64> {
        Some(HEIGHT - BOTTOM - self.y.place(value)? * (HEIGHT - TOP - BOTTOM))
    }

    fn at(&self, (x, y): (f64, f64)) -> Option<(f64, f64)> {
        Some((self.x(x)?, self.y(y)?))
    }
}

impl Panel {
    fn frame(&self) -> Frame {
        let places: Vec<(f64, f64)> = self.series.iter().flat_map(Series::places).collect();
        let (mut xs, mut ys): (Vec<f64>, Vec<f64>) = places.into_iter().unzip();
        xs.extend(self.references.iter().map(|reference| reference.x));
        let bars = self.series.iter().any(|series| matches!(series.shape, Shape::Bars(_)));
        // Heights are compared from 0 on.
        ys.extend((bars && !self.y.log).then_some(0.0));
        let y = Scale::of(ys, self.y.log);
        Frame { x: Scale::of(xs, self.x.log), y: if self.y.log { y } else { y.rounded() } }
    }

    fn draw(&self, out: &mut String) {
        let frame = self.frame();
        text(out, (LEFT, 20.0), "font-size=\"13\" font-weight=\"600\"", &self.title);
        self.axes(out, &frame);
        for (i, series) in self.series.iter().enumerate() {
            series.draw(out, &frame, i % COLOURS);
        }
        for (i, Reference { x, label }) in self.references.iter().enumerate() {
            let Some(x) = frame.x(*x) else { continue };
            line(out, "ref", (x, TOP), (x, HEIGHT - BOTTOM));
            // On the side that has room.
            let (x, anchor) = if x > WIDTH * 0.6 { (x - 5.0, "end") } else { (x + 5.0, "start") };
            // One below the other, where lines are close.
            let y = TOP + 12.0 + 14.0 * i as f64;
            text(out, (x, y), &format!("text-anchor=\"{anchor}\""), label);
        }
        self.legend(out);
    }

    fn axes(&self, out: &mut String, frame: &Frame) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in frame.x.ticks() {
            let Some(x) = frame.x(tick) else { continue };
            line(out, "grid", (x, TOP), (x, bottom));
            text(out, (x, bottom + 17.0), "text-anchor=\"middle\"", &scale::label(tick));
        }
        for tick in frame.y.ticks() {
            let Some(y) = frame.y(tick) else { continue };
            line(out, "grid", (LEFT, y), (right, y));
            text(out, (LEFT - 8.0, y + 4.0), "text-anchor=\"end\"", &scale::label(tick));
        }
        line(out, "axis", (LEFT, bottom), (right, bottom));
        line(out, "axis", (LEFT, TOP), (LEFT, bottom));
        let label = |axis: &Axis| format!("{}{}", axis.label, if axis.log { " (log scale)" } else { "" });
        let middle = f64::midpoint(LEFT, right);
        text(out, (middle, HEIGHT - 14.0), "text-anchor=\"middle\"", &label(&self.x));
        let (x, y) = (18.0, f64::midpoint(TOP, bottom));
        let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 {x} {y})\"");
        text(out, (x, y), &turned, &label(&self.y));
    }

    /// Names beside their colours, in a row.
    fn legend(&self, out: &mut String) {
        let mut x = LEFT;
        for (i, series) in self.series.iter().enumerate().filter(|(_, series)| !series.name.is_empty()) {
            let class = format!("s{} line{}", i % COLOURS, dashes(&series.shape));
            line(out, &class, (x, 38.0), (x + 20.0, 38.0));
            text(out, (x + 26.0, 42.0), "", &series.name);
            x += 46.0 + CHARACTER * series.name.chars().count() as f64;
        }
    }
}

impl Series {
    fn draw(&self, out: &mut String, frame: &Frame, colour: usize) {
        match &self.shape {
            Shape::Line(places) | Shape::Dashed(places) => {
                let path: Vec<(f64, f64)> = places.iter().filter_map(|&place| frame.at(place)).collect();
                let points: Vec<String> = path.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let class = format!("s{colour} line{}", dashes(&self.shape));
                let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
                if matches!(self.shape, Shape::Line(_)) {
                    path.iter().for_each(|&at| circle(out, colour, at, 3.0));
                }
            }
            Shape::Points(places) => {
                // So many that they cover each other are small.
                let radius = if places.len() > 300 { 1.4 } else { 3.0 };
                let on_paper = places.iter().filter_map(|&place| frame.at(place));
                on_paper.for_each(|at| circle(out, colour, at, radius));
            }
            Shape::Bars(bars) => {
                for &(from, to, height) in bars {
                    let (Some(from), Some(to), Some(top)) = (frame.x(from), frame.x(to), frame.y(height))
                    else {
                        continue;
                    };
                    let (width, height) = ((to - from).max(0.5), (HEIGHT - BOTTOM - top).max(0.0));
                    let _ = writeln!(
                        out,
                        "<rect class=\"s{colour} fill bar\" x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" \
                         height=\"{height:.1}\"/>"
                    );
                }
            }
        }
    }
}

fn dashes(shape: &Shape) -> &'static str {
    if matches!(shape, Shape::Dashed(_)) { " dashed" } else { "" }
}

fn line(out: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let ends = format!("x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"");
    let _ = writeln!(out, "<line class=\"{class}\" {ends}/>");
}

fn circle(out: &mut String, colour: usize, (x, y): (f64, f64), radius: f64) {
    let _ =
        writeln!(out, "<circle class=\"s{colour} fill point\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"/>");
}

fn text(out: &mut String, (x, y): (f64, f64), attributes: &str, text: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{}</text>", escaped(text));
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(shape: Shape, log: bool) -> Panel {
        Panel {
            title: "a <b> & c".to_owned(),
            x: Axis { label: "x".to_owned(), log },
            y: Axis::linear("y"),
            series: vec![Series::new("one", shape)],
            references: vec![Reference { x: 2.0, label: "limit".to_owned() }],
        }
    }

    #[test]
    fn values_that_cannot_be_shown_are_left_out() {
        let odd = vec![(1.0, 1.0), (f64::NAN, 1.0), (2.0, f64::INFINITY), (-1.0, 2.0), (10.0, 3.0)];
        let out = svg("t", &[panel(Shape::Points(odd.clone()), true), panel(Shape::Line(odd), false)], &[]);
        assert_eq!(out.matches("<circle").count(), 2 + 3, "not above 0, and not finite");
        assert!(!out.contains("NaN") && !out.contains("inf") && out.contains("a &lt;b&gt; &amp; c"));
        for shape in [Shape::Line(vec![]), Shape::Bars(vec![]), Shape::Points(vec![(1.0, 1.0)])] {
            let out = svg("t", &[panel(shape, true)], &["note".to_owned()]);
            assert!(!out.contains("NaN") && out.ends_with("</svg>\n"));
        }
    }

    #[test]
    fn a_histogram_counts_every_value_once() {
        for axis in [Axis::linear("x"), Axis::log("x")] {
            let values = [0.001, 0.01, 0.1, 1.0, 1.0, 10.0];
            let Series { shape: Shape::Bars(bars), .. } = Series::histogram("h", &values, 4, &axis) else {
                return;
            };
            assert_eq!(bars.iter().map(|bar| bar.2).sum::<f64>(), 6.0, "{axis:?}");
            assert!((bars[0].0 - 0.001).abs() + (bars[3].1 - 10.0).abs() < 1e-9);
            assert_eq!(bars[0].2, if axis.log { 1.0 } else { 5.0 });
        }
    }
}
