//! A host withdraws its layers because its owner asks for it or changes them, or because other programs
//! need the memory. Answers of other members go on without a lost token, and the layers come back. Real
//! model, real processes.

use std::fs;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::community::{RANGES, SECOND, Street, chat};
use crate::support::memory_group::Group;
use crate::support::*;

/// Tokens of an answer.
const TOKENS: usize = 512;

/// State of a home's running node.
fn running(home: &Home) -> Value {
    community::json(home, &[], &["status"])["node"]["running"].clone()
}

/// Waits until a home serves no layers, for a reason with these words.
fn until_suspended(home: &Home, words: &str) {
    until(&format!("no layers are served: {words}"), || {
        let node = running(home);
        let why = node["suspended"].as_str().unwrap_or_default();
        node["serving"].is_null() && why.contains(words)
    });
}

fn until_serving(home: &Home) {
    until("layers are served", || running(home)["serving"].is_string());
}

/// Asserts that an answer is that of one machine alone, and moved once, from a host to the spare.
fn assert_moved(frames: &[Value], alone: &[Value], gone: &str, spare: &str) {
    let answer = told(frames, "token_delta");
    assert_eq!(answer, told(alone, "token_delta"));
    let moves = told(frames, "shard_failover");
    assert_eq!(moves.len(), 1, "{moves:#?}");
    assert_eq!(moves[0]["host"], gone);
    assert_eq!(moves[0]["replacements"], json!([spare]));
}

#[test]
fn a_pause_during_an_answer_costs_no_token_and_resume_brings_the_layers_back() {
    let Street {
        founder,
        members,
        node: _node,
        hosts: _hosts,
        ids,
    } = Street::start(&[], &RANGES);
    let alone = chat(&founder, TOKENS, &["--local"], |_| {});
    let mut paused = None;
    let frames = chat(&founder, TOKENS, &[], |frames| {
        let at = serving(frames, &ids, SECOND);
        let said = community::json(&members[at], &[], &["pause", "--for", "2h"]);
        assert!(said["until_ms"].is_u64(), "{said:#}");
        paused = Some(at);
    });
    let at = paused.expect("a host was paused");
    assert_moved(&frames, &alone, &ids[at], &ids[3 - at]);
    assert_eq!(told(&frames, "shard_failover")[0]["code"], "leaving");
    until_suspended(&members[at], "paused by you until ");
    let status = members[at].says(&[&QUIET[..], &["status"]].concat());
    assert!(status.contains("paused by you until "), "{status}");

    // The next answer runs without it, although it is the only process of its home.
    let next = chat(&founder, TOKENS, &[], |_| {});
    assert_eq!(told(&next, "token_delta"), told(&alone, "token_delta"));
    assert!(told(&next, "shard_failover").is_empty());

    community::json(&members[at], &[], &["resume"]);
    until_serving(&members[at]);
}

#[test]
fn a_host_that_restarts_with_other_layers_during_an_answer_costs_no_token() {
    let Street {
        founder,
        members,
        node,
        mut hosts,
        ids,
    } = Street::start(&[], &RANGES);
    let alone = chat(&founder, TOKENS, &["--local"], |_| {});
    let mut restarted = None;
    let frames = chat(&founder, TOKENS, &[], |frames| {
        let at = serving(frames, &ids, SECOND);
        hosts[at].signal(Signal::TERM);
        wait_for_end(hosts[at].child.id());
        hosts[at] = community::host(&members[at], &node, "0-29");
        restarted = Some(at);
    });
    let at = restarted.expect("a host was restarted");
    assert_moved(&frames, &alone, &ids[at], &ids[3 - at]);
    let layers = &hosts[at].ready["descriptor"]["layer_range"];
    assert_eq!(layers, &json!([0, 29]));
    let next = chat(&founder, TOKENS, &[], |_| {});
    assert_eq!(told(&next, "token_delta"), told(&alone, "token_delta"));
}

/// `hearthnet shard serve` beside the running daemon of a home, once the daemon serves the layers.
fn attached(home: &Home, layers: &str) -> Running {
    let shard = ["shard", "serve", "--model", model(), "--layers", layers];
    let args = [&ENABLE[..], &QUIET, &shard, &["--json"]].concat();
    let mut running = Running::start(home.hearthnet(&args).stdin(Stdio::piped()));
    let ready: Value = serde_json::from_str(&running.line()).expect("JSON");
    assert!(ready["descriptor"]["layer_range"].is_array(), "{ready:#}");
    running
}

#[test]
fn a_daemon_that_changes_its_layers_during_an_answer_costs_no_token_and_counts_what_it_gave() {
    let Street {
        founder,
        mut members,
        node,
        hosts: _hosts,
        mut ids,
    } = Street::start(&[], &["0-14"]);
    let mut daemons = Vec::new();
    let mut requests = Vec::new();
    for _ in SECOND {
        let member = community::join(&founder, &node);
        daemons.push(community::serve(&member, &community::static_peer(&node)));
        requests.push(Some(attached(&member, "15-29")));
        ids.push(member.node_id());
        members.push(member);
    }
    let alone = chat(&founder, TOKENS, &["--local"], |_| {});
    let mut changed = None;
    let frames = chat(&founder, TOKENS, &[], |frames| {
        let at = serving(frames, &ids, SECOND);
        let request = &mut requests[at - 1];
        if let Some(before) = request.take() {
            interrupt(&before.child);
            wait_for_end(before.child.id());
        }
        until("the layers are withdrawn", || {
            running(&members[at])["serving"].is_null()
        });
        *request = Some(attached(&members[at], "0-14"));
        changed = Some(at);
    });
    let at = changed.expect("a daemon changed its layers");
    assert_moved(&frames, &alone, &ids[at], &ids[3 - at]);
    // Before the day ends, its own status shows what it has given so far, and the log has nothing.
    let status = community::json(&members[at], &[], &["status"]);
    let tokens = status["node"]["running"]["gave"]["tokens"].as_u64();
    assert!(tokens > Some(0), "{status:#}");
    let mut all = status["members"].as_array().expect("a list").iter();
    assert!(all.all(|member| member["gave"].is_null()), "{status:#}");
    let people = members[at].says(&[&QUIET[..], &["status"]].concat());
    let tokens = format!("this node up to now: {} tokens", tokens.unwrap_or_default());
    assert!(people.contains(&tokens), "{people}");
    drop(daemons);
}

/// Class of a process at the disk.
fn disk_class(process: u32) -> String {
    let ionice = Command::new("ionice")
        .args(["-p", &process.to_string()])
        .output();
    let said = ionice.expect("ionice of util-linux starts").stdout;
    text(&said).trim().to_owned()
}

#[test]
fn a_pause_survives_a_restart_and_chats_of_the_home_go_on() {
    let host = "research.distributed_inference.host";
    let on = format!("{host}.serve_shards=true");
    let all = format!("{host}.serve_layers=\"0-29\"");
    let settings = ["--set", &on, "--set", &all];
    let (founder, daemon) = community::founded(&settings);
    until_serving(&founder);
    let classes = |node: &Server| {
        let node = node.child.id();
        [node, engine_of(node)].map(disk_class)
    };
    assert_eq!(classes(&daemon), ["idle"; 2]);
    let alone = chat(&founder, TOKENS, &["--local"], |_| {});

    community::json(&founder, &[], &["pause"]);
    until_suspended(&founder, "paused by you");
    let own = chat(&founder, TOKENS, &[], |_| {});
    assert_eq!(told(&own, "token_delta"), told(&alone, "token_delta"));

    drop(daemon);
    let settings = [&settings[..], &["--set", "manners.idle_io=false"]].concat();
    let daemon = community::serve(&founder, &settings);
    until_suspended(&founder, "paused by you");
    community::json(&founder, &[], &["resume"]);
    until_serving(&founder);
    let usual = disk_class(std::process::id());
    assert_eq!(classes(&daemon), [usual.clone(), usual]);
}

#[test]
fn a_pause_without_a_daemon_counts_from_the_next_start_on() {
    let founder = community::founder();
    let paused = |home: &Home| community::json(home, &[], &["status"])["node"]["paused"].clone();
    assert_eq!(paused(&founder), Value::Null);
    community::json(&founder, &[], &["pause", "--until", "22:00"]);
    assert!(paused(&founder)["until_ms"].is_u64());
    community::json(&founder, &[], &["resume"]);
    assert_eq!(paused(&founder), Value::Null);

    let wrong = founder.run(&words("pause --until 25:00"));
    assert_eq!(wrong.status.code(), Some(2));
    assert_complains(&wrong, "22:00");
    let stranger = Home::new();
    assert_fails(&stranger.run(&words("pause --json")), 10, "no_community");
}

/// Memory of a host and of its engine that is not a copy of a file, in bytes.
fn anonymous_bytes(host: u32) -> u64 {
    let engines = children_of(host).into_iter().flat_map(children_of);
    let all = std::iter::once(host).chain(engines);
    all.filter_map(|process| {
        // An engine may have ended meanwhile.
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib << 10)
    })
    .sum()
}

#[test]
fn a_memory_hog_gets_the_memory_of_layers_and_the_answer_goes_on() {
    let Some(groups) = ["a", "b"]
        .into_iter()
        .map(|name| Group::or_skip(name, 512 << 20))
        .collect::<Option<Vec<Group>>>()
    else {
        return;
    };
    let Street {
        founder,
        members,
        node: _node,
        hosts,
        ids,
    } = Street::start(&[], &RANGES);
    let alone = chat(&founder, TOKENS, &["--local"], |_| {});
    // Layers that are loaded in the group count for it.
    for (at, group) in SECOND.into_iter().zip(&groups) {
        let host = hosts[at].child.id();
        group.take(host);
        // The next engine is in the group of the process that starts it.
        children_of(host)
            .into_iter()
            .for_each(|starter| group.take(starter));
        community::json(&members[at], &[], &["pause"]);
        until_suspended(&members[at], "paused by you");
        community::json(&members[at], &[], &["resume"]);
        until_serving(&members[at]);
    }

    let own = |at: usize| anonymous_bytes(hosts[at].child.id());
    let mut hog = None;
    let frames = chat(&founder, TOKENS, &[], |frames| {
        let at = serving(frames, &ids, SECOND);
        let group = &groups[at - 1];
        let before = own(at);
        let hungry = group.hog(group.available() - (40 << 20));
        let weights = hosts[at].ready["weight_bytes"].as_u64().expect("bytes");
        let took = until("most of the layers' memory is free", || {
            before.saturating_sub(own(at)) > weights / 10 * 8
        });
        println!("{weights} bytes of layers are free {took:?} after a hog of memory started");
        hog = Some((at, hungry));
    });
    let (at, mut hog) = hog.expect("a host was disturbed");
    assert_moved(&frames, &alone, &ids[at], &ids[3 - at]);
    until_suspended(&members[at], "other programs need the memory");
    // The hog got what it wanted.
    assert!(hog.process.try_wait().expect("our own process").is_none());
    drop(hog);
    until_serving(&members[at]);
}
