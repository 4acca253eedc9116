//! Run of an attack from start to end, and the checks around it:
//!
//! ```text
//! start     victim and honest caller
//! quiet     latency of honest steps; memory baseline
//! attack    once, or until enough honest steps were measured beside it
//! after     peak memory within the budget; the attacker's sessions and streams gone;
//!           the honest caller served throughout, with the same answers; a new one served too;
//!           every gauge back to zero; a normal exit, and no panic in the log
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::runtime::{Builder, Runtime};

use crate::attack::Entry;
use crate::bench::Bench;
use crate::cores::Cores;
use crate::findings::{Findings, Observation, Verdict, micros};
use crate::honest::Honest;
use crate::memory::Budget;
use crate::victim::{Gauges, Model, Pace, Victim, until};
use crate::{HarnessError, Result};

/// Steps of the honest caller before the memory baseline, so that its buffers are allocated.
const WARM_UP_STEPS: u64 = 64;

/// Settings of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    /// The suite's own program, which also runs as the victim.
    #[serde(skip)]
    pub program: PathBuf,
    /// Deadlines of the victim.
    pub pace: Pace,
    /// Model of the victim.
    pub model: Model,
    pub effort: Effort,
}

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// The attack runs once: for tests, which assert no timings.
    Once,
    /// The attack is repeated until the honest caller has made enough steps beside it, or the time
    /// is up. The honest caller makes as many steps before the attack.
    Measured {
        /// Steps of the honest caller.
        steps: u64,
        /// Time after which the attack is not repeated any more.
        at_most: Duration,
        /// Cores, one of them reserved for the attackers.
        #[serde(skip)]
        cores: Cores,
    },
}

/// Latency of the honest caller's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    pub p50_us: u64,
    pub p99_us: u64,
}

impl Percentiles {
    fn of(mut samples: Vec<Duration>) -> Option<Percentiles> {
        samples.sort_unstable();
        let percentile = |share: usize| {
            let at = (samples.len() * share).div_ceil(100).checked_sub(1)?;
            samples.get(at).copied().map(micros)
        };
        Some(Percentiles {
            p50_us: percentile(50)?,
            p99_us: percentile(99)?,
        })
    }
}

/// Effect of an attack on the honest caller's latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// In the same run, before the attack.
    pub quiet: Percentiles,
    /// During the attack.
    pub attacked: Percentiles,
    /// Honest steps measured during the attack.
    pub steps: usize,
}

impl Latency {
    /// Minimum number of steps for a meaningful 99th percentile.
    const LEAST_STEPS: usize = 500;

    fn of(quiet: Vec<Duration>, attacked: Vec<Duration>) -> Option<Latency> {
        if quiet.len().min(attacked.len()) < Latency::LEAST_STEPS {
            return None;
        }
        let steps = attacked.len();
        Some(Latency {
            quiet: Percentiles::of(quiet)?,
            attacked: Percentiles::of(attacked)?,
            steps,
        })
    }

    /// Factor by which the 99th percentile grew.
    pub fn ratio(&self) -> f64 {
        self.attacked.p99_us as f64 / self.quiet.p99_us.max(1) as f64
    }

    /// True if the 99th percentile at most doubled.
    pub fn is_within_bound(&self) -> bool {
        self.ratio() <= 2.0
    }
}

/// Times from the start of an attempt until the attack was detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Detection {
    pub median_us: u64,
    pub slowest_us: u64,
    /// Detected attempts.
    pub attempts: usize,
}

impl Detection {
    fn of(observations: &[Observation]) -> Option<Detection> {
        let times = observations.iter().filter_map(|seen| seen.detected_us);
        let mut times: Vec<u64> = times.collect();
        times.sort_unstable();
        Some(Detection {
            median_us: *times.get(times.len() / 2)?,
            slowest_us: *times.last()?,
            attempts: times.len(),
        })
    }
}

/// Effect of an attack on the victim's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryGrowth {
    /// Highest resident size in bytes, from the start of the attack.
    pub peak: u64,
    /// Growth in bytes, from before the attack to the peak.
    pub bytes: u64,
    pub budget: Budget,
}

/// Result of an attack.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub verdict: Verdict,
    /// All observations, including those that held.
    pub observations: Vec<Observation>,
    /// Number of times the host counted each expected code.
    pub counted: BTreeMap<String, u64>,
    /// `None` if no check with a code detected the attack, for example because it has no effect.
    pub detection: Option<Detection>,
    /// `None` if the system does not report it.
    pub memory: Option<MemoryGrowth>,
    /// `None` if too few steps were measured. Never part of the verdict: people must judge timings
    /// of a shared machine.
    pub latency: Option<Latency>,
}

impl Outcome {
    /// True if the claim holds.
    pub fn is_good(&self) -> bool {
        self.verdict == Verdict::Held
    }

    /// Observations that did not hold, one line each.
    pub fn failures(&self) -> Vec<String> {
        let missed = self.observations.iter().filter(|seen| !seen.held);
        let told = missed.map(|o| format!("{}: must be {}, was {}", o.what, o.expected, o.seen));
        told.collect()
    }
}

/// Carries an attack out and judges it.
///
/// # Errors
/// [`HarnessError`] if the harness failed.
pub async fn run(entry: &Entry, setup: &Setup) -> Result<Outcome> {
    let which = match setup.model {
        Model::Real if !entry.any_model => Model::Share,
        model => model,
    };
    let mut bench = Bench::start(&setup.program, setup.pace, entry.scene, which).await?;
    bench.honest.steps(WARM_UP_STEPS).await;
    bench.honest.take_samples();
    let (steps, at_most) = match setup.effort {
        Effort::Once => (0, Duration::ZERO),
        Effort::Measured { steps, at_most, .. } => (steps, at_most),
    };
    bench.honest.steps(steps).await;
    let quiet = bench.honest.take_samples();
    let before = bench.victim.usage();
    bench.victim.forget_peak();

    let begin = Instant::now();
    let mut found = Findings::default();
    let attackers = Attackers::new(setup.effort)?;
    loop {
        let done;
        (bench, found, done) = attackers.carry_out(entry, bench, found).await?;
        done.map_err(|trouble| explained(trouble, &bench))?;
        let enough = bench.honest.samples() as u64 >= steps || begin.elapsed() >= at_most;
        if enough || !entry.repeats || found.verdict() == Verdict::NotHeld {
            break;
        }
    }
    let attacked = bench.honest.take_samples();

    let what = "the attacker's sessions and streams";
    settled(&mut bench.victim, what, 1, &mut found).await?;
    let peak = bench.victim.usage();
    let memory = before.zip(peak).map(|(before, peak)| MemoryGrowth {
        peak: peak.peak,
        bytes: peak.peak.saturating_sub(before.resident),
        budget: entry.budget.plus(which.kv_of_streams()),
    });
    if let Some(MemoryGrowth { bytes, budget, .. }) = memory {
        let (kib, why) = (budget.bytes >> 10, budget.why);
        let expected = format!("at most {kib} KiB ({why}; and a page of KV for each stream)");
        let seen = format!("{} KiB", bytes >> 10);
        let what = "growth of the host's memory";
        found.check(what, expected, seen, bytes <= budget.bytes);
    }
    let counted = counted(&mut bench.victim, &mut found).await?;
    aftermath(bench, &mut found).await?;
    Ok(Outcome {
        verdict: found.verdict(),
        detection: Detection::of(&found.observations),
        observations: found.observations,
        counted,
        memory,
        latency: Latency::of(quiet, attacked),
    })
}

/// Threads of the attackers. Where latency is measured they have a core of their own, because a
/// real attacker works on another machine.
struct Attackers(Option<Runtime>);

impl Attackers {
    fn new(effort: Effort) -> Result<Attackers> {
        let mut threads = Builder::new_multi_thread();
        threads.worker_threads(2).enable_all();
        if let Effort::Measured { cores, .. } = effort {
            threads.on_thread_start(move || cores.attack());
        }
        Ok(Attackers(Some(threads.build()?)))
    }

    async fn carry_out(
        &self,
        entry: &Entry,
        mut bench: Bench,
        mut found: Findings,
    ) -> Result<(Bench, Findings, Result<()>)> {
        let Some(threads) = &self.0 else {
            return Err(HarnessError::attacker("no threads for the attack"));
        };
        let run = entry.run;
        let attack = threads.spawn(async move {
            let done = run(&mut bench, &mut found).await;
            (bench, found, done)
        });
        Ok(attack.await?)
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        if let Some(threads) = self.0.take() {
            threads.shutdown_background();
        }
    }
}

/// Appends the victim's log to the error: a crashed victim explains most failures.
fn explained(trouble: HarnessError, bench: &Bench) -> HarnessError {
    match bench.victim.log() {
        log if log.is_empty() => trouble,
        log => HarnessError::Victim(format!("{trouble}; its log says: {log}")),
    }
}

/// Waits until only `callers` honest callers are left, each with one stream.
async fn settled(
    victim: &mut Victim,
    what: &str,
    callers: u32,
    found: &mut Findings,
) -> Result<()> {
    let gauges = until(victim, |gauges| is_settled(gauges, callers)).await?;
    let held = is_settled(&gauges, callers);
    found.check_or(what, "gone", held, || format!("{gauges:?}"));
    Ok(())
}

fn is_settled(gauges: &Gauges, callers: u32) -> bool {
    let idle = gauges.steps_waiting == 0 && gauges.kv_bytes == 0 && gauges.kv_pages_used == 0;
    // Working callers have steps and KV.
    (gauges.sessions, gauges.streams) == (callers, callers) && (idle || callers > 0)
}

/// Checks that every raised code was counted at least as often. The host counts when the connection
/// is gone, which is after the attacker has read the code.
async fn counted(victim: &mut Victim, found: &mut Findings) -> Result<BTreeMap<String, u64>> {
    let raised = found.raised();
    let is_counted = |gauges: &Gauges| {
        let mut raised = raised.iter();
        raised.all(|(code, &times)| gauges.raised(code) >= times)
    };
    let gauges = until(victim, is_counted).await?;
    for (code, &times) in &raised {
        let count = gauges.raised(code);
        let what = format!("the host's count of {code}");
        found.check(what, format!("at least {times}"), count, count >= times);
    }
    let count = |code: String| (code.clone(), gauges.raised(&code));
    Ok(raised.into_keys().map(count).collect())
}

/// Checks that the host is back in its initial state.
async fn aftermath(bench: Bench, found: &mut Findings) -> Result<()> {
    let Bench {
        mut victim,
        mut honest,
        honest_key,
        target,
        _files,
        ..
    } = bench;
    let another = match Honest::begin(&target, &honest_key, Some(&honest.answers())).await {
        Ok(another) => another.end().await,
        Err(trouble) => Err(trouble.to_string()),
    };
    let expected = "served, with the same answers";
    found.done("a new honest caller afterwards", expected, another);
    honest.steps(1).await;
    found.done("the honest caller throughout", expected, honest.end().await);
    settled(&mut victim, "every gauge, without callers", 0, found).await?;

    let (status, log) = victim.stop().await;
    let seen = match status {
        None => "it does not exit".to_owned(),
        Some(status) => status.to_string(),
    };
    let what = "the host's exit after a request to stop";
    found.same(what, "exit status: 0", seen);
    found.same("panics in the host", 0, log.matches("panicked").count());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_the_sample_that_so_many_of_a_hundred_do_not_exceed() {
        let of = |n: u64| {
            let all = Percentiles::of((1..=n).rev().map(Duration::from_micros).collect());
            all.map(|all| (all.p50_us, all.p99_us))
        };
        assert_eq!(of(100), Some((50, 99)));
        assert_eq!(of(1000), Some((500, 990)));
        assert_eq!(of(1), Some((1, 1)));
        assert_eq!(of(0), None);
    }

    #[test]
    fn the_time_to_detection_is_that_of_the_attempts_that_were_detected() {
        let mut found = Findings::default();
        assert_eq!(Detection::of(&found.observations), None);
        for time in [9, 1, 5] {
            found.same("a try", 1, 1);
            found.detected(Duration::from_micros(time));
        }
        found.same("another observation", 1, 1);
        let expected = Detection {
            median_us: 5,
            slowest_us: 9,
            attempts: 3,
        };
        assert_eq!(Detection::of(&found.observations), Some(expected));
    }

    #[test]
    fn a_latency_is_judged_by_its_ratio_and_not_from_a_few_steps() {
        let of = |micros, n| vec![Duration::from_micros(micros); n];
        let latency = Latency::of(of(100, 500), of(200, 500)).unwrap();
        assert!(latency.is_within_bound());
        let latency = Latency::of(of(100, 500), of(201, 500)).unwrap();
        assert!(!latency.is_within_bound());
        assert_eq!(Latency::of(of(100, 500), of(100, 499)), None);
    }

    #[test]
    fn a_host_without_callers_is_settled_only_when_idle() {
        let empty = Gauges::default();
        assert!(is_settled(&empty, 0) && !is_settled(&empty, 1));
        let left: [fn(&mut Gauges); 5] = [
            |g| g.sessions = 1,
            |g| g.streams = 1,
            |g| g.steps_waiting = 1,
            |g| g.kv_bytes = 1,
            |g| g.kv_pages_used = 1,
        ];
        for leave in left {
            let mut gauges = Gauges::default();
            leave(&mut gauges);
            assert!(!is_settled(&gauges, 0));
        }
    }
}
