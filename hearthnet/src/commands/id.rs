//! `hearthnet id`.

use crate::args::{Global, IdArgs};
use crate::failure::Failure;
use crate::output::{note, print, print_json};

pub(crate) fn run(args: &IdArgs, global: &Global) -> Result<(), Failure> {
    let id = global.node_key()?.id();
    if args.json {
        print_json(&serde_json::json!({ "node_id": id.to_string(), "short": id.short() }))
    } else {
        // One line on standard output, so that $(hearthnet id) is the id and nothing else.
        print(format!("{id}\n"))?;
        note(format!("short: {}", id.short()));
        Ok(())
    }
}
