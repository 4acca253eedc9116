//! The report: a table for people, an object for machines. Cases without an attack are in it, as
//! what they are.

use std::fmt;

use serde::Serialize;

use crate::case::CASES;
use crate::trial::Outcome;

/// What became of one attack.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Line {
    Run(Box<Outcome>),
    /// The harness could not do its work.
    Failed {
        case: u8,
        claim: String,
        trouble: String,
    },
}

/// A case that no attack carries out yet.
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
    /// A report of attacks on these cases; `built` says which there are attacks for.
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

    /// Attacks that the host did not hold against.
    pub fn not_held(&self) -> usize {
        self.outcomes().filter(|outcome| !outcome.is_good()).count()
    }

    /// Attacks that could not be carried out.
    pub fn troubles(&self) -> usize {
        self.attacks.len() - self.outcomes().count()
    }

    /// Attacks beside which the honest caller waited more than twice as long.
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
        const CLAIM: usize = 76;
        writeln!(
            f,
            "{:>3}  {:<CLAIM$}  {:<16} {:<14} {:>9}  honest p99 without/with",
            "#", "claim", "code (counted)", "verdict", "memory"
        )?;
        for line in &self.attacks {
            match line {
                Line::Run(outcome) => row::<CLAIM>(f, outcome)?,
                Line::Failed {
                    case,
                    claim,
                    trouble,
                } => {
                    writeln!(f, "{case:>3}  {claim:<CLAIM$}  {:<16} NOT CARRIED OUT", "")?;
                    writeln!(f, "       {trouble}")?;
                }
            }
        }
        for missing in &self.not_built_yet {
            let Missing {
                case, attack, code, ..
            } = missing;
            writeln!(f, "{case:>3}  {attack:<CLAIM$}  {code:<16} not built yet")?;
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
                 attacker, victim and caller share this machine, so look again on a quiet one",
                self.slow()
            )?;
        }
        Ok(())
    }
}

fn row<const CLAIM: usize>(f: &mut fmt::Formatter<'_>, outcome: &Outcome) -> fmt::Result {
    use crate::attack::Verdict;
    let verdict = match outcome.verdict {
        Verdict::Held { .. } => "held",
        Verdict::NotHeld { .. } => "NOT HELD",
        Verdict::NotApplicable { .. } => "not applicable",
    };
    let memory = match outcome.memory {
        Some(memory) => format!("+{:.1} MiB", memory.bytes as f64 / f64::from(1 << 20)),
        None => "unknown".to_owned(),
    };
    let latency = match outcome.latency {
        None => "too few steps".to_owned(),
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
        "{case:>3}  {claim:<CLAIM$}  {code:<16} {verdict:<14} {memory:>9}  {latency}"
    )?;
    if let Verdict::NotApplicable { reason } = &outcome.verdict {
        writeln!(f, "       {reason}")?;
    }
    for failure in outcome.failures() {
        writeln!(f, "       {failure}")?;
    }
    Ok(())
}
