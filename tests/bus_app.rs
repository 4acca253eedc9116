//! Community app on one machine, shard host as another member: the example app prints the same
//! answer as one machine alone.

use crate::support::*;

const PROMPT: &str = "Name three colours.";
const TOKENS: &str = "24";

#[test]
fn an_app_gets_answers_of_another_members_layers_through_its_node() {
    let (founder, node) = community::founded(&TOGETHER);
    let member = community::join(&founder, &node);
    let _host = community::host(&member, &node, "0-29");

    let ask = [PROMPT, "--max-tokens", TOKENS, "--verbose"];
    let output = until_answered(|| chat_app(&founder, &ask));
    let why = text(&output.stderr);
    assert!(why.contains(&member.node_id()), "{why}");
    let chat = ["chat", PROMPT, "--local", "--json", "--model", model()];
    // The app's sampling settings.
    let how = ["--max-tokens", TOKENS, "--temperature", "0"];
    let alone = founder.json(&[&QUIET[..], &chat, &how].concat());
    assert_eq!(succeeded(&output), alone["text"].as_str().expect("text"));
}
