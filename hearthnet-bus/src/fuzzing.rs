//! Bodies of the fuzz targets, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use crate::community::log::{Event, EventHash, Heads};
use crate::evidence::Evidence;
use crate::invite::{Invite, InviteError, JoinRequest};
use crate::receipt::{Claim, Inputs, Statement};
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
            evidence.finding(&evidence.rows, evidence.row_bytes as usize);
        }
    }
}

/// Reads text as an invite code, bytes as the content of one, and JSON as a request to join. Random
/// text passes no checksum, so the content is read without one too.
///
/// # Panics
/// If an accepted code has a second spelling, or an accepted content a second encoding.
pub fn invite(bytes: &[u8]) {
    let refused = |error: InviteError| {
        assert!(!error.to_string().contains(char::is_control));
    };
    let text = String::from_utf8_lossy(bytes);
    match text.parse::<Invite>() {
        Ok(invite) => {
            let typed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
            assert!(invite.to_string().eq_ignore_ascii_case(&typed));
        }
        Err(error) => refused(error),
    }
    match Invite::from_content(bytes) {
        Ok(invite) => {
            assert_eq!(invite.bytes().as_slice(), bytes);
            let again = invite.to_string().parse::<Invite>();
            assert!(again.is_ok_and(|again| again.bytes().as_slice() == bytes));
        }
        Err(error) => refused(error),
    }
    if let Ok(request) = serde_json::from_slice::<JoinRequest>(bytes) {
        let _ = request.verify();
    }
}

/// Bytes of a row of the target [`receipt`].
const ROW: usize = 4;

/// Reads bytes as the statement of a receipt, and as a script for the hashes of a stream's input rows.
/// Each move is a byte for the kind and one for the argument:
///
/// | first byte modulo 4 | move |
/// |---|---|
/// | 0, 1 | rows are appended: 1 to 8, filled with the second byte |
/// | 2 | the stream is shortened to the position in the second byte |
/// | 3 | rows from the position in the second byte on are replaced by one |
///
/// # Panics
/// If an accepted statement has a second encoding; if the hashes differ from those of the rows, or a
/// claim about other rows holds.
pub fn receipt(bytes: &[u8]) {
    if let Some(statement) = Statement::decode(bytes) {
        assert_eq!(statement.encode(), bytes);
        assert!(statement.verify(&[0; SIGNATURE_BYTES]).is_err());
    }
    let (mut inputs, mut rows) = (Inputs::default(), Vec::<u8>::new());
    for (index, step) in bytes.chunks_exact(2).take(256).enumerate() {
        let [kind, argument] = [step[0], step[1]];
        let length = rows.len() / ROW;
        let at = match kind % 4 {
            0 | 1 => length,
            _ => usize::from(argument),
        };
        let added = match kind % 4 {
            0 | 1 => 1 + usize::from(argument % 8),
            2 => 0,
            _ => 1,
        };
        let position = u32::try_from(at).unwrap_or(u32::MAX);
        if kind % 4 == 2 {
            inputs.truncate(position);
            rows.truncate(at * ROW);
        } else {
            let new = [argument, kind, index as u8, 1].repeat(added);
            let fits = at <= length;
            assert_eq!(inputs.extend(position, &new, ROW), fits);
            if fits {
                rows.truncate(at * ROW);
                rows.extend_from_slice(&new);
            }
        }
        assert_eq!(inputs.length() as usize, rows.len() / ROW);
    }
    let mut whole = Inputs::default();
    assert!(whole.extend(0, &rows, ROW) && whole == inputs);
    let last = rows.rchunks(ROW).next().unwrap_or_default();
    if let Some(claim) = Claim::new(&inputs, u32::from(!rows.is_empty()), last) {
        assert!(claim.is_true(&rows, ROW));
        let mut other = rows.clone();
        if let Some(byte) = other.last_mut() {
            *byte ^= 1;
        }
        assert!(!claim.is_true(&other, ROW));
    }
}
