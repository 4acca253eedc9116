//! `hearthnet conformance` on a host of this program, and on a host that breaks rules.

use std::collections::BTreeMap;
use std::sync::Arc;

use hearthnet_bus::{NodeId, NodeKey, testing};
use hearthnet_transport::{
    Admission, CloseCode, Config, Connection, Hello, Listener, Message, StreamOpen, StreamOpened,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::support::{Home, assert_complains, host};

/// Verdict of each check by its name.
fn verdicts(report: &Value) -> BTreeMap<&str, &str> {
    let checks = report["checks"].as_array().expect("checks");
    checks
        .iter()
        .filter_map(|check| Some((check["name"].as_str()?, check["verdict"].as_str()?)))
        .collect()
}

#[test]
fn our_own_host_passes_every_check() {
    let home = Home::new();
    // The deadline of an idle session follows this setting.
    let host = host(&home, "2-9", &["--set", "transport.keep_alive_seconds=2"]);
    let report = home.json(&["conformance", &host.address, "--json"]);
    let verdicts = verdicts(&report);
    let passed = verdicts.values().all(|verdict| *verdict == "passed");
    assert!(passed, "{report:#}");
    for name in ["frame-unknown", "step-order", "receipt", "idle-session"] {
        assert!(verdicts.contains_key(name), "{name} in {report:#}");
    }
}

#[test]
fn the_table_shows_each_check_for_people() {
    let home = Home::new();
    let host = host(&home, "2-9", &[]);
    let shown = home.says(&["conformance", &host.address, "--quick"]);
    let rows = shown
        .lines()
        .filter(|line| line.trim().starts_with("passed"));
    let last = format!("\n{} passed, 0 failed, 0 skipped\n", rows.count());
    assert!(
        shown.contains("frame-unknown") && shown.ends_with(&last),
        "{shown}"
    );
}

#[test]
fn a_host_outside_of_reach_is_named_with_what_helps() {
    let home = Home::new();
    let host = host(&Home::new(), "2-9", &[]);
    let refused = home.run(&["conformance", &host.address, "--quick"]);
    assert_eq!(refused.status.code(), Some(4));
    assert_complains(&refused, "unauthorized");
    assert_complains(&refused, "--peer-key");
}

/// Admits every key, every token and every purpose.
struct AdmitsAll;

impl Admission for AdmitsAll {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }

    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Ok(())
    }
}

/// Opens every stream, and returns the rows of every step unchanged.
async fn echo(mut connection: Connection, host: NodeId) {
    let sender = connection.sender();
    while let Ok(message) = connection.recv().await {
        let answer = match message {
            Message::Describe => {
                let descriptor = testing::descriptor(host).to_cbor().expect("a descriptor");
                Message::Descriptor(descriptor.into())
            }
            Message::StreamOpen(StreamOpen { stream, epoch, .. }) => {
                Message::StreamOpened(StreamOpened { stream, epoch })
            }
            Message::Step(step) => Message::StepResult(step.echo()),
            _ => continue,
        };
        if sender.send(answer).await.is_err() {
            return;
        }
    }
}

#[test]
fn a_host_that_breaks_rules_fails_the_checks_of_these_rules_alone() {
    let key = NodeKey::generate().expect("a key");
    let runtime = Runtime::new().expect("a runtime");
    let address = runtime.block_on(async {
        let identity = key.identity().expect("a certificate");
        // It signs nothing, and says so.
        let config = Config {
            receipts: 0,
            ..Config::default()
        };
        let all = Arc::new(AdmitsAll);
        let listener = Listener::bind("127.0.0.1:0", &identity, all, config, &[]).await;
        let mut listener = listener.expect("a listener");
        let (address, id) = (listener.local_addr(), key.id());
        tokio::spawn(async move {
            loop {
                tokio::spawn(echo(listener.session().await, id));
            }
        });
        format!("{address}#{id}")
    });
    let home = Home::new();
    let options = ["--quick", "--width", "4", "--json"];
    let report = home.run(&[&["conformance", &address][..], &options].concat());
    assert_eq!(report.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&report.stdout).expect("one JSON object");
    let verdicts = verdicts(&report);
    let failed: Vec<&str> = verdicts
        .iter()
        .filter(|(_, verdict)| **verdict == "failed")
        .map(|(name, _)| *name)
        .collect();
    let rules = [
        "authentication",
        "hello",
        "step-error",
        "stream",
        "stream-error",
        "tensor",
        "token",
    ];
    assert_eq!(failed, rules, "{report:#}");
    for name in ["credit-grant", "frame-unknown", "step-order"] {
        assert_eq!(verdicts.get(name), Some(&"passed"), "{report:#}");
    }
    assert_eq!(report["error"]["code"], "not_conforming");
    let said = report["error"]["message"].as_str().expect("a message");
    assert!(rules.iter().all(|name| said.contains(name)), "{said}");
    let checks = report["checks"].as_array().expect("checks");
    let token = checks.iter().find(|check| check["name"] == "token");
    let token = token.expect("the check of tokens");
    assert_eq!(token["section"], "session-grant.md 4");
    assert_eq!(token["done"], json!(["no token"]));
    assert_eq!(token["expected"], "BYE and close frame 4071 token_invalid");
}
