//! Memory budget of a host.

use hearthnet_orchestrator::placement::room;

use crate::failure::{Failure, Kind};
use crate::host_engine::HostEngine;
use crate::models::OpenModel;
use crate::output::bytes;

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

/// Checks that explicitly named layers fit into `memory_budget_mb`. Without a setting there is no
/// limit.
pub(crate) fn named_layers_fit(
    model: &OpenModel,
    engine: &HostEngine,
    (lo, hi): (u32, u32),
    setting_mb: u64,
) -> Result<(), Failure> {
    if setting_mb == 0 {
        return Ok(());
    }
    let all = engine.layer_bytes(&model.file)?;
    // Missing layers are refused elsewhere.
    let layers = all.get(lo as usize..=hi as usize).unwrap_or_default();
    let needed = layers
        .iter()
        .fold(0, |all: u64, one| all.saturating_add(*one));
    let budget = weights_budget(setting_mb);
    if needed <= budget {
        return Ok(());
    }
    let fit = match room(budget, layers) {
        0 => "not one of them does".to_owned(),
        n => format!(
            "{n} of them do, {lo}-{} for example",
            lo.saturating_add(n - 1)
        ),
    };
    let whole = needed.div_ceil(1 << 20);
    Err(Failure::new(
        Kind::Config,
        format!(
            "layers {lo}-{hi} of {} take {}, which do not fit into the {} that \
             memory_budget_mb = {setting_mb} allows; {fit}",
            model.id,
            bytes(needed),
            bytes(budget),
        ),
    )
    .hint(format!(
        "name fewer layers, or set research.distributed_inference.host.memory_budget_mb to {whole} or more"
    )))
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
