//! The page: its calls, and in a real browser (`clients/page.mjs`) with a real model.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde_json::json;

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

#[test]
fn the_page_takes_its_key_from_the_link_and_keeps_it_out_of_the_address() {
    let home = Home::new();
    let (path, key) = (
        home.path().join("http.key"),
        "a key+of/16=bytes".replace(' ', "-"),
    );
    std::fs::write(&path, &key).expect("a file");
    let owner = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, owner).expect("permissions");
    let setting = format!("http.api_key_file={}", path.display());
    let service = alone(&home, &["--set", &setting]);
    passes(&service, "key", &key);
}

#[test]
fn the_page_shows_the_community_and_makes_invites_that_the_log_knows() {
    let (founder, node) = {
        let founder = Home::new();
        community::found(&founder);
        let node = community::serve(&founder, &[]);
        (founder, node)
    };
    let at = http::address(&node);
    let state = http::get_json(&at, "/hearthnet/v1/state");
    assert_eq!(state["community"]["name"], "Elm Street");
    assert_eq!(state["node"]["id"], founder.node_id());
    assert_eq!(state["members"][0]["this_node"], true);
    assert_eq!(state["members"][0]["connected"], true);
    assert_eq!(state["may_invite"], json!(["member", "trusted"]));
    assert_eq!(state["chats"]["running"], 0);
    assert!(state["paused"].is_null() && state["downloads"] == json!([]));

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
        let (got, error) = invite(body);
        assert_eq!(
            (got, &error["error"]["code"]),
            (status, &json!(code)),
            "{error}"
        );
    }
    let (status, error) = http::post_json(&at, "/hearthnet/v1/pause", &json!({}));
    assert_eq!(
        (status, &error["error"]["code"]),
        (501, &json!("not_available"))
    );

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
    let (status, error) = http::post_json(&at, "/hearthnet/v1/invite", &body);
    assert_eq!(
        (status, &error["error"]["code"]),
        (403, &json!("not_a_member"))
    );
}
