//! Binary of the `hearthnet` library.

use std::process::ExitCode;

fn main() -> ExitCode {
    hearthnet::main(std::env::args_os())
}
