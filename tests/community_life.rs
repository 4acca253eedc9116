//! Life of a home in its community: backups and old copies, lost logs, leaving and rejoining,
//! revocation. Real processes on this machine, without multicast.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::community::{
    address, code, founded_bare, invites, join, join_as, json, log_is_whole, members, run, says,
    serve_bare, static_peer,
};
use crate::support::*;

fn data(home: &Home) -> PathBuf {
    home.path().join("data")
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        if entry.file_type().expect("a type").is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
        }
    }
}

/// Removes the log, but no file beside it.
fn lose_log(home: &Home) {
    for name in ["log.sqlite", "log.sqlite-wal", "log.sqlite-shm"] {
        let _ = std::fs::remove_file(data(home).join(name));
    }
}

/// Whether a home takes a member's key for frozen.
fn knows_a_frozen_key(home: &Home) -> bool {
    members(home).iter().any(|one| one["frozen"] == true)
}

/// Waits until other nodes have the events written by a home without a daemon. If the command
/// itself met no node in time on a busy machine, a later command delivers them.
fn until_synced(home: &Home, settings: &[&str], has: impl Fn() -> bool) {
    until("others hear of it", || {
        has() || {
            says(home, settings, &["status"]);
            has()
        }
    });
}

/// Second anchor, which may write durable events.
fn second_anchor(founder: &Home, node: &Server) -> Home {
    let bakery = join(founder, node);
    let id = bakery.node_id();
    says(founder, &[], &["community", "promote", &id, "anchor"]);
    bakery
}

/// Restores the old content of the existing files, as a disk snapshot does: the node cannot detect
/// it directly.
fn roll_back(home: &Home, to: &Path) {
    for entry in std::fs::read_dir(data(home)).expect("a folder") {
        let entry = entry.expect("an entry");
        let old = std::fs::read(to.join(entry.file_name()));
        match old {
            Ok(old) => std::fs::write(entry.path(), old).expect("a file"),
            Err(_) if entry.path().is_file() => {
                std::fs::remove_file(entry.path()).expect("a file");
            }
            Err(_) => {}
        }
    }
}

#[test]
fn a_rolled_back_disk_freezes_no_node_that_can_sync_first() {
    let (founder, node) = founded_bare();
    let bakery = second_anchor(&founder, &node);
    let near = static_peer(&node);
    says(&bakery, &near, &["community", "invite"]);
    let earlier = bakery.path().join("earlier");
    copy(&data(&bakery), &earlier);
    says(&bakery, &near, &["community", "invite"]);
    let known_to_founder = invites(&founder).len();
    roll_back(&bakery, &earlier);

    // The daemon starts while the only node with newer events does not answer yet.
    node.signal(Signal::STOP);
    let daemon = serve_bare(&bakery, &near);
    let invite = bakery.spawn(&[&QUIET[..], &["community", "invite", "--json"]].concat());
    let table = format!("/proc/{}/net/tcp", daemon.child.id());
    let port: u16 = address(&node)
        .rsplit(':')
        .next()
        .and_then(|port| port.parse().ok())
        .expect("a port");
    let asked = format!("0100007F:{port:04X} 01");
    until("it is asked", || {
        std::fs::read_to_string(&table).is_ok_and(|table| table.contains(&asked))
    });
    node.signal(Signal::CONT);
    succeeded(&invite.wait_with_output().expect("its end"));
    until("the founder hears of it", || {
        invites(&founder).len() == known_to_founder + 1
    });
    assert!(!knows_a_frozen_key(&founder));
    log_is_whole(&founder);
}

#[test]
fn a_home_restored_from_an_old_backup_rejoins_without_a_freeze() {
    let (founder, node) = founded_bare();
    let bakery = second_anchor(&founder, &node);
    let near = static_peer(&node);
    // Delivers the new level to the node.
    says(&bakery, &near, &["community", "invite"]);
    let file = bakery.path().join("bakery.backup");
    let file = file.to_str().expect("a UTF-8 path");
    let copied = bakery.path().join("copy");
    copy(&data(&bakery), &copied);
    says(&bakery, &[], &["backup", file]);
    assert_fails(&bakery.run(&["backup", file, "--json"]), 9, "log_failed");
    // The home writes later events, which reach the founder.
    let invite = ["community", "invite", "--level", "trusted", "--json"];
    says(&bakery, &near, &invite[..4]);
    until_synced(&bakery, &near, || invites(&founder).len() == 2);
    assert_fails(&bakery.run(&["restore", file, "--json"]), 9, "not_empty");

    // The data of the machine is lost.
    let id = bakery.node_id();
    std::fs::remove_dir_all(data(&bakery)).expect("it was there");
    std::fs::remove_dir_all(bakery.path().join("config")).ok();
    says(&bakery, &[], &["restore", file]);
    assert_eq!(bakery.node_id(), id);
    log_is_whole(&bakery);
    // Without a reachable node it is in doubt, and does not write.
    drop(node);
    let status = json(&bakery, &[], &["status"]);
    assert_eq!(status["node"]["standing"]["log_in_doubt"], true);
    assert_fails(&run(&bakery, &[], &invite), 10, "log_behind");

    let node = serve_bare(&founder, &[]);
    let near = static_peer(&node);
    says(&bakery, &near, &invite[..4]);
    assert_eq!(invites(&bakery).len(), 3);
    until_synced(&bakery, &near, || invites(&founder).len() == 3);
    assert!(!knows_a_frozen_key(&founder));

    // The same with a copy of the directory, restored by hand.
    std::fs::remove_dir_all(data(&bakery)).expect("it was there");
    copy(&copied, &data(&bakery));
    says(&bakery, &near, &invite[..4]);
    assert_eq!(invites(&bakery).len(), 4);
    until_synced(&bakery, &near, || invites(&founder).len() == 4);
    for home in [&founder, &bakery] {
        assert!(!knows_a_frozen_key(home));
        log_is_whole(home);
    }
}

#[test]
fn a_deleted_or_damaged_log_is_restored_from_a_member() {
    let (founder, node) = founded_bare();
    let bakery = join(&founder, &node);
    let known = || -> Vec<[Value; 3]> {
        let parts = |one: &Value| ["name", "level", "frozen"].map(|part| one[part].clone());
        members(&bakery).iter().map(parts).collect()
    };
    let before = known();
    assert_eq!(before.len(), 2);

    // The founder's address is stored beside the log, so no address is given.
    lose_log(&bakery);
    let output = run(&bakery, &[], &["status", "--json"]);
    succeeded(&output);
    assert_complains(&output, "is back");
    assert_eq!(known(), before);
    log_is_whole(&bakery);

    // A zeroed log, and the file that names the community is deleted.
    let log = data(&bakery).join("log.sqlite");
    let length = std::fs::metadata(&log).expect("a log").len();
    std::fs::write(&log, vec![0; usize::try_from(length).expect("small")]).expect("written");
    std::fs::remove_file(data(&bakery).join("log.community")).expect("it was there");
    assert_eq!(known(), before);
    let kept = std::fs::read_dir(data(&bakery)).expect("a folder");
    let kept = kept.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    assert_eq!(kept.filter(|name| name.contains("damaged")).count(), 1);
    log_is_whole(&bakery);

    // Without a reachable node, no new community is founded over the lost log.
    let community = json(&bakery, &[], &["status"])["community"]["id"].clone();
    drop(node);
    lose_log(&bakery);
    let create = ["community", "create", "Other", "--json"];
    assert_fails(&run(&bakery, &[], &create), 10, "in_community");
    assert_fails(&run(&bakery, &[], &["status", "--json"]), 10, "log_lost");
    let node = serve_bare(&founder, &[]);
    let status = json(&bakery, &static_peer(&node), &["status"]);
    assert_eq!(status["community"]["id"], community);
}

#[test]
fn a_community_is_founded_only_once_after_a_partial_loss() {
    let founder = Home::new();
    let create = ["community", "create", "Elm Street"];
    let again = [&create[..], &["--json"]].concat();
    let first = json(&founder, &[], &create);
    assert_fails(&run(&founder, &[], &again), 10, "in_community");
    lose_log(&founder);
    std::fs::remove_file(data(&founder).join("log.community")).expect("it was there");
    assert_fails(&run(&founder, &[], &again), 10, "in_community");
    std::fs::remove_file(data(&founder).join("community.json")).expect("it was there");
    let second = json(&founder, &[], &create);
    assert_ne!(first["community"], second["community"]);
    assert!(data(&founder).join("root.key.old-1").exists());
}

#[test]
fn the_founder_has_its_name_at_once_and_names_are_case_insensitive() {
    let founder = Home::new();
    let create = ["community", "create", "Elm Street", "--as", "Attic"];
    says(&founder, &[], &create);
    let members = members(&founder);
    assert_eq!(members.len(), 1);
    let only = &members[0];
    assert_eq!(
        (&only["name"], &only["level"]),
        (&"Attic".into(), &"anchor".into())
    );
    assert!(!knows_a_frozen_key(&founder));
    log_is_whole(&founder);
    // The member is found, and then refused as the last anchor.
    let demote = ["community", "demote", "ATTIC", "--json"];
    assert_fails(&run(&founder, &[], &demote), 10, "last_anchor");
}

#[test]
fn the_last_anchor_cannot_be_revoked_or_demoted_or_leave() {
    let (founder, node) = founded_bare();
    let bakery = join(&founder, &node);
    let (own, other) = (founder.node_id(), bakery.node_id());
    for command in ["revoke", "demote"] {
        let output = run(&founder, &[], &["community", command, &own, "--json"]);
        assert_fails(&output, 10, "last_anchor");
        assert_complains(&output, "community promote");
    }
    drop(node);
    let leave = ["community", "leave", "--yes", "--anyway", "--json"];
    assert_fails(&run(&founder, &[], &leave), 10, "last_anchor");
    says(&founder, &[], &["community", "promote", &other, "anchor"]);
    says(&founder, &[], &["community", "revoke", &own, "--yes"]);
}

#[test]
fn invites_are_listed_with_their_users_and_a_withdrawn_one_is_refused() {
    let (founder, node) = founded_bare();
    let _bakery = join_as("member", &founder, &node);
    let list = |all: &[&str]| {
        let said = json(&founder, &[], &[&["community", "invites"], all].concat());
        said["invites"].as_array().expect("a list").clone()
    };
    assert!(list(&[]).is_empty(), "the one that there was is used up");
    let all = list(&["--all"]);
    assert_eq!(
        (&all[0]["used"], &all[0]["open"]),
        (&1.into(), &false.into())
    );
    assert_eq!(all[0]["used_by"].as_array().map(Vec::len), Some(1));

    let made = json(&founder, &[], &["community", "invite", "--uses", "3"]);
    let id = made["id"].as_str().expect("an id");
    assert_eq!(list(&[])[0]["short"], id);
    says(&founder, &[], &["community", "withdraw", id]);
    assert!(list(&[]).is_empty());
    let late = Home::new();
    let code = made["code"].as_str().expect("a code");
    let join = ["community", "join", "--wait", "3s", code, "--json"];
    assert_fails(&run(&late, &static_peer(&node), &join), 10, "bad_invite");
    let again = ["community", "withdraw", id, "--json"];
    assert_fails(&run(&founder, &[], &again), 10, "bad_invite");
}

#[test]
fn a_member_that_leaves_is_removed_and_can_join_again() {
    let (founder, node) = founded_bare();
    let bakery = join(&founder, &node);
    let id = bakery.node_id();
    // No node would learn of the leave: refused without a change.
    let unheard = ["--set", "discovery.static_peers=[]"];
    drop(node);
    let leave = ["community", "leave", "--yes", "--json"];
    assert_fails(&run(&bakery, &unheard, &leave), 10, "unreachable");
    assert_eq!(members(&bakery).len(), 2);

    let node = serve_bare(&founder, &[]);
    let near_again = static_peer(&node);
    let left = json(&bakery, &near_again, &["community", "leave", "--yes"]);
    assert_eq!(left["told"], 1);
    assert_eq!(members(&founder).len(), 1);
    let members_of_none = ["community", "members", "--json"];
    assert_fails(&run(&bakery, &[], &members_of_none), 10, "no_community");

    let code = code(&founder, &[]);
    says(&bakery, &near_again, &["community", "join", &code]);
    assert_eq!(bakery.node_id(), id, "the key is as good as before");
    assert_eq!(members(&founder).len(), 2);
    log_is_whole(&bakery);
}

#[test]
fn a_revoked_node_stops_and_warns_and_rejoins_with_a_new_key() {
    let (founder, node) = founded_bare();
    let bakery = join(&founder, &node);
    let (id, near) = (bakery.node_id(), static_peer(&node));
    let connected = || {
        let status = json(&founder, &[], &["status"]);
        let peers = status["node"]["running"]["peers"].as_array().cloned();
        peers.is_some_and(|peers| peers.iter().any(|peer| peer["connected"] == true))
    };
    // The node is offline during its revocation, and learns of it on start.
    says(&founder, &[], &["community", "revoke", &id]);
    let serve = ["serve", "--model", "none", "--listen", "127.0.0.1:0"];
    let output = run(&bakery, &near, &[&serve[..], &["--json"]].concat());
    let (status, said) = (output.status.code(), text(&output.stderr));
    assert_eq!(status, Some(10), "{said}");
    assert!(said.contains("community leave"), "{said}");
    assert!(
        said.matches("revoked").count() <= 2,
        "it goes on about it: {said}"
    );
    assert!(!connected());

    for command in [
        &["community", "members"][..],
        &["log", "verify"],
        &["status"],
    ] {
        let output = run(&bakery, &[], command);
        succeeded(&output);
        assert_complains(&output, "warning: ");
        assert_complains(&output, "community leave");
    }
    let standing = json(&bakery, &[], &["status"])["node"]["standing"].clone();
    assert_eq!(standing["state"], "revoked");

    says(&bakery, &[], &["community", "leave", "--yes"]);
    let code = code(&founder, &[]);
    says(&bakery, &near, &["community", "join", &code]);
    assert_ne!(bakery.node_id(), id);
    assert_eq!(members(&founder).len(), 2);
}

#[test]
fn a_revoked_home_without_a_daemon_learns_of_it_from_the_first_network_command() {
    let (founder, node) = founded_bare();
    let near = [static_peer(&node), ENABLE].concat();
    let put_out = || {
        let home = join(&founder, &node);
        says(&founder, &[], &["community", "revoke", &home.node_id()]);
        home
    };
    let warns = |home: &Home, command: &[&str]| {
        let output = run(home, &[], command);
        assert_complains(&output, "warning: ");
        assert_complains(&output, "community leave");
    };

    // A chat fails with the revocation and says what to do.
    let home = put_out();
    let chat = ["chat", "hi", "--model", model(), "--no-fallback"];
    let answer = run(&home, &near, &chat);
    assert_eq!(answer.status.code(), Some(10), "{}", text(&answer.stderr));
    assert_complains(&answer, "community leave");
    // From then on every command warns, also those that do not read the log.
    let backup = home.path().join("backup");
    let backup = backup.to_str().expect("a UTF-8 path");
    for command in [
        &["status"][..],
        &["id"],
        &["model", "list"],
        &["backup", backup],
    ] {
        warns(&home, command);
    }
    assert!(says(&home, &[], &["status"]).contains("(revoked, says "));

    // An invite code does not readmit a revoked key, and the error is `revoked`.
    let home = put_out();
    let fresh = code(&founder, &[]);
    let join_again = ["community", "join", &fresh, "--json"];
    assert_fails(&run(&home, &near, &join_again), 10, "revoked");
    warns(&home, &["status"]);

    // Leaving reports the revocation, and discards the key too.
    for how in [&["--yes"][..], &["--yes", "--anyway"]] {
        let home = put_out();
        let id = home.node_id();
        let left = json(&home, &near, &[&["community", "leave"], how].concat());
        assert_eq!(
            (&left["told"], &left["kept_key"]),
            (&Value::Null, &false.into())
        );
        says(&home, &near, &["community", "join", &code(&founder, &[])]);
        assert_ne!(home.node_id(), id);
    }

    // The revoked key in a folder without a log: joining reports the revocation.
    let home = put_out();
    lose_log(&home);
    for name in ["log.community", "community.json"] {
        let _ = std::fs::remove_file(data(&home).join(name));
    }
    let fresh = code(&founder, &[]);
    let join_again = ["community", "join", &fresh, "--json"];
    assert_fails(&run(&home, &near, &join_again), 10, "revoked");
    std::fs::remove_file(data(&home).join("node.key")).expect("a key");
    says(&home, &near, &["community", "join", &fresh]);
}

#[test]
fn only_one_of_three_nodes_admits_a_joiner() {
    let (founder, node) = founded_bare();
    let near = static_peer(&node);
    let others = [join(&founder, &node), join(&founder, &node)];
    let serving = others.each_ref().map(|home| serve_bare(home, &near));
    let code = code(&founder, &["--uses", "5"]);
    let invite = invites(&founder)[0]["invite"].clone();
    // All three nodes know the invite before the joiner starts.
    for home in &others {
        until("all nodes know the invite", || {
            invites(home).iter().any(|one| one["invite"] == invite)
        });
    }
    let addresses: Vec<&str> = [&node, &serving[0], &serving[1]].map(address).to_vec();
    let everybody = format!("discovery.static_peers={addresses:?}");
    let late = Home::new();
    let joined = json(&late, &["--set", &everybody], &["community", "join", &code]);
    assert_eq!(joined["members"], 4);
    until("all nodes know the joiner", || {
        members(&others[0]).len() == 4 && members(&founder).len() == 4
    });
    let id = late.node_id();
    let shown = says(&founder, &[], &["log", "show", "--json"]);
    let admissions = shown
        .lines()
        .filter(|line| line.contains("\"member.admitted\"") && line.contains(&id))
        .count();
    assert_eq!(admissions, 1, "{shown}");
}

#[test]
fn a_joiner_without_a_configuration_gets_a_working_one() {
    let (founder, node) = founded_bare();
    let near = static_peer(&node);
    let code = code(&founder, &[]);
    let late = Home::new();
    let join = ["community", "join", &code, "--name", "Cellar"];
    let output = run(&late, &near, &join);
    succeeded(&output);
    // The output says how to switch the experiment off.
    assert_complains(&output, "enable = false");
    let config = late.path().join("config/hearthnet/hearthnet.toml");
    let config = std::fs::read_to_string(config).expect("a configuration");
    assert!(config.contains("name = \"Cellar\""), "{config}");
    // The recommended command works: it looks for hosts, of which there are none.
    let chat = ["chat", "hello", "--no-fallback", "--json", "--model"];
    let chat = [&chat[..], &[model()]].concat();
    assert_fails(&run(&late, &near, &chat), 4, "shard_unavailable");
}

#[test]
fn root_events_spread_from_a_revoked_home() {
    let (founder, node) = founded_bare();
    let other = second_anchor(&founder, &node);
    let elsewhere = serve_bare(&other, &static_peer(&node));
    let own = founder.node_id();
    says(&founder, &[], &["community", "demote", &own, "trusted"]);
    until("the other anchor hears of both levels", || {
        let all = members(&other);
        let level = |node: &str| {
            let one = all.iter().find(|one| one["node"] == node);
            one.map(|one| one["level"].clone())
        };
        level(&own) == Some("trusted".into()) && level(&other.node_id()) == Some("anchor".into())
    });
    says(&other, &[], &["community", "revoke", &own, "--yes"]);
    // The revocation ends its daemon.
    drop(node);
    let near = static_peer(&elsewhere);
    let research = || json(&other, &[], &["community", "policy"])["research"].clone();
    let before = research();
    let turned = if before == true { "off" } else { "on" };
    let output = run(
        &founder,
        &near,
        &["community", "policy", "--research", turned],
    );
    succeeded(&output);
    assert_complains(&output, "told one other node");
    until("the other anchor hears the root", || research() != before);
    log_is_whole(&other);
    // Only the event of the root key is accepted: the node stays revoked.
    assert_eq!(members(&other).len(), 1);
}

#[test]
fn the_only_anchor_frozen_by_an_old_copy_recovers_by_its_root_key() {
    let (founder, node) = founded_bare();
    let bakery = join(&founder, &node);
    drop(node);
    let earlier = founder.path().join("earlier");
    copy(&data(&founder), &earlier);
    // The home writes on, a neighbour gets its events, and the old copy starts while no node is
    // reachable.
    says(&founder, &[], &["community", "invite"]);
    let node = serve_bare(&founder, &[]);
    says(&bakery, &static_peer(&node), &["status"]);
    drop(node);
    std::fs::remove_dir_all(data(&founder)).expect("it was there");
    copy(&earlier, &data(&founder));
    says(&founder, &[], &["log", "resume", "--yes"]);
    says(&founder, &[], &["community", "invite"]);
    let old = founder.node_id();
    let elsewhere = serve_bare(&bakery, &[]);
    let near = static_peer(&elsewhere);
    until("its key is frozen", || {
        run(&founder, &near, &["status"]);
        knows_a_frozen_key(&bakery)
    });
    let output = run(&founder, &near, &["status"]);
    assert_complains(&output, "community renew");

    let renewed = json(&founder, &near, &["community", "renew", "--yes"]);
    assert_eq!(
        (&renewed["level"], &renewed["told"]),
        (&"anchor".into(), &1.into())
    );
    assert_ne!(founder.node_id(), old);
    assert!(
        !knows_a_frozen_key(&bakery),
        "the old key is no member any more"
    );
    assert_eq!(members(&bakery).len(), 2);
    // The new key is an anchor: its events spread, and its invites work.
    says(&founder, &near, &["community", "invite"]);
    drop(elsewhere);
    let node = serve_bare(&founder, &[]);
    let guest = join_as("member", &founder, &node);
    assert_eq!(members(&guest).len(), 3);
    says(&bakery, &static_peer(&node), &["status"]);
    assert_eq!(members(&bakery).len(), 3);
    log_is_whole(&founder);
    // A key in good standing is not renewed.
    let again = json(&founder, &[], &["community", "renew"]);
    assert_eq!(again["old_key"], Value::Null);
}
