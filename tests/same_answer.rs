//! Promise 1: the same answer, however it is split. Real model, real processes.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod support;

use support::{Home, Host, model};

const PROMPT: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";

fn hosts(home: &Home, ranges: &[&str]) -> Vec<Host> {
    let model = model();
    let model = model.to_str().expect("a UTF-8 path");
    let admit = home.node_id();
    ranges
        .iter()
        .map(|range| {
            // Every host is a user of its own, with a key of its own.
            let own = Home::new();
            let host = Host::start(&own, model, range, &admit, &[]);
            // The key is in memory by now; the directory may go.
            drop(own);
            host
        })
        .collect()
}

fn answer(home: &Home, ranges: &[&str], extra: &[&str]) -> serde_json::Value {
    let hosts = hosts(home, ranges);
    let output = home.ask(PROMPT, &hosts.iter().collect::<Vec<_>>(), extra);
    assert!(output.status.success(), "{}", support::text(&output.stderr));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        value["route"].as_array().expect("a route").len(),
        ranges.len()
    );
    value
}

#[test]
fn one_two_three_and_five_hosts_even_or_not_say_the_same_as_this_machine_alone() {
    let home = Home::new();
    let sampling = [
        "--max-tokens",
        "40",
        "--temperature",
        "0.9",
        "--top-p",
        "0.95",
        "--seed",
        "20261121",
    ];
    let mut local = vec!["chat", PROMPT, "--local", "--json"];
    local.extend(sampling);
    let local = home.json(&local);
    assert!(
        local["token_ids"].as_array().expect("tokens").len() > 10,
        "{local}"
    );
    for ranges in [
        &["0-29"][..],
        &["0-14", "15-29"],
        &["0-0", "1-29"],
        &["0-9", "10-19", "20-29"],
        &["0-1", "2-27", "28-29"],
        &["0-5", "6-11", "12-17", "18-23", "24-29"],
        &["0-0", "1-3", "4-20", "21-28", "29-29"],
    ] {
        let split = answer(&home, ranges, &sampling);
        assert_eq!(split["text"], local["text"], "{ranges:?}");
        assert_eq!(split["token_ids"], local["token_ids"], "{ranges:?}");
    }
}

#[test]
fn overlapping_hosts_are_cut_to_fit_and_say_the_same() {
    let home = Home::new();
    let sampling = ["--max-tokens", "16"];
    let local = home.json(&["chat", PROMPT, "--local", "--json", "--max-tokens", "16"]);
    let split = answer(&home, &["0-17", "10-29"], &sampling);
    assert_eq!(split["token_ids"], local["token_ids"]);
    assert_eq!(split["route"][1]["layers"], serde_json::json!([18, 29]));
}

#[test]
fn another_seed_says_something_else() {
    let home = Home::new();
    let ask = |seed: &str| {
        home.json(&[
            "chat",
            PROMPT,
            "--local",
            "--json",
            "--max-tokens",
            "24",
            "--temperature",
            "1.2",
            "--seed",
            seed,
        ])["text"]
            .clone()
    };
    assert_eq!(ask("1"), ask("1"));
    assert_ne!(ask("1"), ask("2"));
}
