//! Disputes in a community of daemons: a host that lies is found, accused and convicted without
//! anyone's help, and a false accusation falls back on the accuser.
//!
//! The host that lies and the slanderer are of this process, since the program does neither. All
//! others are the program.

use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::Body;
use hearthnet_bus::receipt::{Claim, Inputs, SignedClaims, Statement};
use hearthnet_bus::sealed::{hash_of, seal};
use hearthnet_bus::{NodeId, NodeKey, now_ms};
use hearthnet_engine::{ARITHMETIC, Engine, Head, Span};
use hearthnet_files::ModelFile;
use hearthnet_testkit::one_thread;
use serde_json::{Value, json};

use crate::support::community::{founded, host, join, join_as, serve, serve_bare, static_peer};
use crate::support::http::{address, post_json};
use crate::support::own_host::{OwnHost, key_and_log, model_id};
use crate::support::*;

/// Every answer is audited.
const AUDITED: [&str; 2] = ["--set", "research.distributed_inference.audit_share=1.0"];

/// `hearthnet audit list --json`.
fn disputes(home: &Home) -> Value {
    home.json(&[&QUIET[..], &["audit", "list", "--json"]].concat())
}

/// Ids of the nodes that a home knows as guilty of something.
fn nodes_with(home: &Home, what: &str) -> Vec<String> {
    let all = disputes(home);
    let nodes = all["reputations"].as_array().expect("a list").iter();
    let nodes = nodes.filter(|node| node[what].as_u64() > Some(0));
    let ids = nodes.map(|node| node["node"].as_str().expect("an id").to_owned());
    ids.collect()
}

/// The line of `hearthnet status` about a member.
fn member(home: &Home, id: &str) -> Value {
    let status = home.json(&[&QUIET[..], &["status", "--json"]].concat());
    let members = status["members"].as_array().expect("members").iter();
    let mut found = members.filter(|member| member["node"] == id);
    found.next().expect("the member").clone()
}

/// Asks a daemon for eight tokens.
fn ask(daemon: &Server) {
    let body = json!({
        "model": model_id(),
        "messages": [{"role": "user", "content": "Name a colour, and say why you like it."}],
        "temperature": 0,
        "max_tokens": 8,
    });
    let (status, answer) = post_json(&address(daemon), "/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_host_that_lies_is_convicted_by_the_daemons_and_then_avoided_by_all() {
    let (founder, founder_runs) = founded(&[]);
    let [honest, lies] = [0, 1].map(|_| join(&founder, &founder_runs));
    let asks = join_as("member", &founder, &founder_runs);
    let _honest_runs = host(&honest, &founder_runs, "0-29");
    // Far below the values, so that no check of rows finds it.
    let steer = Box::new(|passing: hearthnet_testkit::Passing<'_>| {
        let steer = |(n, value): (usize, &mut f32)| *value += [0.25, -0.25][n % 2];
        passing.rows.iter_mut().enumerate().for_each(steer);
    });
    let liar = OwnHost::tampered(&lies, &founder_runs, (0, 29), steer);
    // Only hosts answer, so the two hosts contradict each other, and the caller cannot tell who is
    // right.
    let settings = [&static_peer(&founder_runs)[..], &AUDITED, &TOGETHER].concat();
    let asks_runs = serve(&asks, &settings);
    until("both hosts are known", || {
        let status = asks.json(&[&QUIET[..], &["status", "--json"]].concat());
        let models = status["models"].as_array().expect("models");
        models
            .iter()
            .any(|model| model["shards"].as_array().map(Vec::len) == Some(2))
    });
    // Whichever host is asked, the other one is the auditor.
    ask(&asks_runs);
    for home in [&asks, &founder, &honest] {
        until("the liar is not convicted", || {
            nodes_with(home, "guilty") == [liar.id()]
        });
        assert_eq!(nodes_with(home, "falsely_accused"), [""; 0]);
        assert_eq!(member(home, &liar.id())["convicted"], true);
        assert_eq!(member(home, &honest.node_id())["convicted"], false);
        assert_contains(
            &home.says(&[&QUIET[..], &["status"]].concat()),
            &["CONVICTED"],
        );
    }
    let all = disputes(&founder);
    let [dispute] = &all["disputes"].as_array().expect("a list")[..] else {
        panic!("one dispute: {all:#}");
    };
    assert_eq!(dispute["accuser"], asks.node_id());
    assert_eq!(dispute["verdicts"][0]["judge"], founder.node_id());
    // The liar's sessions are closed, and no further answer reaches it.
    until("its sessions end", || liar.host.stats().sessions == 0);
    let steps = liar.steps();
    assert!(steps > 0);
    for _ in 0..3 {
        ask(&asks_runs);
    }
    assert_eq!(liar.steps(), steps);
    let status = asks.json(&[&QUIET[..], &["status", "--json"]].concat());
    let shards = status["models"][0]["shards"].as_array().expect("shards");
    let convicted = shards.iter().filter(|shard| shard["convicted"] == true);
    assert_eq!(convicted.count(), 1, "{status:#}");
    assert_eq!(status["models"][0]["complete"], true);
}

/// Evidence with what a host has truly computed and signed for a caller.
fn true_claims(host: &NodeKey, caller: NodeId) -> Evidence {
    let file = ModelFile::open(model().as_ref()).expect("the real model");
    let (spec, layers) = (file.spec(), (0, 3));
    let tokens: Vec<u32> = (0..300).map(|n| 50 + n * 7).collect();
    let head = Head::load(&file, &one_thread()).expect("a head");
    let (mut values, mut rows, mut returned) = (Vec::new(), Vec::new(), Vec::new());
    head.embed(&tokens, &mut values).expect("rows");
    spec.boundary.encode(&values, &mut rows);
    values.clear();
    spec.boundary.decode(&rows, &mut values).expect("rows");
    let mut engine = Engine::load(&file, layers.0..layers.1 + 1, &one_thread(), &mut |_, _| {})
        .expect("an engine");
    let seq = engine.open().expect("a sequence");
    let count = tokens.len() as u32;
    let spans = [Span::new(seq, 0, count)];
    engine.forward(&spans, &mut values).expect("rows");
    spec.boundary.encode(&values, &mut returned);
    let row_bytes = spec.width as usize * spec.boundary.bytes_per_value();
    let mut inputs = Inputs::default();
    assert!(inputs.extend(0, &rows, row_bytes));
    let claim = Claim::new(&inputs, count, &returned).expect("a claim");
    let statement = Statement {
        host: host.id(),
        caller,
        weights: file.manifest(&mut |_, _| {}).weights_id().0,
        layers,
        arithmetic: ARITHMETIC.into(),
        stream: 1,
        epoch: 1,
        claims: 1,
        chain: claim.after([0; 32]),
    };
    let accused = SignedClaims {
        signature: statement.sign(host),
        statement,
        before: [0; 32],
        claims: vec![claim],
    };
    Evidence::new(row_bytes as u32, rows, accused, None).expect("evidence")
}

/// Writes an accusation into the log and the folder of a home whose daemon does not run.
fn accuse(home: &Home, evidence: &Evidence, judge: NodeId) -> Result<(), String> {
    let sealed = seal(&evidence.encode(), [judge]).expect("sealed");
    let sealed = sealed.expect("evidence that is short enough");
    let hash = hash_of(&sealed);
    let folder = home.path().join("data").join("evidence");
    std::fs::create_dir_all(&folder).expect("a folder");
    let name: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(folder.join(name), &sealed).expect("a file");
    let (key, log) = key_and_log(home);
    let dispute = evidence.dispute(hash, sealed.len() as u64);
    let written = log.append(&key, Body::Disputed(dispute), now_ms());
    written.map(drop).map_err(|error| error.to_string())
}

#[test]
fn a_false_accusation_is_judged_by_the_daemons_and_counts_against_the_accuser() {
    let (founder, founder_runs) = founded(&[]);
    let [honest, slanders] = [0, 1].map(|_| join(&founder, &founder_runs));
    let judge: NodeId = founder.node_id().parse().expect("an id");
    let (key, _) = key_and_log(&honest);
    let accuser = slanders.node_id();
    let evidence = true_claims(&key, accuser.parse().expect("an id"));
    let peer = static_peer(&founder_runs);
    let _honest_runs = host(&honest, &founder_runs, "0-29");
    accuse(&slanders, &evidence, judge).expect("an accusation");
    let slanders_runs = serve_bare(&slanders, &peer);
    for home in [&founder, &honest, &slanders] {
        until("the accuser is not known as a false one", || {
            nodes_with(home, "falsely_accused") == [accuser.clone()]
        });
        assert_eq!(nodes_with(home, "guilty"), [""; 0]);
        assert_eq!(member(home, &honest.node_id())["convicted"], false);
        assert_eq!(member(home, &accuser)["false_accuser"], true);
        let said = home.says(&[&QUIET[..], &["audit", "list"]].concat());
        assert_contains(&said, &["accused falsely", "none"]);
    }
    // A second accusation has no effect, so it is not even written.
    drop(slanders_runs);
    let refused = accuse(&slanders, &evidence, judge).expect_err("it is known as false");
    assert_contains(&refused, &["accused falsely"]);
}
