//! Bodies of the fuzz targets, so that tests replay what a fuzzer has found. No public interface.

use crate::SIGNATURE_BYTES;
use crate::community::log::{Event, EventHash, Heads, look_at_wal};

/// Decodes one event; what is accepted has exactly one encoding.
///
/// # Panics
/// When a promise is broken.
pub fn log_event(raw: &[u8]) {
    let verified = Event::verify(raw);
    let Some(again) = Event::encode_again(raw) else {
        assert!(verified.is_err(), "verified, and cannot be decoded");
        return;
    };
    let signed = raw.len().saturating_sub(SIGNATURE_BYTES);
    assert_eq!(raw.get(..signed), Some(again.as_slice()));
    assert!(EventHash::of(raw).is_some());
}

/// Decodes heads; what is accepted has exactly one encoding.
///
/// # Panics
/// When a promise is broken.
pub fn log_heads(bytes: &[u8]) {
    if let Some(heads) = Heads::from_cbor(bytes) {
        assert_eq!(heads.to_cbor(), bytes);
    }
}

/// Looks through bytes as if they were what a crash left of SQLite's write-ahead log.
pub fn log_wal(bytes: &[u8]) {
    look_at_wal(bytes);
}
