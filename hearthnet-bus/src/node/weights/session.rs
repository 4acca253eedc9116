//! Requests in flight on one connection: of the asking and of the serving side. Pure.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use hearthnet_transport::{CloseCode, Violation};

use super::message::{MAX_DATA_BYTES, Reply, Request};
use super::store::Held;

/// Unanswered requests per connection.
pub(super) const MAX_IN_FLIGHT: usize = 16;
/// Smallest DATA that is not the last of its answer.
const MIN_PART_BYTES: usize = 4096;

/// Requests of a peer, in the order of their arrival. The first one is being answered.
#[derive(Debug, Default)]
pub(super) struct Received {
    open: VecDeque<(u32, Request)>,
}

impl Received {
    /// Takes a message of the peer.
    pub(super) fn receive(&mut self, message: &[u8]) -> Result<(), Violation> {
        let (number, request) = Request::decode(message)?;
        if self.open.len() >= MAX_IN_FLIGHT {
            let detail = "more unanswered requests than the limit";
            return Err(CloseCode::CreditOverrun.violation(detail));
        }
        if self.open.iter().any(|(open, _)| *open == number) {
            let detail = "a number that an unanswered request has";
            return Err(CloseCode::ProtocolState.violation(detail));
        }
        self.open.push_back((number, request));
        Ok(())
    }

    /// The request to answer.
    pub(super) fn first(&self) -> Option<(u32, Request)> {
        self.open.front().copied()
    }

    /// Removes the first request: it is answered.
    pub(super) fn answered(&mut self) {
        self.open.pop_front();
    }
}

/// Complete answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    None,
    Held(Held),
    Bytes(Vec<u8>),
}

/// Requests of this side that the peer has not answered.
#[derive(Debug, Default)]
pub(super) struct Asked {
    open: BTreeMap<u32, Open>,
    last: u32,
}

#[derive(Debug)]
struct Open {
    request: Request,
    /// Bytes of the answer received so far, if it comes in parts.
    parts: Vec<u8>,
}

impl Asked {
    /// Gives a request its number. The caller keeps to the limit of requests in flight.
    pub(super) fn ask(&mut self, request: Request) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            if !self.open.contains_key(&self.last) {
                break;
            }
        }
        let parts = Vec::new();
        self.open.insert(self.last, Open { request, parts });
        self.last
    }

    /// Takes a message of the peer. Returns a request's number and answer if it completes one.
    pub(super) fn receive(&mut self, message: &Bytes) -> Result<Option<(u32, Answer)>, Violation> {
        let (number, reply) = Reply::decode(message)?;
        let state = |detail| CloseCode::ProtocolState.violation(detail);
        let Some(open) = self.open.get_mut(&number) else {
            return Err(state("an answer without a request"));
        };
        let answer = match (reply, &open.request) {
            (Reply::None, _) if open.parts.is_empty() => Answer::None,
            (Reply::Held(held), Request::Held { .. }) => Answer::Held(held),
            (Reply::Data { more, bytes }, Request::Piece { .. } | Request::Range { .. }) => {
                let (least, most) = match open.request {
                    Request::Range { len, .. } => (len as usize, len as usize),
                    _ => (0, MAX_DATA_BYTES),
                };
                let total = open.parts.len() + bytes.len();
                if total > most || (!more && total < least) {
                    let detail = "an answer of another length";
                    return Err(CloseCode::FrameLength.violation(detail));
                }
                if more {
                    if bytes.len() < MIN_PART_BYTES {
                        let detail = "a part that is too small";
                        return Err(CloseCode::ChunkTooSmall.violation(detail));
                    }
                    // Once, for the longest answer that this side asked for.
                    open.parts.reserve_exact(most - open.parts.len());
                    open.parts.extend_from_slice(&bytes);
                    return Ok(None);
                }
                Answer::Bytes(match open.parts.is_empty() {
                    true => bytes.into(),
                    false => {
                        open.parts.extend_from_slice(&bytes);
                        std::mem::take(&mut open.parts)
                    }
                })
            }
            _ => return Err(state("an answer of another kind")),
        };
        self.open.remove(&number);
        Ok(Some((number, answer)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Object;
    use super::*;

    const WEIGHTS: [u8; 32] = [1; 32];

    fn piece(index: u32) -> Request {
        Request::Piece {
            weights: WEIGHTS,
            index,
        }
    }

    fn range(len: u32) -> Request {
        Request::Range {
            weights: WEIGHTS,
            object: Object::Head,
            offset: 0,
            len,
        }
    }

    fn data(number: u32, more: bool, len: usize) -> Bytes {
        let bytes = vec![number as u8; len].into();
        Reply::Data { more, bytes }.encode(number)
    }

    #[test]
    fn a_peer_may_have_sixteen_unanswered_requests_each_with_its_own_number() {
        let mut received = Received::default();
        for number in 0..16 {
            received.receive(&piece(number).encode(number)).unwrap();
        }
        let code = |result: Result<(), Violation>| result.unwrap_err().code;
        let above = received.receive(&piece(16).encode(16));
        assert_eq!(code(above), CloseCode::CreditOverrun);
        received.answered();
        let twice = received.receive(&piece(16).encode(1));
        assert_eq!(code(twice), CloseCode::ProtocolState);
        received.receive(&piece(16).encode(0)).unwrap();
        assert_eq!(received.first(), Some((1, piece(1))));
    }

    #[test]
    fn answers_come_in_any_order_whole_or_in_parts() {
        let mut asked = Asked::default();
        let first = asked.ask(piece(5));
        let second = asked.ask(range(10_000));
        let third = asked.ask(Request::Held { weights: WEIGHTS });
        assert_eq!(asked.receive(&data(second, true, 5_000)), Ok(None));
        let none = asked.receive(&Reply::None.encode(third));
        assert_eq!(none, Ok(Some((third, Answer::None))));
        let whole = asked.receive(&data(first, false, 262_144)).unwrap();
        assert_eq!(
            whole,
            Some((first, Answer::Bytes(vec![first as u8; 262_144])))
        );
        let rest = asked.receive(&data(second, false, 5_000)).unwrap();
        assert_eq!(
            rest,
            Some((second, Answer::Bytes(vec![second as u8; 10_000])))
        );
        assert!(asked.is_empty());
    }

    #[test]
    fn wrong_answers_are_violations() {
        use CloseCode::{ChunkTooSmall, FrameLength, ProtocolState};
        let held = Reply::Held(Held::default());
        for (request, replies, code) in [
            (piece(0), &[data(2, false, 1)][..], ProtocolState), // not asked for
            (piece(0), &[held.encode(1)], ProtocolState),
            (
                Request::Held { weights: WEIGHTS },
                &[data(1, false, 1)],
                ProtocolState,
            ),
            (range(8), &[data(1, false, 7)], FrameLength),
            (range(8), &[data(1, false, 9)], FrameLength),
            (piece(0), &[data(1, true, 4095)], ChunkTooSmall),
            (
                piece(0),
                &[data(1, true, 262_144), data(1, false, 1)],
                FrameLength,
            ),
            (
                piece(0),
                &[data(1, true, 4096), Reply::None.encode(1)],
                ProtocolState,
            ),
            // A second answer.
            (
                piece(0),
                &[data(1, false, 1), data(1, false, 1)],
                ProtocolState,
            ),
        ] {
            let mut asked = Asked::default();
            assert_eq!(asked.ask(request), 1);
            let (last, before) = replies.split_last().unwrap();
            before
                .iter()
                .for_each(|it| drop(asked.receive(it).unwrap()));
            assert_eq!(asked.receive(last).unwrap_err().code, code, "{replies:?}");
        }
    }
}
