//! Memory, processor and graphics cards of the machine.

use std::fs;
use std::path::PathBuf;

use super::bytes;

/// Available memory in bytes, without swapping, if the system reports it (Linux).
pub fn available_bytes() -> Option<u64> {
    bytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
}

/// Name of the processor in `/proc/cpuinfo`: `model name` on x86, `Model` on ARM boards; empty if
/// unknown.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        info.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().to_owned())
    };
    field("model name")
        .or_else(|| field("Model"))
        .unwrap_or_default()
}

/// Devices of graphics cards: NVIDIA's, AMD's, and the kernel's generic interface.
pub fn graphics_cards() -> Vec<PathBuf> {
    let is_card = |name: &str| name.starts_with("nvidia") || ["kfd", "dri"].contains(&name);
    let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
    let cards = devices.filter(|device| is_card(&device.file_name().to_string_lossy()));
    cards.map(|device| device.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_read_from_meminfo() {
        let table = "MemTotal:       16384 kB\nMemAvailable:    2048 kB\nBuffers: 1 kB\n";
        assert_eq!(bytes(table, "MemAvailable"), Some(2 << 20));
        for odd in [
            "",
            "MemAvailable: many kB",
            "MemAvailable: 5",
            "MemAvailable: 99999999999999999999 kB",
        ] {
            assert_eq!(bytes(odd, "MemAvailable"), None, "{odd}");
        }
    }
}
