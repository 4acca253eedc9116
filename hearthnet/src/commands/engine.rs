//! `hearthnet engine`: the processes that compute for a daemon, which starts them itself.

use crate::cli::Failure;
use crate::cli::args::EngineCommand;
use crate::daemon::isolation;
use crate::hosting::engine_process::{run_engine, run_starter};

pub(crate) fn run(command: EngineCommand) -> Result<(), Failure> {
    match command {
        EngineCommand::Starter => run_starter(),
        EngineCommand::Run => run_engine(isolation::enter_engine),
    }
    .map_err(Failure::internal)
}
