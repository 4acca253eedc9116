//! Plots as SVG inside of a page. Colours come from the page's style sheet.

use std::fmt::Display;

/// Width of a plot.
const WIDTH: f64 = 960.0;
/// Height of a row of a plot with rows.
const ROW: f64 = 18.0;
/// Space above the first row and below the last one, for the numbers of the axis.
const EDGE: f64 = 26.0;

/// Text as content or attribute of a page.
pub(crate) fn escape(text: impl Display) -> String {
    let text = text.to_string();
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            _ => safe.push(c),
        }
    }
    safe
}

/// Axis of numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    pub(crate) from: f64,
    pub(crate) to: f64,
    /// Whether each power of ten takes the same space.
    pub(crate) log: bool,
    /// Writes a number of the axis.
    pub(crate) label: fn(f64) -> String,
}

impl Axis {
    /// Axis over powers of ten that contains all positive values.
    pub(crate) fn powers(values: impl Iterator<Item = f64>, label: fn(f64) -> String) -> Axis {
        let (mut from, mut to) = (f64::INFINITY, 0.0f64);
        for value in values.filter(|value| *value > 0.0) {
            (from, to) = (from.min(value), to.max(value));
        }
        if from > to {
            (from, to) = (1.0, 10.0);
        }
        let (from, to) = (from.log10().floor(), to.log10().ceil());
        Axis {
            from: 10f64.powf(from),
            to: 10f64.powf(to.max(from + 1.0)),
            log: true,
            label,
        }
    }

    /// Position of a value: 0 at the start of the axis, 1 at its end.
    fn place(self, value: f64) -> f64 {
        let place = match self.log {
            true => {
                (value.max(f64::MIN_POSITIVE) / self.from).log10() / (self.to / self.from).log10()
            }
            false => (value - self.from) / (self.to - self.from),
        };
        place.clamp(0.0, 1.0)
    }

    /// Values with a grid line.
    fn ticks(self) -> Vec<f64> {
        match self.log {
            true => {
                let powers = (self.to / self.from).log10().round() as i32;
                (0..=powers)
                    .map(|power| self.from * 10f64.powi(power))
                    .collect()
            }
            false => {
                let step = (self.to - self.from) / 4.0;
                (0..5)
                    .map(|tick| self.from + step * f64::from(tick))
                    .collect()
            }
        }
    }
}

/// Mark in a row.
pub(crate) struct Mark {
    pub(crate) at: f64,
    /// Class in the style sheet.
    pub(crate) kind: &'static str,
}

/// Row of a plot.
pub(crate) struct Row {
    pub(crate) label: String,
    /// Shown by a browser at the row.
    pub(crate) title: String,
    /// Lines, each from one value to another, with their class.
    pub(crate) lines: Vec<(f64, f64, &'static str)>,
    pub(crate) marks: Vec<Mark>,
}

/// Plot of one row per attack over a common axis.
pub(crate) fn rows(title: &str, axis: Axis, rows: &[Row]) -> String {
    let (left, right) = (450.0, WIDTH - 30.0);
    let x = |value: f64| left + (right - left) * axis.place(value);
    let height = 2.0 * EDGE + ROW * rows.len() as f64;
    let mut svg = begin(title, height);
    for tick in axis.ticks() {
        let (x, label) = (x(tick), escape((axis.label)(tick)));
        svg += &format!(
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{EDGE}\" y2=\"{:.1}\"/>\
             <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>\
             <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>\n",
            height - EDGE,
            EDGE - 9.0,
            height - EDGE + 17.0,
        );
    }
    for (row, y) in rows
        .iter()
        .zip((0..).map(|n| EDGE + ROW * (f64::from(n) + 0.5)))
    {
        svg += &format!(
            "<g><title>{}</title><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            escape(&row.title),
            left - 12.0,
            y + 4.0,
            escape(&row.label),
        );
        for &(from, to, kind) in &row.lines {
            svg += &format!(
                "<line class=\"{kind}\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
                x(from),
                x(to),
            );
        }
        for Mark { at, kind } in &row.marks {
            let x = x(*at);
            svg += &format!("<circle class=\"{kind}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>");
        }
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

/// Draws one square per attack, with its class and its title; a line of squares per group.
pub(crate) fn squares(title: &str, groups: &[(&str, Vec<(&'static str, String, u8)>)]) -> String {
    let (left, side) = (250.0, 16.0);
    let mut svg = begin(title, ROW * groups.len() as f64 + 8.0);
    for ((group, attacks), y) in groups.iter().zip((0..).map(|n| 4.0 + ROW * f64::from(n))) {
        svg += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 12.0,
            y + 13.0,
            escape(group),
        );
        for ((kind, title, case), n) in attacks.iter().zip(0..) {
            svg += &format!(
                "<a href=\"#case-{case}\"><rect class=\"{kind}\" x=\"{:.1}\" y=\"{y:.1}\" \
                 width=\"{side}\" height=\"{side}\"><title>{}</title></rect></a>",
                left + 20.0 * f64::from(n),
                escape(title),
            );
        }
        svg += "\n";
    }
    svg + "</svg>\n"
}

/// Curve of shares.
pub(crate) struct Curve {
    /// Class in the style sheet.
    pub(crate) kind: &'static str,
    /// Value on the axis, and a share from 0 to 1.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Small plot of shares over an axis, with its title above it.
pub(crate) fn curves(title: &str, axis: Axis, curves: &[Curve]) -> String {
    let (left, right, top, bottom) = (40.0, 440.0, 34.0, 190.0);
    let x = |value: f64| left + (right - left) * axis.place(value);
    let y = |share: f64| bottom - (bottom - top) * share.clamp(0.0, 1.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 460 220\" role=\"img\" \
         aria-label=\"{title}\"><text x=\"{left}\" y=\"18\">{title}</text>\n",
        title = escape(title)
    );
    for share in [0.0, 0.5, 1.0] {
        let y = y(share);
        svg += &format!(
            "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
            left - 6.0,
            y + 4.0,
            100.0 * share,
        );
    }
    for tick in axis.ticks() {
        svg += &format!(
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x(tick),
            bottom + 18.0,
            escape((axis.label)(tick)),
        );
    }
    for Curve { kind, points } in curves {
        let points = points
            .iter()
            .map(|&(at, share)| format!("{:.1},{:.1}", x(at), y(share)));
        let points: Vec<String> = points.collect();
        svg += &format!(
            "<polyline class=\"{kind}\" points=\"{}\"/>",
            points.join(" ")
        );
    }
    svg + "\n</svg>\n"
}

fn begin(title: &str, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" \
         aria-label=\"{}\">\n",
        escape(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_of_powers_contains_its_values_and_has_a_line_at_each_power() {
        let axis = Axis::powers([20.0, 0.0, 4_000.0].into_iter(), |v| v.to_string());
        assert_eq!((axis.from, axis.to), (10.0, 10_000.0));
        assert_eq!(axis.ticks().len(), 4);
        assert_eq!(axis.place(10.0), 0.0);
        assert!((axis.place(100.0) - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(axis.place(1e9), 1.0);
        let none = Axis::powers(std::iter::empty(), |v| v.to_string());
        assert!(none.from < none.to);
    }

    #[test]
    fn markup_in_a_text_is_shown_as_text() {
        assert_eq!(escape("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }
}
