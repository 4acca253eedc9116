//! Body of the fuzz target `sync_session`, also used by tests that replay a fuzzer's findings. Not
//! a public interface.

use bytes::Bytes;
use hearthnet_transport::CloseCode;

use super::budget::{Stored, SyncConfig};
use super::message::SyncMessage;
use super::session::{Done, SyncSession, WINDOW, Work};
use crate::{CommunityId, NodeKey};

/// Drives a session. The input is a list of moves: a byte for the kind, a byte for the argument or
/// the length, and the piece.
///
/// | first byte modulo 8 | move |
/// |---|---|
/// | 0 to 3 | the piece is a message |
/// | 4 | a HELLO of the right community arrives |
/// | 5 | the log changes |
/// | 6 | as many seconds pass as the second byte says |
/// | 7 | the current work fails, or succeeds as the second byte says |
///
/// # Panics
/// If the session breaks an invariant.
pub fn session(mut input: &[u8]) {
    let community = CommunityId::from(NodeKey::from_secret(&[7; 32]).id());
    let mut session = SyncSession::new(community, SyncConfig::default(), 0);
    let (mut now, mut unacked, mut work) = (0u64, 0usize, None);
    while let [what, length, rest @ ..] = input {
        let (piece, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        let argument = *length;
        match what % 8 {
            0..=3 => {
                let message = Bytes::copy_from_slice(piece);
                if let Ok(decoded) = SyncMessage::decode(&message) {
                    assert_eq!(decoded.encode(), message, "two encodings of one message");
                }
                if let Ok(SyncMessage::Ack { .. }) = SyncMessage::decode(&message) {
                    unacked = unacked.saturating_sub(1);
                }
                session.handle_message(now, &message);
            }
            4 => {
                let hello = SyncMessage::Hello {
                    version: 1,
                    community: *community.as_bytes(),
                };
                session.handle_message(now, &hello.encode());
            }
            5 => session.handle_change(),
            6 => now += u64::from(argument) * 1000,
            _ => done(&mut session, work.take(), now, argument),
        }
        session.handle_timeout(now);
        if work.is_none() {
            work = session.poll_work(now);
        }
        while let Some(message) = session.poll_transmit() {
            if let Ok(SyncMessage::Events { .. }) = SyncMessage::decode(&message) {
                unacked += 1;
                assert!(
                    unacked <= WINDOW,
                    "more batches than the window are unacknowledged"
                );
            }
        }
        if session.closed().is_some() {
            assert_eq!(session.poll_timeout(), None);
            assert_eq!(session.poll_work(now), None);
            return;
        }
        input = match what % 8 {
            0..=3 => rest,
            _ => input.get(2..).unwrap_or_default(),
        };
    }
}

fn done(session: &mut SyncSession, work: Option<Work>, now: u64, how: u8) {
    let Some(work) = work else { return };
    let done = match work {
        Work::Store(events) if how == 0 => Done::Failed(Some(events)),
        _ if how == 0 => Done::Failed(None),
        Work::Heads => Done::Heads(vec![how; 9]),
        Work::Learn(_) => Done::Learned(how != 1),
        Work::Collect => Done::Collected {
            events: vec![Bytes::from_static(b"event"); usize::from(how) % 3],
            more: how.is_multiple_of(2),
        },
        Work::Store(events) => Done::Stored(Stored {
            accepted: u64::from(how) % 4,
            known: events.len() as u64,
            refused: u64::from(how) % 3,
            hostile: (how == 255).then_some(CloseCode::InvalidSignature),
        }),
    };
    session.handle_done(now, done);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn scripts_of_chance_are_survived(script in prop::collection::vec(any::<u8>(), 0..400)) {
            super::session(&script);
        }
    }
}
