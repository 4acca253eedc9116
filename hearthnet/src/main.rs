//! The `hearthnet` program, all of which is in the library of its name.

use std::process::ExitCode;

fn main() -> ExitCode {
    hearthnet::main(std::env::args_os())
}
