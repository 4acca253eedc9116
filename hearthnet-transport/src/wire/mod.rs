//! Frame codec: pure functions between bytes and values.
//!
//! Each WebSocket binary message is one frame: a 16-byte header, then the body.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 1 | version, 0x01 |
//! | 1 | 1 | frame type |
//! | 2 | 2 | reserved, zero |
//! | 4 | 4 | sequence number, from 1 |
//! | 8 | 4 | payload length: exactly the rest of the message |
//! | 12 | 4 | flags |
//!
//! The header and the fixed bodies are big-endian; tensor elements are little-endian.
//!
//! | file | bodies |
//! |---|---|
//! | `control.rs` | HELLO, BYE, ACK, NACK, FLOWCTL, TENSOR_END, PING, PONG |
//! | `chunk.rs` | TENSOR_DATA |
//! | `pipeline/` | STREAM_OPEN and the rest, from 0x10 |
//! | `cbor.rs` | the CBOR maps in control bodies, defined as structs |

pub(crate) mod cbor;
pub(crate) mod chunk;
pub(crate) mod control;
pub(crate) mod pipeline;
pub(crate) mod reader;
#[cfg(test)]
mod spec_tests;

use bytes::Buf as _;

use crate::code::{CloseCode, Violation};

/// Version byte of every frame.
pub const VERSION: u8 = 0x01;
/// Length of the frame header.
pub(crate) const HEADER_BYTES: usize = 16;
/// Position of the sequence number, which is filled in when the frame is sent.
const SEQUENCE_AT: std::ops::Range<usize> = 4..8;

/// Kind of a frame.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::FromRepr, strum::VariantArray,
)]
#[repr(u8)]
pub enum FrameType {
    /// A chunk of a tensor.
    TensorData = 0x01,
    /// The sender abandons a tensor.
    TensorEnd = 0x02,
    /// The receiver returns credit.
    Ack = 0x03,
    /// The receiver refuses a tensor.
    Nack = 0x04,
    /// First frame of each side.
    Hello = 0x05,
    /// Last frame of a side.
    Bye = 0x06,
    /// The receiver widens the window.
    FlowCtl = 0x07,
    /// Asks for a PONG.
    Ping = 0x08,
    /// Answers a PING.
    Pong = 0x09,
    /// Caller: begin a stream.
    StreamOpen = 0x10,
    /// Host: the stream is open.
    StreamOpened = 0x11,
    /// Caller: the stream is done or cancelled.
    StreamClose = 0x12,
    /// Caller: run rows.
    Step = 0x13,
    /// Host: result rows.
    StepResult = 0x14,
    /// Host: the stream has ended.
    StreamError = 0x15,
    /// Caller: drop positions.
    Truncate = 0x16,
    /// Caller: request for the descriptor.
    Describe = 0x17,
    /// Host: the descriptor.
    Descriptor = 0x18,
    /// Host: announces the end of its sessions.
    Leaving = 0x19,
    /// Host: signature over the steps of a stream.
    Receipt = 0x1a,
    /// Host: the positions that a stream has after TRUNCATE.
    Truncated = 0x1b,
}

impl FrameType {
    /// Every type, in numeric order.
    pub const ALL: &'static [FrameType] = <Self as strum::VariantArray>::VARIANTS;

    /// `true` if only callers send it, `false` if only hosts do, `None` if both may.
    pub(crate) fn is_callers(self) -> Option<bool> {
        match self {
            FrameType::StreamOpen | FrameType::StreamClose | FrameType::Step => Some(true),
            FrameType::Truncate | FrameType::Describe => Some(true),
            FrameType::StreamOpened | FrameType::StreamError | FrameType::StepResult => Some(false),
            FrameType::Descriptor | FrameType::Leaving | FrameType::Receipt => Some(false),
            FrameType::Truncated => Some(false),
            _ => None,
        }
    }
}

/// Flags of a frame. Undefined bits must be zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(u32);

impl Flags {
    /// No flag.
    pub const NONE: Flags = Flags(0);
    /// The data of a chunk is one zstd frame.
    pub const COMPRESSED: Flags = Flags(0x1);
    /// The last chunk of its tensor.
    pub const FINAL: Flags = Flags(0x2);

    /// Union of both sets.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// Returns whether every flag of `other` is set.
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Variable fields of a frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: FrameType,
    /// Position in the sender's sequence, from 1.
    pub sequence: u32,
    /// Bytes of the body.
    pub length: u32,
    /// Flags.
    pub flags: Flags,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = VERSION;
        out[1] = self.kind as u8;
        out[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[8..12].copy_from_slice(&self.length.to_be_bytes());
        out[12..16].copy_from_slice(&self.flags.0.to_be_bytes());
        out
    }

    /// Splits a message into its header and body.
    ///
    /// # Errors
    /// `frame_length` if the message is shorter than a header or its length differs from the
    /// header's; `frame_unknown` for an unknown version, type or flag, a flag that the type does
    /// not allow, or a reserved field that is not zero.
    pub fn decode(message: &[u8]) -> Result<(Header, &[u8]), Violation> {
        let unknown = |detail| Err(CloseCode::FrameUnknown.violation(detail));
        let Some((mut head, body)) = message.split_at_checked(HEADER_BYTES) else {
            return Err(CloseCode::FrameLength.violation("shorter than a frame header"));
        };
        let (version, kind, reserved) = (head.get_u8(), head.get_u8(), head.get_u16());
        let (sequence, length, flags) = (head.get_u32(), head.get_u32(), head.get_u32());
        if version != VERSION {
            return unknown(format!("frame version {version:#04x} is not supported"));
        }
        if reserved != 0 {
            return unknown("the reserved field is not zero".to_owned());
        }
        let Some(kind) = FrameType::from_repr(kind) else {
            return unknown(format!("frame type {kind:#04x} does not exist"));
        };
        let allowed = match kind {
            FrameType::TensorData => Flags::COMPRESSED.with(Flags::FINAL),
            _ => Flags::NONE,
        };
        if flags & !allowed.0 != 0 {
            return unknown(format!("flags {flags:#x} are not defined for {kind:?}"));
        }
        if usize::try_from(length).ok() != Some(body.len()) {
            return Err(CloseCode::FrameLength.violation(format!(
                "the header says {length} bytes of payload, the message has {}",
                body.len()
            )));
        }
        Ok((
            Header {
                kind,
                sequence,
                length,
                flags: Flags(flags),
            },
            body,
        ))
    }
}

/// A frame under construction: space for the header first, without sequence number.
#[derive(Clone, Debug)]
pub(crate) struct FrameBuf(Vec<u8>);

impl FrameBuf {
    /// Reserves space for a header and `body` bytes.
    pub(crate) fn with_capacity(body: usize) -> FrameBuf {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body);
        bytes.resize(HEADER_BYTES, 0);
        FrameBuf(bytes)
    }

    /// Buffer to which the body is appended.
    pub(crate) fn body(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }

    /// Overwrites existing bytes of the body; used for ids that are assigned late.
    pub(crate) fn patch_u16(&mut self, at: usize, value: u16) {
        if let Some(to) = self.0.get_mut(HEADER_BYTES + at..HEADER_BYTES + at + 2) {
            to.copy_from_slice(&value.to_be_bytes());
        }
    }

    /// Fills in the header, except for the sequence number.
    pub(crate) fn finish(mut self, kind: FrameType, flags: Flags) -> FrameBuf {
        let length = u32::try_from(self.0.len() - HEADER_BYTES).unwrap_or(u32::MAX);
        let header = Header {
            kind,
            sequence: 0,
            length,
            flags,
        }
        .encode();
        if let Some(to) = self.0.get_mut(..HEADER_BYTES) {
            to.copy_from_slice(&header);
        }
        self
    }

    /// Bytes so far, header included.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Finished frame.
    pub(crate) fn into_bytes(mut self, sequence: u32) -> Vec<u8> {
        if let Some(to) = self.0.get_mut(SEQUENCE_AT) {
            to.copy_from_slice(&sequence.to_be_bytes());
        }
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> impl Strategy<Value = (Header, Vec<u8>)> {
        let body = prop::collection::vec(any::<u8>(), 0..64);
        let kinds = prop::sample::select(FrameType::ALL);
        (kinds, any::<u32>(), body, 0u32..4).prop_map(|(kind, sequence, body, flags)| {
            let header = Header {
                kind,
                sequence,
                length: body.len() as u32,
                flags: match kind {
                    FrameType::TensorData => Flags(flags),
                    _ => Flags::NONE,
                },
            };
            (header, body)
        })
    }

    #[test]
    fn the_header_has_the_documented_layout_for_every_type() {
        let numbers = [
            0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x10, 0x11, 0x12, 0x13, 0x14,
            0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b,
        ];
        assert_eq!(FrameType::ALL.len(), numbers.len());
        for (&kind, number) in FrameType::ALL.iter().zip(numbers) {
            let header = Header {
                kind,
                sequence: 0x0102_0304,
                length: 5,
                flags: Flags::NONE,
            };
            let mut message = header.encode().to_vec();
            let expected = [1, number, 0, 0, 1, 2, 3, 4, 0, 0, 0, 5, 0, 0, 0, 0];
            assert_eq!(message, expected);
            message.extend_from_slice(&[9; 5]);
            assert_eq!(Header::decode(&message).unwrap(), (header, &[9u8; 5][..]));
        }
        let flags = Flags::COMPRESSED.with(Flags::FINAL);
        let header = Header {
            kind: FrameType::TensorData,
            sequence: 1,
            length: 0,
            flags,
        };
        assert_eq!(header.encode()[12..], [0, 0, 0, 3]);
    }

    proptest! {
        #[test]
        fn headers_survive_a_round_trip((header, body) in header()) {
            let mut message = header.encode().to_vec();
            message.extend_from_slice(&body);
            prop_assert_eq!(Header::decode(&message).unwrap(), (header, &body[..]));
        }

        #[test]
        fn a_length_that_disagrees_is_refused((header, body) in header(), wrong in any::<u32>()) {
            prop_assume!(wrong as usize != body.len());
            let mut message = Header { length: wrong, ..header }.encode().to_vec();
            message.extend_from_slice(&body);
            prop_assert_eq!(Header::decode(&message).unwrap_err().code, CloseCode::FrameLength);
        }

        #[test]
        fn a_flipped_bit_in_a_fixed_field_is_refused((header, body) in header(), bit in 0usize..128) {
            let byte = bit / 8;
            // Bytes 4 to 7 are the sequence number, which the session checks.
            prop_assume!(!(4..8).contains(&byte));
            let mut message = header.encode().to_vec();
            message.extend_from_slice(&body);
            message[byte] ^= 1 << (bit % 8);
            match Header::decode(&message) {
                Err(violation) => prop_assert!(matches!(
                    violation.code,
                    CloseCode::FrameUnknown | CloseCode::FrameLength
                )),
                // Another type, or another flag of TENSOR_DATA, may be valid as well.
                Ok((other, _)) => prop_assert!(other != header && matches!(byte, 1 | 15)),
            }
        }

        #[test]
        fn decoding_never_panics(message in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Header::decode(&message);
        }
    }
}
