//! The crate's modules form three layers: `identity` imports no other, `community` only `identity`,
//! `node` both. Checked in the sources.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// Lowest layer first.
const LAYERS: [&str; 3] = ["identity", "community", "node"];

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(path)
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Test files may import everything.
fn is_test(path: &Path) -> bool {
    let name = path.to_string_lossy();
    name.contains("/tests/") || name.ends_with("/tests.rs") || name.ends_with("_tests.rs")
}

/// The code without comments and without the tests at its end.
fn code(text: &str) -> String {
    let code = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Names that `lib.rs` re-exports from a layer.
fn names_of(layer: &str, lib: &str) -> Vec<String> {
    let Some((_, list)) = lib.split_once(&format!("pub use {layer}::{{")) else {
        return Vec::new();
    };
    let list = list.split('}').next().unwrap_or_default();
    let names = list.split(',').map(|name| name.trim().to_owned());
    names.filter(|name| !name.is_empty()).collect()
}

/// The first names of all paths that begin with `crate::`, groups in braces included.
fn imports(code: &str) -> Vec<String> {
    let word = |text: &str| -> String {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        text[..end.unwrap_or(text.len())].to_owned()
    };
    let mut found = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let Some(group) = rest.strip_prefix('{') else {
            found.push(word(rest));
            continue;
        };
        // Names at the first level of the braces.
        let (mut depth, mut fresh) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' => fresh = depth == 0,
                c if fresh && c.is_alphabetic() => {
                    found.push(word(&group[at..]));
                    fresh = false;
                }
                _ => {}
            }
        }
    }
    found
}

/// Imports of higher layers in a layer's code.
fn upwards(layer: &str, code: &str, lib: &str) -> Vec<String> {
    let own = LAYERS.iter().position(|name| *name == layer).unwrap();
    let above = &LAYERS[own + 1..];
    let mut named: Vec<String> = above.iter().map(|layer| (*layer).to_owned()).collect();
    named.extend(above.iter().flat_map(|layer| names_of(layer, lib)));
    imports(code)
        .into_iter()
        .filter(|name| named.contains(name))
        .collect()
}

#[test]
fn no_layer_imports_from_a_higher_one() {
    let lib = fs::read_to_string(source("lib.rs")).unwrap();
    let mut read = 0;
    for layer in LAYERS {
        let mut found = Vec::new();
        files(&source(layer), &mut found);
        for path in found.iter().filter(|path| !is_test(path)) {
            let text = fs::read_to_string(path).unwrap();
            let wrong = upwards(layer, &code(&text), &lib);
            assert!(wrong.is_empty(), "{} imports {wrong:?}", path.display());
            read += 1;
        }
    }
    assert!(read > 60, "only {read} files were read");
}

#[test]
fn an_import_from_a_higher_layer_is_detected() {
    let lib = fs::read_to_string(source("lib.rs")).unwrap();
    for (layer, code) in [
        ("identity", "use crate::community::log::Level;"),
        ("identity", "fn f(of: &crate::Descriptor) {}"),
        ("identity", "use crate::{NodeId, log};"),
        ("community", "use crate::node::flight;"),
        (
            "community",
            "use crate::{CommunityId, calls::{Client, Code}};",
        ),
        ("community", "crate::flight::record(event);"),
    ] {
        assert_eq!(upwards(layer, code, &lib).len(), 1, "{layer}: {code}");
    }
    for (layer, code) in [
        ("identity", "use crate::{NodeId, NodeKey};"),
        ("community", "use crate::identity::cbor::{self, Bytes};"),
        ("node", "use crate::community::log::EventLog;"),
    ] {
        assert!(upwards(layer, code, &lib).is_empty(), "{layer}: {code}");
    }
}
