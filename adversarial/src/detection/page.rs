//! Page of a measurement: one HTML file without scripts, and without anything that a browser would
//! fetch.

use super::{By, Detections, Found, GOAL, MOST, Runs, SIMULATED, requests};
use crate::report::page_of;
use crate::report::plot::{Axis, Curve, curves, escape};

impl Detections {
    /// Page with a curve of each lie.
    pub fn page(&self) -> String {
        let share = 100.0 * self.audit_share;
        let mut body = format!(
            "<p class=\"soft\">{}. HearthNet {}.</p>\n\
         <p>A host lies in every answer. Of the requests, {share:.0} % are drawn for an audit: an \
         honest host computes the rows again. Each plot: requests in which the host lied from left to \
         right, and the share of the runs that had caught it. Dark: real hosts, receipts and audits, \
         with a small model of random weights. Light: {SIMULATED} simulated runs, which draw as the \
         product does and find the lie as often as {} real requests did. Upright line: {GOAL} \
         requests, by which 95 % must be caught.</p>\n<div class=\"grid-of-plots\">\n",
            escape(&self.date),
            escape(self.version),
            super::PROBES,
        );
        for found in &self.lies {
            body += &plot(found);
        }
        body += "</div>\n<h2>All figures</h2>\n";
        body += &table(self);
        body += &format!("<pre>{}</pre>\n", escape(self));
        page_of("HearthNet: detection of hosts that lie", &body)
    }
}

fn plot(found: &Found) -> String {
    let axis = Axis {
        from: 0.0,
        to: MOST as f64,
        log: false,
        label: |requests| format!("{requests:.0}"),
    };
    let curve = |kind, runs: &Runs| Curve {
        kind,
        points: (0..=MOST).map(|n| (n as f64, runs.within(n))).collect(),
    };
    let all = [
        Curve {
            kind: "limit",
            points: vec![(GOAL as f64, 0.0), (GOAL as f64, 0.95)],
        },
        curve("line-light", &found.simulated),
        curve("line-dark", &found.real),
    ];
    curves(found.lie.name(), axis, &all)
}

fn table(result: &Detections) -> String {
    let mut table = format!(
        "<table>\n<tr><th>lie</th><th>the host</th><th>real runs</th><th>caught by rows</th>\
         <th>caught by audits</th><th>not caught in {MOST}</th><th>within {GOAL} requests (95 % \
         interval)</th><th>95 % within</th><th>simulated within {GOAL}</th><th>95 % \
         within</th></tr>\n"
    );
    for found in &result.lies {
        let (real, simulated) = (&found.real, &found.simulated);
        let (percent, low, high) = real.percent_within_goal();
        let [rows, audits] = [By::Rows, By::Audit].map(|by| real.by(by));
        let numbers = [
            real.0.len().to_string(),
            rows.to_string(),
            audits.to_string(),
            (real.0.len() - rows - audits).to_string(),
            format!("{percent:.1} % ({low:.1} to {high:.1})"),
            requests(real.most_within()),
            format!("{:.1} %", 100.0 * simulated.within(GOAL)),
            requests(simulated.most_within()),
        ];
        let numbers: String = numbers
            .iter()
            .map(|number| format!("<td class=\"number\">{number}</td>"))
            .collect();
        table += &format!(
            "<tr><td>{}</td><td>{}</td>{numbers}</tr>\n",
            escape(found.lie.name()),
            escape(found.lie.explanation()),
        );
    }
    table + "</table>\n"
}
