use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::*;

fn known() -> BTreeSet<String> {
    let names = NUMBERS.iter().map(|number| number.name.to_owned());
    names.collect()
}

/// Rust files of the crates that record metrics, without their tests.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = "crates/hearthnet-http hearthnet hearthnet-bus hearthnet-orchestrator \
                  hearthnet-shard hearthnet-transport";
    let dirs = crates
        .split(' ')
        .map(|folder| root.join(folder).join("src"));
    let (mut dirs, mut files): (Vec<PathBuf>, Vec<PathBuf>) = (dirs.collect(), Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            match path.is_dir() {
                true => dirs.push(path),
                false if name.ends_with("tests.rs") => {}
                false if name.ends_with(".rs") => files.push(path),
                false => {}
            }
        }
    }
    files
}

/// Names passed to a macro or method as literals, its first argument.
fn names_in<'a>(text: &'a str, call: &str) -> Vec<&'a str> {
    let after = text.split(call).skip(1);
    let names = after.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
    names.collect()
}

#[test]
fn every_metric_is_described_and_recorded() {
    let mut counted = BTreeSet::new();
    for path in sources() {
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for (call, kinds) in [
            ("histogram!(", &[Kind::Histogram][..]),
            ("gauge!(", &[Kind::Gauge]),
            // Sums over the hosts of a process.
            (".gauge(", &[Kind::Gauge]),
            ("counter!(", &[Kind::Counter, Kind::Labelled]),
        ] {
            for name in names_in(code, call) {
                let described = NUMBERS.iter().find(|number| number.name == name);
                let kind = described.map(|number| number.kind);
                assert!(
                    kind.is_some_and(|kind| kinds.contains(&kind)),
                    "{name} of {} is not described as what it is",
                    path.display()
                );
                counted.insert(name.to_owned());
            }
        }
    }
    assert_eq!(counted, known());
}

#[test]
fn names_and_units_are_as_prometheus_wants_them() {
    for number in NUMBERS {
        let is_total = number.name.ends_with("_total");
        let counts = matches!(number.kind, Kind::Counter | Kind::Labelled);
        assert_eq!(is_total, counts, "{}", number.name);
        if number.kind == Kind::Histogram {
            let has_buckets = ["_seconds", "_tokens_per_second"];
            let has_buckets = has_buckets.iter().any(|unit| number.name.ends_with(unit));
            assert!(has_buckets, "{}", number.name);
        }
        // As `promtool check metrics`: base units, and no types or reserved endings.
        let reserved = "ms us ns bucket count sum histogram gauge counter summary";
        let mut parts = number.name.split('_');
        let is_plain = parts.all(|part| !reserved.split(' ').any(|word| word == part));
        assert!(is_plain, "{}", number.name);
        let described = number.what.len() > 10 && !number.what.ends_with('.');
        assert!(described, "{}", number.name);
    }
}

#[test]
fn the_dashboard_shows_exactly_the_metrics() {
    let text = include_str!("../../../../config/grafana-dashboard.json");
    let dashboard: serde_json::Value = serde_json::from_str(text).unwrap();
    let mut shown = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let id = panel["id"].as_u64().unwrap();
        assert!(ids.insert(id), "two panels, one id");
        // A row is a heading, and has no targets.
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().unwrap();
            let words = expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let is_ours = |word: &&str| {
                word.starts_with("distributed_inference_") || word.starts_with("hearthnet_")
            };
            let names = words.filter(is_ours);
            shown.extend(names.map(|word| word.trim_end_matches("_bucket").to_owned()));
        }
    }
    assert_eq!(shown, known());
}

#[test]
fn the_names_of_the_specification_are_there() {
    let names = "pipeline_construct_seconds first_token_seconds tokens_per_second shard_latency_seconds \
                 failovers_total fallback_to_local_total shard_corruption_detected_total";
    for name in names.split(' ') {
        let name = format!("distributed_inference_{name}");
        assert!(known().contains(&name), "{name}");
    }
}
