//! `hearthnet adversarial`: runs the suite of attacks, a program beside this one. So no attack is
//! part of the program that daemons run.

use std::env::consts::EXE_SUFFIX;
use std::ffi::OsString;
use std::process::Command;

use crate::cli::{Failure, failure};

/// Name of the suite's program.
const SUITE: &str = "hearthnet-adversarial";

/// Runs the suite with these arguments, and ends this process with its exit status.
///
/// # Errors
/// If the suite is not installed, or cannot be started.
pub(crate) fn run(arguments: &[OsString]) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(Failure::internal)?;
    let program = own.with_file_name(format!("{SUITE}{EXE_SUFFIX}"));
    let status = Command::new(&program).args(arguments).status();
    let status =
        status.map_err(|error| {
            let program = program.display();
            failure!(Refused, "cannot start the suite of attacks, {program}: {error}").hint(
            "it is part of every package of HearthNet; in a checkout, `cargo build --release -p \
             hearthnet-adversarial` makes it",
        )
        })?;
    // A process that a signal ended has no status of its own.
    std::process::exit(status.code().unwrap_or(1))
}
