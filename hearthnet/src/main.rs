//! The `hearthnet` program: commands, configuration and human output.
//!
//! Answers go to standard output, everything else to standard error; with
//! `--json` standard output carries one JSON object. Every failure is one
//! sentence and a hint, and has its own exit status (`hearthnet help` lists them).

mod addresses;
mod args;
mod backends;
mod commands;
mod community;
mod community_service;
mod config;
mod daemon;
mod explain;
mod failure;
mod host_process;
mod host_setup;
mod local_api;
mod lock;
mod members;
mod membership;
mod memory;
mod metrics_server;
mod node;
mod output;
mod paths;
mod private_layers;
mod refill;
mod service_setup;
mod signals;
mod standing;
mod timeline;
mod transient_node;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command, ConfigCommand, Global};
use crate::config::CpuLatency;
use crate::failure::{Failure, Kind};
use crate::output::note;

fn main() -> ExitCode {
    let args = Args::parse();
    init_logs(&args);
    let json = args.wants_json();
    let dir = match args.command {
        // They print files, for machines.
        Command::Completions { .. } | Command::Man { .. } => None,
        _ => paths::data_dir(args.global.data_dir.clone()).ok(),
    };
    let outcome = run(args);
    standing::say(outcome.as_ref().err(), dir.as_deref());
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report(&failure, json);
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

/// Logs go to standard error; `HEARTHNET_LOG` chooses what (`info`,
/// `hearthnet_shard=debug`, ...). Nothing logs a prompt, a token or an activation. A chat says in
/// its own words what people should know, so it logs nothing unless it is asked to.
fn init_logs(args: &Args) {
    use tracing_subscriber::EnvFilter;
    let usual = match &args.command {
        Command::Chat(_) => "off",
        _ => "warn",
    };
    let filter = EnvFilter::try_from_env("HEARTHNET_LOG").unwrap_or_else(|_| EnvFilter::new(usual));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}

fn run(args: Args) -> Result<(), Failure> {
    let global = args.global;
    if let Command::Init(command) = args.command {
        // The configuration may be what it is to write.
        return commands::init::run(&command, &global);
    }
    if let Command::Restore(command) = args.command {
        // So may what is in the backup.
        return commands::restore::run(&command, &global);
    }
    if let Command::Config(ConfigCommand::Check { file }) = &args.command {
        // The user's own may be what is wrong.
        return commands::config::check(file.as_deref(), &global);
    }
    // Neither needs a configuration that can be read.
    match &args.command {
        Command::Completions { shell } => return commands::manual::completions(*shell),
        Command::Man { directory } => return commands::manual::man(directory),
        _ => {}
    }
    let loaded = config::Loaded::load(global.config.as_deref(), &global.set)?;
    act(args.command, &global, &loaded).map_err(|failure| match failure.kind {
        Kind::ExperimentalDisabled if loaded.module_is_off() => failure.hint(
            "research.distributed_inference.enabled = false in the configuration switches it off",
        ),
        _ => failure,
    })
}

fn act(command: Command, global: &Global, loaded: &config::Loaded) -> Result<(), Failure> {
    if command.moves_rows()
        && let Some(latency) = loaded.config.engine.cpu_latency()
        && let Err(error) = hearthnet_transport::cpu_latency::limit(latency)
    {
        match loaded.config.engine.cpu_latency_us {
            CpuLatency::Microseconds(_) => note(format!(
                "cores sleep as the system likes, whatever engine.cpu_latency_us says: {error}"
            )),
            // Nobody has asked for it.
            CpuLatency::Word(_) => tracing::debug!("cores sleep as the system likes: {error}"),
        }
    }
    match command {
        Command::Init(command) => commands::init::run(&command, global),
        Command::Completions { shell } => commands::manual::completions(shell),
        Command::Man { directory } => commands::manual::man(&directory),
        Command::Community(command) => commands::community::run(command, global, &loaded.config),
        Command::Serve(command) => commands::serve::run(command, global, &loaded.config),
        Command::Diagnose(command) => commands::diagnose::run(&command, global, &loaded.config),
        Command::Status(command) => commands::status::run(&command, global, &loaded.config),
        Command::Backup(command) => commands::backup::run(&command, global),
        Command::Restore(command) => commands::restore::run(&command, global),
        Command::Log(command) => commands::log::run(command, global),
        Command::Model(command) => commands::model::run(command, global, &loaded.config),
        Command::Config(command) => commands::config::run(&command, loaded),
        Command::Id(command) => commands::id::run(&command, global),
        Command::Shard(command) => commands::shard::run(command, global, &loaded.config),
        Command::Chat(command) => commands::chat::run(command, global, &loaded.config),
        Command::Demo(command) => commands::demo::run(command, global, &loaded.config),
        Command::Bench(command) => commands::bench::run(command, global, &loaded.config),
    }
}

/// Tells of a failure: to people, and with `json` to programs.
pub(crate) fn report(failure: &Failure, json: bool) {
    if failure.kind == Kind::OutputClosed {
        return;
    }
    if json {
        // The reader of the JSON may be gone; the exit status still tells.
        let _ = commands::print_json(&failure.to_json());
    }
    note(format!("error: {failure}"));
    if let Some(hint) = failure.hint_text() {
        note(format!("hint: {hint}"));
    }
}
