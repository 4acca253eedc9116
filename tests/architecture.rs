//! ARCHITECTURE.md matches the repository: its table of crates matches the manifests, and every
//! path exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn architecture() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md")
}

fn manifest(folder: &str) -> toml::Table {
    let path = root().join(folder).join("Cargo.toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.parse()
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Texts between backticks on a line.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Rows of the crate table, in order: a crate, and the crates that it imports.
fn table(text: &str) -> Vec<(String, BTreeSet<String>)> {
    text.lines()
        .skip_while(|line| !line.starts_with("| crate |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
            let [name, _contents, imports] = cells[..] else {
                panic!("not three cells: {line}");
            };
            let name = code_spans(name).next().expect("a crate in backticks");
            (
                name.to_owned(),
                code_spans(imports).map(str::to_owned).collect(),
            )
        })
        .collect()
}

/// Crates of the workspace by the last part of their folder, each with its non-test dependencies
/// within the workspace.
fn manifests() -> BTreeMap<String, BTreeSet<String>> {
    let workspace = manifest(".");
    let folders: Vec<&str> = workspace["workspace"]["members"]
        .as_array()
        .expect("a list of members")
        .iter()
        .map(|folder| folder.as_str().expect("the name of a folder"))
        .collect();
    let packages: BTreeMap<&str, toml::Table> = folders
        .into_iter()
        .map(|folder| (folder, manifest(folder)))
        .collect();
    let ours: BTreeSet<&str> = packages
        .values()
        .filter_map(|package| package["package"]["name"].as_str())
        .collect();
    packages
        .iter()
        .map(|(folder, package)| {
            let everywhere = package.get("dependencies");
            let on_some_systems = package
                .get("target")
                .and_then(toml::Value::as_table)
                .into_iter()
                .flat_map(|systems| systems.values())
                .filter_map(|system| system.get("dependencies"));
            let imports = everywhere
                .into_iter()
                .chain(on_some_systems)
                .filter_map(toml::Value::as_table)
                .flat_map(|dependencies| dependencies.keys())
                .filter(|name| ours.contains(name.as_str()))
                .cloned()
                .collect();
            let name = folder.rsplit('/').next().unwrap_or(folder);
            (name.to_owned(), imports)
        })
        .collect()
}

#[test]
fn the_table_of_crates_agrees_with_their_manifests() {
    let rows: BTreeMap<_, _> = table(&architecture()).into_iter().collect();
    assert_eq!(
        rows,
        manifests(),
        "left: ARCHITECTURE.md, right: Cargo.toml"
    );
}

#[test]
fn each_crate_imports_only_crates_in_the_rows_above_it() {
    let mut above = BTreeSet::new();
    for (name, imports) in table(&architecture()) {
        for import in &imports {
            assert!(above.contains(import), "{name} imports {import}");
        }
        assert!(above.insert(name), "a crate stands in the table twice");
    }
    assert!(!above.is_empty(), "no table of crates was found");
}

#[test]
fn every_path_in_architecture_md_exists() {
    let text = architecture();
    let is_path = |span: &&str| {
        let named = [".rs", ".md", ".toml", ".service"];
        !span.contains(char::is_whitespace)
            && !span.starts_with('/')
            && (span.contains('/') || named.iter().any(|end| span.ends_with(end)))
    };
    let paths: BTreeSet<&str> = text.lines().flat_map(code_spans).filter(is_path).collect();
    assert!(paths.len() > 50, "only {} paths were found", paths.len());
    let missing: Vec<&str> = paths
        .into_iter()
        .filter(|path| !root().join(path).exists())
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}
