//! Bodies of the fuzz targets, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use crate::SIGNATURE_BYTES;
use crate::community::log::{Event, EventHash, Heads};

/// Decodes one event and checks that an accepted event has exactly one encoding.
///
/// # Panics
/// If that property does not hold.
pub fn log_event(raw: &[u8]) {
    let verified = Event::verify(raw);
    let Some(again) = Event::encode_again(raw) else {
        assert!(verified.is_err(), "a verified event cannot be decoded");
        return;
    };
    let signed = raw.len().saturating_sub(SIGNATURE_BYTES);
    assert_eq!(raw.get(..signed), Some(again.as_slice()));
    assert!(EventHash::of(raw).is_some());
}

/// Decodes heads and checks that accepted heads have exactly one encoding.
///
/// # Panics
/// If that property does not hold.
pub fn log_heads(bytes: &[u8]) {
    if let Some(heads) = Heads::from_cbor(bytes) {
        assert_eq!(heads.to_cbor(), bytes);
    }
}
