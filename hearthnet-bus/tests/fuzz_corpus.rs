//! Replays the corpora of the event log's fuzz targets, and feeds the targets what chance makes of them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use hearthnet_bus::fuzzing;
use proptest::prelude::*;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 3] = [
    ("log_event", fuzzing::log_event),
    ("log_heads", fuzzing::log_heads),
    ("log_wal", fuzzing::log_wal),
];

/// The inputs in a target's folder, in the order of their names.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(target);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|path| (path.display().to_string(), std::fs::read(&path).unwrap()))
        .collect()
}

#[test]
fn the_corpus_of_every_target_passes() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(inputs.len() >= 10, "{name} has only {} seeds", inputs.len());
        for (path, input) in inputs {
            println!("{path}");
            target(&input);
        }
    }
}

/// Pieces of seeds, joined, cut and damaged.
fn mutant(target: usize) -> impl Strategy<Value = Vec<u8>> {
    let seeds: Vec<Vec<u8>> = corpus(TARGETS[target].0)
        .into_iter()
        .map(|(_, seed)| seed)
        .collect();
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
            // The first piece keeps its beginning: what decides how the rest is read.
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

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_events_pass(input in mutant(0)) {
        TARGETS[0].1(&input);
    }

    #[test]
    fn damaged_heads_pass(input in mutant(1)) {
        TARGETS[1].1(&input);
    }

    #[test]
    fn damaged_write_ahead_logs_pass(input in mutant(2)) {
        TARGETS[2].1(&input);
    }
}
