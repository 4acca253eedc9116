//! Replays the corpus of every fuzz target, and runs those that are fast on random mutations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hearthnet::fuzzing as program;
use hearthnet_bus::{calls, discovery, fuzzing as log, node, sync};
use hearthnet_engine::fuzzing as engine;
use hearthnet_files::fuzzing as files;
use hearthnet_orchestrator::fuzzing as caller;
use hearthnet_shard::fuzzing as host;
use hearthnet_tokens::fuzzing as tokens;
use hearthnet_transport::fuzzing as wire;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

type Target = fn(&[u8]);

/// Targets, with the minimum number of inputs in their corpus.
const TARGETS: [(&str, Target, usize); 29] = [
    ("bus_frames", calls::fuzzing::frames, 12),
    ("configuration", program::configuration, 13),
    ("discovery", discovery::fuzzing::announcement, 5),
    ("evidence", log::evidence, 19),
    ("gguf", tokens::gguf, 90),
    ("host_streams", host::host_streams, 9),
    ("http_request", caller::http_request, 26),
    ("hugging_face", files::hugging_face, 10),
    ("invite", log::invite, 15),
    ("kv_pages", engine::kv_pages, 7),
    ("log_event", log::log_event, 23),
    ("log_heads", log::log_heads, 10),
    ("manifest", files::manifest, 40),
    ("pipeline", caller::pipeline, 6),
    ("receipt", log::receipt, 7),
    ("safetensors", files::safetensors, 13),
    ("split", |data| drop(files::split(data)), 11),
    ("stop", tokens::stop, 20),
    ("sync_session", sync::fuzzing::session, 8),
    ("template", tokens::template, 23),
    ("template_source", tokens::template_source, 40),
    ("tokenizer", tokens::tokenizer, 10),
    ("weight_blocks", engine::weight_blocks, 20),
    ("weights_session", node::weights::fuzzing::session, 9),
    ("wire_certificate", wire::certificate, 10),
    ("wire_decompress", wire::decompress, 10),
    ("wire_frame", wire::frame, 30),
    ("wire_session", wire::session, 30),
    ("wire_websocket", wire::websocket, 10),
];

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// Files of a folder, in it or in its folders, whose name ends with one of `ends`.
fn files_in(folder: &Path, ends: &[&str]) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let files = entries
        .map(|entry| entry.unwrap().path())
        .flat_map(|path| match path.is_dir() {
            true => files_in(&path, ends),
            false => vec![path],
        });
    let is_one = |path: &PathBuf| ends.iter().any(|end| path.to_str().unwrap().ends_with(end));
    files.filter(is_one).collect()
}

/// A model of each family, which seeds these targets as well. `tests/fuzz` names the same folders.
fn families(target: &str) -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hearthnet-files/tests/data");
    match target {
        "gguf" => files_in(&data.join("families"), &[".gguf"]),
        "hugging_face" => files_in(
            &data.join("hugging_face"),
            &["/config.json", ".safetensors"],
        ),
        _ => Vec::new(),
    }
}

/// Inputs in a target's folder, sorted by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut files = files_in(&fuzz().join("corpus").join(target), &[""]);
    files.sort();
    files
        .into_iter()
        .map(|path| (path.display().to_string(), std::fs::read(&path).unwrap()))
        .collect()
}

#[test]
fn the_corpus_of_every_target_passes() {
    for (name, target, least) in TARGETS {
        let inputs = corpus(name);
        assert!(inputs.len() >= least, "{name} has {} seeds", inputs.len());
        for (path, input) in inputs {
            println!("{path}");
            target(&input);
        }
        for path in families(name) {
            println!("{}", path.display());
            target(&std::fs::read(&path).unwrap());
        }
    }
}

#[test]
fn every_new_family_seeds_the_readers_of_files() {
    let names = |target: &str| -> String {
        let paths = families(target);
        let names = paths.iter().map(|path| path.display().to_string());
        names.collect::<Vec<_>>().join(" ")
    };
    let (files, directories) = (names("gguf"), names("hugging_face"));
    for family in [
        "bert",
        "deepseek2",
        "gemma4ple",
        "gemmaembedding",
        "glm47flash",
        "granitehybrid",
        "lfm2",
        "museglimmer",
        "nemotronh",
        "nomicbert",
        "qwen35",
        "qwen35moe",
        "qwen3next",
    ] {
        assert!(files.contains(&format!("/{family}.gguf")), "{family}");
        assert!(
            directories.contains(&format!("/{family}/config.json")),
            "{family}"
        );
    }
}

#[test]
fn no_target_is_left_out() {
    let entries = std::fs::read_dir(fuzz().join("fuzz_targets")).unwrap();
    let stem = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        path.file_stem().unwrap().to_str().unwrap().to_owned()
    };
    let all: BTreeSet<String> = entries.map(stem).collect();
    assert_eq!(all, TARGETS.map(|(name, ..)| name.to_owned()).into());
}

/// Pieces of seeds, joined, cut and damaged.
fn mutant(target: &str) -> impl Strategy<Value = Vec<u8>> {
    let seeds: Vec<Vec<u8>> = corpus(target).into_iter().map(|(_, seed)| seed).collect();
    let pieces = prop::collection::vec(
        (
            prop::sample::select(seeds),
            any::<prop::sample::Index>(),
            any::<prop::sample::Index>(),
        ),
        1..4,
    );
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    (pieces, damage).prop_map(|(pieces, damage)| {
        let mut out = Vec::new();
        for (seed, from, to) in pieces {
            let (from, to) = (from.index(seed.len() + 1), to.index(seed.len() + 1));
            // The first piece keeps its beginning, because it decides how the rest is parsed.
            let from = if out.is_empty() { 0 } else { from.min(to) };
            out.extend_from_slice(&seed[from..to.max(from)]);
        }
        for (at, byte) in damage {
            if !out.is_empty() {
                let at = at.index(out.len());
                out[at] = byte;
            }
        }
        out
    })
}

#[test]
fn damaged_inputs_of_fast_targets_pass() {
    let config = ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    // Other targets have tests of this kind in their crates, or take long for some inputs.
    let fast = [
        "host_streams",
        "http_request",
        "invite",
        "kv_pages",
        "pipeline",
        "receipt",
        "safetensors",
    ];
    let damaged =
        |name: &str| name.starts_with("wire_") || name.starts_with("log_") || fast.contains(&name);
    for (name, target, _) in TARGETS.into_iter().filter(|(name, ..)| damaged(name)) {
        let run = TestRunner::new(config.clone()).run(&mutant(name), |input| {
            target(&input);
            Ok(())
        });
        run.unwrap_or_else(|failure| panic!("{name}: {failure}"));
    }
}
