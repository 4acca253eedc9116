//! A host that loses its rights or is convicted receives no more rows, even if it ignores that: in
//! the middle of an answer, and for an idle conversation.
//!
//! The host is a node in this process that serves real layers and never checks its own rights. It
//! is reached over a slow line, so that an answer takes long enough.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use hearthnet_bus::log::{Body, Finding, Level};
use hearthnet_bus::node::Node;
use hearthnet_bus::testing::dispute;
use hearthnet_shard::{ServeConfig, ShardConfig, ShardHost};
use hearthnet_testkit::one_thread;
use serde_json::{Value, json};

use crate::support::community::{founded, host, join, join_as, serve, static_peer};
use crate::support::http::Reply;
use crate::support::own_host::{OwnHost, OwnNode, free_address, model_id};
use crate::support::*;

/// By its measurements another host could be faster than the stubborn one.
const POLICY: &str = "research.distributed_inference.routing_policy=greedy";
const QUESTION: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";

/// Delay of everything sent to the host.
const SLOW_LINE: Duration = Duration::from_millis(15);

/// Forwards connections to `to`, with a delay in that direction. Returns its address.
fn slow_line(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(to) else {
                continue;
            };
            let pair = || Some((near.try_clone().ok()?, far.try_clone().ok()?));
            let (Some((a, b)), Some((c, d))) = (pair(), pair()) else {
                continue;
            };
            std::thread::spawn(move || forward(a, b, SLOW_LINE));
            std::thread::spawn(move || forward(d, c, Duration::ZERO));
        }
    });
    at
}

fn forward(mut from: TcpStream, mut to: TcpStream, each: Duration) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        std::thread::sleep(each);
        if to.write_all(&bytes[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}

/// Host that goes on serving after it has lost its rights.
struct Stubborn(OwnHost);

impl Stubborn {
    fn start(home: &Home, founder: &Server, layers: (u32, u32)) -> Self {
        let listen = free_address();
        let line = slow_line(listen.parse().expect("an address")).to_string();
        let node = OwnNode::start(home, founder, (&listen, &line));
        Self(node.host(async |node: &Node| {
            let config = ShardConfig {
                model_id: Some(model_id()),
                engine: one_thread(),
                serve: ServeConfig {
                    endpoint: Some(line.clone()),
                    ..ServeConfig::new(&listen)
                },
                ..ShardConfig::new(model(), layers, &listen)
            };
            let host = ShardHost::start(config, node, |_| {});
            host.await.expect("a host")
        }))
    }

    fn id(&self) -> String {
        self.0.id()
    }

    fn steps(&self) -> u64 {
        self.0.steps()
    }

    /// Waits until its last session has ended. Returns the number of steps that it ran.
    fn steps_when_left(&self) -> u64 {
        let host = &self.0.host;
        until("its sessions end", || host.stats().sessions == 0);
        assert_eq!(host.stats().streams, 0);
        self.steps()
    }
}

/// Waits until a home's node knows the three hosts of a street.
fn until_hosts_are_known(home: &Home) {
    until("all three are known", || {
        let status = home.json(&["status", "--json"]);
        let models = status["models"].as_array().expect("models");
        let shards = models.iter().filter_map(|model| model["shards"].as_array());
        shards.map(Vec::len).sum::<usize>() == 3
    });
}

/// Community of five: the founder, the stubborn host of the first half, two hosts that have all
/// layers together, and a member that asks.
struct Street {
    founder: Home,
    founder_runs: Server,
    stubborn: Stubborn,
    asks: Home,
    _homes: Vec<Home>,
    _hosts: Vec<Server>,
}

impl Street {
    fn new() -> Self {
        let (founder, founder_runs) = founded(&[]);
        let homes: Vec<Home> = (0..3).map(|_| join(&founder, &founder_runs)).collect();
        let asks = join_as("member", &founder, &founder_runs);
        // It reaches furthest from layer 0, so it is chosen, followed by the other half.
        let stubborn = Stubborn::start(&homes[0], &founder_runs, (0, 14));
        let hosts = vec![
            host(&homes[1], &founder_runs, "0-9"),
            host(&homes[2], &founder_runs, "10-29"),
        ];
        let street = Self {
            founder,
            founder_runs,
            stubborn,
            asks,
            _homes: homes,
            _hosts: hosts,
        };
        until_hosts_are_known(&street.founder);
        street
    }

    fn chat(&self, extra: &[&str]) -> std::process::Command {
        let known = [ENABLE, QUIET, static_peer(&self.founder_runs)].concat();
        let ask = ["chat", QUESTION, "--model", model(), "--max-tokens", "96"];
        let how = ["--temperature", "0.8", "--seed", "7", "--set", POLICY];
        self.asks
            .hearthnet(&[&known[..], &ask, &how, extra].concat())
    }

    /// Asks over the host. Returns the chat after some tokens.
    fn chat_over_the_host(&self) -> Running {
        // On a loaded machine, a chat may reach the host too late for its route.
        for _ in 0..5 {
            let mut chat = self.chat(&["--no-fallback", "--no-service", "--frames"]);
            let mut chat = Running::start(&mut chat);
            let is_token = |line: std::io::Result<String>| {
                let line = line.expect("a line");
                let frame: Value = serde_json::from_str(&line).expect("JSON");
                frame["event"] == "token_delta"
            };
            let tokens = chat
                .lines
                .by_ref()
                .filter_map(|line| is_token(line).then_some(()));
            assert_eq!(tokens.take(5).count(), 5, "tokens");
            if self.stubborn.steps() > 0 {
                return chat;
            }
        }
        panic!("the host runs the first half");
    }

    /// Asks and lets `act` act against the host after some tokens. The host must run no step once
    /// its replacement works, and the answer must be the same.
    fn ends_mid_answer(&self, act: impl Fn(), code: &str) {
        let alone = self.chat(&["--local", "--json"]).output().expect("it runs");
        let alone = json_output(&alone);
        let mut chat = self.chat_over_the_host();
        act();
        let (mut left, mut done) = (None, None);
        for line in chat.lines.by_ref() {
            let frame: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
            let data = &frame["data"];
            match frame["event"].as_str().unwrap_or_default() {
                "shard_failover" => {
                    assert_eq!(data["code"], code, "{frame}");
                    assert_eq!(data["host"], self.stubborn.id(), "{frame}");
                    left = Some(self.stubborn.steps_when_left());
                }
                "done" => done = Some(data.clone()),
                _ => {}
            }
        }
        assert_eq!(chat.status(), Some(0), "{}", chat.complaint());
        let (left, done) = (
            left.expect("a replacement took over"),
            done.expect("an end"),
        );
        assert_eq!(self.stubborn.steps(), left, "it saw more rows");
        assert_eq!(done["text"], alone["text"]);
        assert_eq!(done["token_ids"], alone["token_ids"]);
        // Another question does not use the host, although it is still advertised.
        let again = self.chat(&["--no-fallback", "--no-service", "--json"]);
        let again = json_output(&{ again }.output().expect("it runs"));
        assert_eq!(again["text"], alone["text"]);
        assert_eq!(self.stubborn.steps(), left);
    }
}

#[test]
fn a_host_revoked_during_an_answer_gets_no_more_rows() {
    let street = Street::new();
    let id = street.stubborn.id();
    let revoke = || drop(street.founder.says(&["community", "revoke", &id]));
    street.ends_mid_answer(revoke, "revoked");
}

#[test]
fn a_host_convicted_during_an_answer_gets_no_more_rows_and_all_hosts_behind_it_compute_again() {
    let street = Street::new();
    let [accuser, judge] = ["member", "trusted"].map(|level| {
        let home = join_as(level, &street.founder, &street.founder_runs);
        let promote = ["community", "promote", &home.node_id(), "anchor"];
        if level == "trusted" {
            street.founder.says(&promote);
        }
        let at = free_address();
        (
            OwnNode::start(&home, &street.founder_runs, (&at, &at)),
            home,
        )
    });
    let host = street.stubborn.id().parse().expect("an id");
    let rows = dispute(host);
    let id = rows.id(&accuser.0.node.id());
    // The judge's node has to know the host and the accuser.
    until("the accuser knows the host", || {
        accuser.0.log().state().member(&host).is_some()
    });
    accuser.0.append(Body::Disputed(rows));
    until("the judge knows the dispute", || {
        let state = judge.0.log().state();
        state.dispute(&id).is_some() && state.level(&judge.0.node.id()) == Some(Level::Anchor)
    });
    let convict = || {
        judge.0.append(Body::Judged {
            dispute: id,
            finding: Finding::Accused,
        });
    };
    street.ends_mid_answer(convict, "convicted");
}

#[test]
fn a_host_demoted_during_an_answer_beside_a_running_node_gets_no_more_rows() {
    let street = Street::new();
    let id = street.stubborn.id();
    // The home also runs a node, and the chat in another process watches its own connections.
    let _runs = serve(&street.asks, &static_peer(&street.founder_runs));
    until_hosts_are_known(&street.asks);
    let demote = || drop(street.founder.says(&["community", "demote", &id]));
    street.ends_mid_answer(demote, "unauthorized");
}

#[test]
fn the_next_turn_of_a_conversation_avoids_a_former_host() {
    let street = Street::new();
    let settings = [static_peer(&street.founder_runs), ["--set", POLICY]].concat();
    let service = serve(&street.asks, &settings);
    // An earlier question would be answered without the hosts.
    until_hosts_are_known(&street.asks);
    let mut messages = vec![json!({"role": "user", "content": QUESTION})];
    let ask = |messages: &[Value]| {
        let body = json!({"model": model_id(), "messages": messages,
            "temperature": 0, "max_tokens": 8});
        let mut reply = Reply::chat(&http::address(&service), &body);
        let answer = reply.text();
        assert_eq!(reply.status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        answer["choices"][0]["message"].clone()
    };
    // A known host may not be connected yet: until then others answer.
    let mut first = Value::Null;
    until("it runs the first half", || {
        first = ask(&messages);
        street.stubborn.steps() > 0
    });
    assert_eq!(
        street.stubborn.0.host.stats().streams,
        1,
        "what it knows is kept"
    );
    let host = street.stubborn.0.short();
    assert!(street.asks.says(&["status"]).contains(&host));
    street
        .founder
        .says(&["community", "revoke", &street.stubborn.id()]);
    // Without any question, the revocation ends the session.
    let left = street.stubborn.steps_when_left();
    messages.extend([first, json!({"role": "user", "content": "Go on."})]);
    ask(&messages);
    assert_eq!(street.stubborn.steps(), left);
    // Its measurements are not shown any more.
    assert!(!street.asks.says(&["status"]).contains(&host));
}
