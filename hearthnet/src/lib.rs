//! The `hearthnet` program: commands, configuration and output. It is a library so that another
//! program, such as the adversarial suite, can run it in its own process.
//!
//! Answers go to standard output, everything else to standard error; with `--json` standard output
//! carries one JSON object. Every failure has a message, a hint, and its own exit status
//! (`hearthnet help` lists them).
//!
//! Modules, each of which imports only those above it:
//!
//! | module | contents |
//! |---|---|
//! | `cli` | arguments, input, output, errors and signals |
//! | `config` | settings and their sources |
//! | `home` | data directory: key, log of the community, files beside it |
//! | `models` | models on this machine |
//! | `node` | node of the daemon or of one command; local API; writer of the log |
//! | `hosting` | hosts of layers |
//! | `planning` | plan of a model's placement, in numbers and words |
//! | `page` | page for browsers, and its calls |
//! | `answering` | chats, over hosts or on this machine |
//! | `daemon` | daemon of a home; its sandbox |
//! | `commands` | one file or folder each |

mod answering;
mod cli;
mod commands;
mod config;
mod daemon;
/// Bodies of the fuzz targets. Not a public interface.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::config::fuzzing::configuration;
}
mod home;
mod hosting;
mod models;
mod node;
mod page;
mod planning;

use std::alloc::System;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::ArgMatches;
use hearthnet_platform::machine::stand_back_at_disk;
use hearthnet_platform::process::set_name;
use zeroizing_alloc::ZeroAlloc;

use crate::cli::args::{Args, Command, ConfigCommand, Global};
use crate::cli::{Failure, Kind, Sanitized, report};
use crate::config::{Context, Loaded};
use crate::daemon::isolation;
use crate::home::key_status;
use crate::hosting::engine_process::start_starter;
use crate::models::adopted;

/// Wipes memory as it is freed. Prompts, answers and keys pass through buffers of many libraries.
/// Without wiping they could remain in a core dump, in swap space, or for a later attacker.
#[global_allocator]
static ALLOCATOR: ZeroAlloc<System> = ZeroAlloc(System);

/// Runs the program with its name and arguments; returns the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let (args, matches) = Args::read(args).unwrap_or_else(|error| error.exit());
    init_logs(&args);
    let json = wants_json(&matches);
    let dir = match args.command {
        // These commands print files for other programs, or are parts of a daemon.
        Command::Completions { .. } | Command::Man { .. } | Command::Engine(_) => None,
        _ => args.global.dir().ok(),
    };
    let outcome = run(args);
    if let Some(dir) = &dir {
        key_status::warn_of_clock(dir);
        key_status::warn_of_key(dir, outcome.as_ref().err());
    }
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report(&failure, json);
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

/// Sandboxes this process as the program would for a daemon with these arguments. Returns the state
/// of the sandbox as text. Irrevocable.
///
/// # Errors
/// Returns an error if the arguments start no daemon, or if the configuration cannot be read.
pub fn isolate(args: impl IntoIterator<Item = OsString>) -> Result<&'static str, String> {
    let (Args { global, command }, _) = Args::read(args).map_err(|e| e.to_string())?;
    let loaded = Loaded::load(global.config.as_deref(), &global.set).map_err(|e| e.to_string())?;
    let serves = command.serves();
    let (model, engine, from) = serves.ok_or("these arguments start no daemon")?;
    let config = loaded.config;
    isolation::enter(&Context { global, config }, model, engine, from);
    Ok(isolation::stands())
}

/// Whether the command was given `--json`.
fn wants_json(matches: &ArgMatches) -> bool {
    match matches.subcommand() {
        Some((_, inner)) => wants_json(inner),
        None => matches!(matches.try_get_one("json"), Ok(Some(true))),
    }
}

/// Logs go to standard error; `HEARTHNET_LOG` sets the filter (`info`, `hearthnet_shard=debug`,
/// ...). Logs never contain a prompt, a token or an activation. A chat prints its own messages, so
/// its log is off by default.
fn init_logs(args: &Args) {
    use tracing_subscriber::EnvFilter;
    let usual = match &args.command {
        Command::Chat(_) => "off",
        _ => "warn",
    };
    let filter = EnvFilter::try_from_env("HEARTHNET_LOG").unwrap_or_else(|_| EnvFilter::new(usual));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        // No colours, so that every escape sequence in the log is foreign and can be removed.
        .with_ansi(false)
        .with_writer(|| Sanitized(std::io::stderr()))
        .init();
}

fn run(args: Args) -> Result<(), Failure> {
    let global = args.global;
    // These commands must work without a valid configuration: they write, restore or check it.
    match &args.command {
        Command::Init(command) => return commands::init::run(command, &global),
        Command::Restore(command) => return commands::restore::run(command, &global),
        Command::Up(command) => return commands::up::run(command, global),
        Command::Config(ConfigCommand::Check { file }) => {
            return commands::config::check(file.as_deref(), &global);
        }
        Command::Completions { shell } => return commands::manual::completions(*shell),
        Command::Man { directory } => return commands::manual::man(directory),
        Command::Engine(command) => return commands::engine::run(*command),
        Command::Adversarial { arguments } => return commands::adversarial::run(arguments),
        _ => {}
    }
    let loaded = Loaded::load(global.config.as_deref(), &global.set)?;
    act(args.command, global, &loaded).map_err(|failure| match failure.kind {
        Kind::ExperimentalDisabled if loaded.module_is_off => failure.hint(
            "research.distributed_inference.enabled = false in the configuration switches it off",
        ),
        _ => failure,
    })
}

fn act(command: Command, global: Global, loaded: &Loaded) -> Result<(), Failure> {
    let mut config = loaded.config.clone();
    // The sandbox needs to know it.
    if let Command::Serve(args) = &command
        && let Some(path) = &args.answers.http_socket
    {
        config.http.socket.clone_from(path);
    }
    let cx = &Context { global, config };
    // Before any thread is started, because threads keep the access they start with.
    if let Some((model, engine, from)) = command.serves() {
        // `up` becomes the daemon by a path that does not name the program.
        set_name(c"hearthnet");
        if cx.config.manners.idle_io {
            stand_back_at_disk();
        }
        start_starter();
        isolation::enter(cx, model, engine, from);
    }
    let adopted = command.reads().and_then(|(model, into)| {
        // The sandbox denies the community's log, which has the names of adopted models.
        let adopted = adopted::named(&cx.global, &model);
        isolation::enter_to_read(cx, &model, into);
        adopted
    });
    match command {
        Command::Community(command) => commands::community::run(command, cx),
        Command::Serve(command) => commands::serve::run(command, cx),
        Command::Page { open, wait } => commands::page::run(open, wait, &cx.global),
        Command::HttpKey(command) => commands::http_key::run(command, cx),
        Command::Diagnose(command) => commands::diagnose::run(&command, cx),
        Command::Pause(command) => commands::pause::pause(&command, cx),
        Command::Resume { json } => commands::pause::resume(json, cx),
        Command::Plan(command) => commands::plan::run(&command, cx),
        Command::Status { json } => commands::status::run(json, cx),
        Command::Backup(command) => commands::backup::run(&command, &cx.global),
        Command::Audit(command) => commands::audit::run(command, cx),
        Command::Log(command) => commands::log::run(command, cx),
        Command::Model(command) => commands::model::run(command, adopted.as_ref(), cx),
        Command::Conformance(command) => commands::conformance::run(&command, cx),
        Command::Id { json } => commands::id::run(json, &cx.global),
        Command::Shard(command) => commands::shard::run(command, cx),
        Command::Chat(command) => commands::chat::run(command, cx),
        Command::Embed(command) => commands::embed::run(&command, cx),
        Command::Demo(command) => commands::demo::run(&command, cx),
        Command::Bench(command) => commands::bench::run(command, cx),
        Command::Config(_) => commands::config::show(loaded),
        Command::Init(_)
        | Command::Up(_)
        | Command::Restore(_)
        | Command::Adversarial { .. }
        | Command::Completions { .. }
        | Command::Man { .. }
        | Command::Engine(_) => Ok(()),
    }
}
