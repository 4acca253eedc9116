//! A community member shuts down during another member's answer: the chat moves without being
//! asked, no token is lost, and no failure is reported. Real model, real processes, discovery
//! through the community only.

use std::io::Write;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::community::{RANGES, SECOND, Street, chat};
use crate::support::gauges::Gauges;
use crate::support::*;

/// Tokens of an answer.
const TOKENS: usize = 256;

/// Nodes that advertise layers, according to a node's own log.
fn advertised(home: &Home) -> Vec<String> {
    let status = home.json(&[&QUIET[..], &["status", "--json"]].concat());
    let models = status["models"].as_array().expect("models").iter();
    let shards = models.flat_map(|model| model["shards"].as_array().expect("shards"));
    let nodes = shards.map(|shard| shard["node"].as_str().expect("a node").to_owned());
    let mut nodes: Vec<String> = nodes.collect();
    nodes.sort_unstable();
    nodes
}

/// Waits until exactly these nodes advertise layers, according to one node.
fn until_advertised(home: &Home, nodes: &[&str]) {
    let mut nodes = nodes.to_vec();
    nodes.sort_unstable();
    until(&format!("{nodes:?} advertise"), || {
        advertised(home) == nodes
    });
}

#[test]
fn a_member_that_shuts_down_during_an_answer_costs_no_token_and_is_no_failure() {
    // The host exits when no caller needs it; waiting for this deadline would fail the test.
    let patient = "research.distributed_inference.host.drain_seconds=3600";
    // Bindings are dropped in reverse: the processes before their homes.
    let Street {
        founder,
        members,
        node,
        mut hosts,
        ids,
    } = Street::start(&["--set", patient], &RANGES);
    let all: Vec<&str> = ids.iter().map(String::as_str).collect();
    until_advertised(&founder, &all);

    let undisturbed = chat(&founder, TOKENS, &["--local"], |_| {});
    assert_eq!(told(&undisturbed, "token_delta").len(), TOKENS);

    let mut leaver = None;
    let frames = chat(&founder, TOKENS, &[], |frames| {
        let at = serving(frames, &ids, SECOND);
        hosts[at].signal(Signal::TERM);
        leaver = Some(at);
    });
    let leaver = leaver.expect("a host was asked to stop");
    let (gone, spare) = (ids[leaver].as_str(), ids[3 - leaver].as_str());

    // The answer is byte-identical.
    let answer = told(&frames, "token_delta");
    assert_eq!(answer, told(&undisturbed, "token_delta"));
    let (done, alone) = (told(&frames, "done")[0], told(&undisturbed, "done")[0]);
    for same in ["text", "token_ids", "finish_reason"] {
        assert_eq!(done[same], alone[same], "{same}");
    }

    // The chat moved once, in the middle, to the spare.
    let moves = told(&frames, "shard_failover");
    assert_eq!(moves.len(), 1, "{moves:#?}");
    assert_eq!(moves[0]["code"], "leaving");
    assert_eq!(moves[0]["host"], gone);
    assert_eq!(moves[0]["replacements"], json!([spare]));
    let at = frames.iter().position(|f| f["event"] == "shard_failover");
    let after = at.map_or(0, |at| told(&frames[at..], "token_delta").len());
    assert!((1..TOKENS).contains(&after), "{after}");
    let route = done["route"].as_array().expect("a route").iter();
    let route = route.map(|hop| &hop["host"]).filter(|host| !host.is_null());
    let route: Vec<&Value> = route.collect();
    assert_eq!(route, [ids[0].as_str(), spare]);

    // No failure is reported: not in the frames, not in the caller's metrics, not by the host's
    // exit status.
    for status in told(&frames, "shard_status") {
        assert_eq!(status["status"], "ready", "{status:#}");
    }
    let numbers = Gauges::at(&http::address(&node));
    assert_eq!(numbers.count("distributed_inference_moves_total"), 1);
    for name in [
        "distributed_inference_failovers_total",
        "distributed_inference_fallback_to_local_total",
        "distributed_inference_shard_corruption_detected_total",
    ] {
        assert_eq!(numbers.count(name), 0, "{name}");
    }
    wait_for_end(hosts[leaver].child.id());
    let status = hosts[leaver].child.wait().expect("our own process");
    assert_eq!(status.code(), Some(0));

    // Every remaining member knows that it has left and that it withdrew its layers itself.
    for (at, member) in members.iter().enumerate() {
        if at != leaver {
            until_advertised(member, &[&ids[0], spare]);
        }
    }
    until_advertised(&founder, &[&ids[0], spare]);
    let record = founder.json(&[&QUIET[..], &["diagnose", "--json"]].concat());
    let record = record["events"].as_array().expect("events");
    let own = founder.node_id();
    let of_founder =
        |event: &Value, kind: &str| event["node"] == own && event["event"]["kind"] == kind;
    let goodbye = record
        .iter()
        .find(|event| of_founder(event, "advert_gone") && event["event"]["peer"] == gone);
    let goodbye = goodbye.unwrap_or_else(|| panic!("no goodbye: {record:#?}"));
    assert_eq!(goodbye["event"]["code"], "withdrawn");
    assert!(!record.iter().any(|event| of_founder(event, "host_failed")));

    // The next chat runs without it.
    let next = chat(&founder, TOKENS, &[], |_| {});
    assert_eq!(told(&next, "token_delta"), answer);
    assert!(told(&next, "shard_failover").is_empty());
}

#[test]
fn a_silent_member_with_a_spare_delays_no_chat() {
    let Street {
        founder,
        members: _members,
        node: _node,
        hosts,
        ids,
    } = Street::start(&[], &RANGES);
    let all: Vec<&str> = ids.iter().map(String::as_str).collect();
    until_advertised(&founder, &all);
    let undisturbed = chat(&founder, TOKENS, &["--local"], |_| {});
    let same = |frames: &[Value], what: &str| {
        let (told, alone) = (
            told(frames, "token_delta"),
            told(&undisturbed, "token_delta"),
        );
        assert_eq!(told, alone, "{what}");
    };

    // One of the two hosts of the second half is stopped before any connection. The answer shows no
    // trace of it, whether the chat would have chosen it or kept it as a spare.
    hosts[SECOND[0]].signal(Signal::STOP);
    let frames = chat(&founder, TOKENS, &[], |_| {});
    same(&frames, "beside a stopped host");
    for status in told(&frames, "shard_status") {
        assert_eq!(status["status"], "ready", "{status:#}");
    }
    assert!(told(&frames, "shard_failover").is_empty());
    hosts[SECOND[0]].signal(Signal::CONT);

    // Stopped in mid-answer, at the default settings.
    let mut struck = None;
    let frames = chat(&founder, TOKENS, &[], |frames| {
        let at = serving(frames, &ids, SECOND);
        hosts[at].signal(Signal::STOP);
        struck = Some(at);
    });
    let struck = struck.expect("a host was stopped");
    same(&frames, "stopped in mid-answer");
    let moves = told(&frames, "shard_failover");
    assert_eq!(moves.len(), 1, "{moves:#?}");
    assert_eq!(moves[0]["host"], ids[struck].as_str());
    let spare = ids[3 - struck].as_str();
    assert_eq!(moves[0]["replacements"], json!([spare]));
    let waits = told(&frames, "shard_status").into_iter();
    let waits: Vec<&Value> = waits
        .filter(|status| status["status"] == "waiting")
        .collect();
    assert!(
        waits.iter().any(|wait| wait["code"] == "silent"),
        "{waits:#?}"
    );
    hosts[struck].signal(Signal::CONT);
}

#[test]
fn a_chat_returns_to_its_recovered_host_with_the_next_question() {
    let home = Home::new();
    let model = model();
    let host = host(&home, "0-29", &[]);
    let chat = words("chat --lines --frames --max-tokens 8 --model");
    let args = [&ENABLE[..], &chat, &[model, "--shard", &host.address]].concat();
    let mut chat = Running::start(home.hearthnet(&args).stdin(Stdio::piped()));
    let mut questions = chat.child.stdin.take().expect("a pipe");
    let mut hosts = |question: &str| -> Vec<bool> {
        writeln!(questions, "{question}").expect("it reads");
        loop {
            let frame: Value = serde_json::from_str(&chat.line()).expect("JSON");
            if frame["event"] == "done" {
                let route = frame["data"]["route"].as_array().expect("a route");
                return route.iter().map(|hop| hop["host"].is_string()).collect();
            }
        }
    };
    // The first layers are this machine's own.
    assert_eq!(hosts("Name a colour."), [false, true]);
    host.signal(Signal::STOP);
    assert!(!hosts("And another.").contains(&true));
    host.signal(Signal::CONT);
    assert_eq!(hosts("And a third."), [false, true]);
    drop(questions);
    assert_eq!(chat.status(), Some(0));
}
