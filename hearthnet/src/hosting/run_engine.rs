//! The process of an engine, which `engine_process.rs` starts.

use std::io;

use hearthnet_platform::pipe::Pipe;
use hearthnet_platform::process::{end_first_without_memory, end_with_parent, set_name};
use hearthnet_shard::serve_engine;

use super::host_engine::cards;

/// Runs an engine, until its connection ends. `isolate` sandboxes this process, once the graphics card
/// that the daemon has chosen is open.
pub(crate) fn run_engine(isolate: impl FnOnce()) -> io::Result<()> {
    // Ends in the middle of a batch, too.
    end_with_parent()?;
    set_name(c"hearthnet-engine");
    if let Err(error) = end_first_without_memory() {
        tracing::info!("the kernel treats this engine like other processes: {error}");
    }
    let pipe = Pipe::from_stdin()?;
    // A driver opens its files before the sandbox denies them.
    serve_engine(&pipe, |device| cards::begin(device, isolate))
}
