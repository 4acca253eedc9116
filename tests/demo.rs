//! The demo, as the README's first command runs it.

use serde_json::json;

use crate::support::*;

#[test]
fn the_demo_answers_over_two_hosts_and_reports_where_the_time_went() {
    let home = Home::new();
    let report = home.json(&["demo", "--json", "--max-tokens", "24"]);
    for key in words("text token_ids usage route timings hosts local seed") {
        assert!(!report[key].is_null(), "{key} is missing: {report}");
    }
    assert_eq!(report["token_ids"].as_array().map(Vec::len), Some(24));
    assert_eq!(report["usage"]["completion_tokens"], 24);
    assert_eq!(report["local"]["same_tokens"], true);
    let hosts = report["hosts"].as_array().expect("hosts");
    assert_eq!(hosts.len(), 2);
    let weights: Vec<u64> = hosts
        .iter()
        .filter_map(|h| h["weight_bytes"].as_u64())
        .collect();
    // Each host has 14 of 30 equal layers, which take 66 MB in all; two layers are this machine's
    // own.
    assert_eq!(weights.len(), 2);
    assert_eq!(weights[0], weights[1]);
    assert!(
        (25_000_000..60_000_000).contains(&weights[0]),
        "{weights:?}"
    );
    for host in hosts {
        assert!(
            host["compute_ms_per_token"]
                .as_f64()
                .is_some_and(|ms| ms > 0.0),
            "{host}"
        );
    }
    let route = report["route"].as_array().expect("a route");
    let layers: Vec<_> = route.iter().map(|hop| hop["layers"].clone()).collect();
    assert_eq!(json!(layers), json!([[0, 1], [2, 15], [16, 29]]));
    assert!(route[0]["host"].is_null(), "the first layers are here");
    assert_ne!(
        route[1]["host"], route[2]["host"],
        "each host has a key of its own"
    );
}

#[test]
fn a_question_on_the_command_line_is_the_one_that_is_answered() {
    let home = Home::new();
    let demo = |prompt: &str| {
        let how = ["--json", "--max-tokens", "12", "--shards", "3"];
        home.json(&[&["demo", prompt], &how[..]].concat())["text"].clone()
    };
    let question = "Name one animal with stripes.";
    let greedy = ["--max-tokens", "12", "--temperature", "0"];
    let local = home.json(&[&["chat", question, "--local", "--json"][..], &greedy].concat());
    assert_eq!(demo(question), local["text"]);
    assert_ne!(demo(question), demo("Why is the sky blue?"));
}

#[test]
fn the_mesh_bench_compares_every_answer_and_reports_all_speeds() {
    let _alone = PROCESSORS.write();
    let home = Home::new();
    let bench = "bench mesh --json --repetitions 1 --prefill 100 --decode 6 --chats 3";
    let report = home.json(&words(bench));
    // The speed is not tested, but the comparison of the answers is.
    assert_eq!(report["same_answers"], true);
    assert_eq!(report["answer_tokens"], 6);
    for speed in ["prefill", "one_chat", "many_chats"] {
        for value in ["base", "mesh", "ratio"] {
            let value = &report[speed][value];
            assert!(value.as_f64().is_some_and(|n| n > 0.0), "{speed}: {report}");
        }
    }
    // The prompt may end before the chat says another word.
    assert!(report["chat_beside_prompt"]["base"].as_f64() > Some(0.0));
    assert!(report["prompt_beside_chat"]["mesh"].as_f64() > Some(0.0));
    let hops = report["hops"].as_array().expect("hops");
    assert_eq!(hops.len(), 2);
    assert_eq!(hops[1]["layers"], json!([16, 29]));
    assert_eq!(report["own_layers"][0]["layers"], json!([0, 1]));
}
