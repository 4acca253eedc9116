//! Bodies of the fuzz targets, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use crate::community::log::{Event, EventHash, Heads};
use crate::evidence::Evidence;
use crate::{NodeKey, SIGNATURE_BYTES, sealed};

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

/// Opens sealed evidence, and decodes and checks evidence. Accepted evidence has exactly one encoding.
///
/// # Panics
/// If that property does not hold.
pub fn evidence(bytes: &[u8]) {
    let opened = sealed::open(bytes, &NodeKey::from_secret(&[4; 32]));
    for bytes in opened.iter().map(Vec::as_slice).chain([bytes]) {
        let Ok(evidence) = Evidence::decode(bytes) else {
            continue;
        };
        assert_eq!(evidence.encode(), bytes);
        let accuser = evidence.accused.statement.caller;
        let dispute = evidence.dispute([0; 32], 1);
        if evidence.check(&accuser, &dispute, "canonical-1").is_ok() {
            // The rows stand for those that a judge computed.
            evidence.finding(&evidence.rows);
        }
    }
}
