//! Memory use of a host.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Bytes of the loaded weights, as packed for the engine; 0 while they are unloaded.
    pub weight_bytes: u64,
    /// KV bytes per position of one stream.
    pub kv_bytes_per_position: u64,
    /// Positions that all streams together may hold, in whole pages.
    #[serde(default)]
    pub kv_positions: u64,
    /// Resident memory of the process and its engine's, where the system reports it (Linux).
    pub resident_bytes: Option<u64>,
}
