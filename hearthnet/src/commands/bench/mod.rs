//! `hearthnet bench`: measure the engine, the transport, or hosts on this machine.

mod interval;
mod mesh;
mod policies;
mod receipts;
mod setup;
mod transport;

use hearthnet_engine::bench::{self, BenchTest, EngineBench, bench_engine};
use hearthnet_engine::kernels::Isa;
use hearthnet_shard::Device;

use crate::cli::args::{BenchCommand, EngineArgs, EngineKind};
use crate::cli::{Failure, Kind, bytes, note, print_result, table};
use crate::config::Context;
use crate::hosting::cards;
use crate::hosting::host_engine::{self, exact_device};
use crate::models::open_file::open_file;
use crate::models::{pick, refuse_encoder, resolve};

pub(crate) fn run(command: BenchCommand, cx: &Context) -> Result<(), Failure> {
    match command {
        BenchCommand::Engine(args) => engine(args, cx),
        BenchCommand::Mesh(args) if args.receipts => receipts::run(&args, cx),
        BenchCommand::Mesh(args) if args.policy.is_empty() => mesh::run(&args, cx),
        BenchCommand::Mesh(args) => policies::run(&args, cx),
        BenchCommand::Transport {
            echo_for: Some(caller),
            ..
        } => transport::echo(caller, &cx.config),
        BenchCommand::Transport { rounds, json, .. } => transport::run(rounds, json, &cx.config),
    }
}

fn engine(args: EngineArgs, cx: &Context) -> Result<(), Failure> {
    let path = resolve(&cx.global, &pick(cx, args.model.as_ref(), None)?)?.path;
    refuse_encoder(&path.display().to_string(), &open_file(&path)?)?;
    let inference = &cx.config.research.distributed_inference;
    let options = bench::BenchOptions {
        threads: args.threads,
        prefill: args.prefill,
        decode: args.decode,
        depths: args.depth,
        batches: args.batch,
        repetitions: args.repetitions,
        isa: args.isa.unwrap_or_else(Isa::detect),
        cache: args.cache.unwrap_or(inference.cache_dtype),
    };
    let mut progress = |what: &str| note(what);
    let report = match args.engine {
        EngineKind::Exact => {
            // Without `--device` the processor is measured.
            match exact_device(&args.torch, "cpu")? {
                Device::Processor => bench_engine(&path, &options, &mut progress).map_err(|e| {
                    Failure::new(Kind::BadRequest, e.to_string()).hint("see --help")
                })?,
                card => cards::bench(&path, card, &options, &mut progress)?,
            }
        }
        EngineKind::Torch => host_engine::bench(&path, &args.torch, &options, &mut progress)?,
    };
    print_result(args.json, &report, || engine_table(&report))
}

fn engine_table(report: &EngineBench) -> String {
    let rows = report.results.iter().map(|r| {
        let test = match r.test {
            BenchTest::Prefill => "prefill",
            BenchTest::Decode => "decode",
        };
        // The chats of a batch read the weights once together, except for experts.
        let read = report.token_bytes as f64 * r.tokens_per_second / f64::from(r.batch);
        let read = matches!(r.test, BenchTest::Decode).then_some(read);
        [
            format!("{test} {}", r.tokens),
            r.threads.to_string(),
            r.batch.to_string(),
            r.depth.to_string(),
            format!("{:.1}", r.tokens_per_second),
            read.map_or_else(String::new, rate),
            rate(r.memory_bandwidth),
            read.map_or_else(String::new, |read| {
                format!("{:.0}%", 100.0 * read / r.memory_bandwidth)
            }),
        ]
    });
    format!(
        "{}\n{} ({}, {} in memory, loaded in {:.1} s)\nengine: {}; {}, {} cores, kernels: {}\n",
        table(
            "test|threads|at once|depth|tokens/s|GB/s of weights|of a streaming read|share",
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
    )
}

/// Bytes per second in GB/s.
fn rate(bytes_per_second: f64) -> String {
    format!("{:.1}", bytes_per_second / 1e9)
}
