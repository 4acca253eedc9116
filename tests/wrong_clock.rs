//! A home whose clock is wrong, and then right again: its events are accepted, and refused writes
//! are reported. Real processes on this machine; a small preloaded library shifts their clock.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::community::{
    founded_bare, join, join_as, json, log_is_whole, members, says, serve_bare, static_peer,
};
use crate::support::*;

const DAY: i64 = 86_400;

/// Source of the library that shifts the clock of a program.
const AHEAD: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, time);
    const char *ahead = getenv("SECONDS_AHEAD");
    if (!failed && clock == CLOCK_REALTIME && ahead) time->tv_sec += atol(ahead);
    return failed;
}
"#;

/// Compiles the library into a folder.
fn library(dir: &Path) -> PathBuf {
    let (source, library) = (dir.join("ahead.c"), dir.join("ahead.so"));
    std::fs::write(&source, AHEAD).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    let compiled = compiler.arg(source).arg("-ldl").output().expect("cc");
    succeeded(&compiled);
    library
}

/// Runs a command of a home whose clock is `seconds` ahead.
fn ahead(home: &Home, seconds: i64, settings: &[&str], command: &[&str]) -> Output {
    let command = [&QUIET[..], settings, command].concat();
    let mut command = home.hearthnet(&command);
    command
        .env("LD_PRELOAD", library(home.path()))
        .env("SECONDS_AHEAD", seconds.to_string());
    command.output().expect("hearthnet starts")
}

fn ids(home: &Home) -> Vec<String> {
    let id = |one: &Value| one["node"].as_str().expect("an id").to_owned();
    members(home).iter().map(id).collect()
}

/// Founder, trusted neighbour, and a guest to be revoked; none of them runs.
fn three() -> (Home, Home, Home) {
    let (founder, node) = founded_bare();
    let neighbour = join(&founder, &node);
    let guest = join_as("member", &founder, &node);
    says(&neighbour, &static_peer(&node), &["status"]);
    assert_eq!(ids(&neighbour).len(), 3);
    (founder, neighbour, guest)
}

#[test]
fn events_written_offline_a_day_ahead_do_no_harm_once_the_clock_is_right() {
    let (founder, neighbour, guest) = three();
    succeeded(&ahead(&founder, DAY, &[], &["community", "invite"]));

    // The clock is right again, and a neighbour is reachable.
    let elsewhere = serve_bare(&neighbour, &[]);
    let near = static_peer(&elsewhere);
    let out = guest.node_id();
    let revoke = ["community", "revoke", &out, "--yes"];
    let revoked = founder.run(&[&QUIET[..], &near, &revoke].concat());
    succeeded(&revoked);
    assert_complains(&revoked, "told one other node");
    assert!(!ids(&neighbour).contains(&out), "it takes effect there");
    let status = json(&founder, &near, &["status"]);
    assert_eq!(status["log"]["health"], "ok", "{status}");
    assert_eq!(status["log"]["dated_ahead"], serde_json::json!([]));
    // Its invites work, also at the neighbour.
    let code = json(&founder, &near, &["community", "invite"]);
    let code = code["code"].as_str().expect("a code").to_owned();
    let joiner = Home::new();
    let join = [&QUIET[..], &near, &["community", "join", &code]].concat();
    succeeded(&until_answered(|| joiner.run(&join)));
    assert!(ids(&neighbour).contains(&joiner.node_id()));
    for home in [&founder, &neighbour] {
        log_is_whole(home);
    }
}

#[test]
fn a_daemon_with_a_corrected_clock_passes_on_its_early_events() {
    let (founder, neighbour, guest) = three();
    let out = guest.node_id();
    let revoke = ["community", "revoke", &out, "--yes"];
    let revoked = ahead(&founder, DAY, &[], &revoke);
    succeeded(&revoked);
    assert_complains(&revoked, "no other member could be told yet");
    let elsewhere = serve_bare(&neighbour, &[]);
    let node = serve_bare(&founder, &static_peer(&elsewhere));
    until("the neighbour hears it", || !ids(&neighbour).contains(&out));
    drop((node, elsewhere));
}

#[test]
fn a_clock_that_differs_from_a_neighbours_blocks_writes_with_an_error() {
    let (founder, neighbour, guest) = three();
    let elsewhere = serve_bare(&neighbour, &[]);
    let near = static_peer(&elsewhere);
    let out = guest.node_id();
    let revoke = ["community", "revoke", &out, "--yes"];
    for seconds in [DAY, 720] {
        let refused = ahead(
            &founder,
            seconds,
            &near,
            &[&revoke[..], &["--json"]].concat(),
        );
        assert_fails(&refused, 10, "clock_wrong");
        assert_complains(&refused, "clock");
        assert!(ids(&founder).contains(&out) && ids(&neighbour).contains(&out));
    }
    // A few minutes ahead are tolerated.
    let done = ahead(&founder, 300, &near, &revoke);
    succeeded(&done);
    assert_complains(&done, "told one other node");
    assert!(!ids(&neighbour).contains(&out));
}

#[test]
fn a_caller_with_a_clock_before_1970_is_told_about_its_clock() {
    let home = Home::new();
    let host = host(&home, "0-29", &[]);
    let chat = words("chat hi --no-fallback --json --model");
    let chat = [&chat[..], &[model(), "--shard", &host.address]].concat();
    let answer = ahead(&home, -3_000_000_000, &ENABLE, &chat);
    assert_fails(&answer, 4, "shard_unavailable");
    assert_complains(&answer, "clock");
}
