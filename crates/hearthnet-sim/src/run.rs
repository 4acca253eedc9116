//! Runs a scene on a runtime of its own, in virtual time.

use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// Runs a scene to its end.
///
/// # Panics
/// If no runtime can be made.
#[allow(
    clippy::expect_used,
    reason = "without a runtime there is no simulation"
)]
pub(crate) fn in_virtual_time<T>(scene: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime of one thread");
    LocalSet::new().block_on(&runtime, scene)
}
