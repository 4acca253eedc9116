//! Runtime for network I/O.

use std::time::Duration;

use hearthnet_transport::threads_can_start;
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;

use crate::cli::failure::{Failure, no_thread};

const WORKERS: usize = 2;

/// Starts the runtime for network I/O. Chats and engines run on threads of their own.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    // At least one more thread is needed for blocking work.
    threads_can_start(WORKERS + 1).map_err(|e| no_thread(&e))?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .map_err(Failure::internal)
}

/// Runs a future on a new runtime. Remaining tasks, such as closing connections, have half a
/// second.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

/// Runs work that blocks, such as on the disk, from a task.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    spawn_blocking(work).await.map_err(Failure::internal)?
}
