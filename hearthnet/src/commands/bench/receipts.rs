//! `hearthnet bench mesh --receipts`: cost of receipts (`specs/receipts.md`) beside decode.
//!
//! One chat is answered with and without receipts in turns, over the same hosts. Rounds begin with and
//! without them in turns. The speeds are compared by the ratios of the rounds: their median, and a
//! confidence interval (`interval.rs`). The cost is far below what rounds differ by, so the work is also measured
//! by itself: hashes of a position, a signature, a comparison of one.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_bus::NodeKey;
use hearthnet_bus::receipt::{Claim, Inputs, Statement};
use hearthnet_engine::ARITHMETIC;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::HostPool;
use hearthnet_transport::Config as Transport;
use serde::Serialize;

use super::interval::Ratios;
use super::mesh::median;
use super::setup::{self, Questions};
use crate::answering::chat_backends::choice;
use crate::answering::chat_setup::hosted_model;
use crate::cli::args::MeshArgs;
use crate::cli::{Failure, print_result, table};
use crate::config::Context;
use crate::hosting::host_process::require_same_answers;

/// Calls of which the mean is taken.
const CALLS: u32 = 200;
/// Means of which the median is taken.
const MEANS: usize = 21;

pub(super) fn run(args: &MeshArgs, cx: &Context) -> Result<(), Failure> {
    let mut setup = setup::start(args, cx)?;
    let (config, model) = (&setup.config, &setup.model);
    let spec = model.file.spec();
    let row_bytes = spec.width as usize * spec.boundary.bytes_per_value();
    let costs = Costs::measure(row_bytes, config.transport().receipts)?;

    let handle = setup.runtime.handle().clone();
    let (mut services, mut records) = (Vec::new(), Vec::new());
    for receipts in [config.transport().receipts, 0] {
        let transport = Transport {
            receipts,
            ..config.transport()
        };
        let choice = choice(model, setup.hosts.key.id(), config);
        records.push(choice.health.clone());
        let (key, addresses) = (Arc::clone(&setup.hosts.key), setup.hosts.addresses());
        let pool = HostPool::new(handle.clone(), key, transport, addresses, choice);
        let served = hosted_model(model, config, false, &handle, pool)?;
        let service = Service::new(handle.clone(), vec![served], setup::uncached(config));
        services.push(service);
    }
    let [with, without] = &services[..] else {
        return Err(Failure::internal("two services were made"));
    };
    let bench = Bench {
        questions: Questions::new(model, with, args),
        args,
        with,
        without,
    };
    let samples = setup.run(&[with, without], bench.measure())?;
    setup.hosts.stop();
    let signed: Vec<u64> = records.iter().map(signed).collect();
    if !matches!(signed[..], [1..=u64::MAX, 0]) {
        let what = "the hosts signed other answers than they were asked to";
        return Err(Failure::internal(what));
    }
    let report = Report::new(&bench, setup.assigned.len(), costs, &samples);
    print_result(args.json, &report, || report.table())?;
    require_same_answers(report.same_answers, "hearthnet bench mesh --receipts")
}

/// Answers that receipts cover.
fn signed(health: &SharedHealth) -> u64 {
    health.all().iter().map(|host| host.audits.signed).sum()
}

struct Bench<'a> {
    questions: Questions,
    args: &'a MeshArgs,
    with: &'a Service,
    without: &'a Service,
}

/// Decoded tokens per second of one round.
struct Sample {
    with: f64,
    without: f64,
    tokens: usize,
    same: bool,
}

impl Bench<'_> {
    async fn measure(&self) -> Result<Vec<Sample>, Failure> {
        let mut samples = Vec::new();
        for round in 0..=self.args.repetitions {
            setup::say_round(self.args, round);
            let ask = |service| self.questions.ask(service, self.questions.chat(0));
            let (with, without) = match round % 2 {
                0 => {
                    let with = ask(self.with).await?;
                    (with, ask(self.without).await?)
                }
                _ => {
                    let without = ask(self.without).await?;
                    (ask(self.with).await?, without)
                }
            };
            if round > 0 {
                samples.push(Sample {
                    with: with.timings.tokens_per_second,
                    without: without.timings.tokens_per_second,
                    tokens: with.token_ids.len(),
                    same: with.token_ids == without.token_ids,
                });
            }
        }
        Ok(samples)
    }
}

/// Work of receipts, measured by itself, in microseconds.
#[derive(Debug, Serialize)]
struct Costs {
    row_bytes: usize,
    /// Positions between two receipts.
    interval: u32,
    /// Hashes of one position: its row as received and as returned, and the chain. The host and the
    /// caller each compute them.
    hash_us: f64,
    /// A signature of the host.
    sign_us: f64,
    /// A comparison of a signature by the caller.
    verify_us: f64,
}

impl Costs {
    fn measure(row_bytes: usize, interval: u32) -> Result<Self, Failure> {
        let key = NodeKey::generate().map_err(Failure::internal)?;
        let mut statement = Statement {
            host: key.id(),
            caller: key.id(),
            weights: [1; 32],
            layers: (0, 1),
            arithmetic: ARITHMETIC.into(),
            stream: 1,
            epoch: 1,
            claims: 0,
            chain: [0; 32],
        };
        let (row, mut inputs) = (vec![0x11; row_bytes], Inputs::default());
        let hash_us = per_call(|| {
            inputs.extend(inputs.length(), &row, row_bytes);
            if let Some(claim) = Claim::new(&inputs, 1, &row) {
                statement.chain = claim.after(statement.chain);
                statement.claims += 1;
            }
        });
        let sign_us = per_call(|| {
            std::hint::black_box(statement.sign(&key));
        });
        let signature = statement.sign(&key);
        let mut is_valid = true;
        let verify_us = per_call(|| is_valid &= statement.verify(&signature).is_ok());
        if !is_valid {
            return Err(Failure::internal(
                "a signature of this program is not valid",
            ));
        }
        Ok(Self {
            row_bytes,
            interval,
            hash_us,
            sign_us,
            verify_us,
        })
    }

    /// Work of a host for one position.
    fn host_us(&self) -> f64 {
        self.hash_us + self.sign_us / f64::from(self.interval.max(1))
    }

    /// Work of the caller for one position of one host.
    fn caller_us(&self) -> f64 {
        self.hash_us + self.verify_us / f64::from(self.interval.max(1))
    }
}

/// Time of a call in microseconds: the median of some means.
fn per_call(mut work: impl FnMut()) -> f64 {
    median((0..MEANS).map(|_| {
        let began = Instant::now();
        (0..CALLS).for_each(|_| work());
        began.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS)
    }))
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    hosts: usize,
    repetitions: u32,
    answer_tokens: usize,
    /// Medians, in tokens per second.
    with: f64,
    without: f64,
    /// The speed with receipts divided by that without.
    #[serde(flatten)]
    rounds: Ratios,
    costs: Costs,
    /// Work of all hosts for a token, in percent of the time of a token without receipts.
    hosts_percent: f64,
    /// Work of the caller for a token, in percent of the same time.
    caller_percent: f64,
    /// Whether the answers are the same with and without.
    same_answers: bool,
}

impl Report {
    fn new(bench: &Bench<'_>, hosts: usize, costs: Costs, samples: &[Sample]) -> Self {
        let without = median(samples.iter().map(|sample| sample.without));
        let speeds = samples.iter().map(|sample| (sample.with, sample.without));
        // Every host works for every token.
        let percent = |us: f64| 100.0 * us * hosts as f64 * without / 1e6;
        Self {
            model: bench.questions.model_id.clone(),
            hosts,
            repetitions: bench.args.repetitions,
            answer_tokens: samples.first().map_or(0, |sample| sample.tokens),
            with: median(samples.iter().map(|sample| sample.with)),
            without,
            rounds: Ratios::new(speeds),
            hosts_percent: percent(costs.host_us()),
            caller_percent: percent(costs.caller_us()),
            costs,
            same_answers: samples.iter().all(|sample| sample.same),
        }
    }

    fn table(&self) -> String {
        let costs = &self.costs;
        let (host_us, caller_us) = (costs.host_us(), costs.caller_us());
        let work = [
            [
                format!("hashes of a row of {} bytes, to and fro", costs.row_bytes),
                format!("{:.2} us", costs.hash_us),
                "host and caller, each position".to_owned(),
            ],
            [
                "signature".to_owned(),
                format!("{:.1} us", costs.sign_us),
                format!("host, each {} positions", costs.interval),
            ],
            [
                "comparison of a signature".to_owned(),
                format!("{:.1} us", costs.verify_us),
                format!("caller, each {} positions", costs.interval),
            ],
        ];
        format!(
            "{}: {} hosts; answers of {} tokens, medians of {}, in turns\n\n{}\n{}\n  \
             of the {:.2} ms of a token, the receipts' work is {:.3}% at all hosts together \
             ({host_us:.2} us each) and {:.3}% at the caller ({caller_us:.2} us per host)\n  \
             answers: {}\n",
            self.model,
            self.hosts,
            self.answer_tokens,
            self.repetitions,
            table(
                "decode|without|with receipts|ratio|95% interval",
                [[
                    "tokens/s".to_owned(),
                    format!("{:.2}", self.without),
                    format!("{:.2}", self.with),
                    format!("{:.4}", self.rounds.ratio),
                    format!("{:.4} to {:.4}", self.rounds.low, self.rounds.high),
                ]]
            ),
            table("work|takes|by", work),
            1e3 / self.without.max(f64::MIN_POSITIVE),
            self.hosts_percent,
            self.caller_percent,
            if self.same_answers {
                "identical with and without, token for token"
            } else {
                "NOT identical with and without"
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_shared_by_the_positions_of_its_interval() {
        let costs = Costs {
            row_bytes: 1152,
            interval: 64,
            hash_us: 2.0,
            sign_us: 32.0,
            verify_us: 64.0,
        };
        assert_eq!((costs.host_us(), costs.caller_us()), (2.5, 3.0));
        let none = Costs {
            interval: 0,
            ..costs
        };
        assert!(none.host_us().is_finite());
    }
}
