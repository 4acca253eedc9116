//! Body of the fuzz target `weights_session`, also used by tests that replay a fuzzer's findings.
//! Not a public interface.

use bytes::Bytes;

use super::message::{MAX_DATA_BYTES, Reply, Request};
use super::session::{Answer, Asked, MAX_IN_FLIGHT, Received};
use super::store::Object;

/// Drives both sides of a connection. The input is a list of moves: a byte for the kind, a byte for
/// the argument or the length, and the piece.
///
/// | first byte modulo 8 | move |
/// |---|---|
/// | 0, 1 | the piece is a message to the serving side |
/// | 2, 3 | the piece is a message to the asking side |
/// | 4 | the asking side asks, as the second byte says |
/// | 5 | the serving side has answered the first request |
/// | 6 | DATA for the request with the number in the second byte, of 4,096 bytes, with more to come |
/// | 7 | the last DATA for that request, of 100 bytes |
///
/// # Panics
/// If a session breaks an invariant.
pub fn session(mut input: &[u8]) {
    let (mut received, mut asked) = (Received::default(), Asked::default());
    let (mut waiting, mut unanswered) = (0usize, 0usize);
    while let [what, length, rest @ ..] = input {
        let (piece, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        let (piece, argument) = (Bytes::copy_from_slice(piece), *length);
        let data = |len, more| {
            let bytes = vec![argument; len].into();
            Reply::Data { more, bytes }.encode(u32::from(argument))
        };
        let reply = match what % 8 {
            0 | 1 => {
                if let Ok((number, request)) = Request::decode(&piece) {
                    assert_eq!(
                        request.encode(number),
                        piece,
                        "two encodings of one message"
                    );
                }
                if received.receive(&piece).is_err() {
                    return;
                }
                unanswered += 1;
                assert!(unanswered <= MAX_IN_FLIGHT);
                None
            }
            2 | 3 => Some(piece),
            4 => {
                asked.ask(request(argument));
                waiting += 1;
                None
            }
            5 => {
                unanswered -= usize::from(received.first().is_some());
                received.answered();
                None
            }
            6 => Some(data(4096, true)),
            _ => Some(data(100, false)),
        };
        if let Some(message) = reply {
            if let Ok((number, reply)) = Reply::decode(&message) {
                assert_eq!(
                    reply.encode(number),
                    message,
                    "two encodings of one message"
                );
            }
            match asked.receive(&message) {
                Err(_) => return,
                Ok(None) => {}
                Ok(Some((_, answer))) => {
                    if let Answer::Bytes(bytes) = answer {
                        assert!(bytes.len() <= MAX_DATA_BYTES);
                    }
                    waiting -= 1;
                }
            }
            assert_eq!(waiting == 0, asked.is_empty());
        }
        input = match what % 8 {
            0..=3 => rest,
            _ => input.get(2..).unwrap_or_default(),
        };
    }
}

fn request(how: u8) -> Request {
    let weights = [how; 32];
    match how % 4 {
        0 => Request::Held { weights },
        1 => Request::Piece { weights, index: 7 },
        _ => Request::Range {
            weights,
            object: Object::Head,
            offset: 0,
            len: u32::from(how) * 100,
        },
    }
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
