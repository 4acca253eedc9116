//! `hearthnet adversarial detection`: requests until a host that lies in every answer is caught
//! (`specs/receipts.md` 4).
//!
//! ```text
//! real run:       request -> liar (asked first) -> rows -> checks of the caller -> caught by rows
//!                                                   |
//!                                                   +-> receipt -> drawn -> honest host -> evidence
//!                                                                                  caught by an audit
//! simulated run:  the same with the shares of the two, as measured, and the draw of the product
//! ```
//!
//! A run counts the requests in which the host lied, and ends when it is caught. The hosts, their
//! receipts and the audits are real; the model is a small one of random weights, with bands measured
//! on it. Evidence counts only if the honest layers, computed again, convict the liar by it.

mod lies;
mod page;

use std::fmt;
use std::time::{Duration, SystemTime};

use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::Finding;
use hearthnet_orchestrator::chat::{ChatRequest, Prompt};
use hearthnet_orchestrator::sharded::{PumpSettings, is_drawn};
use hearthnet_testkit::TinyLlama;
use serde::Serialize;
use strum::VariantArray as _;
use tokio::runtime::Handle;

pub use lies::HostLie;

use crate::bench::new_key;
use crate::fleet::{Fleet, Hosts, PROMPT, TOKENS, question, unchanged};
use crate::sensitivity::measured_bands;
use crate::{HarnessError, Result};
use lies::{Liar, Lied, PRIVATE};

/// Requests with a lie in a run, at most.
const MOST: usize = 200;
/// Requests within which 95% of the runs must have caught the liar.
const GOAL: usize = 59;
const SIMULATED: usize = 1_000;
/// Requests of which each is audited, to measure the shares that are caught.
const PROBES: usize = 20;
/// Wait for evidence after a request. Evidence that comes later counts for a later request.
const PAUSE: Duration = Duration::from_millis(60);
/// Wait for evidence where an audit is certain, and after the last request of a run.
const TIMEOUT: Duration = Duration::from_secs(10);
/// By which the observed range of rows is widened, as `calibrate` does.
const MARGIN: f32 = 1.5;
const MODEL: &str = "tiny-audited";

/// Check that caught a liar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum By {
    /// A check of its rows, in the answer itself.
    Rows,
    Audit,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Caught {
    /// Requests with a lie, this one included.
    requests: usize,
    by: By,
}

/// Runs with one lie. `None`: not caught within [`MOST`] requests.
#[derive(Clone, Debug, Default, Serialize)]
struct Runs(Vec<Option<Caught>>);

/// A lie, and how soon it was caught.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    lie: HostLie,
    /// Share of the requests that a check of rows catches.
    by_rows: f64,
    /// Share of the others that an audit catches, if they are drawn.
    by_audit: f64,
    real: Runs,
    simulated: Runs,
}

/// Result of all lies.
#[derive(Clone, Debug, Serialize)]
pub struct Detections {
    version: &'static str,
    date: String,
    /// Share of the requests that are audited.
    audit_share: f64,
    lies: Vec<Found>,
}

impl Runs {
    /// Share of the runs that were caught within so many requests.
    fn within(&self, requests: usize) -> f64 {
        let caught = self.0.iter().flatten();
        let caught = caught.filter(|caught| caught.requests <= requests);
        caught.count() as f64 / self.0.len().max(1) as f64
    }

    /// Requests within which 95% of the runs were caught.
    fn most_within(&self) -> Option<usize> {
        (1..=MOST).find(|requests| self.within(*requests) >= 0.95)
    }

    /// Percentage of the runs that were caught within [`GOAL`] requests, with its 95% interval.
    fn percent_within_goal(&self) -> (f64, f64, f64) {
        let share = self.within(GOAL);
        let (low, high) = interval(share, self.0.len());
        (100.0 * share, 100.0 * low, 100.0 * high)
    }

    fn by(&self, by: By) -> usize {
        let caught = self.0.iter().flatten();
        caught.filter(|caught| caught.by == by).count()
    }
}

/// 95% confidence interval of a share of `runs` (E. B. Wilson, *Probable inference, the law of
/// succession, and statistical inference*, 1927).
fn interval(share: f64, runs: usize) -> (f64, f64) {
    const Z: f64 = 1.96;
    let n = runs.max(1) as f64;
    let middle = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    ((middle - half) / scale, (middle + half) / scale)
}

/// Small model with bands of its rows, whose caller audits this share.
fn fleet(runtime: &Handle, audit_share: f64) -> Result<Fleet> {
    let tiny = TinyLlama {
        layers: 6,
        weights: "q8_0",
        ..TinyLlama::default()
    };
    let mut fleet = Fleet::of(&tiny, MODEL, runtime.clone(), None)?;
    fleet.set_bands(measured_bands(fleet.file(), MARGIN)?);
    fleet.pump.audit_share = audit_share;
    Ok(fleet)
}

/// A caller that asks the liar first, and an honest host.
struct Scene<'a> {
    fleet: &'a Fleet,
    hosts: Hosts,
    liar: NodeId,
    lied: Lied,
    evidence: std::sync::mpsc::Receiver<Evidence>,
}

impl<'a> Scene<'a> {
    fn new(fleet: &'a Fleet, lie: HostLie) -> Result<Self> {
        let Liar { file, tamper, lied } = Liar::new(lie, fleet)?;
        let key = new_key()?;
        let liar = key.id();
        let honest = (new_key()?, fleet.shared_file(), unchanged());
        let both = vec![(key, file, tamper), honest];
        let mut hosts = fleet.hosts_of(new_key()?, both)?;
        hosts.order = vec![liar];
        Ok(Self {
            fleet,
            evidence: hosts.evidence(),
            hosts,
            liar,
            lied,
        })
    }

    /// Makes the request of a number. Returns whether the host lied, and what caught it if
    /// evidence comes within `wait`.
    fn request(&self, number: usize, wait: Duration) -> Result<(bool, Option<By>)> {
        // No two requests of a run have the same tokens.
        let first = 3 + (number % MOST) as u32;
        let request = ChatRequest {
            prompt: Prompt::Tokens((first..first + PROMPT).collect()),
            ..question(PROMPT, TOKENS)
        };
        self.lied.take();
        let (answer, left) = self.fleet.ask_for(&self.hosts, PRIVATE, &request)?;
        answer?;
        let lied = self.lied.take();
        match left.is_empty() {
            true => Ok((lied, self.audited(wait)?)),
            false if lied => Ok((true, Some(By::Rows))),
            false => Err(HarnessError::victim(format!(
                "the caller left an honest answer: {left}"
            ))),
        }
    }

    /// Waits for evidence, which must convict the liar.
    fn audited(&self, wait: Duration) -> Result<Option<By>> {
        let Ok(evidence) = self.evidence.recv_timeout(wait) else {
            return Ok(None);
        };
        let accused = &evidence.accused.statement;
        let finding = self.fleet.finding(&evidence, accused.layers)?;
        match accused.host == self.liar && finding == Finding::Accused {
            true => Ok(Some(By::Audit)),
            false => Err(HarnessError::victim(format!(
                "evidence that convicts another host than the liar: {finding:?}"
            ))),
        }
    }
}

/// Makes requests until the liar is caught.
fn run(fleet: &Fleet, lie: HostLie) -> Result<Option<Caught>> {
    let scene = Scene::new(fleet, lie)?;
    let mut requests = 0;
    // Some lies need an honest answer first.
    for number in 0..=MOST {
        let (lied, by) = scene.request(number, PAUSE)?;
        requests += usize::from(lied);
        if let Some(by) = by {
            return Ok(Some(Caught { requests, by }));
        }
        if requests == MOST {
            break;
        }
    }
    let late = scene.audited(TIMEOUT)?;
    Ok(late.map(|by| Caught { requests, by }))
}

/// Share of the requests with a lie that rows catch, and share of the others that an audit
/// catches. `fleet` audits every request.
fn shares(fleet: &Fleet, lie: HostLie, probes: usize) -> Result<(f64, f64)> {
    let (mut rows, mut audits) = (0, 0);
    for _ in 0..probes {
        let scene = Scene::new(fleet, lie)?;
        for number in 0.. {
            // The host of an honest answer is confirmed, which takes no evidence.
            let (lied, by) = scene.request(number, PAUSE)?;
            let by = match by {
                None if lied => scene.audited(TIMEOUT)?,
                by => by,
            };
            match by {
                Some(By::Rows) => rows += 1,
                Some(By::Audit) => audits += 1,
                None => {}
            }
            if lied || number == MOST {
                break;
            }
        }
    }
    let share = |count: usize, of: usize| count as f64 / of.max(1) as f64;
    Ok((share(rows, probes), share(audits, probes - rows)))
}

/// Runs in which rows catch the liar with one probability, and an audit with another if the
/// request is drawn.
fn simulated(by_rows: f64, by_audit: f64) -> Runs {
    let one = || {
        (1..=MOST).find_map(|requests| {
            let by = match is_drawn(by_rows) {
                true => Some(By::Rows),
                false if is_drawn(PumpSettings::default().audit_share) && is_drawn(by_audit) => {
                    Some(By::Audit)
                }
                false => None,
            };
            by.map(|by| Caught { requests, by })
        })
    };
    Runs((0..SIMULATED).map(|_| one()).collect())
}

/// Runs every lie so many times. `progress` receives the runs that are done, and all.
///
/// # Errors
/// If hosts cannot be started or do not answer, or an honest host is accused.
pub fn detection(
    runtime: &Handle,
    runs: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Detections> {
    let audit_share = PumpSettings::default().audit_share;
    let (probed, drawn) = (fleet(runtime, 1.0)?, fleet(runtime, audit_share)?);
    let (mut lies, mut done) = (Vec::new(), 0);
    for &lie in HostLie::VARIANTS {
        let (by_rows, by_audit) = shares(&probed, lie, PROBES)?;
        let mut real = Runs::default();
        for _ in 0..runs {
            progress(done, runs * HostLie::VARIANTS.len());
            real.0.push(run(&drawn, lie)?);
            done += 1;
        }
        lies.push(Found {
            lie,
            by_rows,
            by_audit,
            real,
            simulated: simulated(by_rows, by_audit),
        });
    }
    Ok(Detections {
        version: env!("CARGO_PKG_VERSION"),
        date: httpdate::fmt_http_date(SystemTime::now()),
        audit_share,
        lies,
    })
}

/// Requests, or that there were not enough.
fn requests(most: Option<usize>) -> String {
    most.map_or_else(|| format!("over {MOST}"), |most| most.to_string())
}

/// Table for people.
impl fmt::Display for Detections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<24}  {:>15}  {:>29}  {:>15}  {:>6}  {:>9}  {:>6}",
            "", "found by", "real runs caught", "by", "95%", "simulated", "95%"
        )?;
        writeln!(
            f,
            "{:<24}  {:>7} {:>7}  {:>5} {:>23}  {:>7} {:>7}  {:>6}  {:>9}  {:>6}",
            "lie",
            "rows",
            "audit",
            "runs",
            format!("within {GOAL} requests"),
            "rows",
            "audit",
            "within",
            format!("within {GOAL}"),
            "within",
        )?;
        for found in &self.lies {
            let (real, simulated) = (&found.real, &found.simulated);
            let (percent, low, high) = real.percent_within_goal();
            let shown = format!("{percent:.1}% ({low:.1} to {high:.1})");
            writeln!(
                f,
                "{:<24}  {:>6.0}% {:>6.0}%  {:>5} {shown:>23}  {:>7} {:>7}  {:>6}  {:>8.1}%  {:>6}",
                found.lie.name(),
                100.0 * found.by_rows,
                100.0 * found.by_audit,
                real.0.len(),
                real.by(By::Rows),
                real.by(By::Audit),
                requests(real.most_within()),
                100.0 * simulated.within(GOAL),
                requests(simulated.most_within()),
            )?;
        }
        let never = self.lies.iter().filter(|found| found.by_rows == 0.0);
        let audited: Vec<Option<Caught>> = never.flat_map(|found| found.real.0.clone()).collect();
        let audited = Runs(audited);
        let (percent, low, high) = audited.percent_within_goal();
        writeln!(
            f,
            "\nreal runs that only an audit can end: {}, of which {percent:.1}% ({low:.1} to {high:.1}) within \
             {GOAL} requests, 95% within {}\nexpected, if every audit finds the lie: {:.1}%",
            audited.0.len(),
            requests(audited.most_within()),
            100.0 * (1.0 - (1.0 - self.audit_share).powi(GOAL as i32)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lie_is_caught_by_rows_or_by_an_audit() {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
        let fleet = fleet(runtime.handle(), 1.0).unwrap();
        for &lie in HostLie::VARIANTS {
            let shares = shares(&fleet, lie, 1).unwrap();
            let expected = match lie {
                // Rows that this caller has seen before.
                HostLie::OwnOldRows => (1.0, 0.0),
                _ => (0.0, 1.0),
            };
            assert_eq!(shares, expected, "{}", lie.name());
        }
    }

    #[test]
    fn simulated_runs_are_caught_within_the_goal_as_often_as_the_shares_say() {
        // 5 standard deviations around 95.2%.
        let share = simulated(0.0, 1.0).within(GOAL);
        assert!((0.918..0.986).contains(&share), "{share}");
        assert_eq!(simulated(0.0, 0.0).within(MOST), 0.0);
        let by_rows = simulated(1.0, 1.0);
        assert_eq!(
            (
                by_rows.within(1),
                by_rows.by(By::Rows),
                by_rows.by(By::Audit)
            ),
            (1.0, SIMULATED, 0)
        );
    }

    #[test]
    fn an_interval_of_a_share_holds_the_share_and_shrinks_with_the_runs() {
        let (low, high) = interval(0.95, 100);
        assert!((0.88..0.90).contains(&low) && (0.97..0.99).contains(&high));
        let (closer, _) = interval(0.95, 1_000);
        assert!(closer > low);
        assert!(interval(1.0, 10).1 <= 1.0 + 1e-9);
    }

    #[test]
    fn runs_are_counted_by_their_last_request() {
        let caught = |requests, by| Some(Caught { requests, by });
        let mut runs = Runs(vec![caught(1, By::Rows); 18]);
        runs.0.extend([caught(7, By::Audit), None]);
        assert_eq!((runs.within(6), runs.within(7)), (0.9, 0.95));
        assert_eq!(runs.most_within(), Some(7));
        assert_eq!((runs.by(By::Rows), runs.by(By::Audit)), (18, 1));
    }
}
