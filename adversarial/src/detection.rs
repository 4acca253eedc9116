//! `hearthnet adversarial detection`: requests until an audit finds a host that lies in every answer
//! (`specs/receipts.md` 4).
//!
//! A run has a host that lies and an honest one, both real, and a caller that draws a twentieth of
//! its requests for an audit. It ends when the caller has evidence. Simulated runs only draw, with
//! the share of audits that find the lie as it was measured.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_engine::{Engine, SeqId, Span};
use hearthnet_files::gguf::TensorType;
use hearthnet_files::{Gguf, ModelFile};
use hearthnet_orchestrator::chat::{ChatRequest, Prompt};
use hearthnet_testkit::{Passing, Tamper, TinyLlama, encoded, one_thread, rewritten};
use serde::Serialize;
use tokio::runtime::Handle;

use crate::bench::new_key;
use crate::fleet::{Fleet, Hosts, PROMPT, TOKENS, question};
use crate::report::page_of;
use crate::report::plot::{Axis, Curve, curves, escape};
use crate::{HarnessError, Result};

/// Share of the requests that are audited, as by default.
const SHARE: f64 = 0.05;
/// Requests of a run at most.
const MOST: usize = 200;
/// Requests within which 95% of the runs must have found the lie.
const GOAL: usize = 59;
const SIMULATED: usize = 1_000;
/// Requests whose audit is awaited, to measure how many audits find a lie.
const PROBES: usize = 10;
/// Wait for evidence after a request. Evidence that comes later counts for a later request.
const PAUSE: Duration = Duration::from_millis(60);
const PATIENCE: Duration = Duration::from_secs(30);
/// Positions that a host with a truncated context remembers.
const CONTEXT: usize = 16;
const MODEL: &str = "tiny-audited";

/// A lie, and how soon it was found.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    lie: &'static str,
    /// Share of audits that find it.
    by_audit: f64,
    /// Requests until it was found, of each run; `None` if it was not.
    real: Vec<Option<usize>>,
    simulated: Vec<Option<usize>>,
}

/// Result of all lies.
#[derive(Clone, Debug, Serialize)]
pub struct Detections {
    version: &'static str,
    lies: Vec<Found>,
}

/// The files of a host that lies, by tensors that it computes with.
fn changed(file: &ModelFile, change: impl Fn(&str, &mut Vec<f32>)) -> Result<Arc<ModelFile>> {
    let bytes = rewritten(file.gguf(), &[], |info, mut values| {
        change(&info.name, &mut values);
        encoded(info.dtype, &values)
    });
    Ok(Arc::new(ModelFile::from_gguf(Gguf::from_bytes(bytes)?)?))
}

/// Values as a coarser type keeps them.
fn coarse(values: &mut Vec<f32>) {
    let (_, bytes) = encoded(TensorType::Q4_0, values);
    let mut rounded = Vec::new();
    if hearthnet_files::quantize::decode(TensorType::Q4_0, &bytes, &mut rounded).is_ok() {
        *values = rounded;
    }
}

/// Lies by name: the file that the host computes with, and what it does to rows.
fn lie(name: &str, fleet: &Fleet) -> Result<(Arc<ModelFile>, Tamper)> {
    let (file, honest) = (fleet.shared_file(), fleet.file());
    let nothing: Tamper = Box::new(|_| {});
    let is_matrix = |tensor: &str| tensor.starts_with("blk.") && !tensor.ends_with("norm.weight");
    Ok(match name {
        "steering vector" => {
            let steer = |passing: Passing<'_>| {
                let values = passing.rows.iter_mut().enumerate();
                values.for_each(|(n, value)| *value += [0.004, -0.004][n % 2]);
            };
            (file, Box::new(steer))
        }
        "4-bit weights as 8-bit" => {
            let change = |tensor: &str, values: &mut Vec<f32>| {
                if is_matrix(tensor) {
                    coarse(values);
                }
            };
            (changed(honest, change)?, nothing)
        }
        "skipped layer" => {
            let outputs = ["blk.2.attn_output.weight", "blk.2.ffn_down.weight"];
            let change = |tensor: &str, values: &mut Vec<f32>| {
                if outputs.contains(&tensor) {
                    values.fill(0.0);
                }
            };
            (changed(honest, change)?, nothing)
        }
        "yesterday's rows" => (file, yesterday(fleet.width())),
        "truncated context" => {
            let forgetful = truncated(&file, fleet.width())?;
            (file, forgetful)
        }
        // Stands for a cache of lower precision: the keys and values differ as much.
        _ => {
            let change = |tensor: &str, values: &mut Vec<f32>| {
                if tensor.ends_with("attn_k.weight") || tensor.ends_with("attn_v.weight") {
                    coarse(values);
                }
            };
            (changed(honest, change)?, nothing)
        }
    })
}

const LIES: [&str; 6] = [
    "steering vector",
    "4-bit weights as 8-bit",
    "skipped layer",
    "yesterday's rows",
    "truncated context",
    "coarser keys and values",
];

/// Returns at each position the row that it returned there in its first answer.
fn yesterday(width: usize) -> Tamper {
    let mut kept: HashMap<u32, Vec<f32>> = HashMap::new();
    Box::new(move |passing: Passing<'_>| {
        let mut rows = passing.rows.chunks_exact_mut(width);
        for span in passing.spans {
            for (position, row) in (span.position..span.position + span.rows).zip(rows.by_ref()) {
                let kept = kept.entry(position).or_insert_with(|| row.to_vec());
                row.copy_from_slice(kept);
            }
        }
    })
}

/// Computes each row behind the last [`CONTEXT`] ones only.
fn truncated(file: &ModelFile, width: usize) -> Result<Tamper> {
    let layers = 0..file.spec().layers;
    let mut engine = Engine::load(file, layers, &one_thread(), &mut |_, _| {})?;
    let mut inputs: HashMap<SeqId, Vec<f32>> = HashMap::new();
    Ok(Box::new(move |passing: Passing<'_>| {
        let mut sent = passing.sent.chunks_exact(width);
        let mut rows = passing.rows.chunks_exact_mut(width);
        for span in passing.spans {
            let input = inputs.entry(span.seq).or_default();
            input.truncate(span.position as usize * width);
            let count = span.rows as usize;
            for (own, row) in sent.by_ref().take(count).zip(rows.by_ref()) {
                input.extend_from_slice(own);
                let from = (input.len() / width).saturating_sub(CONTEXT) * width;
                let mut last = input.get(from..).unwrap_or_default().to_vec();
                let Ok(seq) = engine.open() else { continue };
                let span = Span::new(seq, 0, (last.len() / width) as u32);
                if engine.forward(&[span], &mut last).is_ok()
                    && let Some(computed) = last.chunks_exact(width).next_back()
                {
                    row.copy_from_slice(computed);
                }
                engine.close(seq);
            }
        }
    }))
}

/// A caller, a host that lies in a way, and an honest one.
fn hosts(fleet: &Fleet, name: &str) -> Result<Hosts> {
    let (file, tamper) = lie(name, fleet)?;
    let unchanged: Tamper = Box::new(|_| {});
    let both = vec![
        (new_key()?, file, tamper),
        (new_key()?, fleet.shared_file(), unchanged),
    ];
    fleet.hosts_of(new_key()?, both)
}

/// The request of a number: no two of a run have the same tokens.
fn request(number: usize) -> ChatRequest {
    let first = 3 + (number % MOST) as u32;
    ChatRequest {
        prompt: Prompt::Tokens((first..first + PROMPT).collect()),
        ..question(PROMPT, TOKENS)
    }
}

/// Requests until there is evidence; `None` if there is none after `most` requests.
fn run(fleet: &Fleet, name: &str, most: usize, wait: Duration) -> Result<Option<usize>> {
    let hosts = hosts(fleet, name)?;
    let evidence = hosts.evidence();
    for number in 0..most {
        let (answer, _) = fleet.ask_for(&hosts, 1, &request(number))?;
        answer?;
        if evidence.recv_timeout(wait).is_ok() {
            return Ok(Some(number + 1));
        }
    }
    Ok(None)
}

/// Runs every lie so many times. `progress` receives the runs that are done, and all.
///
/// # Errors
/// If hosts cannot be started, or do not answer.
pub fn detection(
    runtime: &Handle,
    runs: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Detections> {
    let tiny = TinyLlama {
        layers: 4,
        weights: "q8_0",
        ..TinyLlama::default()
    };
    let mut fleet = Fleet::of(&tiny, MODEL, runtime.clone(), None)?;
    let (mut lies, mut done) = (Vec::new(), 0);
    for name in LIES {
        fleet.pump.audit_share = 1.0;
        // The first answer of a host that repeats it is no lie.
        let honest_first = usize::from(name == "yesterday's rows");
        let mut hits = 0;
        for _ in 0..PROBES {
            let found = run(&fleet, name, 1 + honest_first, PATIENCE / 10)?;
            hits += usize::from(found.is_some());
        }
        fleet.pump.audit_share = SHARE;
        let mut real = Vec::with_capacity(runs);
        for _ in 0..runs {
            progress(done, runs * LIES.len());
            real.push(run(&fleet, name, MOST, PAUSE)?);
            done += 1;
        }
        let by_audit = hits as f64 / PROBES as f64;
        lies.push(Found {
            lie: name,
            by_audit,
            real,
            simulated: simulated(SHARE * by_audit)?,
        });
    }
    Ok(Detections {
        version: env!("CARGO_PKG_VERSION"),
        lies,
    })
}

/// Runs in which each request finds the lie with this probability.
fn simulated(share: f64) -> Result<Vec<Option<usize>>> {
    let one = |_| {
        for number in 1..=MOST {
            let lot = getrandom::u32().map_err(HarnessError::attacker)?;
            if f64::from(lot) / 2f64.powi(32) < share {
                return Ok(Some(number));
            }
        }
        Ok(None)
    };
    (0..SIMULATED).map(one).collect()
}

/// Share of the runs that found the lie within so many requests.
fn within(runs: &[Option<usize>], requests: usize) -> f64 {
    let found = runs.iter().flatten().filter(|number| **number <= requests);
    found.count() as f64 / runs.len().max(1) as f64
}

impl Detections {
    /// Page with a curve of each lie.
    pub fn page(&self) -> String {
        let mut body = format!(
            "<p class=\"soft\">HearthNet {}.</p>\n<p>Share of the runs that had found the lie, by the \
             number of requests, of which {:.0} % are audited. Dark: real hosts. Light: {SIMULATED} \
             simulated runs.</p>\n<div class=\"grid-of-plots\">\n",
            self.version,
            100.0 * SHARE,
        );
        for found in &self.lies {
            let axis = Axis {
                from: 0.0,
                to: MOST as f64,
                log: false,
                label: |value| format!("{value:.0}"),
            };
            let curve = |kind, runs: &[Option<usize>]| Curve {
                kind,
                points: (0..=MOST).map(|n| (n as f64, within(runs, n))).collect(),
            };
            let both = [
                curve("line-light", &found.simulated),
                curve("line-dark", &found.real),
            ];
            body += &curves(found.lie, axis, &both);
        }
        body += &format!("</div>\n<pre>{}</pre>\n", escape(self));
        page_of("HearthNet: detection of lies by audits", &body)
    }
}

/// Table for people.
impl fmt::Display for Detections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = ("lie", "found by audit", "runs", "within 59", "simulated");
        let (lie, by_audit, runs, real, simulated) = columns;
        writeln!(
            f,
            "{lie:<24} {by_audit:>14} {runs:>6} {real:>10} {simulated:>10}"
        )?;
        for found in &self.lies {
            writeln!(
                f,
                "{:<24} {:>13.0}% {:>6} {:>9.1}% {:>9.1}%",
                found.lie,
                100.0 * found.by_audit,
                found.real.len(),
                100.0 * within(&found.real, GOAL),
                100.0 * within(&found.simulated, GOAL),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lie_is_found_by_an_audit() {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
        let tiny = TinyLlama {
            layers: 4,
            weights: "q8_0",
            ..TinyLlama::default()
        };
        let mut fleet = Fleet::of(&tiny, MODEL, runtime.handle().clone(), None).unwrap();
        fleet.pump.audit_share = 1.0;
        for name in LIES {
            let found = run(&fleet, name, 3, PATIENCE).unwrap();
            assert!(found.is_some(), "{name}");
        }
    }

    #[test]
    fn simulated_runs_are_found_within_the_goal_as_often_as_the_share_says() {
        let share = within(&simulated(SHARE).unwrap(), GOAL);
        assert!((0.92..0.98).contains(&share), "{share}");
        assert_eq!(within(&simulated(0.0).unwrap(), MOST), 0.0);
    }
}
