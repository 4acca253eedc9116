//! `hearthnet id`.

use crate::args::{Global, IdArgs};
use crate::commands::{node_key, print_bytes, print_json};
use crate::failure::Failure;
use crate::output::note;

pub(crate) fn run(args: &IdArgs, global: &Global) -> Result<(), Failure> {
    let id = node_key(global)?.id();
    if args.json {
        print_json(&serde_json::json!({ "node_id": id.to_string(), "short": id.short() }))
    } else {
        // One line on standard output, so that $(hearthnet id) is the id and nothing else.
        print_bytes(format!("{id}\n").as_bytes())?;
        note(format!("short: {}", id.short()));
        Ok(())
    }
}
