//! Every attack of the registry as a test: its claim must hold. Timings are judged only in the
//! report.

#![allow(clippy::panic, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hearthnet_adversarial::{ATTACKS, Case, Effort, Pace, Setup, run};

async fn must_hold(name: &str) {
    let setup = Setup {
        program: PathBuf::from(env!("CARGO_BIN_EXE_hearthnet-adversarial")),
        pace: Pace::Brief,
        effort: Effort::Once,
    };
    let entry = ATTACKS.iter().find(|entry| entry.name == name).unwrap();
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
                must_hold(stringify!($name)).await;
            }
        )*
    };
}

hearthnet_adversarial::every_attack!(as_tests);

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
        .filter(|name| name != "mod" && name != "table")
        .collect();
    let entries: BTreeSet<String> = ATTACKS.iter().map(|entry| entry.name.to_owned()).collect();
    assert_eq!(entries.len(), ATTACKS.len());
    // Entries without a file are functions of the table; otherwise the crate would not compile.
    assert!(files.is_subset(&entries));
    for entry in ATTACKS {
        assert!(Case::find(entry.case).is_some(), "{}", entry.name);
    }
}
