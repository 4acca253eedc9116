//! State and memory of a process, from `/proc/PID`.

use std::fs;

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

#[cfg(test)]
mod tests {
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
