//! `hearthnet config show`.

use std::fmt::Write as _;

use crate::args::ConfigCommand;
use crate::commands::print_bytes;
use crate::config::Loaded;
use crate::failure::Failure;

pub(crate) fn run(command: &ConfigCommand, loaded: &Loaded) -> Result<(), Failure> {
    let ConfigCommand::Show = command;
    let rows = loaded.explain();
    let width = rows
        .iter()
        .map(|(k, v, _)| k.len() + v.len())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for (key, value, origin) in rows {
        let pad = " ".repeat(width - key.len() - value.len());
        let _ = writeln!(out, "{key} = {value}{pad}   # {origin}");
    }
    print_bytes(out.as_bytes())
}
