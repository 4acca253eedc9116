//! Processes that compute for the hosts of a daemon.
//!
//! ```text
//!  daemon ---- a connection for each engine ----> starter ----> hearthnet engine run
//!     |                                                                 |
//!     +---------------------- messages of the engine -------------------+
//! ```
//!
//! A sandboxed daemon cannot start programs. So it starts a *starter* before it enters the sandbox.
//! The starter does one thing: for each connection that the daemon sends it, it starts this program
//! as an engine, with the connection as standard input. It ends with the daemon, and the engines end
//! with it.

use std::io;
use std::process::{Child, Stdio};
use std::sync::OnceLock;

use hearthnet_platform::pipe::Pipe;
use hearthnet_platform::process::{
    end_first_without_memory, end_with_parent, set_name, this_program,
};
use hearthnet_platform::terminal::in_own_group;
use hearthnet_shard::{Connect, serve_engine};

use super::cards;
use crate::cli::args::EngineCommand;

/// Connection to the starter of this process.
static STARTER: OnceLock<Pipe> = OnceLock::new();

/// Starts the starter. Must run before the sandbox and before any thread.
pub(crate) fn start_starter() {
    let started = || -> io::Result<Pipe> {
        let (near, far) = Pipe::pair()?;
        start(EngineCommand::Starter, far)?;
        Ok(near)
    };
    match started() {
        Ok(pipe) => drop(STARTER.set(pipe)),
        Err(error) => tracing::warn!("engines run in this process: {error}"),
    }
}

/// Starts engine processes, if this process has a starter.
pub(crate) fn connect() -> Option<Connect> {
    let starter = STARTER.get()?;
    Some(Box::new(move || {
        let (near, far) = Pipe::pair()?;
        starter.send_pipe(&far)?;
        Ok(near)
    }))
}

fn start(role: EngineCommand, pipe: Pipe) -> io::Result<Child> {
    let mut command = this_program();
    command.args(["engine", role.into()]);
    command.stdin(pipe).stdout(Stdio::null());
    // A signal of the terminal reaches only the daemon, which ends its chats in order.
    in_own_group(&mut command);
    command.spawn()
}

/// Runs the starter, until the daemon ends.
pub(crate) fn run_starter() -> io::Result<()> {
    let daemon = Pipe::from_stdin()?;
    set_name(c"hearthnet-start");
    while let Some(pipe) = daemon.receive_pipe()? {
        match start(EngineCommand::Run, pipe) {
            // The daemon notices that its connection has ended.
            Err(error) => tracing::error!("cannot start an engine: {error}"),
            Ok(engine) => drop(std::thread::Builder::new().spawn(|| report_end(engine))),
        }
    }
    Ok(())
}

/// Waits for the end of an engine, so that the system forgets it.
fn report_end(mut engine: Child) {
    match engine.wait() {
        Ok(status) if status.success() => {}
        Ok(status) => tracing::error!("engine process {} has ended: {status}", engine.id()),
        Err(error) => tracing::error!("engine process {}: {error}", engine.id()),
    }
}

/// Runs an engine, until its connection ends. `isolate` sandboxes this process, once the graphics card
/// that the daemon has chosen is open. Its argument says whether one is.
pub(crate) fn run_engine(isolate: impl FnOnce(bool)) -> io::Result<()> {
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
