//! State and memory of a process, from `/proc/PID`; how this process ends.

use std::process::Command;
use std::{fs, io};

use super::{bytes, value};

/// Whether the parent process ignores SIGHUP for this program, as `nohup` does.
pub fn hangup_is_ignored() -> bool {
    // If the system does not report it, SIGHUP is handled.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = value(&status, "SigIgn").map(|mask| u64::from_str_radix(mask, 16));
    // Signal 1 is the lowest bit.
    matches!(ignored, Some(Ok(mask)) if mask & 1 == 1)
}

/// Whether a signal has stopped the process.
pub fn is_stopped(id: u32) -> bool {
    // The third field, after a name in parentheses, is the state (proc_pid_stat(5)).
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ");
    state.is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// Resident memory of a process in bytes (`VmRSS`), if the system reports it.
pub fn resident_bytes(id: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    bytes(&status, "VmRSS")
}

/// Resident memory of a process and of all its descendants in bytes, if the system reports it.
pub fn resident_bytes_of_all(id: u32) -> Option<u64> {
    let children = children(id).into_iter().filter_map(resident_bytes_of_all);
    Some(children.fold(resident_bytes(id)?, u64::saturating_add))
}

/// Child processes of a process.
fn children(id: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{id}/task"));
    let lists = tasks.into_iter().flatten().flatten();
    let lists = lists.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let ids = lists.flat_map(|list| {
        let ids = list.split_whitespace().map(str::parse);
        ids.collect::<Vec<_>>()
    });
    ids.flatten().collect()
}

/// Command that starts the program of this process again, the same file even if another one has
/// taken its place.
#[cfg(target_os = "linux")]
pub fn this_program() -> Command {
    use std::os::unix::process::CommandExt as _;
    let mut command = Command::new("/proc/self/exe");
    command.arg0(std::env::args_os().next().unwrap_or_default());
    command
}

/// Names this process in the system's lists (at most 15 bytes).
#[cfg(target_os = "linux")]
pub fn set_name(name: &std::ffi::CStr) {
    // The name matters to readers only.
    let _ = rustix::thread::set_name(name);
}

/// Lets the kernel kill this process when the thread that started it ends.
///
/// # Errors
/// The system's error.
#[cfg(target_os = "linux")]
pub fn end_with_parent() -> io::Result<()> {
    use rustix::process::{Signal, set_parent_process_death_signal};
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Lets the kernel kill this process before most others when memory is short.
///
/// # Errors
/// The system's error.
pub fn end_first_without_memory() -> io::Result<()> {
    fs::write("/proc/self/oom_score_adj", "800")
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn the_memory_of_all_includes_a_child_process() {
        let mut sleeper = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let (own, id) = (
            super::resident_bytes(sleeper.id()).unwrap(),
            std::process::id(),
        );
        assert!(super::children(id).contains(&sleeper.id()));
        let all = super::resident_bytes_of_all(id).unwrap();
        assert!(all >= own, "{all} {own}");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_resident_memory_grows_with_what_is_touched() {
        let before = super::resident_bytes(std::process::id()).unwrap();
        let block = vec![1u8; 64 << 20];
        let after = super::resident_bytes(std::process::id()).unwrap();
        assert!(after >= before + (32 << 20), "{before} -> {after}");
        drop(block);
    }
}
