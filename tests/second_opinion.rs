//! `hearthnet community join` through a member that withholds a revocation, with and without
//! another reachable member. The members are nodes in this process; the joiner is the program.

use std::net::SocketAddr;
use std::sync::Arc;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::joining;
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::testing::{self, TruncatingMember, durable_copy, key};
use hearthnet_bus::{NodeId, NodeKey};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::support::*;

/// Key seeds of the nodes.
const HONEST: u8 = 1;
const LIAR: u8 = 2;
const ACCOMPLICE: u8 = 3;

/// Community of an anchor that knows everything, and a liar that admits joiners and withholds the
/// revocation of the accomplice.
struct Community {
    runtime: Runtime,
    anchor: testing::Home,
    honest: Node,
    _lies: Node,
    /// Addresses that a joiner knows: the liar's and the anchor's.
    peers: Vec<SocketAddr>,
    invite: Invite,
}

impl Community {
    /// Community in which this member is the revoked one.
    fn without(dir: &Home, put_out: u8) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let anchor = testing::Home::founded(key(HONEST), true);
        anchor.admit(key(LIAR).id(), Level::Trusted);
        anchor.admit(key(ACCOMPLICE).id(), Level::Member);
        let invite = anchor.invite(Level::Member, 1);
        let kept = durable_copy(&dir.path().join("kept"), &anchor.log);
        anchor.revoke(key(put_out).id());
        let registry = Registry::new();
        let keeps_back =
            TruncatingMember::new(Arc::new(key(LIAR)), kept.clone(), anchor.log.clone());
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
        let peers = [&lies, &honest].map(|node| node.listen_addr().expect("an address"));
        Self {
            runtime,
            anchor,
            honest,
            _lies: lies,
            peers: peers.to_vec(),
            invite,
        }
    }

    /// Runs `hearthnet community join` in a new home.
    fn join(&self, home: &Home, how: &[&str]) -> std::process::Output {
        let peers: Vec<String> = self.peers.iter().map(ToString::to_string).collect();
        let peers = format!("discovery.static_peers={peers:?}");
        let code = self.invite.to_string();
        let command = ["--set", &peers, "community", "join", &code];
        home.run(&[&QUIET[..], &command, how].concat())
    }
}

/// New home, and a community with a revoked member.
fn community(put_out: u8) -> (Home, Community) {
    let home = Home::new();
    let community = Community::without(&home, put_out);
    (home, community)
}

fn members(home: &Home) -> Vec<NodeId> {
    let said = home.json(&[&QUIET[..], &["community", "members", "--json"]].concat());
    let list = said["members"].as_array().expect("a list").iter();
    let ids = list.map(|one| one["node"].as_str().expect("an id").parse());
    ids.collect::<Result<_, _>>().expect("ids")
}

#[test]
fn a_joiner_learns_of_a_withheld_revocation_and_reports_it_in_json() {
    let (home, community) = community(ACCOMPLICE);
    let joined = community.join(&home, &["--json"]);
    let said = json_output(&joined);
    let [liar, honest, accomplice] = [LIAR, HONEST, ACCOMPLICE].map(|seed| key(seed).id());
    assert_eq!(said["asked"], json!([liar.to_string(), honest.to_string()]));
    assert_eq!(said["kept_back"], json!([accomplice.to_string()]));
    assert_eq!(said["members"], 3, "{said:#}");
    assert!(!members(&home).contains(&accomplice));
    // For the honest anchor, the joiner is a member too.
    let own = home.node_id().parse().expect("an id");
    assert_eq!(
        community.anchor.log.state().level(&own),
        Some(Level::Member)
    );
}

#[test]
fn a_joiner_tells_its_user_about_the_withheld_revocation() {
    let (home, community) = community(ACCOMPLICE);
    let joined = community.join(&home, &[]);
    succeeded(&joined);
    assert_complains(&joined, "was revoked: other members report it");
    assert!(!text(&joined.stderr).contains("could be asked"));
}

#[test]
fn a_joiner_without_another_reachable_member_says_so() {
    let (home, mut community) = community(ACCOMPLICE);
    community.peers.truncate(1);
    community.runtime.block_on(community.honest.shutdown());
    let joined = community.join(&home, &[]);
    succeeded(&joined);
    assert_complains(&joined, "could be asked");
    assert!(!text(&joined.stderr).contains("was revoked"));
    assert!(members(&home).contains(&key(ACCOMPLICE).id()));
}

#[test]
fn a_joiner_admitted_by_a_revoked_member_learns_that_it_is_no_member() {
    let (home, community) = community(LIAR);
    let joined = community.join(&home, &[]);
    succeeded(&joined);
    assert_complains(&joined, "does not know this node as a member");
    let own: NodeId = home.node_id().parse().expect("an id");
    assert_eq!(community.anchor.log.state().level(&own), None);
    // The command that the message names removes the useless membership.
    let leave = ["community", "leave", "--yes", "--anyway"];
    succeeded(&home.run(&[&QUIET[..], &leave].concat()));
    let members = home.run(&[&QUIET[..], &["community", "members"]].concat());
    assert_complains(&members, "not in a community");
}
