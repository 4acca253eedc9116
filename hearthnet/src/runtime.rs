//! The runtime for network I/O.

use std::time::Duration;

use tokio::runtime::Runtime;

use crate::failure::Failure;

/// The runtime for network I/O. Chats and engines run on threads of their own.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Failure::internal)
}

/// Runs something to its end on a runtime of its own. What it leaves behind, as connections that say
/// goodbye, has half a second.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}
