//! Schedules of faults, from seeds. `HEARTHNET_SIM_SEEDS` sets their number.

#![allow(clippy::panic, clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use hearthnet_sim::Report;
use hearthnet_sim::answers::{self, Answers};
use hearthnet_sim::faults::{Scene, Schedule};
use hearthnet_sim::logs::{self, Founded, Logs};
use hearthnet_sim::model::{ANSWER, Model};
use strum::VariantArray as _;

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| Arc::new(Model::load()));
static FOUNDED: LazyLock<Founded> = LazyLock::new(Founded::new);

fn sound<S: Scene>(schedule: &Schedule<S>, run: impl Fn(&Schedule<S>) -> Report) -> Report {
    let report = run(schedule);
    if !report.violations.is_empty() {
        let broken = report.violations.join("\n");
        panic!("{broken}\nrepeat: {}", schedule.command());
    }
    report
}

fn answer(schedule: &Schedule<Answers>) -> Report {
    sound(schedule, |schedule| answers::run(&MODEL, schedule))
}

fn log(schedule: &Schedule<Logs>) -> Report {
    sound(schedule, |schedule| logs::run(&FOUNDED, schedule))
}

/// Number of schedules of a test; a part of it runs on each thread.
fn seeds(usual: u64) -> u64 {
    let seeds = std::env::var("HEARTHNET_SIM_SEEDS").ok();
    seeds.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn lines(report: &Report, part: &str) -> usize {
    let lines = report.trace.iter().filter(|line| line.contains(part));
    lines.count()
}

/// Each hunk of the patches of `planted` changes lines that the sources still have.
#[test]
fn the_planted_bugs_apply_to_these_sources() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut patches = 0;
    for entry in fs::read_dir(here.join("tests/planted")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "patch") {
            continue;
        }
        patches += 1;
        let patch = fs::read_to_string(&path).unwrap();
        let (mut source, mut hunks) = (String::new(), 0);
        for part in patch.split("\n@@ ") {
            let (_, lines) = part.split_once('\n').unwrap_or_default();
            let before: String = lines
                .lines()
                .take_while(|line| !line.starts_with("--- "))
                .filter_map(|line| line.strip_prefix([' ', '-']))
                .map(|line| format!("{line}\n"))
                .collect();
            if !source.is_empty() {
                hunks += 1;
                assert!(source.contains(&before), "{}: {before}", path.display());
            }
            if let Some((_, file)) = part.split_once("\n+++ b/") {
                let file = file.lines().next().unwrap();
                source = fs::read_to_string(here.join("../..").join(file)).unwrap();
            }
        }
        assert!(hunks > 0, "{}", path.display());
    }
    assert!(patches >= 5);
}

#[test]
fn without_faults_every_call_is_answered_by_the_hosts() {
    let report = answer(&Schedule::new(0, Vec::new()));
    assert!(report.done > 5, "{} calls", report.done);
    assert_eq!(report.failed, 0);
    assert!(lines(&report, ", token ") >= report.done as usize * ANSWER);
    assert_eq!(lines(&report, "layers moved"), 0);
    assert!(lines(&report, " confirmed, 0 differ") > 0);
    assert_eq!(lines(&report, "dispute"), 0);
}

/// The observer also checks that each finding names the host that lies.
#[test]
fn audits_find_the_host_that_lies() {
    let (mut lied, mut found) = (0, 0);
    for seed in 0..24 {
        let schedule = Schedule::read(seed, &format!("Lies@{}:500+100", seed % 3)).unwrap();
        let report = answer(&schedule);
        lied += usize::from(lines(&report, "follows from a lie") > 0);
        found += usize::from(lines(&report, "dispute with") > 0);
    }
    assert!(lied >= 12, "{lied} runs with wrong tokens");
    assert!(found >= 12, "{found} liars");
}

#[test]
fn calls_survive_schedules_of_faults() {
    let seeds = seeds(500);
    let (mut done, mut moved) = (0, 0);
    for seed in 0..seeds {
        let report = answer(&Schedule::of_seed(seed));
        done += u64::from(report.done);
        moved += lines(&report, "layers moved") as u64;
    }
    assert!(done > 4 * seeds, "{done} calls");
    assert!(moved > seeds / 2, "{moved} failovers");
}

#[test]
fn logs_survive_schedules_of_faults() {
    let seeds = seeds(500);
    let (mut done, mut revoked) = (0, 0);
    for seed in 0..seeds {
        let report = log(&Schedule::of_seed(seed));
        done += u64::from(report.done);
        revoked += lines(&report, "over: Revoke") as u64;
    }
    assert!(done > 10 * seeds, "{done} events");
    assert!(revoked > seeds / 10, "{revoked} revocations");
}

/// A member lost its last events, and the peer that had them was away when it asked another one.
#[test]
fn a_member_that_lost_events_waits_for_the_peer_that_has_them() {
    let faults = "Partition@2:605+42409,ClockJump@3:3261+799,PartitionOut@3:1431+1789,\
                  LostWrites@1:3217+1471,Crash@0:2991+3261";
    log(&Schedule::read(823, faults).unwrap());
}

/// A torn file is repaired while the host starts, after it was looked at and before it is read.
#[test]
fn a_file_may_be_repaired_during_a_start() {
    let faults = "TornWrite@1:3923+733,SlowHost@1:1004+4684,PowerLoss@1:3767+889,\
                  DamagedPacket@0:3544+1941,SpoiledRows@2:2507+99";
    answer(&Schedule::read(43986, faults).unwrap());
}

/// The founder lost the events that admitted all others, and so it knew of no member to ask.
#[test]
fn a_founder_that_lost_all_members_waits_for_its_own_events() {
    let faults = "SlowLink@3:3164+1,LostWrites@0:390+1660";
    log(&Schedule::read(10_604, faults).unwrap());
}

/// A member's clock refused the revocation, and its full disk the batch after it.
#[test]
fn a_revocation_outlasts_a_wrong_clock_on_a_full_disk() {
    let faults = "FullDisk@2:348+4620,Revoke@3:1689+1519,Partition@2:599+2194,\
                  ClockJump@2:2492+823,ClockJump@0:3665+1394";
    log(&Schedule::read(31_413, faults).unwrap());
}

fn is_repeatable(first: &Report, second: &Report, seed: u64) {
    let differs = first.trace.iter().zip(&second.trace).find(|(a, b)| a != b);
    assert_eq!(differs, None, "seed {seed}");
    assert_eq!(first.hash, second.hash, "seed {seed}");
}

#[test]
fn a_seed_has_one_trace() {
    for seed in 0..30 {
        let schedule = Schedule::of_seed(seed);
        is_repeatable(&answer(&schedule), &answer(&schedule), seed);
        let schedule = Schedule::of_seed(seed);
        is_repeatable(&log(&schedule), &log(&schedule), seed);
    }
}

#[test]
fn a_schedule_is_read_as_it_is_written() {
    for seed in 0..100 {
        let schedule = Schedule::<Answers>::of_seed(seed);
        assert_eq!(Schedule::read(seed, &schedule.to_string()), Ok(schedule));
    }
    for wrong in [
        "",
        "Crash",
        "Crash@3:1+1",
        "Crush@0:1+1",
        "Crash@0:1",
        "Crash@0:1+1,",
    ] {
        assert!(Schedule::<Answers>::read(0, wrong).is_err(), "{wrong}");
    }
}

#[test]
fn all_combinations_of_up_to_three_faults_come_once() {
    let one = answers::Kind::VARIANTS.len() * 3;
    let mut all: Vec<String> = Schedule::<Answers>::triples()
        .map(|it| it.to_string())
        .collect();
    assert_eq!(all.len(), one + one.pow(2) + one.pow(3));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), one + one.pow(2) + one.pow(3));
}
