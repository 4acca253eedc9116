//! `hearthnet demo`: host processes on this machine, an orchestrator, an answer,
//! and the same answer without them.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeKey;
use hearthnet_model::ChatMessage;
use hearthnet_orchestrator::chat::{ChatRequest, Conversation, Done, Prompt};
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_orchestrator::{Cancel, ChatError};
use serde::{Deserialize, Serialize};

use crate::args::{DemoArgs, Global};
use crate::commands::chat::{
    Print, connect, connected, local_backend, open_route, print_text, stream_answer,
    watch_interrupt,
};
use crate::commands::shard::Ready;
use crate::commands::{
    OpenModel, engine_options, load_head, open_or_pull_model, print_bytes, print_json, runtime,
    sampling, text_model,
};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::output::{bytes, note, table};

/// How long a host may take to load its layers. Loading is bound by the disk.
const READY_DEADLINE: Duration = Duration::from_secs(120);

/// How long a host gets to end by itself before it is killed.
const LEAVE_DEADLINE: Duration = Duration::from_secs(3);

pub(crate) fn run(args: DemoArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    let mut config = config.clone();
    // Whoever runs the demo has asked for it, and nothing leaves this machine.
    config.policy.research.enable = true;

    let runtime = runtime()?;
    let cancel = Cancel::default();
    watch_interrupt(&runtime, cancel.clone());
    let model = open_or_pull_model(global, &args.model)?;
    let layers = model.file.spec().layers;
    let ranges = split(layers, args.shards, &args.cuts)?;
    let threads = (config.threads() / ranges.len()).max(1);
    let prompt = Prompt::Messages(vec![ChatMessage::user(&args.prompt)]);
    let request = ChatRequest {
        prompt,
        sampling: sampling(&args.sampling)?,
        max_tokens: args.sampling.max_tokens,
        stop: args.sampling.stop.clone(),
    };

    let key = Arc::new(NodeKey::generate().map_err(Failure::internal)?);
    let directory = tempfile::tempdir().map_err(|e| {
        Failure::new(
            Kind::Host,
            format!("cannot make a temporary directory: {e}"),
        )
    })?;
    if !args.json {
        note(format!(
            "{}: {layers} layers, {} host processes with {threads} thread{} each",
            model.id,
            ranges.len(),
            if threads == 1 { "" } else { "s" }
        ));
    }
    let mut hosts = Vec::new();
    for (index, &(lo, hi)) in ranges.iter().enumerate() {
        let home = directory.path().join(format!("host-{index}"));
        hosts.push(HostProcess::spawn(
            &model.path,
            (lo, hi),
            threads,
            &key,
            &home,
        )?);
    }
    for host in &mut hosts {
        host.wait_until_ready(&cancel)?;
    }
    if !args.json {
        for host in &hosts {
            note(format!(
                "  layers {} on {}",
                host.layers_text(),
                host.address_text()
            ));
        }
        note(format!("\n> {}\n", args.prompt));
    }

    let head = load_head(&model, &engine_options(&config, Some(threads)))?;
    let text = text_model(&model, head)?;
    let mut print: Print = if args.json { |_| Ok(()) } else { print_text };
    let started = Instant::now();
    let addresses: Vec<HostAddr> = hosts.iter().filter_map(HostProcess::address).collect();
    let links = runtime.block_on(connect(&addresses, &key, &config))?;
    let own = key.id().to_string();
    // Hosts only: what is compared below must not be this machine twice.
    let handle = runtime.handle();
    let source = connected(links, &model, &own, &config);
    let backend = open_route(handle, &model, source, &config, None, &cancel)?;
    let mut conversation = Conversation::new(backend);
    let done = stream_answer(
        &mut conversation,
        &text,
        &request,
        started,
        &cancel,
        &mut print,
    )?;
    let memory: Vec<Option<u64>> = hosts.iter().map(HostProcess::resident_bytes).collect();
    drop(conversation);
    for host in hosts.iter_mut() {
        host.stop();
    }

    // The same question without any host, on as many threads as one host had.
    let (backend, head) = local_backend(&model, &config, Some(threads))?;
    let text = text_model(&model, head)?;
    let mut conversation = Conversation::new(Box::new(backend));
    let local = stream_answer(
        &mut conversation,
        &text,
        &request,
        Instant::now(),
        &cancel,
        &mut |_| Ok(()),
    )?;
    let report = Report::new(&model, done, local, &hosts, &memory, threads);
    if args.json {
        print_json(&report)?;
    } else {
        print_bytes(b"\n\n")?;
        print_bytes(report.table().as_bytes())?;
    }
    if !report.local.same_tokens {
        return Err(Failure::new(
            Kind::Internal,
            "the hosts and this machine alone gave different answers, which must never happen",
        )
        .hint("please report this with the output of `hearthnet demo --json`"));
    }
    Ok(())
}

/// Inclusive layer ranges: evenly, or cut where the user says.
fn split(layers: u32, shards: u32, cuts: &[u32]) -> Result<Vec<(u32, u32)>, Failure> {
    let wrong =
        |why: String| Err(Failure::new(Kind::Config, why).hint("see `hearthnet demo --help`"));
    let firsts: Vec<u32> = if cuts.is_empty() {
        if shards == 0 || shards > layers {
            return wrong(format!(
                "--shards must lie between 1 and the model's {layers} layers"
            ));
        }
        (0..shards)
            .map(|i| (u64::from(i) * u64::from(layers) / u64::from(shards)) as u32)
            .collect()
    } else {
        std::iter::once(0).chain(cuts.iter().copied()).collect()
    };
    let ends = firsts.iter().skip(1).copied().chain([layers]);
    let mut ranges = Vec::new();
    for (lo, end) in firsts.iter().copied().zip(ends) {
        if lo >= end {
            return wrong(format!(
                "--cuts must rise and lie between 1 and {}",
                layers - 1
            ));
        }
        ranges.push((lo, end - 1));
    }
    Ok(ranges)
}

/// A `hearthnet shard serve` of our own. Dropping it ends the process.
struct HostProcess {
    child: Child,
    lines: mpsc::Receiver<String>,
    errors: mpsc::Receiver<String>,
    layers: (u32, u32),
    ready: Option<Ready>,
}

impl HostProcess {
    fn spawn(
        model: &Path,
        layers: (u32, u32),
        threads: usize,
        key: &NodeKey,
        home: &Path,
    ) -> Result<Self, Failure> {
        let fail = |e: std::io::Error| {
            Failure::new(Kind::Host, format!("cannot start a host process: {e}"))
        };
        let program = std::env::current_exe().map_err(fail)?;
        let mut child = Command::new(program)
            .args(["--set", "policy.research.enable=true", "--data-dir"])
            .arg(home)
            .args([
                "shard",
                "serve",
                "--json",
                "--lifeline",
                "--listen",
                "127.0.0.1:0",
            ])
            .arg("--model")
            .arg(model)
            .args(["--layers", &format!("{}-{}", layers.0, layers.1)])
            .args(["--threads", &threads.to_string()])
            .args(["--peer-key", &key.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C reaches the demo, which then ends its hosts in
            // order. If the demo dies without a word, their standard input ends, and so do they.
            .process_group(0)
            .spawn()
            .map_err(fail)?;
        let lines = read_lines(child.stdout.take());
        let errors = read_lines(child.stderr.take());
        Ok(Self {
            child,
            lines,
            errors,
            layers,
            ready: None,
        })
    }

    fn wait_until_ready(&mut self, cancel: &Cancel) -> Result<(), Failure> {
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            if cancel.is_cancelled() {
                return Err(ChatError::Cancelled.into());
            }
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => {
                    let ready = serde_json::from_str(&line).map_err(|e| {
                        Failure::internal(format!("a host process said something else: {e}"))
                    })?;
                    self.ready = Some(ready);
                    return Ok(());
                }
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(_) => {
                    let why: Vec<String> = self.errors.try_iter().collect();
                    return Err(Failure::new(
                        Kind::Host,
                        format!(
                            "the host process for layers {} did not start: {}",
                            self.layers_text(),
                            if why.is_empty() {
                                "no reason given".into()
                            } else {
                                why.join("; ")
                            }
                        ),
                    ));
                }
            }
        }
    }

    fn layers_text(&self) -> String {
        format!("{}-{}", self.layers.0, self.layers.1)
    }

    fn address(&self) -> Option<HostAddr> {
        self.ready.as_ref()?.address.parse().ok()
    }

    fn address_text(&self) -> String {
        self.ready
            .as_ref()
            .map_or_else(String::new, |r| r.address.clone())
    }

    /// Memory that the process occupies now, where the system tells.
    fn resident_bytes(&self) -> Option<u64> {
        crate::commands::shard::resident_bytes(self.child.id())
    }

    /// Ends the process: politely, then for good.
    fn stop(&mut self) {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + LEAVE_DEADLINE;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        // It may have ended in between; either way nothing is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The lines of a child's output, read by a thread so that waiting can have a limit.
fn read_lines(output: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let Some(output) = output else { return };
        // One line is a descriptor: a few kilobytes. The bound keeps a runaway child harmless.
        for line in BufReader::new(output.take(1 << 20)).lines() {
            let Ok(line) = line else { return };
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// What the demo found out.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    done: Done,
    model: String,
    weights_sha256: String,
    hosts: Vec<HostReport>,
    local: LocalReport,
}

#[derive(Debug, Serialize, Deserialize)]
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

#[derive(Debug, Serialize)]
struct LocalReport {
    threads: usize,
    tokens_per_second: f64,
    first_token_ms: f64,
    prefill_tokens_per_second: f64,
    same_tokens: bool,
    /// Tokens per second over the hosts, divided by those of this machine alone.
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
    ) -> Self {
        let hosts = hosts
            .iter()
            .zip(memory)
            .zip(&done.timings.hops)
            .map(|((host, resident), hop)| HostReport {
                address: host.address_text(),
                layers: host.layers,
                threads,
                weight_bytes: host.ready.as_ref().map_or(0, |r| r.weight_bytes),
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
            hosts,
            local,
            done,
        }
    }

    fn table(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .hosts
            .iter()
            .map(|h| {
                let address = h.address.split('#').next().unwrap_or_default().to_owned();
                vec![
                    address,
                    format!("{}-{}", h.layers.0, h.layers.1),
                    bytes(h.weight_bytes),
                    h.resident_bytes.map_or_else(|| "unknown".into(), bytes),
                    format!("{:.2} ms", h.compute_ms_per_token),
                    format!("{:.3} ms", h.hop_overhead_ms_p50),
                    format!("{:.3} ms", h.hop_overhead_ms_p95),
                ]
            })
            .collect();
        let head = [
            "host",
            "layers",
            "weights",
            "memory",
            "compute/token",
            "on the wire p50",
            "p95",
        ];
        let t = &self.done.timings;
        let n = self.hosts.len();
        let speeds = vec![
            vec![
                format!("over {n} host{}", if n == 1 { "" } else { "s" }),
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
            "{}\n  here: {:.2} ms per token for embedding, output matrix and sampling\n\n{}\n  ratio {:.2}; {} tokens, {}\n",
            table(&head, &rows),
            t.head_ms_per_token,
            table(&["", "", ""], &speeds).trim_start_matches('\n'),
            self.local.ratio,
            self.done.token_ids.len(),
            if self.local.same_tokens {
                "the same ones, byte for byte"
            } else {
                "NOT the same ones"
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_split_evenly_and_completely() {
        assert_eq!(split(30, 2, &[]).unwrap(), [(0, 14), (15, 29)]);
        assert_eq!(split(5, 3, &[]).unwrap(), [(0, 0), (1, 2), (3, 4)]);
        assert_eq!(split(3, 3, &[]).unwrap(), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(split(30, 1, &[]).unwrap(), [(0, 29)]);
    }

    #[test]
    fn layers_are_cut_where_the_user_says() {
        assert_eq!(split(30, 2, &[7, 20]).unwrap(), [(0, 6), (7, 19), (20, 29)]);
    }

    #[test]
    fn impossible_splits_are_refused() {
        assert!(split(4, 0, &[]).is_err());
        assert!(split(4, 5, &[]).is_err());
        for cuts in [&[0][..], &[4], &[2, 2], &[3, 1], &[u32::MAX]] {
            assert!(split(4, 2, cuts).is_err(), "{cuts:?}");
        }
    }
}
