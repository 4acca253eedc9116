//! `hearthnet diagnose` for a chat whose host died, in a community of real processes and over
//! standalone hosts: its findings, its access control, and the absence of prompt and answer text.
//! Real model.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpListener;

use hearthnet_bus::node::bus_rule;
use hearthnet_bus::now_ms;
use hearthnet_bus::testing::DiagnoseHost;
use hearthnet_transport::PathRule;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::community::Street;
use crate::support::*;

/// Difference between the clocks of two nodes in one timeline.
const CLOCKS_MS: f64 = 2.0;
/// Words that occur by chance in no answer.
const PROMPT: &str = "Tell me about zyzzyva, quokka and umbrella, at length.";
const RARE: [&str; 3] = ["zyzzyva", "quokka", "umbrella"];

fn diagnose(home: &Home, extra: &[&str]) -> String {
    home.says(&[&QUIET[..], &["diagnose"], extra].concat())
}

fn diagnose_json(home: &Home, extra: &[&str]) -> Value {
    let text = diagnose(home, &[&["--json"], extra].concat());
    serde_json::from_str(&text).expect("one JSON object")
}

/// Runs a chat frame by frame. After some tokens `on_frames` is called once with the frames so far.
fn chat(home: &Home, on_frames: impl FnOnce(&[Value])) -> Vec<Value> {
    let ask = ["chat", PROMPT, "--frames", "--model", model()];
    let greedy = ["--temperature", "0", "--max-tokens", "64"];
    let args = [&ENABLE[..], &ask, &greedy].concat();
    frames(&mut home.hearthnet(&args), 8, on_frames)
}

/// Visits every number and list under a key, in all of a value.
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

/// Asserts that these events of a pipeline come in this order: the node that has recorded each, its
/// kind, and the host or the peer that it is about, if any. Returns the last event.
fn assert_order<'a>(line: &'a [Value], pipeline: &str, order: &[(&str, &str, &str)]) -> &'a Value {
    let place = |(node, kind, about): &(&str, &str, &str)| {
        let found = line.iter().position(|e| {
            let event = &e["event"];
            let names = |key: &str| event[key] == *about;
            let is_about = about.is_empty() || names("host") || names("peer");
            e["node"] == *node && event["kind"] == *kind && is_about
        });
        found.unwrap_or_else(|| panic!("{node} has no {kind} {about}: {line:#?}"))
    };
    let places: Vec<usize> = order.iter().map(place).collect();
    // Nodes compare their clocks over messages, which a busy machine delays.
    let ms = |place: &usize, key: &str| line[*place][key].as_f64().expect("a time");
    let earliest = |place: &usize| ms(place, "unix_ms") - ms(place, "give_or_take_ms");
    let latest = |place: &usize| ms(place, "unix_ms") + ms(place, "give_or_take_ms") + CLOCKS_MS;
    let in_order = |before: &usize, after: &usize| earliest(before) < latest(after);
    assert!(places.is_sorted_by(in_order), "{places:?}: {line:#?}");
    for place in &places {
        assert_eq!(line[*place]["pipeline"], pipeline, "{:#}", line[*place]);
    }
    &line[places[places.len() - 1]]["event"]
}

#[test]
fn a_chat_whose_host_died_can_be_traced_over_all_nodes_without_its_text() {
    let street = Street::start(&[], &["0-14", "15-29", "15-29"]);
    let (founder, ids) = (&street.founder, &street.ids);

    // The founder has to know both hosts of the second half before one of them dies.
    let caller = founder.node_id();
    until("the founder knows all three", || {
        let seen = diagnose_json(founder, &[]);
        let adverts = of_kind(&seen, &caller, "advert_seen").into_iter();
        let who = adverts.filter_map(|advert| advert["event"]["peer"].as_str());
        who.collect::<BTreeSet<_>>().len() == 3
    });

    let mut victim = None;
    let frames = chat(founder, |frames| {
        let index = serving(frames, ids, 1..3);
        street.hosts[index].signal(Signal::KILL);
        victim = Some(index);
    });
    let victim = victim.expect("a host was killed");
    let (dead, spare) = (ids[victim].as_str(), ids[3 - victim].as_str());
    let first = ids[0].as_str();
    let done = &frames.last().expect("frames")["data"];

    let whole = diagnose_json(founder, &[]);
    let events = whole["events"].as_array().expect("events");
    let moved = events
        .iter()
        .find(|e| e["event"]["kind"] == "failed_over")
        .unwrap_or_else(|| panic!("no failover: {whole:#}"));
    let pipeline = moved["pipeline"].as_str().expect("a pipeline");
    let tail = &pipeline[20..];
    let line = diagnose_json(founder, &["--pipeline", tail]);
    let line = line["events"].as_array().expect("events");

    // The views of all nodes, in the order of the events.
    let order = [
        (&*caller, "stream_asked", first),
        (first, "stream_opened", &caller),
        (&caller, "pipeline_built", ""),
        (&caller, "host_failed", dead),
        (&caller, "stream_asked", spare),
        (spare, "stream_opened", &caller),
        (&caller, "stream_ready", spare),
        (&caller, "failed_over", dead),
        (&caller, "answered", ""),
    ];
    let answered = assert_order(line, pipeline, &order);
    assert!(events.iter().all(|e| e["doubtful"] == false), "{whole:#}");
    assert_eq!(moved["event"]["code"], "connection_lost");
    assert_eq!(
        answered["completion_tokens"],
        done["usage"]["completion_tokens"]
    );

    // The dead node is listed with the reason.
    let nodes = whole["nodes"].as_array().expect("nodes");
    let of = |id: &str| nodes.iter().find(|n| n["node"] == id).expect("a node");
    assert_eq!(nodes.len(), 4, "{whole:#}");
    assert_eq!(of(dead)["error"]["code"], "unreachable", "{whole:#}");
    assert!(of(spare)["give_or_take_ms"].is_number());
    let people = diagnose(founder, &["--pipeline", tail]);
    assert_contains(
        &people,
        &["no answer: unreachable", "connection_lost", "answered:"],
    );

    // The record holds no text and no token: all numbers and lists are known ones.
    let text = whole.to_string() + &people;
    let answer = done["text"].as_str().expect("a text");
    let answer: Vec<&str> = answer.split_whitespace().collect();
    for phrase in answer.windows(3) {
        assert!(!text.contains(&phrase.join(" ")), "{phrase:?}");
    }
    for word in RARE {
        assert!(!text.to_lowercase().contains(word), "{word}");
    }
    let numbers = "unix_ms give_or_take_ms times hosts ms stream epoch layers replacements \
        replayed prompt_tokens cached_tokens completion_tokens bytes steps rows cut within_ms streams";
    let numbers = words(numbers);
    keys_of(&whole["events"], "events", &mut |key, value| match value {
        Value::Number(_) => assert!(numbers.contains(&key), "{key}"),
        Value::Array(_) => assert!(["events", "layers"].contains(&key), "{key}"),
        _ => {}
    });
}

#[test]
fn a_plain_member_is_refused_by_every_node_and_learns_nothing() {
    let (founder, node) = community::founded(&[]);
    let trusted = community::join(&founder, &node);
    let _host = community::host(&trusted, &node, "0-29");
    let member = community::join_as("member", &founder, &node);
    chat(&founder, |_| {});

    // Proves that there are secrets which could leak.
    let whole = diagnose_json(&founder, &[]);
    let mut secrets = BTreeSet::new();
    let own = founder.node_id();
    let events = whole["events"].as_array().expect("events").iter();
    for event in events.filter(|event| event["node"] == own) {
        for secret in [&event["pipeline"], &event["event"]["session"]] {
            secrets.extend(secret.as_str().map(str::to_owned));
        }
    }
    assert!(secrets.len() >= 2, "a pipeline and its session: {whole:#}");

    let near = community::static_peer(&node);
    let ask = |json: &[&str]| member.run(&[&QUIET[..], &near, &["diagnose"], json].concat());
    let (people, programs) = (ask(&[]), ask(&["--json"]));
    assert_fails(&programs, 10, "unauthorized");
    let seen: Value = serde_json::from_slice(&programs.stdout).expect("one JSON object");
    assert_eq!(seen["events"], json!([]), "{seen:#}");
    let nodes = seen["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), 2, "{seen:#}");
    for node in nodes {
        assert_eq!(node["error"]["code"], "unauthorized", "{seen:#}");
        assert!(node.get("records").is_none(), "{seen:#}");
    }
    // Output for people: the refusing node, the reason, and what to do.
    assert_eq!(people.status.code(), Some(10));
    let (shown, errors) = (text(&people.stdout), text(&people.stderr));
    assert_eq!(
        shown.matches("no answer: unauthorized: ").count(),
        2,
        "{shown}"
    );
    assert!(shown.contains("needs the level trusted"), "{shown}");
    let said = "error: this node is member in \"Elm Street\", and only trusted nodes may read \
                the records of other nodes";
    assert!(errors.contains(said), "{errors}");
    assert_contains(&errors, &["hearthnet community promote ed25519:"]);
    let all = shown + &errors + &text(&programs.stdout) + &text(&programs.stderr);
    for secret in &secrets {
        assert!(!all.contains(secret), "{secret}: {all}");
    }

    // After the promotion it gets the record: the level was the only obstacle.
    let promote = ["community", "promote", &member.node_id(), "trusted"];
    founder.says(&promote);
    // The founder's node learns of the promotion with a delay: another process wrote the event.
    until("it is told", || {
        let output = ask(&["--json"]);
        let told = text(&output.stdout);
        output.status.success() && secrets.iter().all(|secret| told.contains(secret))
    });
}

/// Standalone host on the data directory of an owner of its own.
fn standalone(layers: &str, admitted: &[&str]) -> (Home, Host) {
    let owner = Home::new();
    let (first, more) = admitted.split_first().expect("a node id");
    let more: Vec<&str> = more.iter().flat_map(|id| ["--peer-key", id]).collect();
    let host = Host::start(&owner, model(), layers, first, &more);
    (owner, host)
}

/// Events of one node and one kind.
fn of_kind<'a>(seen: &'a Value, node: &str, kind: &str) -> Vec<&'a Value> {
    let events = seen["events"].as_array().expect("events").iter();
    events
        .filter(|e| e["node"] == node && e["event"]["kind"] == kind)
        .collect()
}

#[test]
fn a_chat_over_standalone_hosts_can_be_traced_only_by_its_caller() {
    let (caller, other) = (Home::new(), Home::new());
    let (caller_id, other_id) = (caller.node_id(), other.node_id());
    let admitted = [caller_id.as_str(), other_id.as_str()];
    let hosts = ["0-14", "15-29", "15-29"].map(|layers| standalone(layers, &admitted));
    let addresses = hosts.each_ref().map(|(_, host)| host.address.clone());
    let ids = addresses
        .each_ref()
        .map(|address| address.split_once('#').expect("a node id").1);
    let settings = [ENABLE, TOGETHER].concat();
    let _service = Server::api(&caller, &settings, model(), &shards(&addresses));

    let mut victim = None;
    chat(&caller, |frames| {
        let index = serving(frames, &ids, 1..3);
        hosts[index].1.signal(Signal::KILL);
        victim = Some(index);
    });
    let victim = victim.expect("a host was killed");
    let (first, dead, spare) = (ids[0], ids[victim], ids[3 - victim]);

    let seen = diagnose_json(&caller, &shards(&addresses));
    let nodes = seen["nodes"].as_array().expect("nodes");
    let of = |id: &str| nodes.iter().find(|n| n["node"] == id).expect("a node");
    assert_eq!(nodes.len(), 4, "{seen:#}");
    assert_eq!(of(dead)["error"]["code"], "unreachable", "{seen:#}");
    assert_eq!(
        (&of(first)["partial"], &of(&caller_id)["partial"]),
        (&json!(true), &json!(false))
    );
    let moved = of_kind(&seen, &caller_id, "failed_over");
    let pipeline = moved.first().expect("a failover")["pipeline"].as_str();
    let pipeline = pipeline.expect("an id");
    let args = [&["--pipeline", pipeline][..], &shards(&addresses)].concat();
    let line = diagnose_json(&caller, &args);
    let line = line["events"].as_array().expect("events");
    let order = [
        (&*caller_id, "stream_asked", first),
        (first, "stream_opened", &caller_id),
        (&caller_id, "host_failed", dead),
        (&caller_id, "stream_asked", spare),
        (spare, "stream_opened", &caller_id),
        (&caller_id, "stream_ready", spare),
        (&caller_id, "failed_over", dead),
    ];
    assert_order(line, pipeline, &order);
    // A host that is named twice is asked once.
    let twice = diagnose_json(&caller, &shards([&addresses[0], &addresses[0]]));
    assert_eq!(
        twice["nodes"].as_array().expect("nodes").len(),
        2,
        "{twice:#}"
    );

    // Another caller learns that the host serves, but nothing about other callers.
    let seen = diagnose_json(&other, &shards(&addresses[..1]));
    assert_eq!(of_kind(&seen, first, "shard_serving").len(), 1, "{seen:#}");
    assert!(!seen.to_string().contains(&caller_id), "{seen:#}");
    for kind in ["session_began", "stream_opened", "stream_ended"] {
        assert!(of_kind(&seen, first, kind).is_empty(), "{seen:#}");
    }
    // The owner, who has the host's own key, gets the whole record.
    let seen = diagnose_json(&hosts[0].0, &shards(&addresses[..1]));
    let opened = of_kind(&seen, first, "stream_opened");
    assert_eq!(
        opened.first().expect("a stream")["event"]["peer"],
        *caller_id
    );
    assert_eq!(seen["nodes"][0]["partial"], false);
    let people = diagnose(&other, &shards(&addresses[..1]));
    assert_contains(&people, &["it reports only events of this node"]);

    // A stranger is refused with an error.
    let stranger = Home::new();
    let args = [&["diagnose", "--json"][..], &shards(&addresses[..1])].concat();
    let refused = stranger.run(&args);
    assert_fails(&refused, 9, "no_record");
    let found: Value = serde_json::from_slice(&refused.stdout).expect("one JSON object");
    assert_eq!(
        found["nodes"][0]["error"]["code"], "unauthorized",
        "{found:#}"
    );
    assert_eq!(found["events"], json!([]));
    let told = text(&refused.stdout);
    assert!(
        !told.contains(&caller_id) && !told.contains("smollm2"),
        "{told}"
    );
}

/// Test double of a host: admits every caller and answers `diagnose` with these pages. `None`: it
/// does not know the method, as a host of another version.
fn play(runtime: &Runtime, pages: Option<Vec<Value>>) -> DiagnoseHost {
    let rules: Vec<PathRule> = pages.iter().map(|_| bus_rule()).collect();
    runtime.block_on(DiagnoseHost::start(Ok(pages.unwrap_or_default()), &rules))
}

#[test]
fn a_host_with_false_or_invalid_records_is_named_and_spoils_no_other_answer() {
    let runtime = Runtime::new().expect("a runtime");
    let asker = Home::new();
    let asker_id = asker.node_id();
    let victim = "ed25519:iojj3XQJ8ZX9UtstPLpdcspnCb8dlBIb83SIAbQPb1w";
    let evil = "\u{1b}]0;owned\u{7} 10:00:00.000 answered";
    let (day_ms, made) = (86_400_000, now_ms());
    let stamp = |mono_us: u64| json!({"unix_ms": now_ms() + day_ms, "mono_us": mono_us});
    let page = |run: u64, seq: u64, event: Value| {
        json!({"run": run, "began": stamp(0), "now": stamp(90_000_000), "forgotten": 0,
            "records": [{"seq": seq, "at": stamp(30_000_000), "event": event}]})
    };
    // Its clock is a day ahead; its event happened a minute before the request.
    let serving = json!({"kind": "shard_serving", "shard": evil});
    let ahead = play(&runtime, Some(vec![page(1, 1, serving)]));
    // Its second page belongs to another run.
    let pages = [1, 2].map(|n| page(n, n, json!({"kind": "weights_evicted"})));
    let disorder = play(&runtime, Some(pages.into()));
    let nonsense = play(&runtime, Some(vec![json!({"records": evil})]));
    let silent = play(&runtime, Some(Vec::new()));
    let old = play(&runtime, None);
    // Another key than the requested one.
    let (endpoint, _) = ahead.at.split_once('#').expect("an address");
    let another = format!("{endpoint}#{victim}");
    // No TLS at all.
    let noise = TcpListener::bind("127.0.0.1:0").expect("a port");
    let noise_at = format!("{}#{victim}", noise.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in noise.incoming() {
            // The client may have disconnected.
            let _ = stream.and_then(|mut stream| stream.write_all(&[0x16; 4096]));
        }
    });

    let [ahead, disorder, nonsense, silent, old] =
        [&ahead, &disorder, &nonsense, &silent, &old].map(|host| host.at.clone());
    let all = [ahead, disorder, nonsense, silent, old, another, noise_at];
    let before = now_ms();
    let seen = diagnose_json(&asker, &shards(&all));
    let after = now_ms();
    let nodes = seen["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), all.len(), "{seen:#}");
    let codes_of = |address: &String| {
        let (_, id) = address.split_once('#').expect("an address");
        let same = nodes.iter().filter(|n| n["node"] == id);
        let codes = same.map(|n| n["error"]["code"].as_str().unwrap_or("told"));
        codes.collect::<BTreeSet<_>>()
    };
    assert_eq!(codes_of(&all[0]), BTreeSet::from(["told"]), "{seen:#}");
    for broken in &all[1..4] {
        assert_eq!(
            codes_of(broken),
            BTreeSet::from(["bad_request"]),
            "{seen:#}"
        );
    }
    assert_eq!(codes_of(&all[4]), BTreeSet::from(["not_found"]), "{seen:#}");
    let named = BTreeSet::from(["identity_mismatch", "unreachable"]);
    assert_eq!(codes_of(&all[5]), named, "{seen:#}");

    let events = seen["events"].as_array().expect("events");
    assert_eq!(events.len(), 1, "{seen:#}");
    let at_ms = events[0]["unix_ms"].as_f64().expect("a time");
    let minute_before = (before as f64 - 60_000.0)..=(after as f64 - 60_000.0 + 1.0);
    assert!(minute_before.contains(&at_ms), "{at_ms}: {seen:#}");
    let ahead_ms = nodes.iter().find_map(|n| n["clock_ahead_ms"].as_i64());
    let off = ahead_ms.expect("one told") - i64::try_from(day_ms).expect("a day");
    // The clock offset is measured when the page was made.
    let made_before = i64::try_from(after - made).expect("a moment");
    assert!((-made_before..=1).contains(&off), "{off}: {seen:#}");

    let people = diagnose(&asker, &shards(&all));
    assert!(
        people.chars().all(|c| c == '\n' || !c.is_control()),
        "{people:?}"
    );
    assert!(people.contains("it may run another version"), "{people}");
    assert!(!people.contains(&asker_id), "{people}");
}
