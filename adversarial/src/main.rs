//! `hearthnet-adversarial`: runs the attacks and prints the results.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use hearthnet_adversarial::{
    ATTACKS, Cores, Effort, HarnessError, Intrusion, Pace, Report, Setup, VictimSettings, intrude,
    run, serve_victim,
};
use tokio::runtime::Builder;

/// Attacks a shard host with every attack of the suite and prints which claims held.
///
/// Exit status: 0 if all held, 1 if one did not hold, 2 if one could not be carried out.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    /// Run only these cases (can be repeated).
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..))]
    only: Vec<u8>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Deadlines of the victim: the defaults of a host, or about one second each.
    #[arg(long, value_enum, default_value_t = Pace::Shipped)]
    pace: Pace,
    /// Steps of the honest caller to measure without and with each attack.
    #[arg(long, default_value_t = 1000)]
    steps: u64,
    /// Seconds after which an attack is not repeated any more, even if fewer steps were measured.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Count it as a failure if the honest caller's p99 more than doubles.
    #[arg(long)]
    enforce_latency: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Runs the real program with these arguments; started by the suite itself.
    #[command(hide = true, disable_help_flag = true)]
    Program {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Runs a part of the real program that computes; started by the program itself.
    #[command(hide = true)]
    Engine { role: OsString },
    /// Runs a compromised daemon; started by the suite itself.
    #[command(hide = true)]
    Intruder {
        #[arg(value_parser = |plan: &str| serde_json::from_str::<Intrusion>(plan))]
        plan: Intrusion,
    },
    /// Runs the host under attack; started by the suite itself.
    #[command(hide = true)]
    Victim {
        #[arg(value_parser = |settings: &str| serde_json::from_str::<VictimSettings>(settings))]
        settings: VictimSettings,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse() {
        // Both roles need a process with a single thread.
        Arguments {
            role: Some(Role::Program { arguments }),
            ..
        } => return hearthnet::main(std::iter::once("hearthnet".into()).chain(arguments)),
        Arguments {
            role: Some(Role::Engine { role }),
            ..
        } => return hearthnet::main(["hearthnet".into(), "engine".into(), role]),
        Arguments {
            role: Some(Role::Intruder { plan }),
            ..
        } => intrude(&plan).map(|()| ExitCode::SUCCESS),
        arguments => {
            // Must run before any other thread starts.
            let cores = match arguments.role {
                None => Cores::divide(),
                Some(_) => None,
            };
            Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .map_err(HarnessError::from)
                .and_then(|runtime| runtime.block_on(perform(arguments, cores)))
        }
    };
    match done {
        Ok(code) => code,
        Err(trouble) => {
            let _ = writeln!(std::io::stderr(), "error: {trouble}");
            ExitCode::from(2)
        }
    }
}

async fn perform(arguments: Arguments, cores: Option<Cores>) -> Result<ExitCode, HarnessError> {
    if let Some(Role::Victim { settings }) = arguments.role {
        serve_victim(settings).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let setup = Setup {
        program: std::env::current_exe()?,
        pace: arguments.pace,
        effort: match cores {
            Some(cores) => Effort::Measured {
                steps: arguments.steps,
                at_most: Duration::from_secs(arguments.seconds),
                cores,
            },
            // With one core, latencies would measure the attacker's own work.
            None => Effort::Once,
        },
    };
    let wanted = |case: u8| arguments.only.is_empty() || arguments.only.contains(&case);
    let built = |case: u8| ATTACKS.iter().any(|entry| entry.case == case);
    let mut report = Report::new(wanted, built);
    for entry in ATTACKS.iter().filter(|entry| wanted(entry.case)) {
        if !arguments.json {
            // A full run takes a minute or two: show the progress.
            let _ = writeln!(
                std::io::stderr(),
                "{:>3}  {} ...",
                entry.case,
                entry.claim()
            );
        }
        match run(entry, &setup).await {
            Ok(outcome) => report.add(outcome),
            Err(trouble) => report.add_trouble(entry.case, entry.claim(), &trouble),
        }
    }
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{report}")?;
    }
    let failed = report.not_held() > 0 || (arguments.enforce_latency && report.slow() > 0);
    Ok(match (report.troubles(), failed) {
        (0, false) => ExitCode::SUCCESS,
        (0, true) => ExitCode::from(1),
        _ => ExitCode::from(2),
    })
}
