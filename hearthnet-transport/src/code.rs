//! Why a session ended: one stable code per cause.
//!
//! The snake_case string travels in BYE and in the WebSocket close reason, the number in the
//! WebSocket close frame. Both are part of the wire format: never renumber, never rename.

use std::borrow::Cow;
use std::fmt;

macro_rules! close_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal $text:literal;)*) => {
        /// Why a session ended. Every violation has its own code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum CloseCode {
            $($(#[$doc])* $name,)*
        }

        impl CloseCode {
            /// Every code, in the order of their numbers.
            pub const ALL: &'static [CloseCode] = &[$(CloseCode::$name,)*];

            /// The stable name, as BYE and logs carry it.
            pub const fn as_str(self) -> &'static str {
                match self { $(CloseCode::$name => $text,)* }
            }

            /// The WebSocket close code, 4000 to 4999.
            pub const fn number(self) -> u16 {
                match self { $(CloseCode::$name => $number,)* }
            }
        }
    };
}

close_codes! {
    /// The side that sent it is done.
    Normal = 4000 "normal";
    /// The process is shutting down.
    Shutdown = 4001 "shutdown";
    /// The negotiated session lifetime (or the sequence numbers) ran out; open a new session.
    SessionExpired = 4002 "session_expired";
    /// The peer sent nothing for two keep-alive intervals.
    KeepAlive = 4003 "keep_alive";
    /// A defect or a resource failure on the side that sent it.
    Internal = 4004 "internal";
    /// The connection ended without a BYE. Never sent.
    Lost = 4005 "lost";
    /// The peer gave a code that this version does not know. Never sent.
    Unrecognised = 4006 "unrecognised";

    /// A text message, reserved bits, an unmasked client frame: the WebSocket rules are broken.
    WebSocket = 4010 "websocket";
    /// The payload length disagrees with the message.
    FrameLength = 4011 "frame_length";
    /// A message, body or tensor larger than what was negotiated.
    FrameTooBig = 4012 "frame_too_big";
    /// An unknown version, frame type or flag, or a reserved field that is not zero.
    FrameUnknown = 4013 "frame_unknown";
    /// A gap, duplicate or wrap in the sequence numbers.
    FrameSequence = 4014 "frame_sequence";
    /// Too many fragments, pings or control frames.
    FrameRate = 4015 "frame_rate";
    /// A known frame in a state or direction where it makes no sense.
    ProtocolState = 4016 "protocol_state";
    /// A body that does not have the layout of its type.
    BodyMalformed = 4017 "body_malformed";
    /// No protocol version in common.
    VersionUnsupported = 4018 "version_unsupported";

    /// A chunk or step beyond the window.
    CreditOverrun = 4030 "credit_overrun";
    /// A grant that lifts the window above its ceiling.
    CreditOverflow = 4031 "credit_overflow";
    /// An ACK or NACK of what was never sent.
    CreditAck = 4032 "credit_ack";
    /// The peer withheld credit past the deadline.
    CreditStall = 4033 "credit_stall";
    /// A chunk smaller than the negotiated chunk size that is not the last one.
    ChunkTooSmall = 4034 "chunk_too_small";
    /// Tensors announced beyond the receiver's buffer.
    BufferOverrun = 4035 "buffer_overrun";
    /// Streams opened and closed faster than the limit.
    StreamChurn = 4036 "stream_churn";
    /// No progress, or progress below the minimum rate, within a phase's deadline.
    PipelineStalled = 4037 "pipeline_stalled";

    /// Dimensions of zero, overflowing, or disagreeing with the data or the announcement.
    TensorShape = 4050 "tensor_shape";
    /// A tensor id that is in use, or that names nothing.
    TensorId = 4051 "tensor_id";
    /// A chunk that does not decompress to exactly the expected length.
    Decompression = 4052 "decompression";

    /// The peer's key is not admitted.
    Unauthorized = 4070 "unauthorized";
    /// The session token cannot be read.
    TokenInvalid = 4071 "token_invalid";
    /// The token's subject is not the TLS peer.
    TokenSubject = 4072 "token_subject";
    /// The token was made for another host.
    TokenAudience = 4073 "token_audience";
    /// The token does not cover this purpose.
    TokenScope = 4074 "token_scope";
    /// The token is not valid yet, or no longer.
    TokenExpired = 4075 "token_expired";
    /// The token was used before.
    TokenReplayed = 4076 "token_replayed";
    /// A signature that does not verify strictly.
    InvalidSignature = 4077 "invalid_signature";
    /// The peer's key or token has been revoked.
    Revoked = 4078 "revoked";
    /// The host does not serve the purpose that HELLO names.
    PurposeUnknown = 4079 "purpose_unknown";
    /// Another key answered than the one that was expected.
    IdentityMismatch = 4080 "identity_mismatch";

    /// The host has as many sessions as it allows.
    SessionLimit = 4090 "session_limit";
    /// Too many connections, from this address or in all.
    ConnectionLimit = 4091 "connection_limit";
}

impl CloseCode {
    /// The code with this name, if there is one.
    pub fn from_name(name: &str) -> Option<CloseCode> {
        CloseCode::ALL
            .iter()
            .copied()
            .find(|code| code.as_str() == name)
    }

    /// The code with this WebSocket close number, if there is one.
    pub fn from_number(number: u16) -> Option<CloseCode> {
        CloseCode::ALL
            .iter()
            .copied()
            .find(|code| code.number() == number)
    }

    /// Whether the code may appear on the wire ([`Lost`](Self::Lost) and
    /// [`Unrecognised`](Self::Unrecognised) only ever describe what was observed).
    pub const fn is_sendable(self) -> bool {
        !matches!(self, CloseCode::Lost | CloseCode::Unrecognised)
    }
}

impl fmt::Display for CloseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A rule that a peer broke: the code that ends the session, and what exactly was wrong.
///
/// The detail is for this side's log. It never contains payload bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct Violation {
    /// The code that the session is closed with.
    pub code: CloseCode,
    /// What was wrong, in words.
    pub detail: Cow<'static, str>,
}

impl Violation {
    /// A violation with a fixed or formatted explanation.
    pub fn new(code: CloseCode, detail: impl Into<Cow<'static, str>>) -> Self {
        Violation {
            code,
            detail: detail.into(),
        }
    }
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the session was closed by {}: {code}{}", if *.by_us { "this side" } else { "the peer" },
    if .detail.is_empty() { String::new() } else { format!(" ({})", .detail) })]
#[non_exhaustive]
pub struct SessionClosed {
    /// The cause.
    pub code: CloseCode,
    /// Whether this side decided it.
    pub by_us: bool,
    /// What exactly happened, where known; from this side's own observation or the peer's BYE.
    pub detail: String,
}

impl SessionClosed {
    /// Closed by this side.
    pub fn by_us(code: CloseCode, detail: impl Into<String>) -> Self {
        SessionClosed {
            code,
            by_us: true,
            detail: detail.into(),
        }
    }

    /// Closed by the peer, or lost.
    pub fn by_peer(code: CloseCode, detail: impl Into<String>) -> Self {
        SessionClosed {
            code,
            by_us: false,
            detail: detail.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_has_its_own_name_and_number() {
        let names: BTreeSet<_> = CloseCode::ALL.iter().map(|c| c.as_str()).collect();
        let numbers: BTreeSet<_> = CloseCode::ALL.iter().map(|c| c.number()).collect();
        assert_eq!(names.len(), CloseCode::ALL.len());
        assert_eq!(numbers.len(), CloseCode::ALL.len());
        for &code in CloseCode::ALL {
            assert!((4000..5000).contains(&code.number()));
            assert_eq!(CloseCode::from_name(code.as_str()), Some(code));
            assert_eq!(CloseCode::from_number(code.number()), Some(code));
            // The reason of a WebSocket close frame holds at most 123 bytes.
            assert!(code.as_str().len() <= 123);
        }
    }
}
