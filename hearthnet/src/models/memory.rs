//! Memory that models need; memory and disk that they may take.

use std::path::Path;

use hearthnet_platform::files::free_bytes;
use hearthnet_platform::hardware::available_bytes;

use crate::config::Config;

/// Estimate of the memory in bytes to run a whole model whose file has `file` bytes: the weights,
/// an eighth of that for the KV cache of a conversation, and 256 MiB for the program.
pub(crate) fn needed_bytes(file: u64) -> u64 {
    file.saturating_add(file / 8).saturating_add(256 << 20)
}

/// Bytes of weights that layers with `--layers auto` may take, of which `held` are in use:
/// host.memory_budget_mb, or what the share of the free memory in `[manners]` leaves beside keys and
/// values.
pub(crate) fn weights_budget(config: &Config, held: u64) -> u64 {
    let host = &config.research.distributed_inference.host;
    match host.memory_budget_mb.0 {
        0 => {
            let percent = config.manners.memory_percent.0;
            // Without the held layers this memory would be free.
            let held = (held / 100).saturating_mul(percent);
            let share = share_of_free(percent).saturating_add(held);
            beside_kv(share, host.kv_budget_mb.0 << 20)
        }
        mb => mb << 20,
    }
}

/// Bytes that this machine would give to weights, keys and values, of which `held` are in use.
pub(crate) fn given_bytes(config: &Config, held: u64) -> u64 {
    let kv = config.research.distributed_inference.host.kv_budget_mb.0 << 20;
    weights_budget(config, held).saturating_add(kv)
}

/// Bytes for weights out of `share` bytes for weights, keys and values. A conversation needs
/// memory for both, so weights get at least half.
fn beside_kv(share: u64, kv: u64) -> u64 {
    share.saturating_sub(kv).max(share / 2)
}

/// Share of the free memory, in bytes.
pub(crate) fn share_of_free(percent: u64) -> u64 {
    // Without a report of the system: machines that run models have two gigabytes free.
    available_bytes().unwrap_or(2 << 30) / 100 * percent
}

/// Bytes on the disk that parts of models may take, by manners.disk_gb. `None`: half of what is
/// free or taken by them.
pub(crate) fn disk_limit(config: &Config) -> Option<u64> {
    match config.manners.disk_gb.0 {
        0 => None,
        gb => Some(gb * 1_000_000_000),
    }
}

/// Bytes on the disk of `folder` that parts of models may take. `taken` are the bytes of the parts
/// there.
pub(crate) fn disk_budget(limit: Option<u64>, folder: &Path, taken: u64) -> std::io::Result<u64> {
    match limit {
        None => Ok(free_bytes(folder)?.saturating_add(taken) / 2),
        Some(bytes) => Ok(bytes),
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
    fn a_budget_in_mib_overrides_the_share_of_memory() {
        let key = "research.distributed_inference.host.memory_budget_mb=3";
        assert_eq!(weights_budget(&Config::for_test(&[key]), 1 << 30), 3 << 20);
        assert!(weights_budget(&Config::for_test(&[]), 0) > 0);
    }

    #[test]
    fn held_memory_counts_as_given() {
        let set = "research.distributed_inference.host.";
        let fixed = Config::for_test(&[
            &format!("{set}memory_budget_mb=3"),
            &format!("{set}kv_budget_mb=2"),
        ]);
        assert_eq!(given_bytes(&fixed, 1 << 30), 5 << 20);
        let share = Config::for_test(&[&format!("{set}kv_budget_mb=1")]);
        assert!(given_bytes(&share, 1 << 50) > 1 << 48);
    }

    #[test]
    fn weights_and_kv_share_memory_and_weights_get_at_least_half() {
        assert_eq!(beside_kv(8 << 30, 1 << 30), 7 << 30);
        assert_eq!(beside_kv(1 << 30, 1 << 30), 1 << 29);
        assert_eq!(beside_kv(0, 1 << 30), 0);
    }

    #[test]
    fn the_disk_budget_is_the_setting_or_half_of_the_free_disk() {
        let dir = tempfile::tempdir().unwrap();
        let budget = |set: &str, taken| {
            disk_budget(disk_limit(&Config::for_test(&[set])), dir.path(), taken).unwrap()
        };
        assert_eq!(budget("manners.disk_gb=7", 5), 7_000_000_000);
        assert!(budget("manners.disk_gb=0", 2 << 60) >= 1 << 60);
        let missing = dir.path().join("missing");
        assert!(disk_budget(None, &missing, 0).is_err());
    }
}
