//! Gossip messages, as canonical CBOR. Each is one WebSocket message.
//!
//! The decoder is not serde's: it refuses oversized values before it allocates, and events stay
//! slices of the message.

use bytes::Bytes;
use hearthnet_transport::{CloseCode, Violation};
use serde_bytes::Bytes as ByteSlice;

use crate::community::log::MAX_HEADS_BYTES;
use crate::identity::cbor;

/// Protocol version.
pub const VERSION: u64 = 1;
/// Maximum number of events in a batch.
pub const MAX_BATCH_EVENTS: usize = 1024;
/// Maximum total bytes of the events in a batch.
pub const MAX_BATCH_BYTES: usize = 512 * 1024;
/// Maximum message length in bytes: the heads of a community of maximum size.
pub const MAX_MESSAGE_BYTES: usize = MAX_HEADS_BYTES + 64;

#[derive(Clone, PartialEq, Eq)]
pub enum SyncMessage {
    /// `[0, version, community]`: first message of each side.
    Hello {
        /// Protocol version, 1.
        version: u64,
        /// Public key of the community's root.
        community: [u8; 32],
    },
    /// `[1, round, heads]`: heads of the sender's log.
    Heads {
        /// Number of the heads, 1, 2, 3 ...
        round: u64,
        /// Encoded heads (`specs/event-log.md`, section 9).
        heads: Bytes,
    },
    /// `[2, number, [event, ...]]`: events that the receiver lacks, as far as the sender knows.
    Events {
        /// Number of the batch, 1, 2, 3 ...
        number: u64,
        /// 1 to 1,024 signed events, at most 512 KiB in total.
        events: Vec<Bytes>,
    },
    /// `[3, number, accepted, refused]`: acknowledges that a batch was processed.
    Ack {
        /// Number of the batch. Acknowledgements come in the order of the batches.
        number: u64,
        /// Number of new events.
        accepted: u64,
        /// Number of refused events.
        refused: u64,
    },
    /// `[4, round]`: the sender has sent all events that the receiver lacked by its heads of this
    /// round.
    Even {
        /// Round of the receiver's heads.
        round: u64,
    },
}

// Shows sizes instead of contents.
impl std::fmt::Debug for SyncMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hello { version, .. } => write!(f, "Hello(version {version})"),
            Self::Heads { round, heads } => write!(f, "Heads({round}, {} bytes)", heads.len()),
            Self::Events { number, events } => write!(f, "Events({number}, {})", events.len()),
            Self::Ack {
                number,
                accepted,
                refused,
            } => write!(f, "Ack({number}, {accepted} accepted, {refused} refused)"),
            Self::Even { round } => write!(f, "Even({round})"),
        }
    }
}

const UNSIGNED: u8 = 0;
const BYTES: u8 = 2;
const ARRAY: u8 = 4;

impl SyncMessage {
    pub fn encode(&self) -> Bytes {
        let encoded = match self {
            Self::Hello { version, community } => {
                cbor::encode(&(0, version, ByteSlice::new(community)))
            }
            Self::Heads { round, heads } => cbor::encode(&(1, round, ByteSlice::new(heads))),
            Self::Events { number, events } => {
                let events: Vec<_> = events.iter().map(|event| ByteSlice::new(event)).collect();
                cbor::encode(&(2, number, events))
            }
            Self::Ack {
                number,
                accepted,
                refused,
            } => cbor::encode(&(3, number, accepted, refused)),
            Self::Even { round } => cbor::encode(&(4, round)),
        };
        debug_assert!(encoded.is_ok(), "{self:?} cannot be encoded");
        // A peer refuses the empty message.
        encoded.unwrap_or_default().into()
    }

    /// Decodes a message of a peer. Only the canonical encoding is accepted.
    ///
    /// # Errors
    /// `frame_too_big` for a message or batch above its limit, `body_malformed` for other bytes
    /// that are not a message.
    pub fn decode(message: &Bytes) -> Result<SyncMessage, Violation> {
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(CloseCode::FrameTooBig.violation("a message too long"));
        }
        let mut reader = Reader { message, at: 0 };
        let fields = reader.head(ARRAY)?;
        let kind = reader.head(UNSIGNED)?;
        let decoded = match (kind, fields) {
            (0, 3) => {
                let version = reader.head(UNSIGNED)?;
                let community = reader.string(32)?;
                let community = community.as_ref().try_into();
                Self::Hello {
                    version,
                    community: community.map_err(|_| malformed("a key of another length"))?,
                }
            }
            (1, 3) => Self::Heads {
                round: reader.head(UNSIGNED)?,
                heads: reader.string(MAX_HEADS_BYTES)?,
            },
            (2, 3) => Self::Events {
                number: reader.head(UNSIGNED)?,
                events: reader.events()?,
            },
            (3, 4) => Self::Ack {
                number: reader.head(UNSIGNED)?,
                accepted: reader.head(UNSIGNED)?,
                refused: reader.head(UNSIGNED)?,
            },
            (4, 2) => Self::Even {
                round: reader.head(UNSIGNED)?,
            },
            _ => return Err(malformed("an unknown kind of message")),
        };
        if reader.at != message.len() {
            return Err(malformed("something after the message"));
        }
        Ok(decoded)
    }
}

fn malformed(detail: &'static str) -> Violation {
    CloseCode::BodyMalformed.violation(detail)
}

struct Reader<'a> {
    message: &'a Bytes,
    at: usize,
}

impl Reader<'_> {
    /// Takes the next `len` bytes of the message.
    fn take(&mut self, len: usize) -> Result<Bytes, Violation> {
        let end = self.at.checked_add(len);
        let end = end.filter(|end| *end <= self.message.len());
        let end = end.ok_or_else(|| malformed("the message ends early"))?;
        let taken = self.message.slice(self.at..end);
        self.at = end;
        Ok(taken)
    }

    /// Reads a head of this major type, in its shortest form.
    fn head(&mut self, major: u8) -> Result<u64, Violation> {
        let first = self.take(1)?;
        let [first] = *first else {
            return Err(malformed("the message ends early"));
        };
        if first >> 5 != major {
            return Err(malformed("a value of another type"));
        }
        let (length, least) = match first & 0x1f {
            value @ 0..=23 => return Ok(u64::from(value)),
            24 => (1, 24),
            25 => (2, 0x100),
            26 => (4, 0x1_0000),
            27 => (8, 0x1_0000_0000),
            _ => return Err(malformed("an indefinite length")),
        };
        let bytes = self.take(length)?;
        let value = bytes
            .iter()
            .fold(0u64, |sum, &byte| (sum << 8) | u64::from(byte));
        if value < least {
            return Err(malformed("a number that is not in its shortest form"));
        }
        Ok(value)
    }

    fn string(&mut self, longest: usize) -> Result<Bytes, Violation> {
        let length = usize::try_from(self.head(BYTES)?).unwrap_or(usize::MAX);
        if length > longest {
            return Err(CloseCode::FrameTooBig.violation("a string above its limit"));
        }
        self.take(length)
    }

    fn events(&mut self) -> Result<Vec<Bytes>, Violation> {
        let count = usize::try_from(self.head(ARRAY)?).unwrap_or(usize::MAX);
        if count == 0 {
            return Err(malformed("a batch without events"));
        }
        if count > MAX_BATCH_EVENTS {
            return Err(CloseCode::FrameTooBig.violation("a batch of too many events"));
        }
        let mut left = MAX_BATCH_BYTES;
        let mut events = Vec::with_capacity(count);
        for _ in 0..count {
            let event = self.string(left)?;
            left -= event.len();
            events.push(event);
        }
        Ok(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn code(bytes: &[u8]) -> CloseCode {
        SyncMessage::decode(&Bytes::copy_from_slice(bytes))
            .unwrap_err()
            .code
    }

    fn any_message() -> impl Strategy<Value = SyncMessage> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
        prop_oneof![
            (any::<u64>(), any::<[u8; 32]>())
                .prop_map(|(version, community)| SyncMessage::Hello { version, community }),
            (any::<u64>(), bytes()).prop_map(|(round, heads)| SyncMessage::Heads { round, heads }),
            (any::<u64>(), prop::collection::vec(bytes(), 1..40))
                .prop_map(|(number, events)| SyncMessage::Events { number, events }),
            any::<(u64, u64, u64)>().prop_map(|(number, accepted, refused)| SyncMessage::Ack {
                number,
                accepted,
                refused
            }),
            any::<u64>().prop_map(|round| SyncMessage::Even { round }),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_the_wire(message in any_message()) {
            prop_assert_eq!(SyncMessage::decode(&message.encode()), Ok(message));
        }

        #[test]
        fn only_the_canonical_encoding_decodes(
            message in any_message(),
            at in any::<prop::sample::Index>(),
            flip in 1u8..,
        ) {
            let mut bytes = message.encode().to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            if let Ok(decoded) = SyncMessage::decode(&Bytes::from(bytes.clone())) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }

        #[test]
        fn decoding_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = SyncMessage::decode(&Bytes::from(bytes));
        }
    }

    #[test]
    fn the_examples_of_the_specification_hold() {
        let hello = SyncMessage::Hello {
            version: 1,
            community: [0x11; 32],
        };
        let expected = [&[0x83, 0x00, 0x01, 0x58, 0x20][..], &[0x11; 32]].concat();
        assert_eq!(hello.encode(), expected);
        let events = SyncMessage::Events {
            number: 2,
            events: vec![Bytes::from_static(b"\xaa\xbb"), Bytes::from_static(b"\xcc")],
        };
        let expected = [0x83, 2, 2, 0x82, 0x42, 0xaa, 0xbb, 0x41, 0xcc];
        assert_eq!(events.encode()[..], expected);
        let ack = SyncMessage::Ack {
            number: 2,
            accepted: 1,
            refused: 300,
        };
        assert_eq!(ack.encode()[..], [0x84, 3, 2, 1, 0x19, 0x01, 0x2c]);
        let even = SyncMessage::Even { round: 24 };
        assert_eq!(even.encode()[..], [0x82, 4, 0x18, 24]);
    }

    #[test]
    fn an_oversized_value_is_refused_at_its_head() {
        // A batch of 1,025 events, one event of 4 GiB, heads of 5 MiB; the contents are missing.
        for bytes in [
            &[0x83, 2, 1, 0x99, 0x04, 0x01][..],
            &[0x83, 2, 1, 0x81, 0x5a, 0xff, 0xff, 0xff, 0xff],
            &[0x83, 1, 1, 0x5a, 0, 0x50, 0, 0],
        ] {
            assert_eq!(code(bytes), CloseCode::FrameTooBig, "{bytes:02x?}");
        }
        // A length within the limits, without the content.
        assert_eq!(code(&[0x83, 1, 1, 0x59, 0x40, 0]), CloseCode::BodyMalformed);
    }

    #[test]
    fn non_canonical_encodings_are_refused() {
        for bytes in [
            &[][..],
            &[0x82, 4, 0x18, 23],      // not the shortest form
            &[0x9f, 4, 24, 0xff],      // an indefinite array
            &[0x82, 4, 0x18, 24, 0],   // trailing bytes
            &[0x82, 4],                // cut short
            &[0x83, 4, 1, 1],          // an extra field
            &[0x82, 5, 1],             // an unknown kind
            &[0x83, 2, 1, 0x80],       // an empty batch
            &[0x83, 0, 1, 0x41, 0x11], // a key of one byte
            &[0x82, 4, 0x41, 0x01],    // a string for a number
        ] {
            assert_eq!(code(bytes), CloseCode::BodyMalformed, "{bytes:02x?}");
        }
    }
}
