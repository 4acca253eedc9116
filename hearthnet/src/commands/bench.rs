//! `hearthnet bench`: measure the engine or the transport.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;

use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_engine::bench::{self, BenchTest, EngineBench, bench_engine};
use hearthnet_engine::kernels::Isa;
use hearthnet_transport::bench::{BenchOptions, BenchReport, PURPOSE, run as measure, serve_echo};
use hearthnet_transport::{Admission, CloseCode, Hello, Identity, Listener};

use crate::cli::args::{BenchCommand, EngineArgs, EngineKind};
use crate::cli::failure::{Failure, Kind};
use crate::cli::output::{bytes, note, print, print_json, table};
use crate::cli::runtime::runtime;
use crate::cli::signals::Stop;
use crate::config::{Config, Context};
use crate::hosting::host_engine::{self, exact_has_no};
use crate::models::find::{pick, resolve};

pub(crate) fn run(command: BenchCommand, cx: &Context) -> Result<(), Failure> {
    match command {
        BenchCommand::Engine(args) => engine(args, cx),
        BenchCommand::Mesh(args) => super::bench_mesh::run(&args, cx),
        BenchCommand::Transport {
            echo_for: Some(caller),
            ..
        } => echo(caller, &cx.config),
        BenchCommand::Transport { rounds, json, .. } => transport(rounds, json, &cx.config),
    }
}

fn engine(args: EngineArgs, cx: &Context) -> Result<(), Failure> {
    let path = resolve(&cx.global, &pick(cx, args.model.as_ref(), None)?)?.path;
    let options = bench::BenchOptions {
        threads: args.threads,
        prefill: args.prefill,
        decode: args.decode,
        depths: args.depth,
        batches: args.batch,
        repetitions: args.repetitions,
        isa: args.isa.unwrap_or_else(Isa::detect),
    };
    let mut progress = |what: &str| note(what);
    let report = match args.engine {
        EngineKind::Exact => {
            exact_has_no(&args.torch)?;
            bench_engine(&path, &options, &mut progress)
                .map_err(|e| Failure::new(Kind::BadRequest, e.to_string()).hint("see --help"))?
        }
        EngineKind::Torch => host_engine::bench(&path, &args.torch, &options, &mut progress)?,
    };
    if args.json {
        print_json(&report)
    } else {
        print(engine_table(&report))
    }
}

fn engine_table(report: &EngineBench) -> String {
    let rows = report.results.iter().map(|r| {
        let test = match r.test {
            BenchTest::Prefill => "prefill",
            BenchTest::Decode => "decode",
        };
        [
            format!("{test} {}", r.tokens),
            r.threads.to_string(),
            r.batch.to_string(),
            r.depth.to_string(),
            format!("{:.1}", r.tokens_per_second),
            match r.test {
                BenchTest::Prefill => String::new(),
                // The chats of a batch read the weights once together, except for experts.
                BenchTest::Decode => {
                    rate(report.token_bytes as f64 * r.tokens_per_second / f64::from(r.batch))
                }
            },
        ]
    });
    let bandwidth: Vec<String> = report.memory_bandwidth.iter().map(|b| rate(*b)).collect();
    format!(
        "{}\n{} ({}, {} in memory, loaded in {:.1} s)\nengine: {}; {}, {} cores, kernels: {}; reads memory at {} GB/s\n",
        table(
            &[
                "test",
                "threads",
                "at once",
                "depth",
                "tokens/s",
                "GB/s of weights"
            ],
            rows
        ),
        report.file.display(),
        report.weight_types.join(" "),
        bytes(report.weight_bytes),
        report.load_seconds,
        report.engine,
        report.cpu,
        report.cores,
        report.isa,
        bandwidth.join(" and "),
    )
}

/// Bytes per second in GB/s.
fn rate(bytes_per_second: f64) -> String {
    format!("{:.1}", bytes_per_second / 1e9)
}

/// Serves one caller with an echo until standard input ends.
fn echo(caller: NodeId, config: &Config) -> Result<(), Failure> {
    let key = NodeKey::generate().map_err(Failure::internal)?;
    let identity = Identity::from_secret(&key.secret()).map_err(Failure::internal)?;
    let transport = config.transport()?;
    runtime()?.block_on(async {
        let admission = Arc::new(OnlyCaller(caller));
        let mut listener = Listener::bind("127.0.0.1:0", &identity, admission, transport, &[])
            .await
            .map_err(|e| Failure::new(Kind::Host, e.to_string()))?;
        print(format!("{}#{}\n", listener.local_addr(), key.id()))?;
        // Standard input ends when the measuring process closes the pipe or dies.
        let stop = Stop::listen(true)?;
        loop {
            tokio::select! {
                connection = listener.session() => { tokio::spawn(serve_echo(connection)); }
                () = stop.asked() => return Ok(()),
            }
        }
    })
}

struct OnlyCaller(NodeId);

impl Admission for OnlyCaller {
    fn admit_peer(&self, peer: &NodeId) -> bool {
        *peer == self.0
    }

    fn admit_hello(&self, _: &NodeId, hello: &Hello, _: u64) -> Result<(), CloseCode> {
        if hello.purpose == PURPOSE {
            Ok(())
        } else {
            Err(CloseCode::PurposeUnknown)
        }
    }
}

fn transport(rounds: u32, json: bool, config: &Config) -> Result<(), Failure> {
    let key = NodeKey::generate().map_err(Failure::internal)?;
    let fail = |e: std::io::Error| Failure::new(Kind::Host, format!("cannot start the echo: {e}"));
    let program = std::env::current_exe().map_err(fail)?;
    // Dropped at the end of this function: the pipe closes and the echo ends.
    let mut child = Command::new(program)
        .args(["bench", "transport", "--echo-for", &key.id().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    let mut address = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut address)
            .map_err(fail)?;
    }
    let address = address
        .trim()
        .parse::<hearthnet_orchestrator::link::HostAddr>()
        .map_err(|_| Failure::internal("the echo process did not start"))?;
    let identity = Identity::from_secret(&key.secret()).map_err(Failure::internal)?;
    let transport = config.transport()?;
    let report = runtime()?.block_on(async {
        // A separate task, because I/O on the thread of `block_on` is slow.
        let work = tokio::spawn(async move {
            let expect = address.node;
            let hello = Hello::new(PURPOSE, Vec::new());
            let endpoint = &address.endpoint;
            let mut connection =
                hearthnet_transport::connect(endpoint, &identity, expect, hello, transport)
                    .await
                    .map_err(Failure::internal)?;
            let options = BenchOptions {
                round_trips: rounds,
                ..BenchOptions::default()
            };
            measure(&mut connection, &options)
                .await
                .map_err(Failure::internal)
        });
        work.await.map_err(Failure::internal)?
    });
    drop(child.stdin.take());
    // The child ends by itself; waiting avoids a zombie.
    let _ = child.wait();
    let report = report?;
    if json {
        print_json(&report)
    } else {
        print(transport_table(&report))
    }
}

fn transport_table(report: &BenchReport) -> String {
    let trips = report.round_trips.iter().map(|r| {
        [
            r.bytes.to_string(),
            format!("{:.1}", r.p50_us),
            format!("{:.1}", r.p95_us),
            format!("{:.1}", r.p99_us),
        ]
    });
    let speeds = report.throughput.iter().map(|t| {
        [
            bytes(u64::from(t.bytes)),
            format!("{:.0}", t.megabytes_per_second),
        ]
    });
    format!(
        "round trips between two processes on loopback, TLS 1.3 and WebSocket\n{}\none way\n{}",
        table(&["bytes", "p50 us", "p95 us", "p99 us"], trips),
        table(&["size", "MB/s"], speeds)
    )
}
