//! `hearthnet bench mesh`: cost and benefit of splitting a model, on this machine.
//!
//! Host processes with one thread each, pinned to a core each if there are enough cores, answer
//! over TLS on loopback. For comparison the same model runs in this process with one thread. Both
//! are called through the chat service, as in `hearthnet serve`. The caller of the hosts samples
//! with the configured number of threads. The ratios:
//!
//! - *prefill*: a long prompt. Its pieces are in different hosts at the same time, so two
//!   hosts can be nearly twice as fast as one machine.
//! - *one chat*: a token depends on the token before it, so hosts take turns. The loss against
//!   one machine is the network.
//! - *many chats*: while one host computes a row of one chat, another computes another chat's.
//!   Rows that wait share a batch.
//! - *a prompt beside a chat*: how much each of them slows down the other on the same hosts.
//!
//! Hosts overlap only as far as the machine's cores do: two virtual cores may be one physical core.
//! So the long prompt also runs on two threads at the same time, each with its own model.
//!
//! The measurements are interleaved, so that a change of the machine's speed affects all of them.
//! The report compares medians, and the best round of each. Every answer is compared with the
//! answer of this machine alone.

use std::time::Instant;

use futures_util::future::try_join_all;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::backend::{HopTimes, RouteHop};
use hearthnet_orchestrator::chat::{ChatRequest, Done};
use hearthnet_orchestrator::placement::runs_text;
use hearthnet_platform::cores::cores;
use serde::Serialize;
use tokio::sync::Notify;

use super::setup::{self, Questions, per_second, rate};
use crate::answering::chat_backends::pooled_hosts;
use crate::answering::chat_setup::{hosted_model, local_model};
use crate::cli::args::MeshArgs;
use crate::cli::{Failure, counted, output, print_result, table};
use crate::config::{Config, Context};
use crate::hosting::host_process::require_same_answers;

pub(super) fn run(args: &MeshArgs, cx: &Context) -> Result<(), Failure> {
    let mut setup = setup::start(args, cx)?;
    let (config, model) = (&setup.config, &setup.model);

    let handle = setup.runtime.handle().clone();
    let (addresses, key) = (setup.hosts.addresses(), &setup.hosts.key);
    let pool = pooled_hosts(&handle, &addresses, key, model, config);
    let over_hosts = hosted_model(model, config, false, &handle, pool)?;
    let mut one_thread = config.clone();
    one_thread.engine.threads.0 = 1;
    let alone = local_model(model, &one_thread)?;
    let beside = local_model(model, &one_thread)?;
    let service = setup::uncached(config);
    let [mesh, local, second] = [over_hosts, alone, beside]
        .map(|served| Service::new(handle.clone(), vec![served], service.clone()));
    let bench = Bench {
        questions: Questions::new(model, &mesh, args),
        threads: setup.assigned.iter().map(|host| host.threads).collect(),
        args,
        mesh,
        local,
        second,
        config,
    };
    let services = [&bench.mesh, &bench.local, &bench.second];
    let samples = setup.run(&services, bench.measure())?;
    setup.hosts.stop();
    let report = Report::new(&bench, setup.hosts.pinned, cores().len(), &samples);
    print_result(args.json, &report, || report.table())?;
    require_same_answers(report.same_answers, "hearthnet bench mesh")
}

struct Bench<'a> {
    questions: Questions,
    /// Compute threads of each host.
    threads: Vec<usize>,
    args: &'a MeshArgs,
    mesh: Service,
    local: Service,
    /// Second engine like `local`, called at the same time.
    second: Service,
    config: &'a Config,
}

struct Sample {
    prefill_local: f64,
    /// Combined speed of the same prompt on two engines at the same time.
    prefill_twice: f64,
    prefill_mesh: f64,
    decode_local: f64,
    /// Last frame of the one chat over hosts, with its timings.
    one: Done,
    /// Tokens per second of the one chat, including its prompt.
    one_total: f64,
    /// Tokens per second of all chats together, including their prompts.
    many_total: f64,
    /// Longest time to first token among all chats, in milliseconds.
    many_first_ms: f64,
    beside: Beside,
    same: bool,
}

/// A chat over the hosts, and a long prompt that begins with the chat's first token.
struct Beside {
    /// Tokens per second of the chat while the prompt runs.
    chat: f64,
    prompt: f64,
    /// Tokens of both answers.
    tokens: [Vec<u32>; 2],
}

impl Bench<'_> {
    /// Measures `repetitions` rounds after one warm-up round.
    async fn measure(&self) -> Result<Vec<Sample>, Failure> {
        let questions = &self.questions;
        // Answers of this machine alone, one chat at a time, without batching.
        let mut expected = Vec::new();
        for n in 0..self.args.chats {
            let alone = questions.ask(&self.local, questions.chat(n)).await?;
            expected.push(alone.token_ids);
        }
        let mut samples = Vec::new();
        for round in 0..=self.args.repetitions {
            setup::say_round(self.args, round);
            let sample = self.round(round, &expected).await?;
            if round > 0 {
                samples.push(sample);
            }
        }
        Ok(samples)
    }

    async fn round(&self, round: u32, expected: &[Vec<u32>]) -> Result<Sample, Failure> {
        let questions = &self.questions;
        let prompt = questions.long_prompt(round);
        let prefill_local = questions.ask(&self.local, prompt.clone()).await?;
        let prefill_mesh = questions.ask(&self.mesh, prompt.clone()).await?;
        let twice = [&self.local, &self.second].map(|local| questions.ask(local, prompt.clone()));
        let prefill_twice = try_join_all(twice).await?;

        let decode_local = questions.ask(&self.local, questions.chat(0)).await?;
        let began = Instant::now();
        let one = questions.ask(&self.mesh, questions.chat(0)).await?;
        let one_total = rate(one.token_ids.len(), began);

        let (many, many_total) = questions.ask_all(&self.mesh).await?;

        let beside = self.prompt_beside_chat(prompt).await?;
        let [chat, prompt] = &beside.tokens;

        let same = prefill_local.token_ids == prefill_mesh.token_ids
            && decode_local.token_ids == one.token_ids
            && (&decode_local.token_ids, &prefill_local.token_ids) == (chat, prompt)
            && many.iter().map(|done| &done.token_ids).eq(expected);
        let first = many.iter().map(|done| done.timings.first_token_ms);
        Ok(Sample {
            prefill_local: prefill(&prefill_local),
            prefill_twice: prefill_twice.iter().map(prefill).sum(),
            prefill_mesh: prefill(&prefill_mesh),
            decode_local: decode_local.timings.tokens_per_second,
            one,
            one_total,
            many_total,
            many_first_ms: first.fold(0.0, f64::max),
            beside,
            same,
        })
    }

    async fn prompt_beside_chat(&self, prompt: ChatRequest) -> Result<Beside, Failure> {
        let questions = &self.questions;
        let (first, mut heard) = (Notify::new(), Vec::new());
        let chat = questions.ask_and_hear(&self.mesh, questions.chat(0), || {
            heard.push(Instant::now());
            first.notify_one();
        });
        let prompt = async {
            first.notified().await;
            let began = Instant::now();
            let done = questions.ask(&self.mesh, prompt).await?;
            Ok((done, began..Instant::now()))
        };
        let (chat, (prompt, ran)) = tokio::try_join!(chat, prompt)?;
        // A short chat ends before the prompt.
        let end = heard.last().map_or(ran.end, |last| ran.end.min(*last));
        let during = heard.iter().filter(|at| ran.contains(*at)).count();
        Ok(Beside {
            chat: per_second(during, end.saturating_duration_since(ran.start)),
            prompt: prefill(&prompt),
            tokens: [chat.token_ids, prompt.token_ids],
        })
    }
}

fn prefill(done: &Done) -> f64 {
    done.timings.prefill_tokens_per_second
}

pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    hearthnet_engine::bench::median(&values.collect::<Vec<f64>>())
}

/// Two speeds in tokens per second, and their ratio.
#[derive(Debug, Serialize)]
struct Comparison {
    base: f64,
    mesh: f64,
    ratio: f64,
    /// Ratio of the fastest rounds. Other load on the machine makes rounds slower, never faster.
    best: f64,
    /// Ratio of each round.
    ratios: Vec<f64>,
}

impl Comparison {
    fn new(samples: &[Sample], base: fn(&Sample) -> f64, mesh: fn(&Sample) -> f64) -> Self {
        let (low, high) = (
            median(samples.iter().map(base)),
            median(samples.iter().map(mesh)),
        );
        let ratio = |base: f64, mesh: f64| mesh / base.max(f64::MIN_POSITIVE);
        Self {
            base: low,
            mesh: high,
            ratio: ratio(low, high),
            best: ratio(
                samples.iter().map(base).fold(0.0, f64::max),
                samples.iter().map(mesh).fold(0.0, f64::max),
            ),
            ratios: samples.iter().map(|s| ratio(base(s), mesh(s))).collect(),
        }
    }

    fn range(&self) -> (f64, f64) {
        self.ratios
            .iter()
            .fold((f64::MAX, 0.0_f64), |(a, b), r| (a.min(*r), b.max(*r)))
    }

    fn row(&self, what: String, base: &str) -> Vec<String> {
        let (least, most) = self.range();
        vec![
            what,
            format!("{:.1} {base}", self.base),
            format!("{:.1}", self.mesh),
            format!("{:.2}", self.ratio),
            format!("{:.2}", self.best),
            format!("{least:.2} to {most:.2}"),
        ]
    }
}

/// Times of a hop in the decode steps of the single chat, in milliseconds. Medians over the rounds.
#[derive(Debug, Serialize)]
struct Hop {
    layers: (u32, u32),
    compute_ms_p50: f64,
    overhead_ms_p50: f64,
    overhead_ms_p95: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    /// Compute threads of each host.
    threads: Vec<usize>,
    cores: usize,
    pinned: bool,
    repetitions: u32,
    prompt_tokens: u32,
    chats: usize,
    answer_tokens: usize,
    /// Threads with which the hosts' caller samples; this machine alone uses one.
    caller_threads: usize,
    /// A long prompt: this machine alone against the hosts.
    prefill: Comparison,
    /// The same prompt on two threads at the same time, each with the whole model, against one
    /// thread: the upper limit for two cores of this machine.
    two_cores: Comparison,
    /// Decode of one chat: this machine alone against the hosts.
    one_chat: Comparison,
    /// One chat over hosts against all chats over hosts, including prompts.
    many_chats: Comparison,
    /// Decode of one chat over hosts: by itself against beside a long prompt.
    chat_beside_prompt: Comparison,
    /// A long prompt over hosts: by itself against beside one chat.
    prompt_beside_chat: Comparison,
    construct_ms: f64,
    first_token_ms: f64,
    /// Longest time to first token among all chats.
    many_first_token_ms: f64,
    head_ms_per_token: f64,
    /// Layers that the caller runs itself.
    own_layers: Vec<Hop>,
    hops: Vec<Hop>,
    /// Whether every answer equals that of this machine alone.
    same_answers: bool,
}

impl Report {
    fn new(bench: &Bench<'_>, pinned: bool, cores: usize, samples: &[Sample]) -> Self {
        let timing = |get: fn(&Sample) -> f64| median(samples.iter().map(get));
        // The route is the same in all rounds.
        let route = samples.first().map_or(&[][..], |s| &s.one.route);
        let hop = |(index, hop): (usize, &RouteHop)| {
            let of = |get: fn(&HopTimes) -> u32| {
                let times = samples.iter().filter_map(|s| s.one.timings.hops.get(index));
                median(times.map(|hop| f64::from(get(hop)) / 1e3))
            };
            Hop {
                layers: hop.layers,
                compute_ms_p50: of(|hop| hop.compute_us_p50),
                overhead_ms_p50: of(|hop| hop.overhead_us_p50),
                overhead_ms_p95: of(|hop| hop.overhead_us_p95),
            }
        };
        let hops = |hosts: bool| {
            let route = route.iter().enumerate();
            let wanted = route.filter(|(_, hop)| hop.host.is_some() == hosts);
            wanted.map(hop).collect()
        };
        Self {
            model: bench.questions.model_id.clone(),
            threads: bench.threads.clone(),
            cores,
            pinned,
            repetitions: bench.args.repetitions,
            prompt_tokens: bench.args.prefill,
            chats: bench.args.chats,
            answer_tokens: samples.first().map_or(0, |s| s.one.token_ids.len()),
            caller_threads: bench.config.threads(),
            prefill: Comparison::new(samples, |s| s.prefill_local, |s| s.prefill_mesh),
            two_cores: Comparison::new(samples, |s| s.prefill_local, |s| s.prefill_twice),
            one_chat: Comparison::new(
                samples,
                |s| s.decode_local,
                |s| s.one.timings.tokens_per_second,
            ),
            many_chats: Comparison::new(samples, |s| s.one_total, |s| s.many_total),
            chat_beside_prompt: Comparison::new(
                samples,
                |s| s.one.timings.tokens_per_second,
                |s| s.beside.chat,
            ),
            prompt_beside_chat: Comparison::new(samples, |s| s.prefill_mesh, |s| s.beside.prompt),
            construct_ms: timing(|s| s.one.timings.construct_ms),
            first_token_ms: timing(|s| s.one.timings.first_token_ms),
            many_first_token_ms: timing(|s| s.many_first_ms),
            head_ms_per_token: timing(|s| s.one.timings.head_ms_per_token),
            own_layers: hops(false),
            hops: hops(true),
            same_answers: samples.iter().all(|s| s.same),
        }
    }

    fn table(&self) -> String {
        let speeds = [
            self.prefill.row(
                format!("prefill, {} tokens", self.prompt_tokens),
                "one thread alone",
            ),
            self.one_chat.row(
                format!("one chat, {} tokens", self.answer_tokens),
                "one thread alone",
            ),
            self.many_chats.row(
                format!("{} chats at once", self.chats),
                "one chat over the hosts",
            ),
            self.chat_beside_prompt
                .row("the chat beside a prompt".to_owned(), "chat over the hosts"),
            self.prompt_beside_chat.row(
                "the prompt beside a chat".to_owned(),
                "prompt over the hosts",
            ),
        ];
        let hops = self.hops.iter().map(|hop| {
            [
                format!("layers {}-{}", hop.layers.0, hop.layers.1),
                format!("{:.2} ms", hop.compute_ms_p50),
                format!("{:.3} ms", hop.overhead_ms_p50),
                format!("{:.3} ms", hop.overhead_ms_p95),
            ]
        });
        let threads = match self.threads.iter().all(|&threads| threads == 1) {
            true => "one thread each".to_owned(),
            false => {
                let each: Vec<String> = self.threads.iter().map(usize::to_string).collect();
                format!("with {} threads", each.join(", "))
            }
        };
        let (least, most) = self.two_cores.range();
        format!(
            "{}: {}, {}{}; their caller has {}\n\
             {} cores; medians of {}\n\n{}\n  \
             two prompts at once on two threads of this machine: {:.2} times one ({least:.2} to {most:.2}, of the best {:.2})\n\n{}\n  \
             here, per token: {:.2} ms for embedding, output matrix and sampling{}\n  \
             construct {:.2} ms, first token {:.1} ms (of {} chats at once, the last: {:.0} ms)\n  \
             answers: {}\n",
            self.model,
            counted(self.threads.len(), "host"),
            threads,
            if self.pinned {
                ", on a core of its own"
            } else {
                ""
            },
            output::threads(self.caller_threads),
            self.cores,
            self.repetitions,
            table(
                "tokens/s|beside|over hosts|ratio|of the best|ratios",
                speeds
            ),
            self.two_cores.ratio,
            self.two_cores.best,
            table("one chat's hops|compute|overhead p50|p95", hops),
            self.head_ms_per_token,
            self.own_layers
                .iter()
                .map(|own| {
                    let (ms, layers) = (own.compute_ms_p50, runs_text(&[own.layers]));
                    format!(", {ms:.2} ms for layers {layers}")
                })
                .collect::<String>(),
            self.construct_ms,
            self.first_token_ms,
            self.chats,
            self.many_first_token_ms,
            if self.same_answers {
                "identical to this machine alone, token for token"
            } else {
                "NOT identical to this machine alone"
            },
        )
    }
}
