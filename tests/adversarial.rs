//! `hearthnet adversarial` without the suite beside the program. The suite's own tests run it with.

use std::fs;
use std::process::Command;

#[test]
fn a_program_without_the_suite_says_where_it_comes_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let (own, alone) = (
        env!("CARGO_BIN_EXE_hearthnet"),
        folder.path().join("hearthnet"),
    );
    // A link needs no copy of the program, but the folder may be on another file system.
    if fs::hard_link(own, &alone).is_err() {
        fs::copy(own, &alone).expect("a copy of the program");
    }
    let output = Command::new(&alone).args(["adversarial", "list"]).output();
    let output = output.expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(13), "{said}");
    for part in ["hearthnet-adversarial", "cargo build"] {
        assert!(said.contains(part), "{said}");
    }
}
