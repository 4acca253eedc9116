//! `hearthnet community join` through a member that keeps back who was put out: what its user hears
//! with another member in reach, and without. The members are nodes in this process, the joiner is the
//! program.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::joining;
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::testing::{self, KeepsBack, key, lasting};
use hearthnet_bus::{NodeId, NodeKey};
use serde_json::Value;
use support::{Home, QUIET, assert_complains, succeeded, text};
use tokio::runtime::Runtime;

/// Numbers of keys.
const HONEST: u8 = 1;
const LIAR: u8 = 2;
const ACCOMPLICE: u8 = 3;

/// An anchor that was told everything, and a member that lets joiners in and keeps back that a third
/// one was put out.
struct Community {
    runtime: Runtime,
    anchor: testing::Home,
    honest: Node,
    _lies: Node,
    liar: SocketAddr,
    invite: Invite,
}

impl Community {
    fn new(dir: &Home) -> Self {
        Self::without(dir, ACCOMPLICE)
    }

    /// The same where another one was put out.
    fn without(dir: &Home, put_out: u8) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let anchor = testing::Home::founded(key(HONEST), true);
        anchor.admit(key(LIAR).id(), Level::Trusted);
        anchor.admit(key(ACCOMPLICE).id(), Level::Member);
        let invite = anchor.invite(Level::Member, 1);
        let kept = lasting(&dir.path().join("kept"), &anchor.log);
        anchor.revoke(key(put_out).id());
        let registry = Registry::new();
        let keeps_back = KeepsBack::new(Arc::new(key(LIAR)), kept.clone(), anchor.log.clone());
        registry
            .register(joining::descriptor(), Arc::new(keeps_back))
            .expect("a place");
        let start = |key: NodeKey, log: EventLog, registry: Registry| {
            let mut settings = NodeSettings::new("node");
            settings.listen = Some("127.0.0.1:0".to_owned());
            settings.discovery.mdns = false;
            let node = Node::start(Arc::new(key), log, settings, Arc::new(registry));
            runtime.block_on(node).expect("a node")
        };
        let honest = start(key(HONEST), anchor.log.clone(), Registry::new());
        let lies = start(key(LIAR), kept, registry);
        let liar = lies.listen_addr().expect("an address");
        Self {
            runtime,
            anchor,
            honest,
            _lies: lies,
            liar,
            invite,
        }
    }

    /// `hearthnet community join` of a new home that knows these addresses.
    fn join(&self, home: &Home, peers: &[SocketAddr], how: &[&str]) -> std::process::Output {
        let peers: Vec<String> = peers.iter().map(ToString::to_string).collect();
        let peers = format!("discovery.static_peers={peers:?}");
        let code = self.invite.to_string();
        let command = ["--set", &peers, "community", "join", &code];
        home.run(&[&QUIET[..], &command, how].concat())
    }
}

fn members(home: &Home) -> Vec<NodeId> {
    let said = home.json(&[&QUIET[..], &["community", "members", "--json"]].concat());
    let list = said["members"].as_array().expect("a list").iter();
    let ids = list.map(|one| one["node"].as_str().expect("an id").parse());
    ids.collect::<Result<_, _>>().expect("ids")
}

#[test]
fn a_joiner_hears_from_another_member_who_was_put_out_and_says_so() {
    let home = Home::new();
    let community = Community::new(&home);
    let other = community.honest.listen_addr().expect("an address");
    let joined = community.join(&home, &[community.liar, other], &["--json"]);
    let said: Value = serde_json::from_str(&succeeded(&joined)).expect("one JSON object");
    let [liar, honest, accomplice] = [LIAR, HONEST, ACCOMPLICE].map(|seed| key(seed).id());
    assert_eq!(
        said["asked"],
        serde_json::json!([liar.to_string(), honest.to_string()])
    );
    assert_eq!(
        said["kept_back"],
        serde_json::json!([accomplice.to_string()])
    );
    assert_eq!(said["members"], 3, "{said:#}");
    assert!(!members(&home).contains(&accomplice));
    // To the other one it is a member as well.
    let own = home.node_id().parse().expect("an id");
    assert_eq!(
        community.anchor.log.state().level(&own),
        Some(Level::Member)
    );
}

#[test]
fn a_joiner_tells_its_user_what_was_kept_back() {
    let home = Home::new();
    let community = Community::new(&home);
    let other = community.honest.listen_addr().expect("an address");
    let joined = community.join(&home, &[community.liar, other], &[]);
    succeeded(&joined);
    assert_complains(&joined, "was put out of the community");
    assert!(!text(&joined.stderr).contains("could be asked"));
}

#[test]
fn a_joiner_without_another_member_in_reach_says_that_there_was_none() {
    let home = Home::new();
    let community = Community::new(&home);
    community.runtime.block_on(community.honest.shutdown());
    let joined = community.join(&home, &[community.liar], &[]);
    succeeded(&joined);
    assert_complains(&joined, "could be asked");
    assert!(!text(&joined.stderr).contains("put out of the community"));
    assert!(members(&home).contains(&key(ACCOMPLICE).id()));
}

#[test]
fn a_joiner_that_was_let_in_by_who_was_put_out_hears_that_it_is_a_stranger() {
    let home = Home::new();
    let community = Community::without(&home, LIAR);
    let other = community.honest.listen_addr().expect("an address");
    let joined = community.join(&home, &[community.liar, other], &[]);
    succeeded(&joined);
    assert_complains(&joined, "this node is no member");
    let own: NodeId = home.node_id().parse().expect("an id");
    assert_eq!(community.anchor.log.state().level(&own), None);
    // It is rid of it with the command that was named.
    let leave = ["community", "leave", "--yes", "--anyway"];
    succeeded(&home.run(&[&QUIET[..], &leave].concat()));
    let members = home.run(&[&QUIET[..], &["community", "members"]].concat());
    assert_complains(&members, "not in a community");
}
