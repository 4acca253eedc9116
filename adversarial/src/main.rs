//! `hearthnet-adversarial`, which `hearthnet adversarial` runs: the command line of the suite.

use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use futures_util::{StreamExt as _, stream};
use hearthnet_adversarial::{
    Bands, Conditions, Cores, Effort, HarnessError, Intrusion, Model, Pace, Report, Setup,
    VictimSettings, calibrate, detection, explain, hash_of, heading, intrude, list, listed,
    new_attack, page, real_model, run, select, sensitivity, serve_victim,
};
use hearthnet_files::ModelFile;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};

/// Attack hosts and nodes of this program with every attack of the suite, and show which claims
/// hold.
///
/// The attacked processes, the sockets and the keys are real and made for each attack. All traffic
/// stays on this machine.
#[derive(Debug, Parser)]
#[command(
    version,
    bin_name = "hearthnet adversarial",
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Carry out attacks and print a row for each as it ends.
    ///
    /// Exit status: 0 if all claims held, 1 if one did not hold, 2 if an attack could not be carried
    /// out.
    Run(RunArgs),
    /// List the attacks by group.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print what an attack does, why it matters, and its conditions.
    Explain {
        /// Name or number of the attack.
        name: String,
        /// Print the source of the attack instead.
        #[arg(long)]
        source: bool,
    },
    /// Write a new attack into a checkout: a file that compiles, with a number and an entry in the
    /// registry.
    New {
        /// The claim that must hold, for example a_full_stream_takes_no_more_rows.
        name: String,
        /// Folder of the checkout.
        #[arg(long, value_name = "DIR", default_value = ".")]
        checkout: PathBuf,
    },
    /// Try lies about rows in all strengths: which are refused, found by an audit, or change the
    /// answer.
    ///
    /// Runs SmolLM2-135M-Instruct with the bands of its catalogue entry, or another model, on all cores,
    /// and takes some minutes. Honest rows are checked for false alarms.
    Sensitivity(SweepArgs),
    /// Let a host lie in every answer, and count the requests until a check of its rows or an audit
    /// catches it.
    ///
    /// Each run starts a host that lies and an honest one, with a small model of random weights, and
    /// audits the product's share of the requests. Ten runs of each lie take a few minutes; use
    /// `--runs 100` for figures.
    Detection(DetectionArgs),
    /// Measure the bands of a model's rows, which the checks of rows need, and write them to a file.
    ///
    /// Prints the SHA-256 of the file, by which it can be pinned.
    Calibrate {
        /// Model file.
        #[arg(value_name = "MODEL.gguf")]
        model: PathBuf,
        /// File to write.
        #[arg(long, short, value_name = "FILE.toml", default_value = "bands.toml")]
        output: PathBuf,
        /// Factor by which the observed range is widened on both sides.
        #[arg(long, default_value_t = 1.5)]
        margin: f32,
    },
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

#[derive(Debug, Args)]
struct RunArgs {
    /// Run only this group, attack or number of a case (can be repeated).
    #[arg(long, value_name = "GROUP|NAME|NUMBER")]
    only: Vec<String>,
    /// Print one JSON object with every observation instead of a table.
    #[arg(long)]
    json: bool,
    /// Also write a page with plots to this file.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Attacks at a time. With more than one, latencies are not measured, because the attacks would
    /// delay each other's honest callers.
    #[arg(long, value_name = "N", default_value = "1")]
    jobs: NonZeroUsize,
    /// Model of the host under attack: SmolLM2-135M-Instruct, or random weights, in the shape of a
    /// third of its blocks or tiny.
    #[arg(long, value_enum, default_value_t = Model::Real)]
    model: Model,
    /// Deadlines of the host under attack: the defaults of a host, or about one second each.
    #[arg(long, value_enum, default_value_t = Pace::Shipped)]
    pace: Pace,
    /// Steps of the honest caller to measure without and with each attack; at least 500 are needed.
    #[arg(long, default_value_t = 1000)]
    steps: u64,
    /// Seconds after which an attack is not repeated any more, even if fewer steps were measured.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Count it as a failure if the honest caller's p99 more than doubles.
    #[arg(long)]
    enforce_latency: bool,
}

#[derive(Debug, Args)]
struct SweepArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Also write a page with plots to this file.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Model file instead of SmolLM2.
    #[arg(long, value_name = "MODEL.gguf", requires = "bands")]
    model: Option<PathBuf>,
    /// Bands of that model, by `calibrate`.
    #[arg(long, value_name = "FILE.toml", requires = "model")]
    bands: Option<PathBuf>,
    /// SHA-256 of the file of bands; another file is refused.
    #[arg(long, value_name = "HASH", requires = "bands")]
    bands_sha256: Option<String>,
}

#[derive(Debug, Args)]
struct DetectionArgs {
    /// Real runs of each lie; 1,000 are simulated in any case.
    #[arg(long, value_name = "N", default_value_t = 10)]
    runs: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Also write a page with the curves to this file.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        // These roles need a process with a single thread.
        Command::Program { arguments } => {
            return hearthnet::main(std::iter::once("hearthnet".into()).chain(arguments));
        }
        Command::Engine { role } => {
            return hearthnet::main(["hearthnet".into(), "engine".into(), role]);
        }
        Command::Intruder { plan } => intrude(&plan).map(|()| ExitCode::SUCCESS),
        Command::Victim { settings } => {
            in_runtime(serve_victim(settings)).map(|()| ExitCode::SUCCESS)
        }
        Command::Run(arguments) => {
            // Must happen before any other thread starts.
            let cores = match arguments.jobs.get() {
                1 => Cores::divide(),
                _ => None,
            };
            in_runtime(attack(arguments, cores))
        }
        Command::Sensitivity(arguments) => sweep(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Detection(arguments) => detect(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Calibrate {
            model,
            output,
            margin,
        } => measure(&model, &output, margin).map(|()| ExitCode::SUCCESS),
        other => print(&other).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(trouble) => {
            let _ = writeln!(std::io::stderr(), "error: {trouble}");
            ExitCode::from(2)
        }
    }
}

fn in_runtime<T>(work: impl Future<Output = Result<T, HarnessError>>) -> Result<T, HarnessError> {
    runtime()?.block_on(work)
}

fn runtime() -> Result<Runtime, HarnessError> {
    let mut builder = Builder::new_multi_thread();
    Ok(builder.worker_threads(2).enable_all().build()?)
}

/// Answers of commands that attack nothing.
fn print(command: &Command) -> Result<(), HarnessError> {
    let text = match command {
        Command::List { json: true } => serde_json::to_string_pretty(&listed())? + "\n",
        Command::List { json: false } => list(),
        Command::Explain { name, source } => {
            let chosen = select(std::slice::from_ref(name))?;
            let texts = chosen.into_iter().map(|entry| match source {
                true => entry.source().to_owned(),
                false => explain(entry),
            });
            texts.collect::<Vec<_>>().join("\n")
        }
        Command::New { name, checkout } => {
            let made = new_attack(&fs::canonicalize(checkout)?, name)?;
            let [attack, cases, registry] = made.files.each_ref().map(|file| file.display());
            let (name, root) = (&made.name, made.checkout.display());
            format!(
                "in {root}:\n  {attack}  (the attack: change it)\n  {cases}  (case {}: say what the \
                 attacker does, and the code that must be raised)\n  {registry}  (its entry)\n\n\
                 then:\n  cargo test -p hearthnet-adversarial {name}\n  cargo run --release -p \
                 hearthnet-adversarial -- run --only {name}\n",
                made.case
            )
        }
        _ => String::new(),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// Progress on standard error, if that is a terminal: steps that are done, and all.
fn progress() -> Result<(ProgressBar, impl FnMut(usize, usize)), HarnessError> {
    let style = ProgressStyle::with_template("{pos} of {len}  {eta} left")?;
    let bar = ProgressBar::new(0).with_style(style);
    let shown = bar.clone();
    let set = move |done: usize, total: usize| {
        shown.set_length(total as u64);
        shown.set_position(done as u64);
    };
    Ok((bar, set))
}

/// Prints the result of a measurement.
fn show(result: &(impl Serialize + Display), json: bool) -> Result<(), HarnessError> {
    let text = match json {
        true => serde_json::to_string_pretty(result)? + "\n",
        false => result.to_string(),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn sweep(arguments: &SweepArgs) -> Result<(), HarnessError> {
    let SweepArgs { json, report, .. } = arguments;
    if let Some(path) = report {
        fs::write(path, "")?;
    }
    let (file, bands) = match (&arguments.model, &arguments.bands) {
        (Some(model), Some(bands)) => {
            let file = ModelFile::open(model)?;
            let bands = Bands::read(bands, arguments.bands_sha256.as_deref(), &file)?;
            (file, bands.boundary_magnitude)
        }
        _ => {
            let (path, bands) = real_model()?;
            (ModelFile::open(&path)?, bands)
        }
    };
    let (bar, mut progress) = progress()?;
    let result = sensitivity(&file, &bands, &mut progress)?;
    bar.finish_and_clear();
    show(&result, *json)?;
    if let Some(path) = report {
        fs::write(path, result.page())?;
    }
    Ok(())
}

fn detect(arguments: &DetectionArgs) -> Result<(), HarnessError> {
    if let Some(path) = &arguments.report {
        fs::write(path, "")?;
    }
    let runtime = runtime()?;
    let (bar, mut progress) = progress()?;
    let result = detection(runtime.handle(), arguments.runs, &mut progress)?;
    bar.finish_and_clear();
    show(&result, arguments.json)?;
    if let Some(path) = &arguments.report {
        fs::write(path, result.page())?;
    }
    Ok(())
}

fn measure(model: &Path, output: &Path, margin: f32) -> Result<(), HarnessError> {
    let (bar, mut progress) = progress()?;
    let text = calibrate(model, margin, &mut progress)?;
    bar.finish_and_clear();
    fs::write(output, &text)?;
    let (output, hash) = (output.display(), hash_of(&text));
    writeln!(std::io::stdout(), "{output}\nsha256 {hash}")?;
    Ok(())
}

async fn attack(arguments: RunArgs, cores: Option<Cores>) -> Result<ExitCode, HarnessError> {
    let entries = select(&arguments.only)?;
    if let Some(path) = &arguments.report {
        // A run takes minutes: a file that cannot be written is reported before it.
        fs::write(path, "")?;
    }
    let setup = Setup {
        program: std::env::current_exe()?,
        pace: arguments.pace,
        model: arguments.model,
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
    let jobs = arguments.jobs.get();
    let mut report = Report::new(Conditions::now(&setup, jobs));
    let style = ProgressStyle::with_template("{pos} of {len}  {wide_msg}")?;
    // Only on a terminal, on standard error.
    let bar = ProgressBar::new(entries.len() as u64).with_style(style);
    let say = |line: &str| match arguments.json {
        true => Ok(()),
        false => bar.suspend(|| writeln!(std::io::stdout(), "{line}")),
    };
    say(&heading())?;
    let runs = entries.into_iter().map(|entry| {
        let (bar, setup) = (&bar, &setup);
        async move {
            bar.set_message(entry.claim());
            (entry, run(entry, setup).await)
        }
    });
    let mut runs = stream::iter(runs).buffer_unordered(jobs);
    while let Some((entry, done)) = runs.next().await {
        bar.inc(1);
        say(&report.add(entry, done).to_string())?;
    }
    bar.finish_and_clear();
    match arguments.json {
        true => writeln!(
            std::io::stdout(),
            "{}",
            serde_json::to_string_pretty(&report)?
        )?,
        false => say(&format!("\n{report}"))?,
    }
    if let Some(path) = &arguments.report {
        fs::write(path, page(&report))?;
    }
    let failed = report.not_held() > 0 || (arguments.enforce_latency && report.slow() > 0);
    Ok(match (report.troubles(), failed) {
        (0, false) => ExitCode::SUCCESS,
        (0, true) => ExitCode::from(1),
        _ => ExitCode::from(2),
    })
}
