//! Clocks, name of the machine, priority of a thread.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Name of the machine in its network.
pub fn host_name() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// Time since boot, including sleep.
#[cfg(target_os = "linux")]
pub fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}

/// Time since the first call in this process.
#[cfg(not(target_os = "linux"))]
pub fn monotonic() -> Duration {
    static START: std::sync::LazyLock<std::time::Instant> =
        std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed()
}

/// Milliseconds since boot, including sleep.
#[cfg(target_os = "linux")]
pub fn up_ms() -> u64 {
    u64::try_from(monotonic().as_millis()).unwrap_or(u64::MAX)
}

/// CPU time of the calling thread.
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // A thread's time is never negative.
    Duration::try_from(time).unwrap_or_default()
}

/// Sets this thread's niceness, from 0 (normal priority) to 19.
pub fn stand_back(niceness: i32) {
    // On other systems than Linux the priority would apply to the whole process.
    if cfg!(target_os = "linux")
        && let Err(error) = rustix::process::setpriority_process(None, niceness)
    {
        tracing::debug!(%error, "a thread keeps the priority of its process");
    }
}
