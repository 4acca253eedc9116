//! Cores that threads run on.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Runs `act` while this thread is pinned to `core`; a process that it starts inherits the pinning.
///
/// # Errors
/// That of `act`, or the system's when it does not pin the thread.
pub fn on_core<T>(core: Option<usize>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(core) = core else { return act() };
    let before = sched_getaffinity(None)?;
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only)?;
    let result = act();
    sched_setaffinity(None, &before)?;
    result
}

/// Cores that this process may run on. Empty if the system does not report them; then nothing is
/// pinned.
pub fn cores() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect()
}
