//! Memory of this machine, and of models.

/// Available memory in bytes, without swapping, if the system reports it (Linux).
pub(crate) fn available_bytes() -> Option<u64> {
    parse_available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Estimate of the memory in bytes to run a whole model whose file has `file` bytes: the weights,
/// an eighth of that for the KV cache of a conversation, and 256 MiB for the program.
pub(crate) fn needed_bytes(file: u64) -> u64 {
    file.saturating_add(file / 8).saturating_add(256 << 20)
}

/// Bytes of weights that `--layers auto` may take: the setting in MiB, or half of the free memory,
/// so that other programs of the household are not affected.
pub(crate) fn weights_budget(setting_mb: u64) -> u64 {
    match setting_mb {
        // Without a report of the system: machines that run models have a gigabyte free.
        0 => available_bytes().map_or(1 << 30, |free| free / 2),
        mb => mb << 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_read_from_meminfo() {
        let table = "MemTotal:       16384 kB\nMemAvailable:    2048 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_available(table), Some(2 << 20));
        for odd in [
            "",
            "MemAvailable: many kB",
            "MemAvailable: 5",
            "MemAvailable: 99999999999999999999 kB",
        ] {
            assert_eq!(parse_available(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_model_needs_more_than_its_file() {
        assert_eq!(needed_bytes(8 << 30), (9 << 30) + (256 << 20));
        assert_eq!(needed_bytes(u64::MAX), u64::MAX);
    }

    #[test]
    fn the_default_budget_is_half_of_the_free_memory() {
        assert_eq!(weights_budget(3), 3 << 20);
        assert!(weights_budget(0) > 0);
    }
}
