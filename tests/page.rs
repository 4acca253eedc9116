//! The page: its calls, and in a real browser (`clients/page.mjs`) with a real model.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::http::{KEY, with_key};
use crate::support::*;

/// `hearthnet serve` on this machine alone, with settings.
fn alone(home: &Home, settings: &[&str]) -> Server {
    Server::api(home, settings, model(), &["--local"])
}

/// Starts a scenario of `clients/page.mjs`; `None` if this machine has no browser for it.
fn browser(service: &Server, scenario: &str, key: &str) -> Option<Child> {
    if std::env::var_os("HEARTHNET_TEST_NODE_MODULES").is_none() {
        skipped("tests/run finds no Chromium, Node.js and npm on this machine");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/page.mjs");
    let mut command = Command::new("node");
    command
        .arg(script)
        .arg(format!("http://{}/", http::address(service)))
        .arg(scenario)
        .env("HEARTHNET_TEST_KEY", key)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Some(command.spawn().expect("node starts"))
}

/// Output of a scenario, which must succeed.
fn passes(service: &Server, scenario: &str, key: &str) -> Option<String> {
    let child = browser(service, scenario, key)?;
    Some(succeeded(&child.wait_with_output().expect("its end")))
}

#[test]
fn the_page_chats_on_a_phone_and_a_desk_is_accessible_and_says_when_the_node_is_away() {
    let service = alone(&Home::new(), &[]);
    passes(&service, "chat", "");
    passes(&service, "away", "");
}

#[test]
fn an_answer_on_the_page_survives_the_death_of_a_host() {
    survives_the_death_of_a_host("failover");
}

#[test]
fn an_answer_on_a_phone_survives_the_death_of_a_host() {
    survives_the_death_of_a_host("failover-phone");
}

fn survives_the_death_of_a_host(scenario: &str) {
    let home = Home::new();
    let mut hosts = hosts(&home, &["0-14", "15-29"], &[]);
    let over = shards(hosts.iter().map(|host| &host.address));
    let service = Server::api(&home, &ENABLE, model(), &over);
    let Some(mut child) = browser(&service, scenario, "") else {
        return;
    };
    let stdout = child.stdout.take().expect("a pipe");
    let line = BufReader::new(stdout).lines().next();
    // Without a line, the scenario has failed and says why.
    if line.is_some() {
        hosts.pop().expect("a host").signal(Signal::KILL);
    }
    succeeded(&child.wait_with_output().expect("its end"));
}

/// Asserts that a call was refused.
#[track_caller]
fn assert_refused((got, error): (u16, Value), status: u16, code: &str) {
    assert_eq!(
        (got, &error["error"]["code"]),
        (status, &json!(code)),
        "{error}"
    );
}

#[test]
fn the_page_takes_its_key_from_the_link_and_keeps_it_out_of_the_address() {
    let home = Home::new();
    let service = alone(&home, &["--set", &with_key(&home)]);
    passes(&service, "key", KEY);
}

#[test]
fn the_page_command_prints_the_address_with_the_key_of_the_running_node() {
    let founder = community::founder();
    let page = ["page"];
    assert_complains(&founder.run(&page), "no node with a page runs here");
    let node = community::serve(&founder, &["--set", &with_key(&founder)]);
    // Only the node was given the setting.
    let link = format!("http://{}/#key={KEY}\n", http::address(&node));
    assert_eq!(founder.says(&page), link);
}

#[test]
fn the_page_shows_the_community_and_makes_invites_that_the_log_knows() {
    let (founder, node) = community::founded(&[]);
    let at = http::address(&node);
    let state = http::get_json(&at, "/hearthnet/v1/state");
    assert_eq!(state["community"]["name"], "Elm Street");
    assert_eq!(state["node"]["id"], founder.node_id());
    // Counted up to now, while the log has nothing before a day has ended.
    let nothing = json!({"tokens": 0, "minutes": 0, "weights_bytes": 0});
    assert_eq!(state["node"]["gave"], nothing);
    assert!(state["members"][0]["gave"].is_null());
    assert_eq!(state["members"][0]["this_node"], true);
    assert_eq!(state["members"][0]["connected"], true);
    assert_eq!(state["may_invite"], json!(["member", "trusted"]));
    assert_eq!(state["chats"]["running"], 0);
    assert_eq!(state["chats"]["models"][0]["alone"], true);
    assert!(state["paused"] == false && state["downloads"] == json!([]));

    let invite = |body| http::post_json(&at, "/hearthnet/v1/invite", &body);
    let (status, made) = invite(json!({"level": "trusted", "uses": 2}));
    assert_eq!(status, 200, "{made}");
    assert!(
        made["qr"]["path"]
            .as_str()
            .is_some_and(|path| path.starts_with('M'))
    );
    let listed = community::json(&founder, &[], &["community", "invites"]);
    let listed = &listed["invites"][0];
    assert_eq!(
        (&listed["level"], &listed["uses"]),
        (&json!("trusted"), &json!(2))
    );
    for (body, status, code) in [
        (json!({"level": "anchor", "uses": 1}), 403, "unauthorized"),
        (json!({"level": "member", "uses": 0}), 400, "invalid_value"),
        (json!({"level": "king", "uses": 1}), 400, "invalid_json"),
        (json!({"level": "member"}), 400, "invalid_json"),
    ] {
        assert_refused(invite(body), status, code);
    }
    passes(&node, "pause", "");
    if let Some(code) = passes(&node, "invite", "") {
        let joiner = Home::new();
        let join = ["community", "join", code.trim(), "--name", "Kim"];
        let joined = community::json(&joiner, &[], &join);
        assert_eq!(joined["level"], "trusted", "{joined}");
        let state = http::get_json(&at, "/hearthnet/v1/state");
        let members = state["members"].as_array().expect("a list");
        assert!(
            members.iter().any(|member| member["name"] == "Kim"),
            "{state}"
        );
    }
}

#[test]
fn the_page_and_the_commands_pause_the_same_node() {
    let (founder, node) = community::founded(&[]);
    let at = http::address(&node);
    let seen = || {
        let state = http::get_json(&at, "/hearthnet/v1/state");
        (state["paused"].clone(), state["pause_reason"].clone())
    };
    let post = |path: &str, body| http::post_json(&at, &format!("/hearthnet/v1/{path}"), &body);
    assert_eq!(seen(), (json!(false), json!(null)));
    let (status, paused) = post("pause", json!({}));
    let expected = json!({"paused": true, "pause_reason": "paused by you"});
    assert_eq!((status, paused), (200, expected));
    // A command ends the pause of the page, and the page that of a command.
    community::says(&founder, &[], &["resume"]);
    assert_eq!(seen(), (json!(false), json!(null)));
    community::says(&founder, &[], &["pause", "--for", "2h"]);
    let (paused, reason) = seen();
    assert_eq!(paused, true);
    let reason = reason.as_str().expect("a reason");
    assert!(reason.starts_with("paused by you until "), "{reason}");
    // It is kept for the next start.
    let file = founder.path().join("data/paused.json");
    assert!(file.exists());
    let (status, resumed) = post("resume", json!({}));
    let expected = json!({"paused": false, "pause_reason": null});
    assert_eq!((status, resumed), (200, expected));
    assert!(!file.exists());

    for (body, code) in [
        (json!({"until_ms": 1}), "invalid_value"),
        (json!({"until_ms": "22:00"}), "invalid_json"),
        (json!({"until": 1}), "invalid_json"),
    ] {
        assert_refused(post("pause", body), 400, code);
    }
    assert_eq!(seen(), (json!(false), json!(null)));
}

#[test]
fn the_page_tells_the_plan_and_keeps_the_quiet_hours_that_it_sets() {
    let host = "research.distributed_inference.host";
    let (on, all) = (
        format!("{host}.serve_shards=true"),
        format!("{host}.serve_layers=\"0-29\""),
    );
    let hours = "manners.quiet_hours=\"03:00-03:01\"";
    let settings = ["--set", &on, "--set", &all, "--set", hours];
    let (founder, node) = community::founded(&settings);
    let at = http::address(&node);
    let words = || {
        let state = http::get_json(&at, "/hearthnet/v1/state");
        state["models"][0]["plan"]["words"].to_string()
    };
    // At first the node has no measurements, and says so.
    until("a plan", || {
        words().contains("An answer here would come at")
    });
    let words = words();
    assert_contains(&words, &["This computer alone would be at least as fast"]);

    let set = |at: &str, body| http::post_json(at, "/hearthnet/v1/quiet-hours", &body);
    let shown = |hours: &str, is_own: bool| {
        let configured = "03:00-03:01";
        json!({"hours": hours, "configured": configured, "is_own": is_own})
    };
    let (status, quiet) = set(&at, json!({"hours": "00:00-23:59"}));
    assert_eq!((status, quiet), (200, shown("00:00-23:59", true)));
    // If it is 23:59, they begin in a minute.
    until("quiet hours", || {
        let state = http::get_json(&at, "/hearthnet/v1/state");
        state["pause_reason"] == "quiet hours until 23:59"
    });
    drop(node);
    let node = community::serve(&founder, &settings);
    let at = http::address(&node);
    let state = http::get_json(&at, "/hearthnet/v1/state");
    assert_eq!(state["quiet_hours"], shown("00:00-23:59", true));
    assert_eq!(set(&at, json!({"hours": ""})), (200, shown("", true)));
    let configured = (200, shown("03:00-03:01", false));
    assert_eq!(set(&at, json!({"hours": null})), configured);
    for (body, code) in [
        (json!({"hours": "22:00"}), "invalid_value"),
        (json!({"from": "22:00"}), "invalid_json"),
    ] {
        assert_refused(set(&at, body), 400, code);
    }
}

/// Level of a member in the log of a home; `None` if it is no member there.
fn level_in(home: &Home, id: &str) -> Option<Value> {
    let members = community::members(home);
    let found = members.iter().find(|it| it["node"] == id);
    found.map(|it| it["level"].clone())
}

const WORDS: &str = "correct horse battery staple";

fn seal_root_key(founder: &Home) {
    let seal = [&QUIET[..], &["community", "passphrase"]].concat();
    succeeded(&founder.run_with(&seal, &format!("{WORDS}\n")));
}

#[test]
fn an_anchor_changes_and_removes_members_on_the_page_and_never_itself() {
    let (founder, node) = community::founded(&[]);
    let member = community::join_as("member", &founder, &node).node_id();
    let other = community::join_as("trusted", &founder, &node).node_id();
    let at = http::address(&node);
    let state = || http::get_json(&at, "/hearthnet/v1/state");
    assert_eq!(
        state()["may_change"],
        json!(["member", "trusted", "anchor"])
    );
    assert_eq!(state()["needs_passphrase"], false);
    let post = |path: &str, body| http::post_json(&at, &format!("/hearthnet/v1/{path}"), &body);
    let set = |level: &str| post("level", json!({"node": member, "level": level}));
    // The second time changes nothing.
    for next in ["trusted", "trusted", "anchor", "member"] {
        let (status, done) = set(next);
        assert_eq!((status, &done["level"]), (200, &json!(next)), "{done}");
        assert_eq!(level_in(&founder, &member), Some(json!(next)));
    }

    // The root key makes anchors.
    seal_root_key(&founder);
    assert_eq!(state()["needs_passphrase"], true);
    assert_refused(set("anchor"), 403, "wrong_passphrase");
    let promote = |passphrase: &str| {
        let body = json!({"node": member, "level": "anchor", "passphrase": passphrase});
        post("level", body)
    };
    assert_refused(promote("correct horse"), 403, "wrong_passphrase");
    assert_eq!(level_in(&founder, &member), Some(json!("member")));
    assert_eq!(promote(WORDS).0, 200);
    assert_eq!(level_in(&founder, &member), Some(json!("anchor")));

    let (own, stranger) = (founder.node_id(), Home::new().node_id());
    let level = |node: &str| json!({"node": node, "level": "trusted"});
    for (path, body, status, code) in [
        ("level", level(&own), 403, "unauthorized"),
        ("revoke", json!({"node": own}), 403, "unauthorized"),
        ("level", level(&stranger), 404, "unknown_node"),
        ("revoke", json!({"node": stranger}), 404, "unknown_node"),
        ("level", level("nobody"), 400, "invalid_json"),
        ("revoke", json!({"node": member}), 403, "wrong_passphrase"),
    ] {
        assert_refused(post(path, body), status, code);
    }
    let removed = post("revoke", json!({"node": other}));
    assert_eq!(removed, (200, json!({"node": other, "revoked": true})));
    assert_eq!(level_in(&founder, &other), None);
    let with_passphrase = json!({"node": member, "passphrase": WORDS});
    assert_eq!(post("revoke", with_passphrase).0, 200);
    assert_eq!(level_in(&founder, &member), None);
}

#[test]
fn with_a_key_the_owner_on_this_machine_still_changes_members() {
    let founder = community::founder();
    let node = community::serve(&founder, &["--set", &with_key(&founder)]);
    let stranger = json!({"node": Home::new().node_id()});
    let revoke = |lines: &str| {
        let at = http::address(&node);
        http::post_json_with(&at, "/hearthnet/v1/revoke", lines, &stranger)
    };
    assert_refused(revoke(""), 401, "invalid_api_key");
    let key = format!("Authorization: Bearer {KEY}\r\n");
    // The owner passes, and is told what is wrong.
    assert_refused(revoke(&key), 404, "unknown_node");
    let forged = format!("{key}Origin: http://evil.example\r\n");
    assert_refused(revoke(&forged), 403, "forbidden_origin");
}

/// Running member with a name and a page.
fn neighbour(name: &str, founder: &Home, node: &Server) -> (Home, Server) {
    let home = Home::new();
    let code = founder.says(&["community", "invite", "--level", "member"]);
    let join = ["community", "join", code.trim(), "--name", name];
    home.says(&[&community::ALONE[..], &community::static_peer(node), &join].concat());
    let running = community::serve(&home, &community::static_peer(node));
    (home, running)
}

#[test]
fn in_a_browser_an_anchor_promotes_and_removes_a_home_and_other_homes_see_no_controls() {
    let (founder, node) = community::founded(&[]);
    let (kim, kims) = neighbour("Kim", &founder, &node);
    let (lee, lees) = neighbour("Lee", &founder, &node);
    let id = kim.node_id();
    for at in [&node, &lees].map(http::address) {
        until("the names of the members", || {
            let state = http::get_json(&at, "/hearthnet/v1/state");
            let members = state["members"].as_array().expect("a list");
            let named = |name: &str| members.iter().any(|it| it["name"] == name);
            named("Kim") && named("Lee")
        });
    }
    let revoke = "/hearthnet/v1/revoke";
    let (removal, founders) = (json!({"node": id}), http::address(&node));
    let foreign = "Origin: http://evil.example\r\n";
    let forged = http::post_json_with(&founders, revoke, foreign, &removal);
    assert_refused(forged, 403, "forbidden_origin");

    let lees_page = http::address(&lees);
    let state = http::get_json(&lees_page, "/hearthnet/v1/state");
    assert_eq!(state["may_change"], json!([]));
    let refused = http::post_json(&lees_page, revoke, &removal);
    assert_refused(refused, 403, "unauthorized");
    passes(&lees, "watch", "");
    assert_eq!(level_in(&lee, &id), Some(json!("member")));

    if passes(&node, "promote", "").is_none() {
        return;
    }
    until("the level in the member's log", || {
        level_in(&kim, &id) == Some(json!("trusted"))
    });
    seal_root_key(&founder);
    passes(&node, "anchor", WORDS);
    until("the level in the member's log", || {
        level_in(&kim, &id) == Some(json!("anchor"))
    });
    // Without the root key an anchor changes no other anchor.
    let kims_page = http::address(&kims);
    until("the controls of an anchor", || {
        let state = http::get_json(&kims_page, "/hearthnet/v1/state");
        state["may_change"] == json!(["member", "trusted"])
    });
    let own = json!({"node": founder.node_id()});
    assert_refused(
        http::post_json(&kims_page, revoke, &own),
        403,
        "unauthorized",
    );
    passes(&node, "remove", WORDS);
    until("the removal in another member's log", || {
        level_in(&lee, &id).is_none()
    });
}

#[test]
fn a_service_unit_does_not_start_a_node_without_a_community_again_and_again() {
    let output = Home::new().run(&["up", "--no-open"]);
    assert_complains(&output, "no community");
    let status = output.status.code().expect("a status").to_string();
    for unit in ["hearthnet.service", "hearthnet-system.service"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config");
        let unit = std::fs::read_to_string(path.join(unit)).expect("a unit");
        let value = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name));
        let command = value("ExecStart=").expect("a command");
        assert!(command.ends_with("/hearthnet up --no-open"), "{command}");
        let mut prevented = value("RestartPreventExitStatus=")
            .expect("a list")
            .split(' ');
        assert!(prevented.any(|it| it == status), "{status}");
    }
}

#[test]
fn a_program_without_a_community_says_so() {
    let service = alone(&Home::new(), &[]);
    let at = http::address(&service);
    let state = http::get_json(&at, "/hearthnet/v1/state");
    assert!(
        state["node"].is_null() && state["community"].is_null(),
        "{state}"
    );
    assert_eq!(state["chats"]["models"].as_array().map(Vec::len), Some(1));
    let body = json!({"level": "member", "uses": 1});
    let refused = http::post_json(&at, "/hearthnet/v1/invite", &body);
    assert_refused(refused, 403, "not_a_member");
    assert!(state["paused"].is_null() && state["quiet_hours"].is_null());
    for path in ["/hearthnet/v1/pause", "/hearthnet/v1/quiet-hours"] {
        let refused = http::post_json(&at, path, &json!({}));
        assert_refused(refused, 501, "not_available");
    }
}
