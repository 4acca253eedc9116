//! Limits of a host's HELLO.

use std::ops::RangeInclusive;

use ciborium::Value;

use crate::raw::Arrived;

/// Chunk size and buffer that the violations of tensors assume.
const DEFAULTS: (u64, u64) = (1 << 20, 64 << 20);

/// Longest interval of receipts.
pub(crate) const RECEIPT_POSITIONS: u64 = 65_536;

/// Limit in HELLO: key, default, range.
type Limit = (&'static str, u64, RangeInclusive<u64>);

static LIMITS: [Limit; 10] = [
    ("chunk_bytes", DEFAULTS.0, 4096..=16 << 20),
    ("inline_max", 65_536, 1024..=1 << 20),
    ("lifetime_ms", 3_600_000, 1..=u64::MAX),
    ("window_chunks", 16, 1..=1024),
    ("recv_buffer_bytes", DEFAULTS.1, 4096..=u32::MAX as u64),
    ("max_steps", 64, 1..=65_535),
    ("stream_steps", 32, 1..=u32::MAX as u64),
    ("caller_steps", 128, 1..=u32::MAX as u64),
    ("unread_bytes", 64 << 20, 0..=u32::MAX as u64),
    ("receipts", 0, 0..=RECEIPT_POSITIONS),
];

/// Limits of the host's HELLO that the checks depend on.
pub(crate) struct Limits {
    chunk_bytes: u64,
    recv_buffer_bytes: u64,
    pub(crate) max_steps: u64,
    pub(crate) stream_steps: u64,
    pub(crate) caller_steps: u64,
    pub(crate) receipts: u64,
}

impl Limits {
    /// Limits in a HELLO. A value that cannot be read counts as absent: the check `hello` reports
    /// it.
    pub(crate) fn of(hello: &Arrived) -> Limits {
        let limit = |name: &str| {
            let given = hello.number(name).map(u64::from);
            let default = LIMITS.iter().find(|(key, ..)| *key == name);
            given
                .or(default.map(|(_, default, _)| *default))
                .unwrap_or(0)
        };
        Limits {
            chunk_bytes: limit("chunk_bytes"),
            recv_buffer_bytes: limit("recv_buffer_bytes"),
            max_steps: limit("max_steps"),
            stream_steps: limit("stream_steps"),
            caller_steps: limit("caller_steps"),
            receipts: limit("receipts"),
        }
    }

    pub(crate) fn are_defaults(&self) -> bool {
        (self.chunk_bytes, self.recv_buffer_bytes) == DEFAULTS
    }
}

/// Tests the limits and the version in a HELLO of a host.
pub(crate) fn limits_in_range(body: &[u8]) -> Result<(), String> {
    let map: Value = ciborium::from_reader(body).map_err(|_| "HELLO is not CBOR".to_owned())?;
    let fields = map.as_map().ok_or("HELLO is not a map")?;
    let number = |name: &str, default: Option<u64>| {
        let named = fields.iter().find(|(key, _)| key.as_text() == Some(name));
        let given = match named {
            None => default,
            Some((_, value)) => value.as_integer().and_then(|number| number.try_into().ok()),
        };
        given.ok_or_else(|| format!("HELLO without a number `{name}`"))
    };
    let version = number("version", None)?;
    if version != 1 {
        return Err(format!("HELLO with version {version}"));
    }
    for (name, default, range) in &LIMITS {
        let value = number(name, Some(*default))?;
        if !range.contains(&value) {
            return Err(format!("HELLO with {name} {value}"));
        }
    }
    let [chunk, buffer] = ["chunk_bytes", "recv_buffer_bytes"];
    match number(chunk, Some(DEFAULTS.0))? <= number(buffer, Some(DEFAULTS.1))? {
        true => Ok(()),
        false => Err(format!("HELLO with a {buffer} smaller than {chunk}")),
    }
}
