//! One daemon per home: it serves layers, answers calls, and opens the doors for its own people, and
//! its own layers count for its own chats. Real model, real processes, one machine.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use support::gauges::Gauges;
use support::{Home, PATIENCE, Server, community, http, model, pid, text, wait_for_end};

const QUESTION: &str = "Name three colours.";

/// No multicast, and an answer that comes from hosts or not at all.
const HERE: [&str; 6] = [
    "--set",
    "policy.research.enable=true",
    "--set",
    "discovery.mdns=false",
    "--set",
    "research.distributed_inference.fallback_to_local=false",
];

fn model_text() -> String {
    model().to_str().expect("a UTF-8 path").to_owned()
}

/// A daemon that is not asked for JSON once it is ready, or that never gets so far.
fn daemon(home: &Home, settings: &[&str], command: &[&str]) -> Server {
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    let door = ["--http", "127.0.0.1:0"];
    Server::start(home, &[&HERE[..], settings, command, &door, &tail].concat())
}

/// What the model says on one machine alone.
fn alone(home: &Home) -> String {
    let model = model_text();
    let args = ["chat", QUESTION, "--local", "--json", "--max-tokens", "24"];
    let all = [&args[..], &["--temperature", "0", "--model", &model]].concat();
    home.json(&all)["text"].as_str().expect("text").to_owned()
}

/// `hearthnet chat`, until there is an answer: hosts may not have been heard of yet.
fn chat(home: &Home, extra: &[&str]) -> Value {
    let model = model_text();
    let args = ["chat", QUESTION, "--json", "--max-tokens", "24"];
    let enable = ["--set", "policy.research.enable=true"];
    let args = [
        &enable[..],
        &args,
        &["--temperature", "0", "--model", &model],
        extra,
    ]
    .concat();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = home.run(&args);
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).expect("JSON");
        }
        assert!(Instant::now() < deadline, "{}", text(&output.stderr));
    }
}

fn app(home: &Home) -> Output {
    let python = std::env::var_os("HEARTHNET_TEST_PYTHON").unwrap_or_else(|| {
        panic!(
            "run tests/run, or set HEARTHNET_TEST_PYTHON to a Python with the package websockets"
        )
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/chat_app.py");
    Command::new(python)
        .arg("-B")
        .arg(script)
        .args([QUESTION, "--max-tokens", "24"])
        .env("HEARTHNET_DATA_DIR", home.path().join("data"))
        .env("PYTHONIOENCODING", "utf-8")
        .output()
        .expect("Python starts")
}

fn status(home: &Home) -> Value {
    home.json(&["--set", "discovery.mdns=false", "status", "--json"])
}

/// Events of a kind in a home's own log, which asks nobody.
fn events(home: &Home, kind: &str) -> usize {
    let shown = home.run(&["log", "show", "--json"]);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    let lines = text(&shown.stdout);
    lines.lines().filter(|line| line.contains(kind)).count()
}

/// The shard that a home's daemon says to serve.
fn serving(home: &Home) -> Option<String> {
    let serving = &status(home)["node"]["running"]["serving"];
    serving.as_str().map(str::to_owned)
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn two_homes_that_serve_a_half_each_both_chat_and_so_do_their_apps() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let attic = daemon(
        &founder,
        &[],
        &["serve", "--model", &model, "--layers", "0-14"],
    );
    let member = community::join(&founder, &attic);
    let peers = community::peers(&attic);
    let shard = ["shard", "serve", "--model", &model, "--layers", "15-29"];
    let cellar = daemon(&member, &["--set", &peers], &shard);
    assert_eq!(
        cellar.ready["descriptor"]["layer_range"],
        serde_json::json!([15, 29])
    );

    let expected = alone(&founder);
    for (home, other) in [(&founder, member.node_id()), (&member, founder.node_id())] {
        // Asked through the daemon, and by a process of its own beside it.
        let answers = [
            chat(home, &[]),
            chat(
                home,
                &[&HERE[..4], &["--no-service", "--no-fallback"]].concat(),
            ),
        ];
        for answer in &answers {
            assert_eq!(answer["text"], expected.as_str());
            let route = answer["route"].as_array().expect("a route");
            assert!(
                route.iter().any(|hop| hop["host"] == other.as_str()),
                "{answer:#}"
            );
        }
        let output = app(home);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), expected);
    }
}

/// How many tensor sessions a daemon has open over sockets, on either side.
fn sockets(server: &Server) -> u64 {
    let numbers = Gauges::at(&http::address(server));
    let open = |side: &str| {
        let name = format!("hearthnet_transport_sessions{{side=\"{side}\"}}");
        numbers.value(&name).unwrap_or(0.0) as u64
    };
    open("host") + open("caller")
}

#[test]
fn a_home_that_serves_every_layer_answers_itself_without_a_wire_and_with_all_checks() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let serve = ["serve", "--model", &model, "--layers", "0-29"];
    let daemon = daemon(&founder, &[], &serve);
    let answer = chat(&founder, &[]);
    assert_eq!(answer["text"], alone(&founder).as_str());
    let route = answer["route"].as_array().expect("a route");
    assert!(!route.is_empty());
    for hop in route {
        // Its layers ran on this machine.
        assert_eq!(hop["host"], Value::Null, "{answer:#}");
    }
    assert_eq!(sockets(&daemon), 0);

    // Another process of the same home comes over the wire, and says the same.
    let own_process = chat(
        &founder,
        &[&HERE[..4], &["--no-service", "--no-fallback"]].concat(),
    );
    assert_eq!(own_process["text"], answer["text"]);

    // The right to it is asked for each session, as it is of others.
    founder.json(&["community", "policy", "--research", "off", "--json"]);
    until("it serves no more", || serving(&founder).is_none());
    let args = [&HERE[..], &["chat", QUESTION, "--model", &model]].concat();
    let refused = founder.run(&args);
    assert_eq!(refused.status.code(), Some(7), "{}", text(&refused.stderr));
}

/// A chat that hosts cannot answer, through the daemon; what it says on standard error.
fn alone_after_all(home: &Home, extra: &[&str]) -> (String, String) {
    let model = model_text();
    let args = ["chat", QUESTION, "--max-tokens", "24", "--model", &model];
    let args = [&args[..], &["--temperature", "0"]].concat();
    let enable = ["--set", "policy.research.enable=true"];
    let output = home.run(&[&enable[..], &args, extra].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_new_question_is_answered_here_when_no_host_can_be_had_and_goes_to_the_hosts_when_they_come() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let on = "research.distributed_inference.fallback_to_local=true";
    let node = daemon(&founder, &["--set", on], &["serve", "--model", &model]);
    let expected = alone(&founder);
    let here = "this machine answers alone";

    // Nobody serves a layer.
    let (answer, said) = alone_after_all(&founder, &[]);
    assert_eq!(answer.trim_end(), expected, "{said}");
    assert!(said.contains(here), "{said}");
    // The same of a process of its own.
    let own_process = [&HERE[..4], &["--no-service"]].concat();
    let (answer, said) = alone_after_all(&founder, &own_process);
    assert_eq!(answer.trim_end(), expected, "{said}");
    assert!(said.contains(here), "{said}");
    // And through the OpenAI door.
    let ask = |stream: bool| {
        let body = serde_json::json!({
            "model": Path::new(&model).file_stem().and_then(|s| s.to_str()),
            "max_tokens": 24, "temperature": 0, "stream": stream,
            "messages": [{"role": "user", "content": QUESTION}],
        });
        http::Reply::chat(&http::address(&node), &body)
    };
    let events = ask(true).text();
    assert!(
        events.contains(&format!(": no host can be had for this: {here}")),
        "{events}"
    );
    assert!(ask(false).alone, "a header says so");

    // A host comes: the conversation that went local keeps nobody here.
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
    let route = answer["route"].as_array().expect("a route");
    assert!(
        route.iter().any(|hop| hop["host"] == id.as_str()),
        "{answer:#}"
    );
    assert!(!ask(false).alone, "hosts answered");
}

#[test]
fn status_calls_a_killed_host_unreachable_and_its_layers_missing() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let node = daemon(&founder, &[], &["serve", "--model", &model]);
    let member = community::join(&founder, &node);
    let mut host = community::host(&member, &node, "0-29");
    let complete = || status(&founder)["models"][0]["complete"] == true;
    until("all layers are served", complete);
    host.child.kill().expect("our own");
    host.child.wait().expect("our own");
    // Its advertisement holds for minutes yet.
    let told = status(&founder);
    let model = &told["models"][0];
    assert_eq!(model["complete"], false, "{told:#}");
    assert_eq!(model["shards"][0]["reachable"], false, "{told:#}");
    let text_of = text(
        &founder
            .run(&["--set", "discovery.mdns=false", "status"])
            .stdout,
    );
    assert!(
        text_of.contains("UNREACHABLE") && text_of.contains("missing layers 0-29"),
        "{text_of}"
    );
    // The same without a daemon.
    drop(node);
    let told = status(&founder);
    assert_eq!(told["node"]["running"], Value::Null);
    assert_eq!(told["models"][0]["complete"], false, "{told:#}");
}

#[test]
fn status_of_a_home_without_a_daemon_asks_the_others_first() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let node = daemon(&founder, &[], &["serve", "--model", &model]);
    let (member, guest) = (
        community::join(&founder, &node),
        community::join(&founder, &node),
    );
    // Nobody served anything when the guest joined, which is when it last heard of anybody.
    let _host = community::host(&member, &node, "0-29");
    until("the founder knows", || {
        status(&founder)["models"][0]["complete"] == true
    });
    assert_eq!(status(&guest)["models"][0]["complete"], true);
}

#[test]
fn a_host_that_comes_back_elsewhere_is_shown_where_it_is() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let node = daemon(&founder, &[], &["serve", "--model", &model]);
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
        // It cannot withdraw what it advertised.
        host.child.kill().expect("our own");
        host.child.wait().expect("our own");
        before = address;
    }
}

#[test]
fn a_hosts_terminal_says_which_layers_are_missing_and_when_the_model_is_whole() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let node = daemon(&founder, &[], &["serve", "--model", &model]);
    let (one, two) = (
        community::join(&founder, &node),
        community::join(&founder, &node),
    );
    let peers = community::peers(&node);
    let serve = ["serve", "--model", &model, "--layers", "0-14"];
    let doors = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let args = [&HERE[..], &["--set", &peers], &serve, &doors].concat();
    let mut going = Going::start(&one, &args);
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
    host.signal(Signal::TERM);
    host.child.wait().expect("our own");
    says("layers 15-29 are now missing");
}

#[test]
fn chat_asks_the_others_before_it_judges_by_its_own_log() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let node = daemon(
        &founder,
        &[],
        &["serve", "--model", &model, "--layers", "0-29"],
    );
    let member = community::join_as("member", &founder, &node);
    let peers = community::peers(&node);
    let args = [
        "chat",
        QUESTION,
        "--no-fallback",
        "--max-tokens",
        "24",
        "--model",
        &model,
    ];
    let ask = [&HERE[..], &["--set", &peers], &args].concat();
    founder.json(&["community", "policy", "--research", "off", "--json"]);
    // It believes its own log, asks in vain, and has heard of it then.
    assert!(!member.run(&ask).status.success());
    assert_eq!(events(&member, "community.policy"), 1);
    founder.json(&["community", "policy", "--research", "on", "--json"]);
    until("it serves again", || serving(&founder).is_some());
    assert_eq!(events(&member, "community.policy"), 1);
    let output = member.run(&ask);
    // Whether it had to wait for them depends on how long its model took to read.
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_second_serve_says_where_the_daemon_is_and_succeeds() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let first = daemon(&founder, &[], &["serve", "--model", &model]);
    let again = founder.json(&[&HERE[..], &["serve", "--json"]].concat());
    assert_eq!(again["runs_already"], true);
    assert_eq!(again["url"], first.ready["url"]);
    let output = founder.run(&[&HERE[..], &["serve"]].concat());
    let url = first.ready["url"].as_str().expect("a door");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains(url),
        "{}",
        text(&output.stdout)
    );
}

/// A command that goes on, and the lines of one of its outputs.
struct Going {
    child: Child,
    lines: Box<dyn Iterator<Item = String>>,
}

impl Going {
    fn start(home: &Home, args: &[&str]) -> Self {
        let mut command = home.hearthnet(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("hearthnet starts");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let lines = Box::new(stdout.lines().map(|line| line.expect("text")));
        Self { child, lines }
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn shard_serve_beside_a_daemon_has_it_serve_the_layers_until_it_is_stopped() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let daemon = daemon(&founder, &[], &["serve", "--model", &model]);
    assert_eq!(serving(&founder), None);

    let shard = [
        "shard", "serve", "--model", &model, "--layers", "0-29", "--json",
    ];
    let args = [&HERE[..], &shard].concat();
    let mut attached = Going::start(&founder, &args);
    let ready: Value = serde_json::from_str(&attached.lines.next().expect("a line")).expect("JSON");
    assert_eq!(
        ready["descriptor"]["layer_range"],
        serde_json::json!([0, 29])
    );
    let shard_id = ready["descriptor"]["shard_id"].as_str().expect("an id");
    assert_eq!(serving(&founder).as_deref(), Some(shard_id));
    assert_eq!(chat(&founder, &[])["text"], alone(&founder).as_str());

    // One range at a time.
    let second = founder.run(&args);
    assert!(!second.status.success());
    assert!(
        text(&second.stderr).contains("serves layers already"),
        "{}",
        text(&second.stderr)
    );

    // Ctrl-C ends the serving, and not the daemon.
    kill_process(pid(attached.child.id()), Signal::INT).expect("it runs");
    wait_for_end(attached.child.id());
    assert_eq!(attached.child.wait().expect("our own").code(), Some(0));
    until("the layers are withdrawn", || serving(&founder).is_none());

    // A client that is killed is a client that is gone.
    let mut killed = Going::start(&founder, &args);
    killed.lines.next().expect("a line");
    until("they are served again", || serving(&founder).is_some());
    drop(killed);
    until("the layers are withdrawn again", || {
        serving(&founder).is_none()
    });
    drop(daemon);
}

#[test]
fn a_daemon_without_the_models_file_does_the_rest() {
    let founder = Home::new();
    community::found(&founder);
    let on = "research.distributed_inference.host.serve_shards=true";
    let missing = founder.path().join("missing.gguf");
    let missing = missing.to_str().expect("a UTF-8 path");
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    let serve = ["--set", on, "serve", "--model", missing];
    let daemon = Server::start(&founder, &[&HERE[..], &serve, &tail].concat());
    assert_eq!(daemon.ready["url"], Value::Null);
    // Others can join through it.
    let member = community::join(&founder, &daemon);
    assert_eq!(status(&member)["node"]["level"], "trusted");
    // Where the layers are what it is about, it is an error.
    let shard = ["shard", "serve", "--model", missing];
    let output = member.run(&[&HERE[..], &shard].concat());
    assert_eq!(output.status.code(), Some(8), "{}", text(&output.stderr));
}

#[test]
fn layers_pause_when_the_community_switches_computing_off_and_come_back_with_it() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let on = "research.distributed_inference.host.serve_shards=true";
    let all = "research.distributed_inference.host.serve_layers=\"0-29\"";
    let daemon = daemon(
        &founder,
        &["--set", on, "--set", all],
        &["serve", "--model", &model],
    );
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
    assert_eq!(status(&founder)["models"], serde_json::json!([]));

    founder.json(&["community", "policy", "--research", "on", "--json"]);
    until("it serves again by itself", || serving(&founder).is_some());
    assert_eq!(chat(&founder, &[])["text"], expected.as_str());
    drop(daemon);
}

#[test]
fn a_node_promoted_while_it_was_away_asks_the_others_before_it_judges() {
    let founder = Home::new();
    community::found(&founder);
    let model = model_text();
    let node = daemon(&founder, &[], &["serve", "--model", &model]);
    let member = community::join_as("member", &founder, &node);
    let peers = community::peers(&node);
    let shard = ["shard", "serve", "--model", &model, "--layers", "0-29"];
    let refused = member.run(&[&HERE[..], &["--set", &peers], &shard].concat());
    assert_eq!(refused.status.code(), Some(10), "{}", text(&refused.stderr));
    let why = text(&refused.stderr);
    assert!(
        why.contains("asking the others") && why.contains("promote"),
        "{why}"
    );

    founder.json(&[
        "community",
        "promote",
        &member.node_id(),
        "trusted",
        "--json",
    ]);
    // Its own log has not heard of it yet.
    assert_eq!(events(&member, "member.level"), 0);
    let host = daemon(&member, &["--set", &peers], &shard);
    assert_eq!(
        host.ready["descriptor"]["layer_range"],
        serde_json::json!([0, 29])
    );
}
