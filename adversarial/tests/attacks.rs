//! Every attack of the registry as a test: its claim must hold. Timings are judged only in the
//! report.

#![allow(clippy::panic, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use hearthnet_adversarial::{
    ATTACKS, CASES, Case, Effort, Entry, Model, Pace, Setup, TEMPLATE, run,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_hearthnet-adversarial");

async fn must_hold(entry: &Entry) {
    let setup = Setup {
        program: PathBuf::from(PROGRAM),
        pace: Pace::Brief,
        model: Model::Tiny,
        effort: Effort::Once,
    };
    let outcome = run(entry, &setup)
        .await
        .unwrap_or_else(|trouble| panic!("{trouble}"));
    assert!(
        outcome.is_good(),
        "\n  {}\n",
        outcome.failures().join("\n  ")
    );
}

macro_rules! as_tests {
    (table { $($listed:tt)* } files { $($file:tt)* }) => {
        as_tests! { $($listed)* $($file)* }
    };
    ($($(#[$mark:meta])* $case:literal $name:ident;)*) => {
        $(
            $(#[$mark])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let mut all = ATTACKS.iter();
                must_hold(all.find(|entry| entry.name == stringify!($name)).unwrap()).await;
            }
        )*
    };
}

hearthnet_adversarial::every_attack!(as_tests);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_template_of_a_new_attack_holds() {
    must_hold(&TEMPLATE).await;
}

/// The suite as users start it: `hearthnet adversarial`, by the program beside it.
fn suite(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(PROGRAM);
    let output = command.args(["program", "adversarial"]).args(args).output();
    let output = output.unwrap();
    let [said, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), said, errors)
}

#[test]
fn the_program_runs_attacks_as_a_table_an_object_and_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    let path = page.to_str().unwrap();
    let only = ["--only", "identity_mismatch_is_no_attack"];
    let brief = ["--model", "tiny", "--pace", "brief", "--jobs", "2"];
    let (status, said, errors) = suite(&[&["run"][..], &only, &brief].concat());
    assert_eq!(status, Some(2), "{said}");
    assert!(errors.contains("hearthnet adversarial list"), "{errors}");

    let only = ["--only", "1", "--only", "a_token_is_bound_to_its_subject"];
    let (status, said, errors) = suite(&[&["run", "--report", path][..], &only, &brief].concat());
    assert_eq!(status, Some(0), "{said}{errors}");
    assert!(
        said.ends_with("\n2 held, 0 did not, 0 could not be carried out\n"),
        "{said}"
    );
    let rows = said.lines().filter(|line| line.contains("  held "));
    assert_eq!(rows.count(), 2, "{said}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("a token is bound to its subject") && page.ends_with("</html>\n"));

    let (status, said, errors) =
        suite(&[&["run", "--json", "--only", "framing"][..], &brief].concat());
    assert_eq!(status, Some(0), "{said}{errors}");
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    let attacks = report["attacks"].as_array().unwrap();
    let cases: Vec<_> = attacks
        .iter()
        .map(|attack| attack["case"].as_u64())
        .collect();
    assert_eq!(cases, (1..=7).map(Some).collect::<Vec<_>>());
    assert!(attacks.iter().all(|attack| attack["verdict"] == "held"));
    assert!(attacks[0]["detection"]["median_us"].as_u64() > Some(0));
}

#[test]
fn the_program_lists_and_explains_attacks() {
    let (status, said, _) = suite(&["list"]);
    assert_eq!(status, Some(0));
    assert!(ATTACKS.iter().all(|entry| said.contains(entry.name)));
    let (status, said, _) = suite(&["explain", "33"]);
    assert_eq!(status, Some(0));
    assert!(
        said.contains("tensor_nonfinite") && said.contains("One NaN in a row"),
        "{said}"
    );
    let (_, said, _) = suite(&["explain", "--source", "33"]);
    assert_eq!(
        said,
        include_str!("../src/attacks/rows_that_are_not_finite_are_refused.rs")
    );
    let (status, said, _) = suite(&["--help"]);
    assert_eq!(status, Some(0));
    assert!(said.contains("Usage: hearthnet adversarial"), "{said}");
}

#[test]
fn every_file_is_in_the_registry_and_every_entry_names_a_case() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/attacks");
    let files: BTreeSet<String> = std::fs::read_dir(folder)
        .unwrap()
        .filter_map(|file| {
            file.unwrap()
                .path()
                .file_stem()?
                .to_str()
                .map(str::to_owned)
        })
        .filter(|name| !["mod", "prelude", "table", "template"].contains(&name.as_str()))
        .collect();
    let entries: BTreeSet<String> = ATTACKS.iter().map(|entry| entry.name.to_owned()).collect();
    assert_eq!(entries.len(), ATTACKS.len());
    // Entries without a file are functions of the table; otherwise the crate would not compile.
    assert!(files.is_subset(&entries));
    let cases: BTreeSet<u8> = ATTACKS.iter().map(|entry| entry.case).collect();
    assert!(CASES.iter().all(|case| cases.contains(&case.number)));
    for entry in ATTACKS {
        assert!(Case::find(entry.case).is_some(), "{}", entry.name);
    }
}
