//! Report: a table for people, an object for machines. It lists cases without an attack as not
//! built.

use std::fmt;

use serde::Serialize;

use crate::attack::Verdict;
use crate::case::CASES;
use crate::trial::Outcome;

/// Width of the claim column: that of the longest claim.
const CLAIM: usize = 63;
/// Width of the code column.
const CODE: usize = 24;

/// Outcome of one attack.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Line {
    Run(Box<Outcome>),
    /// The harness failed.
    Failed {
        case: u8,
        claim: String,
        trouble: String,
    },
}

/// Case without an attack.
#[derive(Debug, Serialize)]
struct Missing {
    case: u8,
    attack: &'static str,
    code: &'static str,
    verdict: &'static str,
}

/// All outcomes of a run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    attacks: Vec<Line>,
    not_built_yet: Vec<Missing>,
}

impl Report {
    /// Report of attacks on these cases; `built` tells which cases have an attack.
    pub fn new(cases: impl Fn(u8) -> bool, built: impl Fn(u8) -> bool) -> Report {
        let missing = CASES
            .iter()
            .filter(|case| cases(case.number) && !built(case.number));
        let missing = missing.map(|case| Missing {
            case: case.number,
            attack: case.attack,
            code: case.code,
            verdict: "not_built_yet",
        });
        Report {
            attacks: Vec::new(),
            not_built_yet: missing.collect(),
        }
    }

    /// Adds an attack that was carried out.
    pub fn add(&mut self, outcome: Outcome) {
        self.attacks.push(Line::Run(Box::new(outcome)));
    }

    /// Adds an attack that could not be carried out.
    pub fn add_trouble(&mut self, case: u8, claim: String, trouble: &dyn fmt::Display) {
        self.attacks.push(Line::Failed {
            case,
            claim,
            trouble: trouble.to_string(),
        });
    }

    fn outcomes(&self) -> impl Iterator<Item = &Outcome> {
        self.attacks.iter().filter_map(|line| match line {
            Line::Run(outcome) => Some(&**outcome),
            Line::Failed { .. } => None,
        })
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

fn micros(us: u64) -> String {
    match us {
        0..10_000 => format!("{us} µs"),
        _ => format!("{:.1} ms", us as f64 / 1000.0),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>3}  {:<CLAIM$}  {:<CODE$}  {:<14} {:>10}  honest p99 without / with",
            "#", "claim that must hold, or attack", "code (counted)", "verdict", "memory"
        )?;
        for case in CASES {
            let missing = self.not_built_yet.iter().find(|m| m.case == case.number);
            if let Some(Missing { attack, code, .. }) = missing {
                let number = case.number;
                writeln!(
                    f,
                    "{number:>3}  {attack:<CLAIM$}  {code:<CODE$}  not built yet"
                )?;
            }
            for line in &self.attacks {
                match line {
                    Line::Run(outcome) if outcome.case == case.number => row(f, outcome)?,
                    Line::Failed {
                        case: number,
                        claim,
                        trouble,
                    } if *number == case.number => {
                        let code = case.code;
                        writeln!(
                            f,
                            "{number:>3}  {claim:<CLAIM$}  {code:<CODE$}  NOT CARRIED OUT"
                        )?;
                        writeln!(f, "       {trouble}")?;
                    }
                    _ => {}
                }
            }
        }
        let held = self.outcomes().filter(|outcome| outcome.is_good()).count();
        writeln!(
            f,
            "\n{held} held, {} did not, {} could not be carried out, {} cases not built yet",
            self.not_held(),
            self.troubles(),
            self.not_built_yet.len()
        )?;
        if self.slow() > 0 {
            writeln!(
                f,
                "beside {} of them the honest caller waited more than twice as long (p99): \
                 look again on a quiet machine",
                self.slow()
            )?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, outcome: &Outcome) -> fmt::Result {
    let verdict = match outcome.verdict {
        Verdict::Held => "held",
        Verdict::NotHeld => "NOT HELD",
    };
    let memory = match outcome.memory {
        Some(memory) => format!("+{:.1} MiB", memory.bytes as f64 / f64::from(1 << 20)),
        None => "unknown".to_owned(),
    };
    let latency = match outcome.latency {
        None => "too few steps to tell".to_owned(),
        Some(latency) => format!(
            "{} / {}, {:.1}x{}",
            micros(latency.quiet_p99_us),
            micros(latency.attacked_p99_us),
            latency.ratio(),
            match latency.is_within_bound() {
                true => "",
                false => " (over 2x)",
            }
        ),
    };
    let code = match outcome.counted.get(outcome.code) {
        Some(count) => format!("{} ({count})", outcome.code),
        None => outcome.code.to_owned(),
    };
    let Outcome { case, claim, .. } = outcome;
    writeln!(
        f,
        "{case:>3}  {claim:<CLAIM$}  {code:<CODE$}  {verdict:<14} {memory:>10}  {latency}"
    )?;
    for failure in outcome.failures() {
        writeln!(f, "       {failure}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attack::Findings;
    use crate::trial::Latency;

    fn outcome(case: u8, held: bool) -> Outcome {
        let mut found = Findings::default();
        found.check("a try", "1", if held { 1 } else { 2 }, held);
        Outcome {
            case,
            claim: format!("claim {case}"),
            code: "frame_length",
            verdict: found.verdict(),
            observations: found.0,
            counted: [("frame_length".to_owned(), 7)].into(),
            memory: None,
            latency: Some(Latency {
                quiet_p99_us: 100,
                attacked_p99_us: 250,
                steps: 1000,
            }),
        }
    }

    #[test]
    fn every_case_is_in_the_report_with_its_verdict() {
        let mut report = Report::new(|_| true, |case| case <= 3);
        report.add(outcome(1, true));
        report.add(outcome(2, false));
        report.add_trouble(3, "claim 3".to_owned(), &"no route");
        assert_eq!(
            (report.not_held(), report.troubles(), report.slow()),
            (1, 1, 2)
        );
        let text = report.to_string();
        let verdicts = ["held", "NOT HELD", "NOT CARRIED OUT", "not built yet"];
        let rows: Vec<&str> = text.lines().filter(|l| !l.starts_with("     ")).collect();
        for case in CASES {
            let start = format!("{:>3}  ", case.number);
            let of_case: Vec<_> = rows.iter().filter(|row| row.starts_with(&start)).collect();
            assert_eq!(of_case.len(), 1, "case {}", case.number);
            let verdict = verdicts[usize::from(case.number.clamp(1, 4)) - 1];
            assert!(of_case[0].contains(verdict), "{}", of_case[0]);
        }
        assert!(text.contains("a try: must be 1, was 2"));
        assert!(text.contains("frame_length (7)"));
        let unbuilt = format!("{} cases not built yet", CASES.len() - 3);
        assert!(text.contains(&unbuilt));
        assert!(text.contains("2.5x (over 2x)"));
    }

    #[test]
    fn the_report_for_machines_names_every_verdict() {
        let mut report = Report::new(|case| case <= 2, |case| case == 1);
        report.add(outcome(1, true));
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(value["attacks"][0]["verdict"], "held");
        assert_eq!(value["attacks"][0]["observations"][0]["what"], "a try");
        assert_eq!(value["not_built_yet"][0]["case"], 2);
        assert_eq!(value["not_built_yet"][0]["verdict"], "not_built_yet");
    }
}
