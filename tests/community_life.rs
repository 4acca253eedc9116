//! The life of a home in its community: backups and old copies, lost logs, leaving and coming back,
//! being put out. Real processes on this machine; nobody finds anybody by multicast.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::process::Signal;
use serde_json::Value;
use support::community::{address, found, join, join_as, peers};
use support::{Home, QUIET, Server, assert_complains, assert_fails, model, succeeded, text, until};

/// A node that stays, without a model: what it does for the community is all that counts here.
fn serve(home: &Home, settings: &[&str]) -> Server {
    let tail = ["serve", "--model", "none", "--listen", "127.0.0.1:0"];
    let args = [&QUIET[..], settings, &tail, &["--json", "--lifeline"]].concat();
    Server::start(home, &args)
}

fn run(home: &Home, settings: &[&str], command: &[&str]) -> Output {
    home.run(&[&QUIET[..], settings, command].concat())
}

/// What a command that must succeed prints.
fn says(home: &Home, settings: &[&str], command: &[&str]) -> String {
    succeeded(&run(home, settings, command))
}

fn json(home: &Home, settings: &[&str], command: &[&str]) -> Value {
    let said = says(home, settings, &[command, &["--json"]].concat());
    serde_json::from_str(&said).expect("one JSON object")
}

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

/// Removes the log, but nothing beside it.
fn lose_log(home: &Home) {
    for name in ["log.sqlite", "log.sqlite-wal", "log.sqlite-shm"] {
        let _ = std::fs::remove_file(data(home).join(name));
    }
}

/// A founder, and its running node.
fn founded() -> (Home, Server) {
    let founder = Home::new();
    found(&founder);
    let node = serve(&founder, &[]);
    (founder, node)
}

/// The code of a new invite.
fn code(founder: &Home) -> String {
    let invite = json(founder, &[], &["community", "invite"]);
    invite["code"].as_str().expect("a code").to_owned()
}

/// The members as a home sees them: name, level, frozen.
fn members(home: &Home, settings: &[&str]) -> Vec<(String, String, bool)> {
    let said = json(home, settings, &["community", "members"]);
    let list = said["members"].as_array().expect("a list");
    list.iter()
        .map(|one| {
            (
                one["name"].as_str().unwrap_or_default().to_owned(),
                one["level"].as_str().unwrap_or_default().to_owned(),
                one["frozen"] == true,
            )
        })
        .collect()
}

/// Waits until others have heard of what a home without a daemon has written: from the command that wrote
/// it, or, where a busy machine let it meet nobody in the seconds that it stayed, from the next one.
fn hears(home: &Home, settings: &[&str], has: impl Fn() -> bool) {
    until("others hear of it", || {
        has() || {
            says(home, settings, &["status"]);
            has()
        }
    });
}

fn log_is_whole(home: &Home) {
    let said = says(home, &[], &["log", "verify"]);
    assert!(said.lines().any(|line| line.starts_with("ok ")), "{said}");
}

/// A member that may write durable events: a second anchor.
fn second_anchor(founder: &Home, node: &Server) -> Home {
    let bakery = join(founder, node);
    let id = bakery.node_id();
    says(founder, &[], &["community", "promote", &id, "anchor"]);
    bakery
}

/// Puts the state of another day back into the very files that are there, as a snapshot of a disk does:
/// nothing tells that it happened.
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
fn a_disk_that_was_put_back_freezes_nobody_who_can_be_told_what_was_said_since() {
    let (founder, node) = founded();
    let bakery = second_anchor(&founder, &node);
    let known = peers(&node);
    let near = ["--set", &known];
    says(&bakery, &near, &["community", "invite"]);
    let earlier = bakery.path().join("earlier");
    copy(&data(&bakery), &earlier);
    says(&bakery, &near, &["community", "invite"]);
    let invites = |home: &Home| {
        let said = json(home, &[], &["community", "invites"]);
        said["invites"].as_array().expect("a list").len()
    };
    let known_to_founder = invites(&founder);
    roll_back(&bakery, &earlier);

    // The daemon starts while the only one who knows better does not answer yet.
    node.signal(Signal::STOP);
    let daemon = serve(&bakery, &near);
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
        invites(&founder) == known_to_founder + 1
    });
    assert!(members(&founder, &[]).iter().all(|(_, _, frozen)| !frozen));
    log_is_whole(&founder);
}

#[test]
fn a_home_that_was_backed_up_lived_on_and_was_lost_comes_back_and_nobody_is_frozen() {
    let (founder, node) = founded();
    let bakery = second_anchor(&founder, &node);
    let known = peers(&node);
    let near = ["--set", &known];
    // It hears of its new level.
    says(&bakery, &near, &["community", "invite"]);
    let file = bakery.path().join("bakery.backup");
    let file = file.to_str().expect("a UTF-8 path");
    let copied = bakery.path().join("copy");
    copy(&data(&bakery), &copied);
    says(&bakery, &[], &["backup", file]);
    assert_fails(&bakery.run(&["backup", file, "--json"]), 9, "log_failed");
    // Life goes on, and the founder hears of it.
    let invite = ["community", "invite", "--level", "trusted", "--json"];
    says(&bakery, &near, &invite[..4]);
    let invites = |home: &Home| {
        let said = json(home, &[], &["community", "invites"]);
        said["invites"].as_array().expect("a list").len()
    };
    hears(&bakery, &near, || invites(&founder) == 2);
    assert_fails(&bakery.run(&["restore", file, "--json"]), 9, "not_empty");

    // The machine is lost.
    let id = bakery.node_id();
    std::fs::remove_dir_all(data(&bakery)).expect("it was there");
    std::fs::remove_dir_all(bakery.path().join("config")).ok();
    says(&bakery, &[], &["restore", file]);
    assert_eq!(bakery.node_id(), id);
    log_is_whole(&bakery);
    // With nobody to ask it is in doubt, and does not write.
    drop(node);
    let status = json(&bakery, &[], &["status"]);
    assert_eq!(status["node"]["standing"]["log_in_doubt"], true);
    assert_fails(&run(&bakery, &[], &invite), 10, "log_behind");

    let node = serve(&founder, &[]);
    let known = peers(&node);
    let near = ["--set", &known];
    says(&bakery, &near, &invite[..4]);
    assert_eq!(invites(&bakery), 3);
    hears(&bakery, &near, || invites(&founder) == 3);
    assert!(members(&founder, &[]).iter().all(|(.., frozen)| !frozen));

    // The same with a copy of the directory, put back by hand.
    std::fs::remove_dir_all(data(&bakery)).expect("it was there");
    copy(&copied, &data(&bakery));
    says(&bakery, &near, &invite[..4]);
    assert_eq!(invites(&bakery), 4);
    hears(&bakery, &near, || invites(&founder) == 4);
    for home in [&founder, &bakery] {
        assert!(members(home, &[]).iter().all(|(.., frozen)| !frozen));
        log_is_whole(home);
    }
}

#[test]
fn a_log_that_is_deleted_or_damaged_beyond_repair_comes_back_from_a_member() {
    let (founder, node) = founded();
    let bakery = join(&founder, &node);
    let before = members(&bakery, &[]);
    assert_eq!(before.len(), 2);

    // Where the founder is stands beside the log: no address is given any more.
    lose_log(&bakery);
    let output = run(&bakery, &[], &["status", "--json"]);
    succeeded(&output);
    assert_complains(&output, "is back");
    assert_eq!(members(&bakery, &[]), before);
    log_is_whole(&bakery);

    // A header of zeros, and the file that names the community gone as well.
    let log = data(&bakery).join("log.sqlite");
    let length = std::fs::metadata(&log).expect("a log").len();
    std::fs::write(&log, vec![0; usize::try_from(length).expect("small")]).expect("written");
    std::fs::remove_file(data(&bakery).join("log.community")).expect("it was there");
    assert_eq!(members(&bakery, &[]), before);
    let kept = std::fs::read_dir(data(&bakery)).expect("a folder");
    let kept = kept.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    assert_eq!(kept.filter(|name| name.contains("damaged")).count(), 1);
    log_is_whole(&bakery);

    // While nobody is there, nothing is founded in its place.
    let community = json(&bakery, &[], &["status"])["community"]["id"].clone();
    drop(node);
    lose_log(&bakery);
    let create = ["community", "create", "Other", "--json"];
    assert_fails(&run(&bakery, &[], &create), 10, "in_community");
    assert_fails(&run(&bakery, &[], &["status", "--json"]), 10, "log_lost");
    let node = serve(&founder, &[]);
    let known = peers(&node);
    let status = json(&bakery, &["--set", &known], &["status"]);
    assert_eq!(status["community"]["id"], community);
}

#[test]
fn a_community_is_founded_once_whatever_was_lost() {
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
fn a_founder_has_its_name_at_once_and_a_name_is_found_in_capitals() {
    let founder = Home::new();
    let create = ["community", "create", "Elm Street", "--as", "Attic"];
    says(&founder, &[], &create);
    let anchor = |name: &str| (name.to_owned(), "anchor".to_owned(), false);
    assert_eq!(members(&founder, &[]), [anchor("Attic")]);
    log_is_whole(&founder);
    // Found, and then refused for what it is.
    let demote = ["community", "demote", "ATTIC", "--json"];
    assert_fails(&run(&founder, &[], &demote), 10, "last_anchor");
}

#[test]
fn the_last_anchor_is_neither_put_out_nor_demoted_nor_leaves_before_there_is_another() {
    let (founder, node) = founded();
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
fn invites_are_listed_with_who_used_them_and_a_withdrawn_one_lets_nobody_in() {
    let (founder, node) = founded();
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
    let known = peers(&node);
    let code = made["code"].as_str().expect("a code");
    let join = ["community", "join", "--wait", "3s", code, "--json"];
    assert_fails(&run(&late, &["--set", &known], &join), 10, "bad_invite");
    let again = ["community", "withdraw", id, "--json"];
    assert_fails(&run(&founder, &[], &again), 10, "bad_invite");
}

#[test]
fn who_leaves_is_gone_for_the_others_and_can_join_again() {
    let (founder, node) = founded();
    let bakery = join(&founder, &node);
    let id = bakery.node_id();
    // Nobody would know: refused, and nothing is changed.
    let unheard = ["--set", "discovery.static_peers=[]"];
    drop(node);
    let leave = ["community", "leave", "--yes", "--json"];
    assert_fails(&run(&bakery, &unheard, &leave), 10, "unreachable");
    assert_eq!(members(&bakery, &[]).len(), 2);

    let node = serve(&founder, &[]);
    let known_again = peers(&node);
    let near_again = ["--set", &known_again];
    let left = json(&bakery, &near_again, &["community", "leave", "--yes"]);
    assert_eq!(left["told"], 1);
    assert_eq!(members(&founder, &[]).len(), 1);
    let members_of_none = ["community", "members", "--json"];
    assert_fails(&run(&bakery, &[], &members_of_none), 10, "no_community");

    let code = code(&founder);
    says(&bakery, &near_again, &["community", "join", &code]);
    assert_eq!(bakery.node_id(), id, "the key is as good as before");
    assert_eq!(members(&founder, &[]).len(), 2);
    log_is_whole(&bakery);
}

#[test]
fn a_node_that_was_put_out_stops_says_so_everywhere_and_comes_back_with_a_new_key() {
    let (founder, node) = founded();
    let bakery = join(&founder, &node);
    let (id, known) = (bakery.node_id(), peers(&node));
    let near = ["--set", &known];
    let connected = || {
        let status = json(&founder, &[], &["status"]);
        let peers = status["node"]["running"]["peers"].as_array().cloned();
        peers.is_some_and(|peers| peers.iter().any(|peer| peer["connected"] == true))
    };
    // It is not there when it is put out, and hears of it when it comes.
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
    let code = code(&founder);
    says(&bakery, &near, &["community", "join", &code]);
    assert_ne!(bakery.node_id(), id);
    assert_eq!(members(&founder, &[]).len(), 2);
}

#[test]
fn a_home_without_a_daemon_that_was_put_out_hears_it_from_the_first_command_that_asks() {
    let (founder, node) = founded();
    let known = peers(&node);
    let near = ["--set", &known, "--set", "policy.research.enable=true"];
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

    // A chat ends with it, and says what to do.
    let home = put_out();
    let chat = ["chat", "hi", "--model", model(), "--no-fallback"];
    let answer = run(&home, &near, &chat);
    assert_eq!(answer.status.code(), Some(10), "{}", text(&answer.stderr));
    assert_complains(&answer, "community leave");
    // From then on every command does, also those that do not look into the log.
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
    assert!(says(&home, &[], &["status"]).contains("(put out, says "));

    // A code does not make a member of a key that was put out, and the answer is not "already".
    let home = put_out();
    let fresh = code(&founder);
    let join_again = ["community", "join", &fresh, "--json"];
    assert_fails(&run(&home, &near, &join_again), 10, "revoked");
    warns(&home, &["status"]);

    // Who leaves hears of it, and leaves the key behind as well.
    for how in [&["--yes"][..], &["--yes", "--anyway"]] {
        let home = put_out();
        let id = home.node_id();
        let left = json(&home, &near, &[&["community", "leave"], how].concat());
        assert_eq!(
            (&left["told"], &left["kept_key"]),
            (&Value::Null, &false.into())
        );
        says(&home, &near, &["community", "join", &code(&founder)]);
        assert_ne!(home.node_id(), id);
    }

    // A key that was taken out of the folder before it was put out: whoever joins with it hears why
    // it is not let in.
    let home = put_out();
    lose_log(&home);
    for name in ["log.community", "community.json"] {
        let _ = std::fs::remove_file(data(&home).join(name));
    }
    let fresh = code(&founder);
    let join_again = ["community", "join", &fresh, "--json"];
    assert_fails(&run(&home, &near, &join_again), 10, "revoked");
    std::fs::remove_file(data(&home).join("node.key")).expect("a key");
    says(&home, &near, &["community", "join", &fresh]);
}

#[test]
fn of_three_nodes_that_could_admit_a_joiner_one_does() {
    let (founder, node) = founded();
    let known = peers(&node);
    let near = ["--set", &known];
    let others = [join(&founder, &node), join(&founder, &node)];
    let serving = others.each_ref().map(|home| serve(home, &near));
    let code = json(&founder, &[], &["community", "invite", "--uses", "5"]);
    let code = code["code"].as_str().expect("a code").to_owned();
    let invite = json(&founder, &[], &["community", "invites"]);
    let invite = invite["invites"][0]["invite"].clone();
    // All three know the invite before anybody asks.
    for home in &others {
        until("everybody knows the invite", || {
            let said = json(home, &[], &["community", "invites"]);
            said["invites"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one["invite"] == invite))
        });
    }
    let addresses: Vec<&str> = [&node, &serving[0], &serving[1]].map(address).to_vec();
    let everybody = format!("discovery.static_peers={addresses:?}");
    let late = Home::new();
    let joined = json(&late, &["--set", &everybody], &["community", "join", &code]);
    assert_eq!(joined["members"], 4);
    until("everybody knows the joiner", || {
        members(&others[0], &[]).len() == 4 && members(&founder, &[]).len() == 4
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
fn a_joiner_without_a_configuration_ends_with_one_that_works() {
    let (founder, node) = founded();
    let known = peers(&node);
    let code = code(&founder);
    let late = Home::new();
    let join = ["community", "join", &code, "--name", "Cellar"];
    let output = run(&late, &["--set", &known], &join);
    succeeded(&output);
    // How to switch it off.
    assert_complains(&output, "enable = false");
    let config = late.path().join("config/hearthnet/hearthnet.toml");
    let config = std::fs::read_to_string(config).expect("a configuration");
    assert!(config.contains("name = \"Cellar\""), "{config}");
    // What was recommended: it gets as far as looking for hosts, of which there are none.
    let chat = ["chat", "hello", "--no-fallback", "--json", "--model"];
    let chat = [&chat[..], &[model()]].concat();
    let near = ["--set", &known];
    assert_fails(&run(&late, &near, &chat), 4, "shard_unavailable");
}

#[test]
fn what_the_root_key_signs_is_heard_from_a_home_that_was_put_out() {
    let (founder, node) = founded();
    let other = second_anchor(&founder, &node);
    let near = peers(&node);
    let elsewhere = serve(&other, &["--set", &near]);
    let own = founder.node_id();
    says(&founder, &[], &["community", "demote", &own, "trusted"]);
    until("the other anchor hears of both levels", || {
        let said = json(&other, &[], &["community", "members"]);
        let level = |node: &str| {
            let mut all = said["members"].as_array().into_iter().flatten();
            let one = all.find(|one| one["node"] == node);
            one.map(|one| one["level"].clone())
        };
        level(&own) == Some("trusted".into()) && level(&other.node_id()) == Some("anchor".into())
    });
    says(&other, &[], &["community", "revoke", &own, "--yes"]);
    // Its daemon ends by that.
    drop(node);
    let known = peers(&elsewhere);
    let near = ["--set", &known];
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
    // Nothing but the root's own word: its node stays out.
    assert_eq!(members(&other, &[]).len(), 1);
}

#[test]
fn the_only_anchor_that_an_old_copy_froze_comes_back_by_its_root_key() {
    let (founder, node) = founded();
    let bakery = join(&founder, &node);
    drop(node);
    let earlier = founder.path().join("earlier");
    copy(&data(&founder), &earlier);
    // It goes on, a neighbour hears it, and the old copy comes back while nobody is there to ask.
    says(&founder, &[], &["community", "invite"]);
    let node = serve(&founder, &[]);
    let known = peers(&node);
    says(&bakery, &["--set", &known], &["status"]);
    drop(node);
    std::fs::remove_dir_all(data(&founder)).expect("it was there");
    copy(&earlier, &data(&founder));
    says(&founder, &[], &["log", "resume", "--yes"]);
    says(&founder, &[], &["community", "invite"]);
    let old = founder.node_id();
    let elsewhere = serve(&bakery, &[]);
    let known = peers(&elsewhere);
    let near = ["--set", &known];
    let frozen = || members(&bakery, &[]).iter().any(|one| one.2);
    until("its key is frozen", || {
        run(&founder, &near, &["status"]);
        frozen()
    });
    let output = run(&founder, &near, &["status"]);
    assert_complains(&output, "community renew");

    let renewed = json(&founder, &near, &["community", "renew", "--yes"]);
    assert_eq!(
        (&renewed["level"], &renewed["told"]),
        (&"anchor".into(), &1.into())
    );
    assert_ne!(founder.node_id(), old);
    assert!(!frozen(), "the old key is no member any more");
    assert_eq!(members(&bakery, &[]).len(), 2);
    // It is an anchor as before: others hear it, and join by its code.
    says(&founder, &near, &["community", "invite"]);
    drop(elsewhere);
    let node = serve(&founder, &[]);
    let guest = join_as("member", &founder, &node);
    assert_eq!(members(&guest, &[]).len(), 3);
    let known = peers(&node);
    says(&bakery, &["--set", &known], &["status"]);
    assert_eq!(members(&bakery, &[]).len(), 3);
    log_is_whole(&founder);
    // Where the key counts it is left as it is.
    let again = json(&founder, &[], &["community", "renew"]);
    assert_eq!(again["old_key"], Value::Null);
}
