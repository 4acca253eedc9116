//! Memory that models need, and that they may take.

use hearthnet_platform::hardware::available_bytes;

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
