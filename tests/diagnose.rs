//! What `hearthnet diagnose` finds out about a chat whose host died, in a community of real
//! processes; and that it tells nothing of what was said. Real model.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;
use support::{Home, PATIENCE, Server, community, model, text};

/// Words that nobody says by chance.
const PROMPT: &str = "Tell me about zyzzyva, quokka and umbrella, at length.";
const RARE: [&str; 3] = ["zyzzyva", "quokka", "umbrella"];

fn diagnose(home: &Home, extra: &[&str]) -> String {
    let args = ["--set", "discovery.mdns=false", "diagnose"];
    let output = home.run(&[&args[..], extra].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn diagnose_json(home: &Home, extra: &[&str]) -> Value {
    let text = diagnose(home, &[&["--json"], extra].concat());
    serde_json::from_str(&text).expect("one JSON object")
}

/// A chat, frame by frame. After some tokens `meddle` hears the frames so far, once.
fn chat(home: &Home, meddle: impl FnOnce(&[Value])) -> Vec<Value> {
    let model = model();
    let model = model.to_str().expect("a UTF-8 path");
    let args = ["chat", PROMPT, "--frames", "--model", model];
    let args = [&args[..], &["--max-tokens", "64"]].concat();
    let mut child = home
        .hearthnet(&[&["--set", "policy.research.enable=true"], &args[..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("hearthnet starts");
    let stdout = child.stdout.take().expect("a pipe");
    let (mut frames, mut meddle) = (Vec::new(), Some(meddle));
    for line in BufReader::new(stdout).lines() {
        let line = line.expect("a line");
        frames.push(serde_json::from_str::<Value>(&line).expect("JSON"));
        if frames.len() == 8
            && let Some(meddle) = meddle.take()
        {
            meddle(&frames);
        }
    }
    let output = child.wait_with_output().expect("its end");
    assert!(output.status.success(), "{}", text(&output.stderr));
    frames
}

/// Every number and list under a key, over all of a value.
fn keys_of(value: &Value, key: &str, seen: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(k, v)| keys_of(v, k, seen)),
        Value::Array(items) => {
            seen(key, value);
            items.iter().for_each(|item| keys_of(item, key, seen));
        }
        other => seen(key, other),
    }
}

#[test]
fn a_chat_whose_host_died_can_be_followed_over_all_nodes_and_not_read() {
    let founder = Home::new();
    community::found(&founder);
    let off = "research.distributed_inference.fallback_to_local=false";
    let node = community::serve(&founder, &["--set", off]);
    let members: Vec<Home> = (0..3).map(|_| community::join(&founder, &node)).collect();
    let mut hosts: Vec<Option<Server>> = ["0-14", "15-29", "15-29"]
        .iter()
        .zip(&members)
        .map(|(layers, member)| Some(community::host(member, &node, layers)))
        .collect();
    let ids: Vec<String> = members.iter().map(Home::node_id).collect();

    // The founder has to know both hosts of the second half before one of them dies.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seen = diagnose_json(&founder, &[]);
        let adverts = seen["events"].as_array().expect("events").iter();
        let adverts = adverts
            .filter(|e| e["node"] == founder.node_id() && e["event"]["kind"] == "advert_seen");
        let who: BTreeSet<&str> = adverts
            .filter_map(|e| e["event"]["peer"].as_str())
            .collect();
        if who.len() == 3 {
            break;
        }
        assert!(Instant::now() < deadline, "{seen:#}");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }

    let mut victim = None;
    let frames = chat(&founder, |frames| {
        let serving = |id: &str| {
            frames
                .iter()
                .any(|f| f["event"] == "shard_status" && f["data"]["host"] == id)
        };
        let index = (1..3).find(|&n| serving(&ids[n])).expect("one of the two");
        let host = hosts[index].take().expect("it runs");
        host.signal(Signal::KILL);
        victim = Some(index);
    });
    let victim = victim.expect("a host was killed");
    let (dead, spare) = (ids[victim].as_str(), ids[3 - victim].as_str());
    let first = ids[0].as_str();
    let caller = founder.node_id();
    let done = &frames.last().expect("frames")["data"];

    let whole = diagnose_json(&founder, &[]);
    let events = whole["events"].as_array().expect("events");
    let moved = events
        .iter()
        .find(|e| e["event"]["kind"] == "failed_over")
        .unwrap_or_else(|| panic!("no failover: {whole:#}"));
    let pipeline = moved["pipeline"].as_str().expect("a pipeline");
    let tail = &pipeline[20..];
    let line = diagnose_json(&founder, &["--pipeline", tail]);
    let line = line["events"].as_array().expect("events");

    // Everybody's view, in the order in which it happened.
    let at = |node: &str, kind: &str, about: &str| {
        let found = line.iter().position(|e| {
            let event = &e["event"];
            let names = |key: &str| event[key] == about;
            e["node"] == node
                && event["kind"] == kind
                && (about.is_empty() || names("host") || names("peer"))
        });
        found.unwrap_or_else(|| panic!("{node} has no {kind} {about}: {line:#?}"))
    };
    let order = [
        at(&caller, "stream_asked", first),
        at(first, "stream_opened", &caller),
        at(&caller, "pipeline_built", ""),
        at(&caller, "host_failed", dead),
        at(&caller, "stream_asked", spare),
        at(spare, "stream_opened", &caller),
        at(&caller, "stream_ready", spare),
        at(&caller, "failed_over", dead),
        at(&caller, "answered", ""),
    ];
    assert!(order.is_sorted(), "{order:?}: {line:#?}");
    for index in order {
        assert_eq!(line[index]["pipeline"], pipeline, "{:#}", line[index]);
    }
    assert!(events.iter().all(|e| e["doubtful"] == false), "{whole:#}");
    assert_eq!(moved["event"]["code"], "connection_lost");
    let answered = &line[at(&caller, "answered", "")]["event"];
    assert_eq!(
        answered["completion_tokens"],
        done["usage"]["completion_tokens"]
    );

    // Who is gone is named, with the reason.
    let nodes = whole["nodes"].as_array().expect("nodes");
    let of = |id: &str| nodes.iter().find(|n| n["node"] == id).expect("a node");
    assert_eq!(nodes.len(), 4, "{whole:#}");
    assert_eq!(of(dead)["error"]["code"], "unreachable", "{whole:#}");
    assert!(of(spare)["give_or_take_ms"].is_number());
    let people = diagnose(&founder, &["--pipeline", tail]);
    for said in ["no answer: unreachable", "connection_lost", "answered:"] {
        assert!(people.contains(said), "{said}: {people}");
    }

    // Not a word, and no token: of numbers and lists there are only those that are known here.
    let text = whole.to_string() + &people;
    let answer = done["text"].as_str().expect("a text");
    let words: Vec<&str> = answer.split_whitespace().collect();
    for phrase in words.windows(3) {
        assert!(!text.contains(&phrase.join(" ")), "{phrase:?}");
    }
    for word in RARE {
        assert!(!text.to_lowercase().contains(word), "{word}");
    }
    let numbers = [
        "unix_ms",
        "give_or_take_ms",
        "times",
        "hosts",
        "ms",
        "stream",
        "epoch",
        "layers",
        "replacements",
        "replayed",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "bytes",
        "steps",
        "rows",
        "cut",
        "within_ms",
        "streams",
    ];
    keys_of(&whole["events"], "events", &mut |key, value| match value {
        Value::Number(_) => assert!(numbers.contains(&key), "{key}"),
        Value::Array(_) => assert!(["events", "layers"].contains(&key), "{key}"),
        _ => {}
    });
}
