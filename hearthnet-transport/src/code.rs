//! The stable names of what goes wrong, and of what ends a session.
//!
//! A [`Code`] is the name that messages, events, counters and logs carry. A [`CloseCode`] ends a
//! session: its snake_case name travels in BYE and in the WebSocket close reason, its number in the
//! WebSocket close frame. All are part of the wire format: never renumber, never rename.

use std::borrow::{Borrow, Cow};
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest code or event name, in bytes.
pub const MAX_NAME: usize = 64;

/// The stable name of a failure: 1 to 64 characters of `a-z 0-9 _`, first a letter.
///
/// The constants are the codes that more than one place knows: those that every call may end with,
/// and those by which a caller decides what to do about a stream. What has codes of its own makes
/// them by [`Code::new`].
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(Cow<'static, str>);

macro_rules! shared_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Self = Self::new($text);)*
        }
    };
}

shared_codes! {
    /// The caller's level is too low, or it is not who it says.
    UNAUTHORIZED = "unauthorized";
    /// The key was revoked.
    REVOKED = "revoked";
    /// A signature does not belong to its signer and these bytes.
    INVALID_SIGNATURE = "invalid_signature";
    /// The envelope was made too long ago, or lies in the future.
    CALL_EXPIRED = "call_expired";
    /// The envelope was used before.
    CALL_REPLAYED = "call_replayed";
    /// The node has no capability of this name.
    NOT_FOUND = "not_found";
    /// The node has the capability in another version.
    VERSION_UNSUPPORTED = "version_unsupported";
    /// The caller makes more calls than its budget allows.
    RATE_LIMITED = "rate_limited";
    /// As many calls of this capability as allowed are running, or a host has work before this.
    BUSY = "busy";
    /// The capability belongs to an experiment that is switched off.
    EXPERIMENTAL_DISABLED = "experimental_disabled";
    /// A parameter is missing, unknown, of the wrong type or out of its range.
    BAD_REQUEST = "bad_request";
    /// The caller gave up.
    CANCELLED = "cancelled";
    /// The call took longer than it may, or its caller took no frames.
    TIMEOUT = "timeout";
    /// The node could not be reached, or the connection was lost.
    UNREACHABLE = "unreachable";
    /// The node failed in a way that is nobody's fault but its own.
    INTERNAL = "internal";
    /// An invite that cannot be used.
    BAD_INVITE = "bad_invite";
    /// The host serves other weights.
    WEIGHTS_MISMATCH = "weights_mismatch";
    /// As many streams are open as the host has room for.
    STREAM_LIMIT = "stream_limit";
    /// The caller has as many streams open as one caller may.
    STREAM_QUOTA = "stream_quota";
    /// The caller, or the session, opens streams faster than it may.
    STREAM_CHURN = "stream_churn";
    /// More positions than the stream was opened for, or than the host allows.
    CONTEXT_FULL = "context_full";
    /// The host's memory for context could never hold the stream.
    KV_TOO_SMALL = "kv_too_small";
    /// The host's memory for context is taken.
    KV_FULL = "kv_full";
    /// The caller holds as much of it as one caller may.
    KV_QUOTA = "kv_quota";
    /// The host took the stream's memory back for others.
    PREEMPTED = "preempted";
    /// More steps or rows wait than the stream may have waiting.
    QUEUE_FULL = "queue_full";
    /// As many steps of the caller wait as one caller may have waiting.
    STEP_QUOTA = "step_quota";
    /// Nothing happened on the stream for too long.
    IDLE_TIMEOUT = "idle_timeout";
    /// A block's output left the range of the boundary dtype.
    BOUNDARY_OVERFLOW = "boundary_overflow";
    /// The node is about to stop.
    SHUTTING_DOWN = "shutting_down";
    /// Layers move away from a host that leaves; nothing went wrong.
    LEAVING = "leaving";
    /// Nothing at all comes from a host.
    SILENT = "silent";
    /// A host is much slower than it should be.
    DEGRADED = "degraded";
    /// A host owed an answer for the health timeout.
    PIPELINE_STALLED = "pipeline_stalled";
    /// No host can be had for some layers.
    SHARD_UNAVAILABLE = "shard_unavailable";
    /// The session with a host ended unexpectedly.
    CONNECTION_LOST = "connection_lost";
    /// Rows whose size cannot be.
    TENSOR_SHAPE = "tensor_shape";
    /// Rows with NaN or an infinity.
    TENSOR_NONFINITE = "tensor_nonfinite";
    /// Rows whose numbers cannot be right.
    TENSOR_BAND = "tensor_band";
}

impl Code {
    /// A code of one's own. What is not spelled like a code is `internal` where it is sent.
    pub const fn new(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }

    /// Reads a code that a peer sent; `None` if it is not spelled like one.
    pub fn parse(text: &str) -> Option<Self> {
        is_name(text).then(|| Self(Cow::Owned(text.to_owned())))
    }

    /// The code as it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a text can be a code or the name of an event.
pub fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&'static str> for Code {
    fn from(name: &'static str) -> Self {
        Self::new(name)
    }
}

/// So that maps are asked by the text.
impl Borrow<str> for Code {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Code {
    fn eq(&self, text: &str) -> bool {
        self.0 == text
    }
}

impl PartialEq<&str> for Code {
    fn eq(&self, text: &&str) -> bool {
        self.0 == *text
    }
}

/// As a label of a metric.
impl From<Code> for metrics::SharedString {
    fn from(code: Code) -> Self {
        code.0.into()
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Code {
    /// What another node calls a code and is none, is `unrecognised`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(Self::parse(&text).unwrap_or(Self::new("unrecognised")))
    }
}

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
    pub(crate) fn from_name(name: &str) -> Option<CloseCode> {
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

    /// The violation of the rule that this code is for, with a fixed or formatted explanation.
    pub fn violation(self, detail: impl Into<Cow<'static, str>>) -> Violation {
        Violation {
            code: self,
            detail: detail.into(),
        }
    }

    /// Whether it names a rule that the other side has broken, and not the end of a connection, a
    /// deadline, or a right.
    pub const fn is_violation(self) -> bool {
        match self {
            CloseCode::CreditStall | CloseCode::PipelineStalled => false,
            code => matches!(code.number(), 4010..=4069),
        }
    }

    /// Whether the code may appear on the wire ([`Lost`](Self::Lost) and
    /// [`Unrecognised`](Self::Unrecognised) only ever describe what was observed).
    pub(crate) const fn is_sendable(self) -> bool {
        !matches!(self, CloseCode::Lost | CloseCode::Unrecognised)
    }
}

impl From<CloseCode> for Code {
    fn from(code: CloseCode) -> Self {
        Self::new(code.as_str())
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
    pub(crate) fn by_peer(code: CloseCode, detail: impl Into<String>) -> Self {
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
    fn codes_have_one_spelling() {
        for good in ["a", "rate_limited", "m26_x", &"a".repeat(64)] {
            assert_eq!(Code::parse(good).unwrap().as_str(), good);
        }
        for bad in ["", "A", "_a", "1a", "a b", "a-b", "é", &"a".repeat(65)] {
            assert_eq!(Code::parse(bad), None, "{bad}");
        }
    }

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
