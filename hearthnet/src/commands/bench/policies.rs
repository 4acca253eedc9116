//! `hearthnet bench mesh --policy a,b`: routing policies compared over the same hosts.
//!
//! The time per layer of each host comes from the benchmark that the daemon uses, with the host's
//! number of threads, and the delay from decode steps of a chat over the host. Then the policies
//! answer the same prompts in turns; another one begins in each round. Each has its own records of
//! the hosts, as a caller has. The first policy is compared with each other one by the ratios of
//! the rounds: their median, and a confidence interval (`interval.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;

use hearthnet_bus::NodeId;
use hearthnet_orchestrator::chat::Done;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::{Choice, HostPool, HostSource, RoutedSpan, Search};
use hearthnet_orchestrator::router::{HostSpeed, PolicyName, Speeds};
use hearthnet_orchestrator::{ChatError, Service};
use parking_lot::Mutex;
use serde::Serialize;

use super::interval::Ratios;
use super::mesh::median;
use super::setup::{self, Questions};
use crate::answering::chat_backends::pooled_hosts;
use crate::answering::chat_setup::hosted_model;
use crate::cli::args::{HostLayers, MeshArgs};
use crate::cli::{Failure, blocking, failure, print_result, table};
use crate::config::{Config, Context};
use crate::hosting::host_process::require_same_answers;
use crate::hosting::layer_times::{benchmark, duration_us, sample, swept_beside};
use crate::models::OpenModel;

/// Tokens of a chat that measures a delay, and most chats until it is known.
const DELAY_TOKENS: u32 = 24;
const DELAY_CHATS: usize = 4;

/// Time per layer of the hosts that a chat is to avoid.
const AVOIDED_US: u64 = 1_000_000;

pub(super) fn run(args: &MeshArgs, cx: &Context) -> Result<(), Failure> {
    let mut setup = setup::start(args, cx)?;
    let (config, model) = (&setup.config, &setup.model);

    let handle = setup.runtime.handle().clone();
    let addresses = setup.hosts.addresses();
    let nodes: Vec<NodeId> = addresses.iter().map(|address| address.node).collect();
    let pool = pooled_hosts(&handle, &addresses, &setup.hosts.key, model, config);
    let choice = pool.choice.clone();
    let current = Arc::new(Mutex::new(choice.clone()));
    let source = Switched {
        pool,
        current: Arc::clone(&current),
    };
    let served = hosted_model(model, config, false, &handle, source)?;
    let service = Service::new(handle, vec![served], setup::uncached(config));
    let bench = Bench {
        questions: Questions::new(model, &service, args),
        hosts: setup.assigned.iter().copied().zip(nodes).collect(),
        args,
        config,
        model,
        service,
        choice,
        current,
    };
    let services = [&bench.service];
    let report = setup.run(&services, bench.measure())?;
    setup.hosts.stop();
    print_result(args.json, &report, || report.table())?;
    require_same_answers(report.same_answers, "hearthnet bench mesh --policy")
}

/// Hosts whose choice the bench sets before each chat.
#[derive(Clone)]
struct Switched {
    pool: HostPool,
    current: Arc<Mutex<Choice>>,
}

impl HostSource for Switched {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        self.pool.route(search)
    }

    fn choice(&self) -> &Choice {
        self.pool.choice()
    }

    fn fork(&self) -> Option<Box<dyn HostSource>> {
        Some(Box::new(self.clone()))
    }

    /// A chat begins.
    fn demand(&mut self, exact: Exact) {
        self.pool.choice = self.current.lock().clone();
        self.pool.demand(exact);
    }

    fn prepare(&mut self, route: &[RoutedSpan]) {
        self.pool.prepare(route);
    }
}

struct Bench<'a> {
    questions: Questions,
    hosts: Vec<(HostLayers, NodeId)>,
    args: &'a MeshArgs,
    config: &'a Config,
    model: &'a OpenModel,
    service: Service,
    choice: Choice,
    current: Arc<Mutex<Choice>>,
}

/// A policy, with its records of the hosts and its results.
struct Contender {
    policy: PolicyName,
    choice: Choice,
    samples: Vec<Sample>,
    /// Routes of single chats, and how many chats took them.
    routes: BTreeMap<String, u32>,
}

/// Tokens per second of one round.
#[derive(Clone, Copy)]
struct Sample {
    prefill: f64,
    one_chat: f64,
    many_chats: f64,
}

/// Name of a number of a round, and the number.
type Metric = (&'static str, fn(&Sample) -> f64);

/// Numbers that are compared.
const METRICS: [Metric; 3] = [
    ("prefill", |sample| sample.prefill),
    ("one chat", |sample| sample.one_chat),
    ("many chats", |sample| sample.many_chats),
];

impl Bench<'_> {
    async fn measure(&self) -> Result<Report, Failure> {
        setup::say(self.args, "measuring the hosts");
        let hosts = self.measure_hosts().await?;
        let each = hosts.iter().zip(&self.hosts);
        let speeds: Speeds = each
            .map(|(measured, (_, node))| {
                let speed = HostSpeed {
                    layer_us: measured.layer_us.into(),
                    // The delay contains the time of the row on the wire.
                    hop_us: 2 * u64::from(measured.delay_us),
                };
                (*node, speed)
            })
            .collect();
        let contender = |&policy: &PolicyName| Contender {
            policy,
            choice: self.choosing(policy, speeds.clone()),
            samples: Vec::new(),
            routes: BTreeMap::new(),
        };
        let mut all: Vec<Contender> = self.args.policy.iter().map(contender).collect();
        let mut same_answers = true;
        for round in 0..=self.args.repetitions {
            setup::say_round(self.args, round);
            let mut answers: Option<Vec<Vec<u32>>> = None;
            let first = round as usize % all.len().max(1);
            all.rotate_left(first);
            for contender in &mut all {
                let (sample, route, said) = self.round(contender, round).await?;
                same_answers &= answers.as_ref().is_none_or(|before| *before == said);
                answers = Some(said);
                if round > 0 {
                    contender.samples.push(sample);
                    *contender.routes.entry(route).or_default() += 1;
                }
            }
            all.rotate_right(first);
        }
        let head_us = self.head_us().await?;
        Ok(Report::new(self, hosts, head_us, &all, same_answers))
    }

    /// A caller without records of the hosts.
    fn choosing(&self, policy: PolicyName, speeds: Speeds) -> Choice {
        Choice {
            policy,
            speeds,
            health: SharedHealth::default(),
            ..self.choice.clone()
        }
    }

    /// Result of one round of a policy: speeds, the route of its single chat, and all answers.
    async fn round(
        &self,
        contender: &Contender,
        round: u32,
    ) -> Result<(Sample, String, Vec<Vec<u32>>), Failure> {
        *self.current.lock() = contender.choice.clone();
        let (questions, service) = (&self.questions, &self.service);
        let prefill = questions.ask(service, questions.long_prompt(round)).await?;
        let one = questions.ask(service, questions.chat(0)).await?;
        let (many, many_chats) = questions.ask_all(service).await?;
        let sample = Sample {
            prefill: prefill.timings.prefill_tokens_per_second,
            one_chat: one.timings.tokens_per_second,
            many_chats,
        };
        let route = self.route_text(&one);
        let answers = [prefill, one].into_iter().chain(many);
        Ok((sample, route, answers.map(|done| done.token_ids).collect()))
    }

    /// Hosts by number with their layers, and the policies that chose them.
    fn route_text(&self, done: &Done) -> String {
        let hops = done.route.iter().filter_map(|hop| {
            let host = hop.host.as_ref()?;
            let mut nodes = self.hosts.iter().map(|(_, node)| node.to_string());
            let number = nodes.position(|node| node == *host)? + 1;
            let (lo, hi) = hop.layers;
            Some(format!("host {number} {lo}-{hi} ({})", hop.policy))
        });
        hops.collect::<Vec<String>>().join(", ")
    }

    async fn measure_hosts(&self) -> Result<Vec<MeasuredHost>, Failure> {
        // By threads: all layers are alike, and so are the cores.
        let mut times: BTreeMap<usize, u32> = BTreeMap::new();
        let mut all = Vec::new();
        for &(HostLayers { layers, threads }, node) in &self.hosts {
            let layer_us = match times.get(&threads) {
                Some(layer_us) => *layer_us,
                None => self.layer_us(threads).await?,
            };
            times.insert(threads, layer_us);
            all.push(MeasuredHost {
                layers,
                threads,
                layer_us,
                delay_us: self.delay_us(node).await?,
            });
        }
        Ok(all)
    }

    async fn layer_us(&self, threads: usize) -> Result<u32, Failure> {
        let file = Arc::clone(&self.model.file);
        let options = self.config.engine_options(Some(threads));
        let times = match sample(&file, u64::MAX) {
            Some(sample) => benchmark(file, sample, options).await,
            None => None,
        };
        let times = times.ok_or_else(|| failure!(Host, "the layers cannot be measured here"))?;
        Ok(times.layer_us)
    }

    /// Delay to a host, from chats whose routes use it as far as possible.
    async fn delay_us(&self, node: NodeId) -> Result<u32, Failure> {
        let speed = |other: NodeId| HostSpeed {
            layer_us: if other == node { 1 } else { AVOIDED_US },
            hop_us: 1,
        };
        let others = self.hosts.iter().map(|(_, other)| *other);
        let speeds = others.map(|other| (other, speed(other))).collect();
        // `planned` would keep to another host where this one gains little.
        let choice = self.choosing(PolicyName::PetalsLike, speeds);
        *self.current.lock() = choice.clone();
        for n in 0..DELAY_CHATS {
            let request = self.questions.chat_of(n, DELAY_TOKENS);
            self.questions.ask(&self.service, request).await?;
            let mut ways = choice.health.ways().into_iter();
            if let Some(way) = ways.find(|way| way.node == node) {
                return Ok(duration_us(way.took));
            }
        }
        let what = "the delay to a host cannot be measured: the model's answers are too short, or \
                    no route can use the host";
        Err(failure!(Host, "{what}"))
    }

    async fn head_us(&self) -> Result<u32, Failure> {
        let served = self.service.model(&self.model.id);
        let served = served.ok_or_else(|| Failure::internal("the bench has no model"))?;
        let swept = swept_beside(&served.file, served.file.head_bytes(), u64::MAX);
        let measure = move || served.text.head.measure(swept).map_err(Failure::internal);
        Ok(duration_us(blocking(measure).await?))
    }
}

#[derive(Debug, Serialize)]
struct MeasuredHost {
    layers: (u32, u32),
    threads: usize,
    layer_us: u32,
    /// Half a round trip with wake-ups.
    delay_us: u32,
}

/// Medians of one policy, in tokens per second.
#[derive(Debug, Serialize)]
struct PolicyResult {
    policy: &'static str,
    prefill: f64,
    one_chat: f64,
    many_chats: f64,
    /// Routes of single chats, and how many chats took them.
    routes: BTreeMap<String, u32>,
}

/// Speed of a policy divided by that of the first one.
#[derive(Debug, Serialize)]
struct PolicyRatio {
    policy: &'static str,
    metric: &'static str,
    #[serde(flatten)]
    rounds: Ratios,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    repetitions: u32,
    prompt_tokens: u32,
    chats: usize,
    answer_tokens: u32,
    hosts: Vec<MeasuredHost>,
    head_us: u32,
    policies: Vec<PolicyResult>,
    ratios: Vec<PolicyRatio>,
    /// Whether all policies gave the same answers.
    same_answers: bool,
}

impl Report {
    fn new(
        bench: &Bench<'_>,
        hosts: Vec<MeasuredHost>,
        head_us: u32,
        all: &[Contender],
        same_answers: bool,
    ) -> Self {
        let result = |one: &Contender| {
            let middle = |of: fn(&Sample) -> f64| median(one.samples.iter().map(of));
            PolicyResult {
                policy: one.policy.into_str(),
                prefill: middle(|sample| sample.prefill),
                one_chat: middle(|sample| sample.one_chat),
                many_chats: middle(|sample| sample.many_chats),
                routes: one.routes.clone(),
            }
        };
        let mut ratios = Vec::new();
        if let Some((first, others)) = all.split_first() {
            for other in others {
                let rounds = (first.samples.as_slice(), other.samples.as_slice());
                for metric in METRICS {
                    ratios.push(PolicyRatio::new(other.policy, rounds, metric));
                }
            }
        }
        Self {
            model: bench.questions.model_id.clone(),
            repetitions: bench.args.repetitions,
            prompt_tokens: bench.args.prefill,
            chats: bench.args.chats,
            answer_tokens: bench.args.decode,
            hosts,
            head_us,
            policies: all.iter().map(result).collect(),
            ratios,
            same_answers,
        }
    }

    fn table(&self) -> String {
        let hosts = self.hosts.iter().zip(1..).map(|(host, number)| {
            let (lo, hi) = host.layers;
            [
                format!("host {number}"),
                format!("{lo}-{hi}"),
                host.threads.to_string(),
                format!("{} us", host.layer_us),
                format!("{} us", host.delay_us),
            ]
        });
        let policies = self.policies.iter().map(|one| {
            [
                one.policy.to_owned(),
                format!("{:.1}", one.prefill),
                format!("{:.1}", one.one_chat),
                format!("{:.1}", one.many_chats),
            ]
        });
        let routes = self.policies.iter().flat_map(|one| {
            let routes = one.routes.iter();
            routes.map(move |(route, count)| format!("  {}: {count} times {route}\n", one.policy))
        });
        let first = self.policies.first().map_or("", |one| one.policy);
        let ratios = self.ratios.iter().map(|ratio| {
            [
                format!("{} / {first}", ratio.policy),
                ratio.metric.to_owned(),
                format!("{:.3}", ratio.rounds.ratio),
                format!("{:.3} to {:.3}", ratio.rounds.low, ratio.rounds.high),
            ]
        });
        format!(
            "{}: medians of {}; prompt of {} tokens, {} chats with {} tokens each\n\n\
             {}\n{}\n{}\n{}\n  embedding and output matrix here: {} us\n  \
             answers: {}\n",
            self.model,
            self.repetitions,
            self.prompt_tokens,
            self.chats,
            self.answer_tokens,
            table("hosts|layers|threads|per layer|away", hosts),
            table("tokens/s|prefill|one chat|many chats", policies),
            routes.collect::<String>(),
            table("compared|speed of|ratio|95% interval", ratios),
            self.head_us,
            if self.same_answers {
                "identical with every policy, token for token"
            } else {
                "NOT identical with every policy"
            },
        )
    }
}

impl PolicyRatio {
    /// Ratio of `policy`, whose rounds are the `others`, to the first policy.
    fn new(
        policy: PolicyName,
        (first, others): (&[Sample], &[Sample]),
        (metric, of): Metric,
    ) -> Self {
        let rounds = first.iter().zip(others);
        Self {
            policy: policy.into_str(),
            metric,
            rounds: Ratios::new(rounds.map(|(a, b)| (of(b), of(a)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(one_chat: [f64; 3]) -> [Sample; 3] {
        one_chat.map(|one_chat| Sample {
            prefill: 1.0,
            one_chat,
            many_chats: 1.0,
        })
    }

    #[test]
    fn a_ratio_pairs_the_rounds_of_two_policies() {
        // The machine was twice as fast in the second round.
        let first = rounds([10.0, 20.0, 10.0]);
        let other = rounds([12.0, 24.0, 13.0]);
        let of = |metric| PolicyRatio::new(PolicyName::Planned, (&first, &other), metric);
        let ratio = of(METRICS[1]);
        assert_eq!((ratio.policy, ratio.metric), ("planned", "one chat"));
        let rounds = ratio.rounds;
        assert_eq!((rounds.ratio, rounds.low, rounds.high), (1.2, 1.2, 1.3));
        let same = of(METRICS[0]);
        let rounds = same.rounds;
        assert_eq!((rounds.ratio, rounds.low, rounds.high), (1.0, 1.0, 1.0));
    }
}
