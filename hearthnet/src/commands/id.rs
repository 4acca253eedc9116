//! `hearthnet id`.

use crate::cli::args::{Global, IdArgs};
use crate::cli::failure::Failure;
use crate::cli::output::{note, print, print_json};

pub(crate) fn run(args: &IdArgs, global: &Global) -> Result<(), Failure> {
    let id = global.node_key()?.id();
    if args.json {
        print_json(&serde_json::json!({ "node_id": id.to_string(), "short": id.short() }))
    } else {
        // Standard output has only the id, so that scripts can use $(hearthnet id).
        print(format!("{id}\n"))?;
        note(format!("short: {}", id.short()));
        Ok(())
    }
}
