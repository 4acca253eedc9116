//! A community app on one machine, a shard host as another member: what the example app
//! prints is what the model says on one machine alone.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::{Home, PATIENCE, Server, model, text};

const PROMPT: &str = "Name three colours.";
const TOKENS: &str = "24";

/// A node that stays, started with these arguments on this machine alone: no multicast.
fn node(home: &Home, args: &[&str]) -> Server {
    let mut all = vec![
        "--set",
        "policy.research.enable=true",
        "--set",
        "discovery.mdns=false",
        "--set",
        "research.distributed_inference.fallback_to_local=false",
    ];
    all.extend(args);
    all.extend(["--listen", "127.0.0.1:0", "--json", "--lifeline"]);
    Server::start(home, &all)
}

fn app(home: &Home, args: &[&str]) -> Output {
    let python = std::env::var_os("HEARTHNET_TEST_PYTHON").unwrap_or_else(|| {
        panic!(
            "run tests/run, or set HEARTHNET_TEST_PYTHON to a Python with the package websockets"
        )
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/chat_app.py");
    Command::new(python)
        .arg("-B")
        .arg(script)
        .args(args)
        .env("HEARTHNET_DATA_DIR", home.path().join("data"))
        .env("PYTHONIOENCODING", "utf-8")
        .output()
        .expect("Python starts")
}

#[test]
fn an_app_hears_through_its_node_what_another_members_layers_compute() {
    let model = model();
    let model = model.to_str().expect("a UTF-8 path");
    let (founder, member) = (Home::new(), Home::new());
    founder.json(&[
        "community",
        "create",
        "Elm Street",
        "--research",
        "on",
        "--json",
    ]);
    let serve = node(
        &founder,
        &["serve", "--model", model, "--http", "127.0.0.1:0"],
    );
    let address = serve.ready["addresses"][0].as_str().expect("an address");

    let invite = founder.json(&["community", "invite", "--level", "trusted", "--json"]);
    let code = invite["code"].as_str().expect("a code");
    let peers = format!("discovery.static_peers=[\"{address}\"]");
    let join = [
        "--set",
        "discovery.mdns=false",
        "--set",
        &peers,
        "community",
        "join",
        code,
    ];
    let joined = member.run(&join);
    assert!(joined.status.success(), "{}", text(&joined.stderr));
    let layers = [
        "--set", &peers, "shard", "serve", "--model", model, "--layers", "0-29",
    ];
    let _host = node(&member, &layers);

    let ask = [PROMPT, "--max-tokens", TOKENS, "--verbose"];
    let deadline = Instant::now() + PATIENCE;
    let output = loop {
        // The host may not have been heard of yet.
        let output = app(&founder, &ask);
        if output.status.success() || Instant::now() > deadline {
            break output;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains(&member.node_id()), "{said}");
    let alone = founder.json(&[
        "chat",
        PROMPT,
        "--local",
        "--json",
        "--model",
        model,
        "--max-tokens",
        TOKENS,
        // As the app asks.
        "--temperature",
        "0",
    ]);
    assert_eq!(text(&output.stdout), alone["text"].as_str().expect("text"));
}
