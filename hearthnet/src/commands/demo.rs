//! `hearthnet demo`: an answer over host processes on this machine, and the same answer without
//! them.

use std::time::Instant;

use hearthnet_files::sampling::SamplingChoice;
use hearthnet_orchestrator::backend::HopTimes;
use hearthnet_orchestrator::chat::{AnswerOptions, ChatRequest, Done, Prompt, TurnOptions};
use hearthnet_orchestrator::placement::runs_text;
use hearthnet_tokens::ChatMessage;
use serde::Serialize;

use crate::answering::chat_backends::pooled_hosts;
use crate::answering::chat_setup::{converse, hosted_model, local_model};
use crate::answering::private_layers;
use crate::answering::stream::{Print, print_text, stream_answer};
use crate::cli::args::{DemoArgs, HostLayers};
use crate::cli::{
    Failure, bytes, counted, note, output, print_result, runtime, table, watch_interrupt,
};
use crate::config::Context;
use crate::hosting::host_process::{
    HostPlan, HostProcess, HostProcesses, require_same_answers, split,
};
use crate::models::{OpenModel, open_or_pull_model};

/// Default length of the answer in tokens: enough to read, and to measure.
const ANSWER_TOKENS: u32 = 256;

pub(crate) fn run(args: &DemoArgs, cx: &Context) -> Result<(), Failure> {
    args.sampling.check()?;
    let mut cx = cx.clone();
    // The command itself is the user's consent, and nothing leaves this machine.
    cx.config.policy.research.enable = true;
    let config = &cx.config;

    let runtime = runtime()?;
    let cancel = watch_interrupt(&runtime);
    let mut model = open_or_pull_model(&cx, args.model.as_ref())?;
    private_layers::load(&mut model, args.private, 1, config)?;
    let layers = model.file.spec().layers;
    let ranges = split(model.private.hosted(), args.shards, &args.cuts)?;
    let threads = (config.threads() / ranges.len()).max(1);
    let prompt = Prompt::Messages(vec![ChatMessage::user(&args.prompt)]);
    let request = ChatRequest {
        prompt,
        sampling: args.sampling.over(&SamplingChoice::GREEDY)?,
        max_tokens: Some(args.sampling.max_tokens.unwrap_or(ANSWER_TOKENS)),
        stop: args.sampling.stop.clone(),
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    };

    if !args.json {
        note(format!(
            "{}: {layers} layers, {} host processes with {} each",
            model.id,
            ranges.len(),
            counted(threads, "thread")
        ));
    }
    let plan = HostPlan {
        model: &model,
        config,
        streams: 1,
    };
    let host = |layers| HostLayers { layers, threads };
    let assigned: Vec<HostLayers> = ranges.into_iter().map(host).collect();
    let mut hosts = HostProcesses::start(&plan, &assigned, &cancel)?;
    if !args.json {
        for own in own_layers(&model) {
            note(format!("  layers {own} on this machine (private layers)"));
        }
        for host in &hosts.all {
            let (layers, address) = (host.layers_text(), host.address_text());
            note(format!("  layers {layers} on {address}"));
        }
        note(format!("\n> {}\n", args.prompt));
    }

    // The hosts share the cores; the caller uses all of them, as on a machine of its own.
    let mut show: Print = if args.json { |_| Ok(()) } else { print_text };
    // No fallback, so that the comparison below is between hosts and this machine.
    let handle = runtime.handle();
    let pool = pooled_hosts(handle, &hosts.addresses(), &hosts.key, &model, config);
    let served = hosted_model(&model, config, false, handle, pool.clone())?;
    let started = Instant::now();
    let (mut conversation, warnings) = converse(handle, &served, Some(&pool), None, &cancel)?;
    warnings.iter().for_each(note);
    let done = stream_answer(
        &mut conversation,
        &served.text,
        &request,
        started,
        &cancel,
        &mut show,
    )?;
    let memory: Vec<Option<u64>> = hosts.all.iter().map(HostProcess::resident_bytes).collect();
    drop(conversation);
    hosts.stop();

    // The same question without hosts, with as many threads as one host had.
    let mut as_one_host = config.clone();
    as_one_host.engine.threads.0 = threads;
    let served = local_model(&model, &as_one_host)?;
    let (mut conversation, _) = converse(handle, &served, None, None, &cancel)?;
    let local = stream_answer(
        &mut conversation,
        &served.text,
        &request,
        Instant::now(),
        &cancel,
        &mut |_| Ok(()),
    )?;
    let caller = config.threads();
    let report = Report::new(&model, done, local, &hosts.all, &memory, threads, caller);
    print_result(args.json, &report, || format!("\n\n{}", report.table()))?;
    require_same_answers(report.local.same_tokens, "hearthnet demo")
}

/// Layer ranges that this machine computes itself, as text.
fn own_layers(model: &OpenModel) -> Vec<String> {
    let (hosted, all) = (model.private.hosted(), model.file.spec().layers);
    let own = [(0, hosted.start), (hosted.end, all)];
    let own = own.into_iter().filter(|(lo, end)| lo < end);
    own.map(|(lo, end)| runs_text(&[(lo, end - 1)])).collect()
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    done: Done,
    model: String,
    weights_sha256: String,
    /// Threads with which the caller samples.
    caller_threads: usize,
    hosts: Vec<HostReport>,
    local: LocalReport,
}

#[derive(Debug, Serialize)]
struct HostReport {
    address: String,
    layers: (u32, u32),
    threads: usize,
    weight_bytes: u64,
    resident_bytes: Option<u64>,
    compute_ms_per_token: f64,
    hop_overhead_ms_p50: f64,
    hop_overhead_ms_p95: f64,
}

/// Times of the layers that this machine ran itself, as text; empty without such layers.
fn own_times(done: &Done) -> String {
    let hops = done.route.iter().zip(&done.timings.hops);
    let own = hops.filter(|(hop, _)| hop.host.is_none());
    let texts = own.map(|(hop, times)| {
        let ms = f64::from(times.compute_us_p50) / 1e3;
        format!(", {ms:.2} ms for layers {}", runs_text(&[hop.layers]))
    });
    texts.collect()
}

/// Times of the hops that are hosts, in order.
fn times_of_hosts(done: &Done) -> impl Iterator<Item = &HopTimes> {
    let hops = done.route.iter().zip(&done.timings.hops);
    hops.filter(|(hop, _)| hop.host.is_some())
        .map(|(_, times)| times)
}

#[derive(Debug, Serialize)]
struct LocalReport {
    threads: usize,
    tokens_per_second: f64,
    first_token_ms: f64,
    prefill_tokens_per_second: f64,
    same_tokens: bool,
    /// Decode speed over the hosts, divided by that of this machine alone.
    ratio: f64,
}

impl Report {
    fn new(
        model: &OpenModel,
        done: Done,
        local: Done,
        hosts: &[HostProcess],
        memory: &[Option<u64>],
        threads: usize,
        caller_threads: usize,
    ) -> Self {
        let hosts = hosts
            .iter()
            .zip(memory)
            .zip(times_of_hosts(&done))
            .map(|((host, resident), hop)| HostReport {
                address: host.address_text(),
                layers: host.layers,
                threads,
                weight_bytes: host.ready.as_ref().map_or(0, |r| r.memory.weight_bytes),
                resident_bytes: *resident,
                compute_ms_per_token: f64::from(hop.compute_us_p50) / 1e3,
                hop_overhead_ms_p50: f64::from(hop.overhead_us_p50) / 1e3,
                hop_overhead_ms_p95: f64::from(hop.overhead_us_p95) / 1e3,
            })
            .collect();
        let local = LocalReport {
            threads,
            tokens_per_second: local.timings.tokens_per_second,
            first_token_ms: local.timings.first_token_ms,
            prefill_tokens_per_second: local.timings.prefill_tokens_per_second,
            same_tokens: local.token_ids == done.token_ids && local.text == done.text,
            ratio: done.timings.tokens_per_second
                / local.timings.tokens_per_second.max(f64::MIN_POSITIVE),
        };
        Self {
            model: model.id.clone(),
            weights_sha256: model.weights.to_string(),
            caller_threads,
            hosts,
            local,
            done,
        }
    }

    fn table(&self) -> String {
        let rows = self.hosts.iter().map(|h| {
            let address = h.address.split_once('#').map_or(&*h.address, |(at, _)| at);
            [
                address.to_owned(),
                format!("{}-{}", h.layers.0, h.layers.1),
                bytes(h.weight_bytes),
                h.resident_bytes.map_or_else(|| "unknown".into(), bytes),
                format!("{:.2} ms", h.compute_ms_per_token),
                format!("{:.3} ms", h.hop_overhead_ms_p50),
                format!("{:.3} ms", h.hop_overhead_ms_p95),
            ]
        });
        let t = &self.done.timings;
        let speeds = vec![
            vec![
                format!("over {}", counted(self.hosts.len(), "host")),
                format!("{:.1} tokens/s", t.tokens_per_second),
                format!("{:.0} ms to the first token", t.first_token_ms),
            ],
            vec![
                "this machine alone".to_owned(),
                format!("{:.1} tokens/s", self.local.tokens_per_second),
                format!("{:.0} ms to the first token", self.local.first_token_ms),
            ],
        ];
        format!(
            "{}\n  here, on {}: {:.2} ms per token for embedding, output matrix and sampling{}\n\n{}\n  ratio {:.2}; {} tokens, {}\n",
            table(
                "host|layers|weights|memory|compute/token|on the wire p50|p95",
                rows
            ),
            output::threads(self.caller_threads),
            t.head_ms_per_token,
            own_times(&self.done),
            table("||", speeds).trim_start_matches('\n'),
            self.local.ratio,
            self.done.token_ids.len(),
            if self.local.same_tokens {
                "byte-identical"
            } else {
                "NOT identical"
            }
        )
    }
}
