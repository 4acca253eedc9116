//! Memory, processor and graphics cards of the machine.

use std::fs;
use std::path::PathBuf;

use super::memory::shared_memory;

/// Available memory in bytes, without swapping, if the system reports it (Linux). A control group
/// with a memory limit around this process may leave less than the machine has.
pub fn available_bytes() -> Option<u64> {
    let all = shared_memory().into_iter();
    all.map(|memory| memory.available_bytes).min()
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

/// Bytes of the largest cache of the first core, which it may share with others, if the system reports
/// it (Linux).
pub fn cache_bytes() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |cache: fs::DirEntry| {
        let size = fs::read_to_string(cache.path().join("size")).ok()?;
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        kib.checked_mul(1024)
    };
    caches.flatten().filter_map(size).max()
}

/// Devices of graphics cards: NVIDIA's, AMD's, and the kernel's generic interface.
pub fn graphics_cards() -> Vec<PathBuf> {
    let is_card = |name: &str| name.starts_with("nvidia") || ["kfd", "dri"].contains(&name);
    let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
    let cards = devices.filter(|device| is_card(&device.file_name().to_string_lossy()));
    cards.map(|device| device.path()).collect()
}
