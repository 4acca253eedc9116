//! Runs schedules of faults, and reports those that break an invariant.
//!
//! ```text
//! hearthnet-sim [--logs] [--from S] --seeds N       N seeds, from S on (default 0)
//! hearthnet-sim [--logs] --seed S [--faults LIST]   one run with its trace; LIST: KIND@NODE:MS+MS,...
//! hearthnet-sim [--logs] [--from S] --all-triples   every ordered combination of up to three faults
//! ```
//!
//! `--logs` chooses the scene of logs instead of that of answers.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the output of a command"
)]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use hearthnet_sim::faults::{Scene, Schedule};
use hearthnet_sim::model::Model;
use hearthnet_sim::{Report, answers, logs};

const USAGE: &str = "usage: hearthnet-sim [--logs] [--from S] (--seeds N | --seed S [--faults LIST] | \
                     --all-triples)";

#[derive(Default)]
struct Arguments {
    logs: bool,
    from: u64,
    seeds: Option<u64>,
    seed: Option<u64>,
    faults: Option<String>,
    triples: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut found = Arguments::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|e| format!("{text:?}: {e}"));
        match word.as_str() {
            "--logs" => found.logs = true,
            "--from" => found.from = number(value()?)?,
            "--seeds" => found.seeds = Some(number(value()?)?),
            "--seed" => found.seed = Some(number(value()?)?),
            "--faults" => found.faults = Some(value()?),
            "--all-triples" => found.triples = true,
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(found)
}

fn main() -> ExitCode {
    let done = arguments().and_then(|asked| match asked.logs {
        true => {
            let founded = logs::Founded::new();
            go(&asked, |schedule| logs::run(&founded, schedule))
        }
        false => {
            let model = Arc::new(Model::load());
            go(&asked, |schedule| answers::run(&model, schedule))
        }
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Does what was asked. Returns whether all invariants held.
fn go<S: Scene>(asked: &Arguments, run: impl Fn(&Schedule<S>) -> Report) -> Result<bool, String> {
    if let Some(seed) = asked.seed {
        let schedule = match &asked.faults {
            Some(faults) => Schedule::read(seed, faults)?,
            None => Schedule::of_seed(seed),
        };
        let report = run(&schedule);
        report.trace.iter().for_each(|line| println!("{line}"));
        println!("faults: {schedule}\ntrace: {:016x}", report.hash);
        return Ok(holds(&schedule, &report));
    }
    let from = asked.from;
    match (asked.seeds, asked.triples) {
        (Some(seeds), false) => {
            let seeds = from..from.saturating_add(seeds);
            Ok(all(seeds.map(Schedule::of_seed), run))
        }
        (None, true) => Ok(all(Schedule::triples().skip(from as usize), run)),
        _ => Err("say which runs".into()),
    }
}

/// Runs all schedules. Returns whether all invariants held in all of them.
fn all<S: Scene>(
    schedules: impl Iterator<Item = Schedule<S>>,
    run: impl Fn(&Schedule<S>) -> Report,
) -> bool {
    let (begin, mut runs, mut broken) = (Instant::now(), 0u64, 0u64);
    let (mut done, mut failed) = (0u64, 0u64);
    let tell = |runs: u64, broken: u64| {
        println!(
            "{runs} runs in {:.0} s, {broken} broken",
            begin.elapsed().as_secs_f64()
        );
    };
    for schedule in schedules {
        let report = run(&schedule);
        runs += 1;
        broken += u64::from(!holds(&schedule, &report));
        done += u64::from(report.done);
        failed += u64::from(report.failed);
        if runs.is_multiple_of(1000) {
            tell(runs, broken);
        }
    }
    tell(runs, broken);
    println!("{done} calls or appends done, {failed} ended with an error");
    broken == 0
}

/// Prints what a run has broken, and how to repeat it.
fn holds<S: Scene>(schedule: &Schedule<S>, report: &Report) -> bool {
    for violation in &report.violations {
        eprintln!("seed {}: {violation}", schedule.seed);
    }
    let holds = report.violations.is_empty();
    if !holds {
        eprintln!("repeat: {}", schedule.command());
    }
    holds
}
