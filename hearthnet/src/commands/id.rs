//! `hearthnet id`.

use crate::cli::args::Global;
use crate::cli::{Failure, note, print, print_json};

pub(crate) fn run(json: bool, global: &Global) -> Result<(), Failure> {
    let id = global.node_key()?.id();
    if json {
        print_json(&serde_json::json!({ "node_id": id.to_string(), "short": id.short() }))
    } else {
        // Standard output has only the id, so that scripts can use $(hearthnet id).
        print(format!("{id}\n"))?;
        note(format!("short: {}", id.short()));
        Ok(())
    }
}
