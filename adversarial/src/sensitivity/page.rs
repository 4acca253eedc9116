//! Page of a sweep: one HTML file without scripts, and without anything that a browser would fetch.

use strum::VariantArray as _;

use super::{Lie, Scope, Sensitivity};
use crate::report::page_of;
use crate::report::plot::{Axis, Curve, curves, escape};

impl Sensitivity {
    /// Page with plots.
    pub fn page(&self) -> String {
        let alarms = &self.false_alarms;
        let mut body = format!(
            "<p class=\"soft\">{}. HearthNet {}. Weights {}. {} texts of {} positions.</p>\n\
         <p><strong>{} of {} honest rows were refused</strong> ({}).</p>\n\
         <p>Each plot: strength of a lie from left to right, shares from 0 to 100 %. Dark: texts with a \
         row that the checks of the boundary refuse (finite, band). Light: texts in which an audit \
         finds a bit that differs. Orange: positions at which the likeliest next token is another \
         one. A lie that changes tokens and is not refused is what audits are for.</p>\n",
            escape(&self.date),
            escape(self.version),
            escape(&self.model),
            self.texts,
            self.positions,
            alarms.refused,
            alarms.rows,
            escape(alarms.texts.join(", ")),
        );
        for &lie in Lie::VARIANTS {
            body += &format!("<h2>{}</h2>\n<div class=\"grid-of-plots\">\n", heading(lie));
            for values in Scope::BOTH {
                for layers in Scope::BOTH {
                    body += &plot(self, lie, values, layers);
                }
            }
            body += "</div>\n";
        }
        body += &format!("<h2>All figures</h2>\n<pre>{}</pre>\n", escape(self));
        page_of("HearthNet: sensitivity of the checks of rows", &body)
    }
}

fn heading(lie: Lie) -> &'static str {
    match lie {
        Lie::Noise => "Noise: random signs, strength as a part of the row's norm",
        Lie::Steering => "Steering: one direction, strength as a part of the row's norm",
        Lie::Scaling => "Scaling: rows times a factor",
    }
}

fn plot(result: &Sensitivity, lie: Lie, values: Scope, layers: Scope) -> String {
    let points = result.points.iter();
    let of =
        |point: &&super::Point| (point.lie, point.values, point.layers) == (lie, values, layers);
    let points: Vec<&super::Point> = points.filter(of).collect();
    let axis = Axis::powers(points.iter().map(|point| point.strength), short);
    let curve = |kind, share: fn(&super::Point) -> f64| Curve {
        kind,
        points: points.iter().map(|p| (p.strength, share(p))).collect(),
    };
    let title = format!(
        "{} of each row, {}",
        match values {
            Scope::All => "all values",
            Scope::One => "one value",
        },
        match layers {
            Scope::All => "at every layer",
            Scope::One => "at the middle layer",
        }
    );
    curves(
        &title,
        axis,
        &[
            curve("line-light", |point| point.audited),
            curve("line-dark", |point| point.refused),
            curve("line-bad", |point| point.changed),
        ],
    )
}

/// Number without the noise of binary fractions.
fn short(number: f64) -> String {
    let text = format!("{number:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
