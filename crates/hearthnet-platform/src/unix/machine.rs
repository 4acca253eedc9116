//! Clocks, local time, name of the machine, priorities of a thread and of a process.

use std::process::{Command, Stdio};
use std::time::Duration;

use chrono::{DateTime, Datelike as _, Local, Timelike as _};
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

/// Local date and time of day, in the machine's time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Tests elsewhere build it.
pub struct LocalTime {
    /// Year, month and day.
    pub date: (i32, u32, u32),
    /// Minute of the day, 0 to 1439.
    pub minute: u16,
}

/// Local time of a moment, in milliseconds since 1970. `None` if no calendar has the year.
pub fn local_time(unix_ms: u64) -> Option<LocalTime> {
    let moment = DateTime::from_timestamp_millis(i64::try_from(unix_ms).ok()?)?;
    let local = moment.with_timezone(&Local);
    Some(LocalTime {
        date: (local.year(), local.month(), local.day()),
        minute: u16::try_from(local.hour() * 60 + local.minute()).ok()?,
    })
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

/// Lets the disk serve other programs before this process and the processes and threads that it
/// starts. Must run before its first thread.
///
/// rustix has no `ioprio_set`, so the program of util-linux makes the call.
pub fn stand_back_at_disk() {
    let process = std::process::id().to_string();
    let mut command = Command::new("ionice");
    command.args(["-c", "3", "-p", &process]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let done = command.stderr(Stdio::null()).status();
    if !done.is_ok_and(|status| status.success()) {
        tracing::debug!("the disk serves this process like others: ionice fails");
    }
}
