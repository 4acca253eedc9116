//! Graphics cards in the program: beside hosts on processors in one pipeline, with the same bytes.
//! The card is Mesa's driver that computes on the processor: these tests say nothing about speed.

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::support::community::founded_bare;
use crate::support::*;

/// Arguments of a host on a card.
const CARD: [&str; 2] = ["--device", "gpu:0"];

const PROMPT: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";
/// Sampling, so that a single wrong bit soon shows.
const SAMPLING: &str = "--max-tokens 24 --temperature 0.9 --top-p 0.95 --seed 20261129";

fn local(home: &Home) -> Value {
    let ask = ["chat", PROMPT, "--local", "--json"];
    home.json(&[&ask[..], &words(SAMPLING)].concat())
}

fn software(host: &Host) -> &str {
    let software = &host.process.ready["descriptor"]["software"];
    software.as_str().expect("text")
}

#[test]
fn a_host_on_a_card_among_hosts_on_processors_gives_the_same_answer() {
    let home = Home::new();
    let local = local(&home);
    for ranges in [["0-9", "10-19", "20-29"], ["0-1", "2-3", "4-29"]] {
        let hosts = [
            host(&home, ranges[0], &["--device", "cpu"]),
            host(&home, ranges[1], &CARD),
            host(&home, ranges[2], &["--device", "cpu"]),
        ];
        let arithmetic = |host: &Host| host.process.ready["descriptor"]["arithmetic"].clone();
        let found: Vec<Value> = hosts.iter().map(arithmetic).collect();
        assert_eq!(found, ["canonical-1", "canonical-1", "canonical-1"]);
        assert!(
            software(&hosts[1]).contains(" card/"),
            "{}",
            software(&hosts[1])
        );
        assert!(!software(&hosts[0]).contains(" card/"));
        let all: Vec<&Host> = hosts.iter().collect();
        let output = home.ask(PROMPT, &all, &words(SAMPLING));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(answer["text"], local["text"], "{ranges:?}");
        assert_eq!(answer["token_ids"], local["token_ids"], "{ranges:?}");
        assert_eq!(answer["arithmetic"], json!(["canonical-1"]));
    }
}

#[test]
fn an_answer_keeps_its_bytes_when_the_process_of_the_card_ends_in_the_middle() {
    let home = Home::new();
    let expected = local(&home);
    let (first, second) = (
        host(&home, "0-19", &["--device", "cpu"]),
        host(&home, "20-29", &CARD),
    );
    let spare = host(&home, "20-29", &["--device", "cpu"]);
    let all = shards([&first, &second, &spare].map(|host| &host.address));
    let ask = ["chat", PROMPT, "--no-fallback", "--frames"];
    let args = [&ENABLE[..], &ask, &words(SAMPLING), &all].concat();
    let engine = children(second.process.child.id(), "hearthnet-engin");
    assert_eq!(engine.len(), 1, "one engine");
    let frames = frames(&mut home.hearthnet(&args), 4, |_| {
        kill_process(pid(engine[0]), Signal::KILL).expect("our own process");
    });
    let done = told(&frames, "done")[0];
    assert_eq!(done["text"], expected["text"]);
    // The host itself goes on, on its processor.
    let again = home.ask(PROMPT, &[&first, &second], &words(SAMPLING));
    assert!(again.status.success(), "{}", text(&again.stderr));
    let again: Value = serde_json::from_slice(&again.stdout).expect("JSON");
    assert_eq!(again["text"], expected["text"]);
}

/// Descendants of a process with this name.
fn children(of: u32, name: &str) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children"));
    let list = list.unwrap_or_default();
    let own = list.split(' ').filter_map(|id| id.trim().parse().ok());
    own.flat_map(|id: u32| {
        let comm = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        let mut found = children(id, name);
        if comm.trim() == name {
            found.push(id);
        }
        found
    })
    .collect()
}

#[test]
fn a_missing_card_is_refused_in_one_sentence_and_auto_uses_the_processor() {
    let home = Home::new();
    let what = ["shard", "serve", "--json", "--model", model(), "--layers"];
    let id = home.node_id();
    let args = [&ENABLE[..], &what, &["10-19", "--peer-key", &id]].concat();
    let refused = home.run(&[&args[..], &["--device", "gpu:99"]].concat());
    assert!(!refused.status.success());
    let why = text(&refused.stderr);
    assert!(
        why.contains("there is no graphics card 99 on this machine"),
        "{why}"
    );
    // `auto` never takes a driver that computes on the processor.
    let auto = host(&home, "10-19", &["--device", "auto"]);
    assert!(!software(&auto).contains(" card/"), "{}", software(&auto));
}

#[test]
fn a_card_is_measured_and_diagnose_lists_it_with_its_arithmetic() {
    let home = Home::new();
    let args = "bench engine --device gpu:0 --threads 1 --prefill 8 --decode 4 --repetitions 1";
    let measured = home.json(&[&words(args)[..], &["--json", "--model", model()]].concat());
    assert_eq!(measured["engine"], "canonical-1");
    let results = measured["results"].as_array().expect("results");
    let tests: Vec<&Value> = results.iter().map(|result| &result["test"]).collect();
    assert_eq!(tests, ["prefill", "decode"]);
    for result in results {
        assert!(result["tokens_per_second"].as_f64() > Some(0.0), "{result}");
    }
    let (founder, _node) = founded_bare();
    let told = text(&founder.run(&["diagnose"]).stderr);
    let card = ["graphics card here: gpu:0 ", "the same bytes, arithmetic "];
    assert_contains(&told, &card);
}
