//! Memory use of a host.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Bytes of the loaded weights, as packed for the engine; 0 while they are unloaded.
    pub weight_bytes: u64,
    /// KV bytes per position of one stream.
    pub kv_bytes_per_position: u64,
    /// Positions that all streams together may hold, in whole pages.
    pub kv_positions: u64,
    /// Resident memory of the whole process, where the system reports it (Linux).
    pub resident_bytes: Option<u64>,
}

/// Resident memory of a process in bytes: `VmRSS` of `/proc/PID/status`, where it exists (Linux).
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
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
