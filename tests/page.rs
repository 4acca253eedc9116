//! The page: its calls, and in a real browser (`clients/page.mjs`) with a real model.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::*;

/// `hearthnet serve` on this machine alone, with settings.
fn alone(home: &Home, settings: &[&str]) -> Server {
    let tail = [
        "serve",
        "--local",
        "--json",
        "--lifeline",
        "--model",
        model(),
    ];
    let http = ["--http", "127.0.0.1:0"];
    Server::start(home, &[settings, &tail, &http].concat())
}

/// Starts a scenario of `clients/page.mjs`; `None` if this machine has no browser for it.
fn browser(service: &Server, scenario: &str, key: &str) -> Option<Child> {
    if std::env::var_os("HEARTHNET_TEST_NODE_MODULES").is_none() {
        println!("skipped: tests/run finds no Chromium, Node.js and npm on this machine");
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
    let home = Home::new();
    let mut hosts = hosts(&home, &["0-14", "15-29"], &[]);
    let addresses: Vec<String> = hosts.iter().map(|host| host.address.clone()).collect();
    let tail = [
        "serve",
        "--json",
        "--lifeline",
        "--model",
        model(),
        "--http",
        "127.0.0.1:0",
    ];
    let args = [&ENABLE[..], &tail, &shards(&addresses)].concat();
    let service = Server::start(&home, &args);
    let Some(mut child) = browser(&service, "failover", "") else {
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

const KEY: &str = "a-key+of/16=bytes";

/// Setting that names a new file with [`KEY`].
fn with_key(home: &Home) -> String {
    let path = home.path().join("http.key");
    std::fs::write(&path, KEY).expect("a file");
    let owner = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, owner).expect("permissions");
    format!("http.api_key_file={}", path.display())
}

#[test]
fn the_page_takes_its_key_from_the_link_and_keeps_it_out_of_the_address() {
    let home = Home::new();
    let service = alone(&home, &["--set", &with_key(&home)]);
    passes(&service, "key", KEY);
}

#[test]
fn the_page_command_prints_the_address_with_the_key_of_the_running_node() {
    let founder = Home::new();
    community::found(&founder);
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
    assert_eq!(state["members"][0]["this_node"], true);
    assert_eq!(state["members"][0]["connected"], true);
    assert_eq!(state["may_invite"], json!(["member", "trusted"]));
    assert_eq!(state["chats"]["running"], 0);
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
    assert!(
        words.contains("This computer alone would be at least as fast"),
        "{words}"
    );

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

#[test]
fn an_anchor_changes_levels_on_the_page_but_makes_and_removes_no_anchor() {
    let (founder, node) = community::founded(&[]);
    let member = community::join_as("member", &founder, &node).node_id();
    let at = http::address(&node);
    let state = http::get_json(&at, "/hearthnet/v1/state");
    assert_eq!(state["may_change_levels"], true);
    let set = |node: &str, level: &str| {
        let body = json!({"node": node, "level": level});
        http::post_json(&at, "/hearthnet/v1/level", &body)
    };
    let level = || {
        let members = community::members(&founder);
        let found = members.iter().find(|it| it["node"] == member.as_str());
        found.expect("the member")["level"].clone()
    };
    // The second time changes nothing.
    for next in ["trusted", "trusted", "member"] {
        let (status, done) = set(&member, next);
        assert_eq!((status, &done["level"]), (200, &json!(next)), "{done}");
        assert_eq!(level(), next);
    }
    let stranger = Home::new().node_id();
    for (id, level, status, code) in [
        (member.as_str(), "anchor", 403, "unauthorized"),
        (&founder.node_id(), "trusted", 403, "unauthorized"),
        (&stranger, "trusted", 404, "unknown_node"),
        ("nobody", "trusted", 400, "invalid_json"),
    ] {
        assert_refused(set(id, level), status, code);
    }
    assert_eq!(level(), "member");
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
