//! Programs of other authors against a node, and the example programs. Real model, real processes.

use crate::openai_http::{alone, over_hosts};
use crate::support::*;

/// The clients that are small enough for every run. `tests/run clients` runs all of them.
const LIGHT: &str = "openai_python,anthropic_python,ollama_python";

#[test]
fn light_clients_have_the_features_of_the_table_over_two_hosts() {
    let service = over_hosts(&[]);
    let output = python("../tests/clients/table/run.py")
        .args(["--service", &service.url, &service.model])
        .args(["--here", "--only", LIGHT])
        .output()
        .expect("Python starts");
    let said = succeeded(&output);
    assert_eq!(said.matches(" chat: ok").count(), 3, "{said}");
}

#[test]
fn the_example_agent_calls_a_tool_over_two_hosts_and_answers() {
    let service = over_hosts(&[]);
    let home = Home::new();
    let notes = home.path().join("notes.txt");
    std::fs::write(notes, "The key is under the blue pot.").expect("a file");
    let output = python("../examples/agent.py")
        .args(["--url", &service.url, "--max-tokens", "100", "--folder"])
        .arg(home.path())
        .arg("Where is the key?")
        .output()
        .expect("Python starts");
    assert!(!succeeded(&output).trim().is_empty());
    let calls = text(&output.stderr);
    let is_call = |line: &str| line.starts_with("list_files {") || line.starts_with("read_file {");
    assert!(calls.lines().next().is_some_and(is_call), "{calls}");
}

#[test]
fn the_example_prints_json_by_its_schema_over_two_hosts() {
    let service = over_hosts(&[]);
    let output = python("../examples/json_by_schema.py")
        .args(["--url", &service.url])
        .arg("Ada Lovelace, born in 1815, lived in London. Alan Turing was born in 1912.")
        .output()
        .expect("Python starts");
    let said = json_output(&output);
    let people = said["people"].as_array().expect("a list");
    assert!((1..=3).contains(&people.len()), "{said}");
    for person in people {
        assert!(person["name"].is_string(), "{person}");
        let year = person["born"].as_u64().expect("a year");
        assert!((1000..=2100).contains(&year), "{person}");
        assert_eq!(
            person.as_object().map(serde_json::Map::len),
            Some(2),
            "{person}"
        );
    }
}

#[test]
fn the_example_evaluation_has_the_same_scores_over_two_hosts() {
    let [split, alone] = [over_hosts(&[]), alone()].map(|service| {
        let questions = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/evaluation.jsonl");
        let output = python("../examples/evaluation.py")
            .args(["--url", &service.url, questions])
            .output()
            .expect("Python starts");
        succeeded(&output)
    });
    // With log-probabilities in full length.
    assert_eq!(split, alone);
    let right = split.lines().filter(|line| line.contains(": right, "));
    let right = right.count();
    // By chance it would be a quarter of ten.
    assert!(right >= 5, "{split}");
    assert!(split.contains(&format!("{right} of 10 right")), "{split}");
}
