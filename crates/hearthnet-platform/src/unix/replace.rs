//! Replacing this process by another program.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Replaces this process by a program, under the same process id. Returns only if that fails.
pub fn replace(mut command: Command) -> io::Error {
    command.exec()
}
