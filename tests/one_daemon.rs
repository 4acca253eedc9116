//! The daemon of a home serves layers, answers calls, opens its interfaces to its own users, and
//! its own layers count for its own chats. Real model, real processes, one machine.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;

use hearthnet_testkit::TinyLlama;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::gauges::Gauges;
use crate::support::*;

const QUESTION: &str = "Name three colours.";

/// Settings of commands here: hosts answer, or the command fails.
fn here() -> Vec<&'static str> {
    [ENABLE, QUIET, TOGETHER].concat()
}

/// Settings of a process beside the daemon that contacts the hosts itself.
fn beside(more: &[&'static str]) -> Vec<&'static str> {
    [&ENABLE[..], &QUIET, &["--no-service"], more].concat()
}

/// Starts a daemon and waits until it is ready.
fn daemon(home: &Home, settings: &[&str], command: &[&str]) -> Server {
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    let http = ["--http", "127.0.0.1:0"];
    Server::start(
        home,
        &[&here()[..], settings, command, &http, &tail].concat(),
    )
}

/// Founder of a community with its daemon, which serves these layers.
fn founded(layers: &[&str]) -> (Home, Server) {
    founded_with(&[], layers)
}

fn founded_with(settings: &[&str], layers: &[&str]) -> (Home, Server) {
    let founder = community::founder();
    let serve = [&["serve", "--model", model()], layers].concat();
    let daemon = daemon(&founder, settings, &serve);
    (founder, daemon)
}

/// Answer of the model on one machine alone.
fn alone(home: &Home) -> String {
    let said = home.json(&[&["chat", QUESTION, "--local", "--json"][..], &greedy()].concat());
    said["text"].as_str().expect("text").to_owned()
}

/// Repeats `hearthnet chat` until it succeeds.
fn chat(home: &Home, extra: &[&str]) -> Value {
    let ask = ["chat", QUESTION, "--json"];
    let args = [&ENABLE[..], &ask, &greedy(), extra].concat();
    let output = until_answered(|| home.run(&args));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Sampling flags of every question here.
fn greedy() -> [&'static str; 4] {
    let [length, heat] = ["--max-tokens=24", "--temperature=0"];
    [length, heat, "--model", model()]
}

fn status(home: &Home) -> Value {
    community::json(home, &[], &["status"])
}

/// Events of a kind in a home's own log, without asking other nodes.
fn events(home: &Home, kind: &str) -> usize {
    let lines = home.says(&["log", "show", "--json"]);
    lines.lines().filter(|line| line.contains(kind)).count()
}

/// Shard that a home's daemon reports to serve.
fn serving(home: &Home) -> Option<String> {
    let serving = &status(home)["node"]["running"]["serving"];
    serving.as_str().map(str::to_owned)
}

/// Asserts that a home's layers took part in an answer.
fn assert_asked(answer: &Value, node: &str) {
    let mut route = answer["route"].as_array().expect("a route").iter();
    assert!(route.any(|hop| hop["host"] == node), "{answer:#}");
}

#[test]
fn two_homes_with_half_the_layers_each_can_both_chat_as_can_their_apps() {
    let (founder, attic) = founded(&["--layers", "0-14"]);
    let member = community::join(&founder, &attic);
    let near = community::static_peer(&attic);
    let shard = ["shard", "serve", "--model", model(), "--layers", "15-29"];
    let cellar = daemon(&member, &near, &shard);
    assert_eq!(cellar.ready["descriptor"]["layer_range"], json!([15, 29]));

    let expected = alone(&founder);
    for (home, other) in [(&founder, member.node_id()), (&member, founder.node_id())] {
        // Through the daemon, and by a separate process.
        let answers = [chat(home, &[]), chat(home, &beside(&["--no-fallback"]))];
        for answer in &answers {
            assert_eq!(answer["text"], expected.as_str());
            assert_asked(answer, &other);
        }
        let output = chat_app(home, &[QUESTION, "--max-tokens", "24"]);
        assert_eq!(succeeded(&output), expected);
    }
}

/// Tensor sessions of a daemon over sockets, on either side.
fn sockets(server: &Server) -> u64 {
    let numbers = Gauges::at(&http::address(server));
    let open = |side: &str| {
        let name = format!("hearthnet_transport_sessions{{side=\"{side}\"}}");
        numbers.value(&name).unwrap_or(0.0) as u64
    };
    open("host") + open("caller")
}

#[test]
fn a_home_with_all_layers_answers_itself_without_sockets_but_with_all_checks() {
    let (founder, daemon) = founded(&["--layers", "0-29"]);
    let answer = chat(&founder, &[]);
    assert_eq!(answer["text"], alone(&founder).as_str());
    let route = answer["route"].as_array().expect("a route");
    assert!(!route.is_empty());
    for hop in route {
        // Its layers ran on this machine.
        assert_eq!(hop["host"], Value::Null, "{answer:#}");
    }
    assert_eq!(sockets(&daemon), 0);

    // Another process of the same home uses sockets and gets the same answer.
    let own_process = chat(&founder, &beside(&["--no-fallback"]));
    assert_eq!(own_process["text"], answer["text"]);

    // Its own sessions need the same permission as those of others.
    founder.json(&["community", "policy", "--research", "off", "--json"]);
    until("it serves no more", || serving(&founder).is_none());
    let args = [&here()[..], &["chat", QUESTION, "--model", model()]].concat();
    let refused = founder.run(&args);
    assert_eq!(refused.status.code(), Some(7), "{}", text(&refused.stderr));
}

/// Chat through the daemon that no host can answer. Returns its output and its standard error.
fn alone_after_all(home: &Home, extra: &[&str]) -> (String, String) {
    let output = home.run(&[&ENABLE[..], &["chat", QUESTION], &greedy(), extra].concat());
    (succeeded(&output), text(&output.stderr))
}

#[test]
fn a_new_question_is_answered_locally_without_hosts_and_by_hosts_once_they_appear() {
    let on = "research.distributed_inference.fallback_to_local=true";
    let (founder, node) = founded_with(&["--set", on], &[]);
    let expected = alone(&founder);
    let here = "this machine answers alone";

    // No host serves a layer.
    let (answer, said) = alone_after_all(&founder, &[]);
    assert_eq!(answer.trim_end(), expected, "{said}");
    assert!(said.contains(here), "{said}");
    // The same with a process of its own.
    let (answer, said) = alone_after_all(&founder, &beside(&[]));
    assert_eq!(answer.trim_end(), expected, "{said}");
    assert!(said.contains(here), "{said}");
    // And through the OpenAI API.
    let ask = |stream: bool| {
        let body = json!({
            "model": Path::new(model()).file_stem().and_then(|s| s.to_str()),
            "max_tokens": 24, "temperature": 0, "stream": stream,
            "messages": [{"role": "user", "content": QUESTION}],
        });
        http::Reply::chat(&http::address(&node), &body)
    };
    let events = ask(true).text();
    assert_contains(&events, &[&format!(": no host is available: {here}")]);
    assert!(ask(false).alone, "a header says so");

    // A host appears: later questions go to it, although the conversation went local before.
    let member = community::join(&founder, &node);
    let _host = community::host(&member, &node, "0-29");
    let id = member.node_id();
    until("the layers are known", || {
        let status = status(&founder);
        let shards = &status["models"][0]["shards"];
        shards
            .as_array()
            .is_some_and(|shards| shards.iter().any(|s| s["node"] == id.as_str()))
    });
    let answer = chat(&founder, &[]);
    assert_eq!(answer["text"], expected.as_str());
    assert_asked(&answer, &id);
    assert!(!ask(false).alone, "hosts answered");
}

#[test]
fn status_calls_a_killed_host_unreachable_and_its_layers_missing() {
    let (founder, node) = founded(&[]);
    let member = community::join(&founder, &node);
    let mut host = community::host(&member, &node, "0-29");
    let complete = || status(&founder)["models"][0]["complete"] == true;
    until("all layers are served", complete);
    host.end(Signal::KILL);
    // Its advertisement is valid for some more minutes.
    let told = status(&founder);
    let model = &told["models"][0];
    assert_eq!(model["complete"], false, "{told:#}");
    assert_eq!(model["shards"][0]["reachable"], false, "{told:#}");
    let people = text(&founder.run(&[&QUIET[..], &["status"]].concat()).stdout);
    assert_contains(&people, &["UNREACHABLE", "missing layers 0-29"]);
    // The same without a daemon.
    drop(node);
    let told = status(&founder);
    assert_eq!(told["node"]["running"], Value::Null);
    assert_eq!(told["models"][0]["complete"], false, "{told:#}");
}

#[test]
fn a_plan_leaves_out_a_killed_home_and_names_it() {
    let (founder, node) = founded(&["--layers", "0-29"]);
    let member = community::join(&founder, &node);
    let mut host = community::host(&member, &node, "0-29");
    let plan = [&ENABLE[..], &QUIET, &["plan", model()]].concat();
    let told = || {
        let output = founder.run(&[&plan[..], &["--json"]].concat());
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default()
    };
    let id = member.node_id();
    let counts = |plan: &Value| {
        let mut rows = plan["nodes"].as_array().into_iter().flatten();
        rows.any(|row| row["node"] == id.as_str())
    };
    until("the plan counts the member", || counts(&told()));
    assert_eq!(told()["unreachable"], json!([]));
    host.end(Signal::KILL);
    // Its measurements are valid for two minutes.
    let left = told();
    assert!(!counts(&left), "{left:#}");
    let named = left["unreachable"].as_array().map(Vec::len);
    assert_eq!(named, Some(1), "{left:#}");
    assert_contains(&founder.says(&plan), &["not reachable now"]);
    drop(node);
}

#[test]
fn status_without_a_daemon_syncs_first() {
    let (founder, node) = founded(&[]);
    let [member, guest] = [(); 2].map(|()| community::join(&founder, &node));
    // No node served layers when the guest joined, which is the last time it was connected.
    let _host = community::host(&member, &node, "0-29");
    until("the founder knows", || {
        status(&founder)["models"][0]["complete"] == true
    });
    assert_eq!(status(&guest)["models"][0]["complete"], true);
}

#[test]
fn a_restarted_host_is_shown_at_its_new_address() {
    let (founder, node) = founded(&[]);
    let member = community::join(&founder, &node);
    let mut before = String::new();
    for time in ["at first", "elsewhere"] {
        let mut host = community::host(&member, &node, "0-29");
        let address = host.ready["descriptor"]["endpoint"].as_str();
        let address = address.expect("an address").to_owned();
        assert_ne!(address, before);
        until(time, || {
            let shards = &status(&founder)["models"][0]["shards"];
            shards[0]["address"] == address.as_str() && shards[0]["reachable"] == true
        });
        assert_eq!(status(&founder)["models"][0]["shards"][1], Value::Null);
        // A killed host cannot withdraw its advertisement.
        host.end(Signal::KILL);
        before = address;
    }
}

#[test]
fn a_host_prints_the_missing_layers_and_when_the_model_is_complete() {
    let (founder, node) = founded(&[]);
    let [one, two] = [(); 2].map(|()| community::join(&founder, &node));
    let near = community::static_peer(&node);
    let serve = ["serve", "--model", model(), "--layers", "0-14"];
    let endpoints = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let args = [&here()[..], &near, &serve, &endpoints].concat();
    let mut going = Running::start(one.hearthnet(&args).stdin(Stdio::piped()));
    let terminal = BufReader::new(going.child.stderr.take().expect("a pipe"));
    let mut lines = terminal.lines().map(|line| line.expect("a line"));
    let mut says = |words: &str| {
        let said = lines.find(|line| line.contains("missing") || line.contains("whole model"));
        let said = said.expect("it says something of the model");
        assert!(said.contains(words), "{said}");
    };
    says("layers 15-29 are still missing");
    let mut host = community::host(&two, &node, "15-29");
    says("\"Elm Street\" serves the whole model now");
    // Waiting would close its lifeline, which is a second request to stop: at once.
    let lifeline = host.child.stdin.take();
    host.end(Signal::TERM);
    drop(lifeline);
    says("layers 15-29 are now missing");
}

#[test]
fn chat_syncs_before_it_decides_by_its_own_log() {
    let (founder, node) = founded(&["--layers", "0-29"]);
    let member = community::join_as("member", &founder, &node);
    let near = community::static_peer(&node);
    let chat = ["chat", QUESTION, "--no-fallback"];
    let ask = [&here()[..], &near, &chat, &greedy()].concat();
    founder.json(&["community", "policy", "--research", "off", "--json"]);
    // Its own log allows it, so it asks in vain; afterwards it has the new policy.
    assert!(!member.run(&ask).status.success());
    assert_eq!(events(&member, "community.policy"), 1);
    founder.json(&["community", "policy", "--research", "on", "--json"]);
    until("it serves again", || serving(&founder).is_some());
    assert_eq!(events(&member, "community.policy"), 1);
    // It may ask other nodes first or not, depending on how long the model takes to load.
    member.says(&ask);
}

#[test]
fn a_second_serve_says_where_the_daemon_is_and_succeeds() {
    let (founder, first) = founded(&[]);
    let again = founder.json(&[&here()[..], &["serve", "--json"]].concat());
    assert_eq!(again["runs_already"], true);
    assert_eq!(again["url"], first.ready["url"]);
    let said = founder.says(&[&here()[..], &["serve"]].concat());
    let url = first.ready["url"].as_str().expect("an API");
    assert!(said.contains(url), "{said}");
}

#[test]
fn shard_serve_beside_a_daemon_makes_it_serve_the_layers_until_it_is_stopped() {
    let (founder, daemon) = founded(&[]);
    assert_eq!(serving(&founder), None);

    let shard = ["shard", "serve", "--model", model(), "--json"];
    let args = [&here()[..], &shard, &["--layers", "0-29"]].concat();
    let start = || Running::start(founder.hearthnet(&args).stdin(Stdio::piped()));
    let mut attached = start();
    let ready: Value = serde_json::from_str(&attached.line()).expect("JSON");
    assert_eq!(ready["descriptor"]["layer_range"], json!([0, 29]));
    let shard_id = ready["descriptor"]["shard_id"].as_str().expect("an id");
    assert_eq!(serving(&founder).as_deref(), Some(shard_id));
    assert_eq!(chat(&founder, &[])["text"], alone(&founder).as_str());

    // A daemon serves one range of a model.
    let second = founder.run(&args);
    assert_fails(&second, 9, "layers_served");
    // It also serves one of another model. The daemon's sandbox lets it read its own folder.
    let tiny = TinyLlama::default().write(&founder.path().join("data"));
    let tiny = tiny.to_str().expect("UTF-8");
    let shard = ["shard", "serve", "--model", tiny, "--json"];
    let args = [&here()[..], &shard, &["--layers", "0-1"]].concat();
    let mut second = Running::start(founder.hearthnet(&args).stdin(Stdio::piped()));
    let ready: Value = serde_json::from_str(&second.line()).expect("JSON");
    let other_id = ready["descriptor"]["shard_id"].as_str().expect("an id");
    let both = serving(&founder).expect("layers");
    let both: BTreeSet<&str> = both.split(", ").collect();
    assert_eq!(both, BTreeSet::from([shard_id, other_id]));
    // The sessions of chats still go to the host of their model.
    assert_eq!(
        chat(&founder, &beside(&["--no-fallback"]))["text"],
        alone(&founder).as_str()
    );
    drop(second);
    until("the other layers are withdrawn", || {
        serving(&founder).as_deref() == Some(shard_id)
    });

    // Ctrl-C ends the serving of layers, but not the daemon.
    interrupt(&attached.child);
    wait_for_end(attached.child.id());
    assert_eq!(attached.status(), Some(0));
    until("the layers are withdrawn", || serving(&founder).is_none());

    // Killing the client ends its request too.
    let mut killed = start();
    killed.line();
    until("they are served again", || serving(&founder).is_some());
    drop(killed);
    until("the layers are withdrawn again", || {
        serving(&founder).is_none()
    });
    drop(daemon);
}

#[test]
fn a_daemon_without_the_model_file_still_runs_its_node() {
    let founder = community::founder();
    let on = "research.distributed_inference.host.serve_shards=true";
    let missing = founder.path().join("missing.gguf");
    let missing = missing.to_str().expect("a UTF-8 path");
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    let serve = ["--set", on, "serve", "--model", missing];
    let daemon = Server::start(&founder, &[&here()[..], &serve, &tail].concat());
    assert_eq!(daemon.ready["url"], Value::Null);
    // Other nodes can join through it.
    let member = community::join(&founder, &daemon);
    assert_eq!(status(&member)["node"]["level"], "trusted");
    // `shard serve` needs the layers, so it fails.
    let shard = ["shard", "serve", "--model", missing];
    let output = member.run(&[&here()[..], &shard].concat());
    assert_eq!(output.status.code(), Some(8), "{}", text(&output.stderr));
}

#[test]
fn a_daemon_that_fails_to_start_gives_the_reason_and_advertises_nothing() {
    let home = community::founder();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let http = taken.local_addr().expect("an address").to_string();
    let serve = ["serve", "--model", model(), "--layers", "auto"];
    let endpoints = ["--listen", "127.0.0.1:0", "--http", &http, "--json"];
    let ended = home.run(&[&here()[..], &serve, &endpoints].concat());
    assert_fails(&ended, 9, "host_failed");
    // A withdrawal would replace an earlier advertisement in the log.
    assert_eq!(events(&home, "experimental.shard.advertised"), 0);
    assert_eq!(serving(&home), None);
}

#[test]
fn layers_pause_while_the_community_has_research_off() {
    let on = "research.distributed_inference.host.serve_shards=true";
    let all = "research.distributed_inference.host.serve_layers=\"0-29\"";
    let (founder, daemon) = founded_with(&["--set", on, "--set", all], &[]);
    until("it serves, as the configuration says", || {
        serving(&founder).is_some()
    });
    let expected = alone(&founder);
    assert_eq!(chat(&founder, &[])["text"], expected.as_str());

    founder.json(&["community", "policy", "--research", "off", "--json"]);
    until("it says why it serves nothing", || {
        let why = &status(&founder)["node"]["running"]["suspended"];
        why.as_str()
            .is_some_and(|why| why.contains("research is off"))
    });
    assert_eq!(status(&founder)["models"], json!([]));

    founder.json(&["community", "policy", "--research", "on", "--json"]);
    until("it serves again by itself", || serving(&founder).is_some());
    assert_eq!(chat(&founder, &[])["text"], expected.as_str());
    drop(daemon);
}

#[test]
fn a_node_promoted_while_offline_syncs_before_it_decides() {
    let (founder, node) = founded(&[]);
    let member = community::join_as("member", &founder, &node);
    let near = community::static_peer(&node);
    let shard = ["shard", "serve", "--model", model(), "--layers", "0-29"];
    let refused = member.run(&[&here()[..], &near, &shard].concat());
    assert_eq!(refused.status.code(), Some(10), "{}", text(&refused.stderr));
    let why = text(&refused.stderr);
    assert_contains(&why, &["asking other members", "promote"]);

    founder.says(&["community", "promote", &member.node_id(), "trusted"]);
    // Its own log does not have the promotion yet.
    assert_eq!(events(&member, "member.level"), 0);
    let host = daemon(&member, &near, &shard);
    assert_eq!(host.ready["descriptor"]["layer_range"], json!([0, 29]));
}
