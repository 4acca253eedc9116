//! Report of a run: rows of a table for people as the attacks end, an object for machines, and a
//! page with plots.

mod html;
pub(crate) mod plot;

use std::fmt;
use std::time::SystemTime;

use serde::Serialize;

pub use html::page;
pub(crate) use html::page_of;

use crate::Result;
use crate::attack::Entry;
use crate::findings::Verdict;
use crate::trial::{Outcome, Percentiles, Setup};

/// Width of the claim column: that of the longest claim.
const CLAIM: usize = 63;
/// Width of the code column.
const CODE: usize = 24;

/// Row of one attack.
#[derive(Debug, Serialize)]
pub struct Line {
    /// Number of the case.
    case: u8,
    /// Heading of the case.
    group: &'static str,
    /// Name of the attack.
    name: &'static str,
    /// Claim that must hold.
    claim: String,
    /// Code of the case.
    code: &'static str,
    #[serde(flatten)]
    end: End,
}

/// End of an attack.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum End {
    Run(Box<Outcome>),
    /// The harness failed.
    Failed {
        trouble: String,
    },
}

/// Conditions of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Conditions {
    version: &'static str,
    date: String,
    machine: String,
    setup: Setup,
    jobs: usize,
}

impl Conditions {
    /// Conditions of a run that starts now.
    pub fn now(setup: &Setup, jobs: usize) -> Conditions {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
        Conditions {
            version: env!("CARGO_PKG_VERSION"),
            date: httpdate::fmt_http_date(SystemTime::now()),
            machine: format!("{arch}, {os}, {cores} cores for the host and the honest caller"),
            setup: setup.clone(),
            jobs,
        }
    }
}

/// All outcomes of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    conditions: Conditions,
    attacks: Vec<Line>,
}

impl Report {
    pub fn new(conditions: Conditions) -> Report {
        Report {
            conditions,
            attacks: Vec::new(),
        }
    }

    /// Adds an attack, whether or not it could be carried out. Returns its row.
    pub fn add(&mut self, entry: &Entry, done: Result<Outcome>) -> &Line {
        let line = Line {
            case: entry.case,
            group: entry.group(),
            name: entry.name,
            claim: entry.claim(),
            code: entry.code(),
            end: match done {
                Ok(outcome) => End::Run(Box::new(outcome)),
                Err(trouble) => End::Failed {
                    trouble: trouble.to_string(),
                },
            },
        };
        // By the number of the case, in whatever order the attacks end.
        let at = self
            .attacks
            .partition_point(|before| before.case < line.case);
        self.attacks.insert(at, line);
        &self.attacks[at]
    }

    fn outcomes(&self) -> impl Iterator<Item = &Outcome> {
        self.attacks.iter().filter_map(Line::outcome)
    }

    /// Attacks against which the host did not hold.
    pub fn not_held(&self) -> usize {
        self.outcomes().filter(|outcome| !outcome.is_good()).count()
    }

    /// Attacks that could not be carried out.
    pub fn troubles(&self) -> usize {
        self.attacks.len() - self.outcomes().count()
    }

    /// Attacks that more than doubled the honest caller's p99.
    pub fn slow(&self) -> usize {
        let slow = |outcome: &&Outcome| outcome.latency.is_some_and(|l| !l.is_within_bound());
        self.outcomes().filter(slow).count()
    }
}

/// Numbers of attacks by verdict.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.outcomes().count() - self.not_held();
        write!(
            f,
            "{held} held, {} did not, {} could not be carried out",
            self.not_held(),
            self.troubles(),
        )?;
        if self.slow() > 0 {
            write!(
                f,
                "\nbeside {} of them the honest caller waited more than twice as long (p99): \
                 look again on a quiet machine",
                self.slow()
            )?;
        }
        Ok(())
    }
}

/// First line of the table.
pub fn heading() -> String {
    columns([
        "#",
        "claim",
        "code (counted)",
        "verdict",
        "detected",
        "peak memory",
        "p50 without/with",
        "p99 without/with",
    ])
}

fn columns(cells: [&str; 8]) -> String {
    let [number, claim, code, verdict, detected, memory, p50, p99] = cells;
    let row = format!(
        "{number:>3}  {claim:<CLAIM$}  {code:<CODE$}  {verdict:<15}  {detected:>8}  {memory:>19}  \
         {p50:>17}  {p99:>17}"
    );
    row.trim_end().to_owned()
}

impl Line {
    /// Outcome of the attack; `None` if the harness failed.
    fn outcome(&self) -> Option<&Outcome> {
        match &self.end {
            End::Run(outcome) => Some(outcome),
            End::Failed { .. } => None,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.outcome().map(|outcome| outcome.verdict) {
            Some(Verdict::Held) => "held",
            Some(Verdict::NotHeld) => "NOT HELD",
            None => "NOT CARRIED OUT",
        }
    }

    /// Differences from what was expected.
    fn failures(&self) -> Vec<String> {
        match &self.end {
            End::Run(outcome) => outcome.failures(),
            End::Failed { trouble } => vec![trouble.clone()],
        }
    }

    /// Cells of the row.
    fn cells(&self) -> [String; 8] {
        let [mut detected, mut memory, mut p50, mut p99] = [const { String::new() }; 4];
        let mut code = self.code.to_owned();
        if let Some(outcome) = self.outcome() {
            if let Some(count) = outcome.counted.get(self.code) {
                code = format!("{code} ({count})");
            }
            if let Some(detection) = outcome.detection {
                detected = time(detection.median_us);
            }
            if let Some(growth) = outcome.memory {
                let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                let (peak, bytes) = (mib(growth.peak), mib(growth.bytes));
                memory = format!("{peak:.1} MiB (+{bytes:.1})");
            }
            if let Some(latency) = outcome.latency {
                let pair = |of: fn(&Percentiles) -> u64| {
                    let [quiet, attacked] = [latency.quiet, latency.attacked];
                    format!("{}/{}", time(of(&quiet)), time(of(&attacked)))
                };
                p50 = pair(|of| of.p50_us);
                p99 = pair(|of| of.p99_us);
            }
        }
        let (case, claim) = (self.case.to_string(), self.claim.clone());
        let verdict = self.verdict().to_owned();
        [case, claim, code, verdict, detected, memory, p50, p99]
    }
}

/// Row of the table, and below it what differed.
impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells = self.cells();
        f.write_str(&columns(cells.each_ref().map(String::as_str)))?;
        for failure in self.failures() {
            write!(f, "\n       {failure}")?;
        }
        Ok(())
    }
}

/// Time with a unit, in about three digits.
pub(crate) fn time(us: u64) -> String {
    let us = us as f64;
    match us {
        ..1e3 => format!("{us:.0} µs"),
        ..1e4 => format!("{:.2} ms", us / 1e3),
        ..1e6 => format!("{:.0} ms", us / 1e3),
        _ => format!("{:.1} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Findings;
    use crate::memory::Budget;
    use crate::trial::{Detection, Effort, Latency, MemoryGrowth};
    use crate::victim::{Model, Pace};
    use crate::{ATTACKS, CASES, HarnessError};

    fn outcome(held: bool) -> Outcome {
        let mut found = Findings::default();
        found.check("a <try>", "1", if held { 1 } else { 2 }, held);
        Outcome {
            verdict: found.verdict(),
            observations: found.observations,
            counted: [("frame_length".to_owned(), 7)].into(),
            detection: Some(Detection {
                median_us: 1234,
                slowest_us: 5678,
                attempts: 3,
            }),
            memory: Some(MemoryGrowth {
                peak: 64 << 20,
                bytes: 3 << 19,
                budget: Budget::SESSION,
            }),
            latency: Some(Latency {
                quiet: Percentiles {
                    p50_us: 50,
                    p99_us: 100,
                },
                attacked: Percentiles {
                    p50_us: 60,
                    p99_us: 250,
                },
                steps: 1000,
            }),
        }
    }

    /// Report of the first three attacks: one held, one did not, one could not be carried out.
    fn report() -> Report {
        let setup = Setup {
            program: "suite".into(),
            pace: Pace::Brief,
            model: Model::Tiny,
            effort: Effort::Once,
        };
        let mut report = Report::new(Conditions::now(&setup, 1));
        let [first, second, third, ..] = ATTACKS else {
            panic!("too few attacks");
        };
        // They end in another order than that of the catalogue.
        report.add(third, Err(HarnessError::usage("no route")));
        report.add(second, Ok(outcome(false)));
        report.add(first, Ok(outcome(true)));
        report
    }

    #[test]
    fn each_row_has_the_measurements_and_what_differed() {
        let report = report();
        let summary = report.to_string();
        assert!(
            summary.starts_with("1 held, 1 did not, 1 could not be carried out\nbeside 2 of them"),
            "{summary}"
        );
        let rows: Vec<String> = report.attacks.iter().map(Line::to_string).collect();
        assert!(rows[0].starts_with("  1  payload length mismatch closes the session"));
        for cell in [
            "frame_length (7)",
            "held",
            "1.23 ms",
            "64.0 MiB (+1.5)",
            "50 µs/60 µs",
            "100 µs/250 µs",
        ] {
            assert!(rows[0].contains(cell), "{cell} in {}", rows[0]);
        }
        let words = |text: &str| text.split_whitespace().count();
        assert!(words(&heading()) > 8 && !rows[0].contains('\n'));
        assert!(rows[1].contains("NOT HELD"));
        assert!(rows[1].ends_with("\n       a <try>: must be 1, was 2"));
        assert!(rows[2].contains("NOT CARRIED OUT") && rows[2].ends_with("\n       no route"));
    }

    #[test]
    fn the_object_for_machines_has_the_verdict_and_the_measurements() {
        let value = serde_json::to_value(report()).unwrap();
        let first = &value["attacks"][0];
        assert_eq!(first["verdict"], "held");
        assert_eq!(first["observations"][0]["what"], "a <try>");
        assert_eq!(first["latency"]["attacked"]["p99_us"], 250);
        assert_eq!(first["detection"]["median_us"], 1234);
        assert_eq!(first["memory"]["peak"], 64 << 20);
        assert_eq!(value["attacks"][2]["trouble"], "no route");
        assert_eq!(value["conditions"]["setup"]["model"], "tiny");
    }

    #[test]
    fn the_page_stands_alone_and_escapes_what_it_shows() {
        let page = page(&report());
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        for elsewhere in ["http://", "https://", "<script", "src=", "@import", "url("] {
            let outside = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!outside.contains(elsewhere), "{elsewhere}");
        }
        assert!(page.contains("a &lt;try&gt;") && !page.contains("<try>"));
        // The page has one overview and three plots of the two attacks that were carried out.
        assert_eq!(page.matches("<svg").count(), 4);
        assert_eq!(page.matches("</svg>").count(), 4);
        for part in ["NOT CARRIED OUT", "no route", "64.0 MiB (+1.5)", "1.23 ms"] {
            assert!(page.contains(part), "{part}");
        }
    }

    #[test]
    fn every_claim_and_code_fits_its_column() {
        let longest = ATTACKS.iter().map(|entry| entry.name.len()).max();
        assert!(
            longest.is_some_and(|longest| longest <= CLAIM),
            "{longest:?}"
        );
        assert!(CASES.iter().all(|case| case.code.len() + 6 <= CODE));
    }

    #[test]
    fn a_time_has_about_three_digits() {
        let all = [7, 999, 1_500, 23_400, 1_500_000].map(time);
        assert_eq!(all, ["7 µs", "999 µs", "1.50 ms", "23 ms", "1.5 s"]);
    }
}
