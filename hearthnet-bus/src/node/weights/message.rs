//! Messages of the transfer: fixed layouts, integers big-endian. Each is one binary WebSocket
//! message. A message has exactly one encoding.

use std::ops::{Range, RangeInclusive};

use bytes::{BufMut as _, Bytes, BytesMut};
use hearthnet_transport::{CloseCode, Violation};

use super::store::{Held, Object};

/// Maximum bytes of a DATA message: one piece.
pub const MAX_DATA_BYTES: usize = 262_144;
/// Numbers of bytes that an answer may have.
pub(super) const DATA_LENGTHS: RangeInclusive<usize> = 1..=MAX_DATA_BYTES;
/// Maximum number of runs in HELD_REPLY.
pub const MAX_RUNS: usize = 32_768;
/// Maximum message length in bytes: 64 bytes above the longest list of runs, and above DATA.
pub(super) const MAX_MESSAGE_BYTES: usize = 8 * MAX_RUNS + 64;

const HELD: u8 = 0x01;
const GET_PIECE: u8 = 0x02;
const GET_RANGE: u8 = 0x03;
const HELD_REPLY: u8 = 0x81;
const DATA: u8 = 0x82;
const NONE: u8 = 0x83;

/// Message of the asking side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The protocol has these.
pub enum Request {
    /// HELD: what the peer holds of a model.
    Held { weights: [u8; 32] },
    /// GET_PIECE.
    Piece { weights: [u8; 32], index: u32 },
    /// GET_RANGE: `len` bytes of an object, 1 to [`MAX_DATA_BYTES`].
    Range {
        weights: [u8; 32],
        object: Object,
        offset: u64,
        len: u32,
    },
}

/// Message of the serving side.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The protocol has these.
pub enum Reply {
    /// HELD_REPLY.
    Held(Held),
    /// DATA: bytes of the answer, 1 to [`MAX_DATA_BYTES`]; `more` follow.
    Data { more: bool, bytes: Bytes },
    /// NONE: the peer does not hold it.
    None,
}

// Shows sizes instead of contents.
impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Held(held) => write!(f, "Held({} runs)", held.pieces.len()),
            Self::Data { more, bytes } => write!(f, "Data({} bytes, more {more})", bytes.len()),
            Self::None => f.write_str("None"),
        }
    }
}

impl Request {
    /// Encodes the request with its number.
    pub fn encode(&self, number: u32) -> Bytes {
        let mut out = BytesMut::with_capacity(64);
        let mut begin = |kind: u8, weights: &[u8; 32]| {
            out.put_u8(kind);
            out.put_u32(number);
            out.put_slice(weights);
        };
        match self {
            Self::Held { weights } => begin(HELD, weights),
            Self::Piece { weights, index } => {
                begin(GET_PIECE, weights);
                out.put_u32(*index);
            }
            Self::Range {
                weights,
                object,
                offset,
                len,
            } => {
                begin(GET_RANGE, weights);
                out.put_u8(*object as u8);
                out.put_u64(*offset);
                out.put_u32(*len);
            }
        }
        out.freeze()
    }

    /// Decodes a request of a peer, and its number.
    ///
    /// # Errors
    /// `frame_length`, `frame_unknown`, `protocol_state` for a reply, or `body_malformed` for a
    /// value out of its range.
    pub fn decode(message: &[u8]) -> Result<(u32, Request), Violation> {
        let mut fields = Fields(message);
        let (kind, number) = fields.begin()?;
        if !matches!(kind, HELD | GET_PIECE | GET_RANGE) {
            return Err(not_here(kind));
        }
        let weights = fields.take()?;
        let request = match kind {
            HELD => Self::Held { weights },
            GET_PIECE => Self::Piece {
                weights,
                index: fields.u32()?,
            },
            _ => Self::Range {
                weights,
                object: match fields.take()? {
                    [0] => Object::Head,
                    [1] => Object::Manifest,
                    [2] => Object::PieceList,
                    _ => return Err(malformed("an unknown object")),
                },
                offset: fields.u64()?,
                len: match fields.u32()? {
                    len if DATA_LENGTHS.contains(&(len as usize)) => len,
                    _ => return Err(malformed("a range of no bytes, or of too many")),
                },
            },
        };
        match fields.0 {
            [] => Ok((number, request)),
            _ => Err(length("something after the message")),
        }
    }
}

impl Reply {
    /// Encodes the reply to request `number`. Runs above the limit are left out.
    pub fn encode(&self, number: u32) -> Bytes {
        let room = match self {
            Self::Held(held) => 8 * held.pieces.len().min(MAX_RUNS) + 32,
            Self::Data { bytes, .. } => bytes.len() + 8,
            Self::None => 8,
        };
        let mut out = BytesMut::with_capacity(room);
        let mut begin = |kind: u8| {
            out.put_u8(kind);
            out.put_u32(number);
        };
        match self {
            Self::Held(held) => {
                begin(HELD_REPLY);
                out.put_u64(held.head_bytes);
                out.put_u64(held.manifest_bytes);
                out.put_u64(held.piece_list_bytes);
                for run in held.pieces.iter().take(MAX_RUNS) {
                    out.put_u32(run.start);
                    out.put_u32(run.end);
                }
            }
            Self::Data { more, bytes } => {
                begin(DATA);
                out.put_u8(u8::from(*more));
                out.put_slice(bytes);
            }
            Self::None => begin(NONE),
        }
        out.freeze()
    }

    /// Decodes a reply of a peer, and the number of its request. The bytes of DATA stay a slice of
    /// the message.
    ///
    /// # Errors
    /// `frame_length`, `frame_unknown`, `protocol_state` for a request, `frame_too_big`, or
    /// `body_malformed` for a value out of its range.
    pub fn decode(message: &Bytes) -> Result<(u32, Reply), Violation> {
        let mut fields = Fields(message);
        let (kind, number) = fields.begin()?;
        let reply = match kind {
            HELD_REPLY => Self::Held(Held {
                head_bytes: fields.u64()?,
                manifest_bytes: fields.u64()?,
                piece_list_bytes: fields.u64()?,
                pieces: runs(fields.0)?,
            }),
            DATA => {
                let more = match fields.take()? {
                    [more @ (0 | 1)] => more == 1,
                    _ => return Err(malformed("a flag that is neither 0 nor 1")),
                };
                if fields.0.len() > MAX_DATA_BYTES {
                    return Err(CloseCode::FrameTooBig.violation("more data than a piece has"));
                }
                if fields.0.is_empty() {
                    return Err(length("data without bytes"));
                }
                let bytes = message.slice_ref(fields.0);
                Self::Data { more, bytes }
            }
            NONE if fields.0.is_empty() => Self::None,
            NONE => return Err(length("something after the message")),
            kind => return Err(not_here(kind)),
        };
        Ok((number, reply))
    }
}

fn runs(bytes: &[u8]) -> Result<Vec<Range<u32>>, Violation> {
    let (pairs, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(length("half a run"));
    }
    if pairs.len() > MAX_RUNS {
        return Err(CloseCode::FrameTooBig.violation("too many runs"));
    }
    let mut runs: Vec<Range<u32>> = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let mut fields = Fields(pair);
        let run = fields.u32()?..fields.u32()?;
        let is_after = runs.last().is_none_or(|last| last.end < run.start);
        if run.is_empty() || !is_after {
            return Err(malformed("runs that are empty, touch or go back"));
        }
        runs.push(run);
    }
    Ok(runs)
}

fn malformed(detail: &'static str) -> Violation {
    CloseCode::BodyMalformed.violation(detail)
}

fn length(detail: &'static str) -> Violation {
    CloseCode::FrameLength.violation(detail)
}

/// Violation of a message that this side never receives.
fn not_here(kind: u8) -> Violation {
    match kind {
        HELD | GET_PIECE | GET_RANGE | HELD_REPLY | DATA | NONE => {
            CloseCode::ProtocolState.violation("a message in the wrong direction")
        }
        _ => CloseCode::FrameUnknown.violation("an unknown kind of message"),
    }
}

/// Fields of a message that are still to be read.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let split = self.0.split_first_chunk();
        let (taken, rest) = split.ok_or_else(|| length("the message ends early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, Violation> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Violation> {
        self.take().map(u64::from_be_bytes)
    }

    /// Kind of the message, and number of its request.
    fn begin(&mut self) -> Result<(u8, u32), Violation> {
        let [kind] = self.take()?;
        Ok((kind, self.u32()?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_request() -> impl Strategy<Value = Request> {
        let object = prop_oneof![
            Just(Object::Head),
            Just(Object::Manifest),
            Just(Object::PieceList)
        ];
        let len = 1..=MAX_DATA_BYTES as u32;
        prop_oneof![
            any::<[u8; 32]>().prop_map(|weights| Request::Held { weights }),
            any::<([u8; 32], u32)>().prop_map(|(weights, index)| Request::Piece { weights, index }),
            (any::<[u8; 32]>(), object, any::<u64>(), len).prop_map(
                |(weights, object, offset, len)| Request::Range {
                    weights,
                    object,
                    offset,
                    len
                }
            ),
        ]
    }

    fn any_reply() -> impl Strategy<Value = Reply> {
        let pieces = prop::collection::vec((1..1000u32, 1..1000u32), 0..40).prop_map(|steps| {
            let mut at = 0;
            let run = |(gap, len)| {
                let start: u32 = at + gap;
                at = start + len;
                start..at
            };
            steps.into_iter().map(run).collect()
        });
        prop_oneof![
            (any::<(u64, u64, u64)>(), pieces).prop_map(|(bytes, pieces)| Reply::Held(Held {
                head_bytes: bytes.0,
                manifest_bytes: bytes.1,
                piece_list_bytes: bytes.2,
                pieces,
            })),
            (any::<bool>(), prop::collection::vec(any::<u8>(), 1..500)).prop_map(
                |(more, bytes)| Reply::Data {
                    more,
                    bytes: bytes.into()
                }
            ),
            Just(Reply::None),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_the_wire(
            number in any::<u32>(),
            request in any_request(),
            reply in any_reply(),
        ) {
            prop_assert_eq!(Request::decode(&request.encode(number)), Ok((number, request)));
            prop_assert_eq!(Reply::decode(&reply.encode(number)), Ok((number, reply)));
        }

        #[test]
        fn decoding_never_panics_and_a_message_has_one_encoding(
            kind in prop_oneof![1..=4u8, 0x80..=0x84u8],
            mut bytes in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            bytes.insert(0, kind);
            let bytes = Bytes::from(bytes);
            if let Ok((number, request)) = Request::decode(&bytes) {
                prop_assert_eq!(request.encode(number), &bytes);
            }
            if let Ok((number, reply)) = Reply::decode(&bytes) {
                prop_assert_eq!(reply.encode(number), &bytes);
            }
        }
    }

    #[test]
    fn each_fault_of_a_message_has_its_code() {
        use CloseCode::{BodyMalformed, FrameLength, FrameTooBig, FrameUnknown, ProtocolState};
        let weights = [7; 32];
        let request = |message: &[u8]| Request::decode(message).unwrap_err().code;
        let piece = Request::Piece { weights, index: 1 }.encode(1);
        let range = |len| Request::Range {
            weights,
            object: Object::Head,
            offset: 0,
            len,
        };
        assert_eq!(request(&[]), FrameLength);
        assert_eq!(request(&piece[..piece.len() - 1]), FrameLength);
        assert_eq!(request(&[&piece[..], &[0]].concat()), FrameLength);
        assert_eq!(request(&[9, 0, 0, 0, 1]), FrameUnknown);
        assert_eq!(request(&Reply::None.encode(1)), ProtocolState);
        assert_eq!(request(&range(0).encode(1)), BodyMalformed);
        let above = MAX_DATA_BYTES as u32 + 1;
        assert_eq!(request(&range(above).encode(1)), BodyMalformed);
        let mut object = range(1).encode(1).to_vec();
        object[37] = 3;
        assert_eq!(request(&object), BodyMalformed);

        let reply = |message: &Bytes| Reply::decode(message).unwrap_err().code;
        let data = |len| Reply::Data {
            more: false,
            bytes: vec![0; len].into(),
        };
        assert_eq!(reply(&piece), ProtocolState);
        assert_eq!(reply(&data(0).encode(1)), FrameLength);
        assert_eq!(reply(&data(MAX_DATA_BYTES + 1).encode(1)), FrameTooBig);
        assert!(data(MAX_DATA_BYTES).encode(1).len() <= MAX_MESSAGE_BYTES);
        let mut flag = data(1).encode(1).to_vec();
        flag[5] = 2;
        assert_eq!(reply(&flag.into()), BodyMalformed);
        let held = |pieces: &[(u32, u32)]| {
            let pieces = pieces.iter().map(|(start, end)| *start..*end).collect();
            let held = Held {
                pieces,
                ..Held::default()
            };
            Reply::Held(held).encode(1)
        };
        for runs in [
            &[(3, 3)][..],
            &[(4, 3)],
            &[(0, 2), (2, 3)],
            &[(5, 6), (0, 1)],
        ] {
            assert_eq!(reply(&held(runs)), BodyMalformed, "{runs:?}");
        }
        let most: Vec<_> = (0..=MAX_RUNS as u32).map(|n| (2 * n, 2 * n + 1)).collect();
        let most = held(&most);
        assert!(most.len() <= MAX_MESSAGE_BYTES);
        let Ok((1, Reply::Held(read))) = Reply::decode(&most) else {
            panic!("the runs above the limit are left out");
        };
        assert_eq!(read.pieces.len(), MAX_RUNS);
        let above = [&most[..], &[0xff; 8]].concat();
        assert_eq!(reply(&above.into()), FrameTooBig);
    }

    #[test]
    fn the_examples_of_the_specification_hold() {
        let spec = include_str!("../../../../specs/weights-transfer.md");
        let example = spec
            .split("```hex\n")
            .nth(1)
            .and_then(|it| it.split("```").next());
        let lines: Vec<Vec<u8>> = example
            .unwrap()
            .lines()
            .map(|line| hex::decode(line.replace(' ', "")).unwrap())
            .collect();
        let weights = [0x11; 32];
        let data = |more, bytes: &'static [u8]| Reply::Data {
            more,
            bytes: Bytes::from_static(bytes),
        };
        let range = Request::Range {
            weights,
            object: Object::Manifest,
            offset: 65_536,
            len: 3,
        };
        let held = Held {
            head_bytes: 4096,
            manifest_bytes: 70_000,
            piece_list_bytes: 320,
            pieces: vec![0..4, 7..10],
        };
        let expected = [
            Request::Held { weights }.encode(1),
            Reply::Held(held).encode(1),
            Request::Piece { weights, index: 9 }.encode(2),
            range.encode(3),
            Reply::None.encode(2),
            data(false, b"\xaa\xbb\xcc").encode(3),
        ];
        assert_eq!(lines, expected);
    }
}
