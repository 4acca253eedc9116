//! Codes of refusals that no other test of the program meets.

use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, EventLog, Level};
use hearthnet_bus::testing::dispute;
use hearthnet_bus::{NodeId, NodeKey, now_ms};

use crate::support::community::founder;
use crate::support::own_host::key_and_log;
use crate::support::*;

#[test]
fn a_file_that_is_no_backup_restores_nothing() {
    let home = Home::new();
    let file = home.path().join("no.backup");
    std::fs::write(&file, "no backup").expect("a file");
    let file = file.to_str().expect("UTF-8");
    assert_fails(&home.run(&["restore", file, "--json"]), 9, "bad_backup");
    assert!(!home.path().join("data/node.key").exists());
}

#[test]
fn there_is_no_record_to_diagnose_where_no_node_runs() {
    let args = [&QUIET[..], &["diagnose", "--json"]].concat();
    assert_fails(&Home::new().run(&args), 9, "no_node");
}

#[test]
fn a_key_is_not_renewed_without_the_root_key() {
    let founder = founder();
    let id = founder.node_id();
    std::fs::remove_file(founder.path().join("data/root.key")).expect("it was there");
    let args = [&QUIET[..], &["community", "renew", "--json"]].concat();
    assert_fails(&founder.run(&args), 10, "no_root_key");
    assert_eq!(founder.node_id(), id);
}

/// Admits a node that never starts.
fn admit(log: &EventLog, anchor: &NodeKey, node: NodeId, level: Level) {
    let expires_ms = now_ms() + 3_600_000;
    let invite = Invite::generate(log.community(), expires_ms / 1000, Vec::new());
    let invite = invite.expect("an invite");
    let invited = Body::Invited {
        invite: invite.key().id(),
        level,
        uses: 1,
        expires_ms,
    };
    log.append(anchor, invited, now_ms()).expect("an event");
    let request = invite.request(node, "neighbour").expect("a request");
    let admitted = Body::Admitted { request, level };
    log.append(anchor, admitted, now_ms()).expect("an event");
}

#[test]
fn no_dispute_is_judged_without_its_evidence() {
    let founder = founder();
    let [accuser, host] = [2, 3].map(|seed| NodeKey::from_secret(&[seed; 32]));
    let (anchor, log) = key_and_log(&founder);
    admit(&log, &anchor, accuser.id(), Level::Member);
    admit(&log, &anchor, host.id(), Level::Trusted);
    let accusation = Body::Disputed(dispute(host.id()));
    log.append(&accuser, accusation, now_ms())
        .expect("an event");
    drop(log);
    let args = |command: &'static [&str]| [&QUIET[..], command].concat();
    let check = founder.run(&args(&["audit", "check", "--json"]));
    assert_fails(&check, 10, "no_evidence");
    let all = founder.json(&args(&["audit", "list", "--json"]));
    assert_eq!(all["disputes"][0]["outcome"], "open");
}
