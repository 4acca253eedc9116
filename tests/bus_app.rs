//! A community app on one machine, a shard host as another member: what the example app
//! prints is what the model says on one machine alone.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

mod support;

use support::{QUIET, TOGETHER, chat_app, community, model, succeeded, text, until_answered};

const PROMPT: &str = "Name three colours.";
const TOKENS: &str = "24";

#[test]
fn an_app_hears_through_its_node_what_another_members_layers_compute() {
    let (founder, node) = community::founded(&TOGETHER);
    let member = community::join(&founder, &node);
    let _host = community::host(&member, &node, "0-29");

    let ask = [PROMPT, "--max-tokens", TOKENS, "--verbose"];
    let output = until_answered(|| chat_app(&founder, &ask));
    let why = text(&output.stderr);
    assert!(why.contains(&member.node_id()), "{why}");
    let chat = ["chat", PROMPT, "--local", "--json", "--model", model()];
    // As the app asks.
    let how = ["--max-tokens", TOKENS, "--temperature", "0"];
    let alone = founder.json(&[&QUIET[..], &chat, &how].concat());
    assert_eq!(succeeded(&output), alone["text"].as_str().expect("text"));
}
